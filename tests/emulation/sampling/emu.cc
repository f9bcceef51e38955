#include "emu.h"
namespace emu {
std::vector<Copy> copies; static uint64_t rng = 88172645463325252ull; static uint64_t Rand() { rng ^= rng << 13; rng ^= rng >> 7; rng ^= rng << 17; return rng; }
int grid; Fiber* cur; ucontext_t main_ctx; std::deque<Fiber*> ready; std::function<void()> body;
static void Entry() { body(); cur->done = true; cur->cta->alive--; swapcontext(&cur->ctx, &main_ctx); }
void RunKernel(int g, int threads, size_t bytes, std::function<void()> f) {
  static std::vector<char*> stacks;
  body = f; grid = g;
  for (int c = 0; c < g / 8; ++c) {
    Cluster cl; cl.total = 8 * threads; cl.ctas.resize(8);
    std::vector<std::unique_ptr<Fiber>> fibers;
    for (int r = 0; r < 8; ++r) {
      Cta& a = cl.ctas[r]; a.rank = r; a.threads = threads; a.alive = threads; a.warps.resize(threads / 32); a.mem.assign(bytes, 0xCD);
      for (int t = 0; t < threads; ++t) {
        auto fb = std::make_unique<Fiber>(); size_t id = fibers.size();
        while (stacks.size() <= id) stacks.push_back((char*)aligned_alloc(4096, 32768));
        getcontext(&fb->ctx); fb->ctx.uc_stack.ss_sp = stacks[id]; fb->ctx.uc_stack.ss_size = 32768; fb->ctx.uc_link = nullptr;
        makecontext(&fb->ctx, Entry, 0);
        fb->tid = t; fb->cta = &a; fb->cluster = &cl; fb->block = c * 8 + r; fibers.push_back(std::move(fb));
      }
    }
    ready.clear();
    for (auto& fb : fibers) ready.push_back(fb.get());
    bool lifo = Rand() % 2; int mode = Rand() % 3;
    while (!ready.empty() || !copies.empty()) {
      if (!copies.empty() && (ready.empty() || Rand() % 64 == 0)) { Land(Rand() % copies.size()); continue; }
      size_t pick = mode == 0 ? Rand() % ready.size() : mode == 1 ? (Rand() % 16 ? 0 : Rand() % ready.size()) : ready.size() - 1 - (Rand() % 16 ? 0 : Rand() % ready.size());
      std::swap(ready[pick], ready.back()); cur = ready.back(); ready.pop_back(); swapcontext(&main_ctx, &cur->ctx); }
    int left = 0; for (auto& fb : fibers) left += !fb->done;
    if (left) { fprintf(stderr, "DEADLOCK: %d fibers of cluster %d\n", left, c); 
      for (auto& fb : fibers) if (!fb->done && fb->tid % 32 == 0) fprintf(stderr, "%d/%d ", fb->cta->rank, fb->tid/32); fprintf(stderr, "\n"); exit(3); }
  }
}
}
