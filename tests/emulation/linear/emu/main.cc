#include "emu.h"
#define private public
#include "kernels/dora/linear_kernel.cuh"
#undef private
namespace emu { Thread* cur; unsigned grid; ucontext_t sched; std::mt19937 rng(7); std::deque<std::function<void()>> pending; long progress; }
using namespace dorad::kernels; using namespace emu;
static CUtensorMap Map(const __nv_bfloat16* d, int r, int c, int ld, int box) { CUtensorMap m; FakeMap f{d, r, c, ld, box}; std::memset(&m, 0, sizeof m); std::memcpy(&m, &f, sizeof f); return m; }
static std::function<void(Thread*)> body;
static void Entry() { body(cur); cur->done = true; --cur->block->alive; ++progress; swapcontext(&cur->ctx, &sched); }
template <int G, int N> void RunKernel(const CUtensorMap& w, const CUtensorMap& x, const LinearArgs& args, int blocks) {
  using B = LinearBlock<G, N>; using C = LinearConfig<G, N>;
  grid = blocks; std::vector<Block> bs(blocks); std::vector<Cluster> cl(blocks); std::vector<Thread> ts((size_t)blocks * C::kThreads);
  const int cs = args.clusters ? args.plan.splits : 1;
  for (int i = 0; i < blocks; ++i) { Block& b = bs[i]; b.index = i; b.mem.assign(232448 + 4096, 0xFF); b.base = (unsigned char*)(((uintptr_t)b.mem.data() + 1023) / 1024 * 1024); b.warps.resize(C::kThreads / 32); b.threads = b.alive = C::kThreads; b.cluster = &cl[i / cs]; b.rank = i % cs; cl[i / cs].blocks.push_back(&b); }
  body = [&](Thread* t) {
    typename B::Shared& shared = *reinterpret_cast<typename B::Shared*>(t->block->base);
    if (t->tid == 0) { B::InitBarriers(shared); shared.tables.pieces = 0; }
    __syncthreads(); FillTables<C::kPanelRows>(args, shared.tables); __syncthreads();
    B block(args, shared, (C::kStaticBytes + 1023) / 1024 * 1024);
    int warp = t->tid / 32;
    if (warp < C::kConsumerWarps) block.Consume(); else if (warp == C::kConsumerWarps) { if (t->tid % 32 == 0) block.ProduceWeights(&w); } else if (warp == C::kConsumerWarps + 1) block.ProduceActivations(&x); else block.Reduce(warp - C::kConsumerWarps - 2);
  };
  for (size_t i = 0; i < ts.size(); ++i) { Thread& t = ts[i]; t.block = &bs[i / C::kThreads]; t.tid = i % C::kThreads; t.stack.resize(64 * 1024); getcontext(&t.ctx); t.ctx.uc_stack.ss_sp = t.stack.data(); t.ctx.uc_stack.ss_size = t.stack.size(); t.ctx.uc_link = &sched; makecontext(&t.ctx, Entry, 0); }
  size_t left = ts.size(); long last = -1; int idle = 0;
  while (left) {
    size_t start = rng() % ts.size();
    for (size_t k = 0; k < ts.size(); ++k) { Thread& t = ts[(start + k) % ts.size()]; if (t.done) continue; cur = &t; swapcontext(&sched, &t.ctx); if (t.done) --left; }
    while (!pending.empty() && rng() % 3) { auto f = pending.front(); pending.pop_front(); f(); ++progress; }
    if (progress == last) { if (++idle > 2000) { std::printf("DEADLOCK\n"); exit(2); } } else idle = 0; last = progress;
  }
  for (Block& b : bs) for (auto& [a, m] : b.bars) if (m.tx != 0) std::printf("tx left\n");
}
static float R(float s) { static std::normal_distribution<float> n(0, 1); return s * n(rng); }
static std::vector<__nv_bfloat16> RB(size_t n, float s) { std::vector<__nv_bfloat16> v(n); for (auto& x : v) x = __float2bfloat16(R(s)); return v; }
template <int N> void Dispatch(const CUtensorMap& w, const CUtensorMap& x, const LinearArgs& a, int blocks) { if constexpr (N <= 128) if (a.plan.groups == 3) return RunKernel<3, N>(w, x, a, blocks); RunKernel<2, N>(w, x, a, blocks); }
struct Case { DoraLinearShape shape; int processors; std::vector<std::vector<int>> ranks; };
int main(int argc, char** argv) {
  int bad = 0; if (std::getenv("SEED")) rng.seed(std::atoi(std::getenv("SEED"))); const bool clusters = argc < 2 || std::strcmp(argv[1], "nocluster");
  std::vector<Case> cases = {{{512, 3, {192, 64, 80}}, 5, {{40, 8, 16}, {0, 100, 5}, {384, 16, 64}}}, {{1024, 1, {128}}, 4, {{24}, {100}, {8}}}, {{1024, 1, {192}}, 4, {{24}, {100}, {8}}}, {{200, 2, {304, 208}}, 3, {{24, 8}, {100, 7}, {72, 300}}}, {{128, 1, {1000}}, 2, {{16}, {24}, {130}}}};
  for (Case& c : cases) {
    const DoraLinearShape& s = c.shape; int out = OutFeatures(s), in = s.in; auto x = RB((size_t)256 * in, 1), w = RB((size_t)out * in, .05f); std::vector<float> bias(out); for (auto& b : bias) b = R(1);
    struct F { std::vector<__nv_bfloat16> a, b; std::vector<float> g; }; std::vector<F> fs; std::vector<DoraFactors> table; std::vector<CUtensorMap> maps; int maxr = 0;
    for (auto& ad : c.ranks) for (int p = 0; p < s.parts; ++p) { int r = ad[p]; maxr = std::max(maxr, r); fs.push_back({}); F& f = fs.back(); int ld = (r + 7) / 8 * 8; f.a = RB((size_t)r * in, .05f); f.b = RB((size_t)s.out[p] * ld, .05f); for (int n = 0; n < s.out[p]; ++n) for (int k = r; k < ld; ++k) f.b[(size_t)n * ld + k] = __float2bfloat16(0.f); for (int n = 0; n < s.out[p]; ++n) f.g.push_back(1 + R(.2f)); }
    size_t q = 0; for (auto& ad : c.ranks) for (int p = 0; p < s.parts; ++p, ++q) { DoraFactors d; d.a = fs[q].a.data(); d.b = fs[q].b.data(); d.g = q % 4 == 3 ? nullptr : fs[q].g.data(); d.scale = .5f + q * .1f; d.rank = ad[p]; d.ldb = (ad[p] + 7) / 8 * 8; table.push_back(d); maps.push_back(Map(d.a, d.rank, in, in, 64)); maps.push_back(Map(d.b, s.out[p], d.ldb, d.ldb, 64)); }
    std::map<std::pair<int,int>, std::vector<float>> first;  // row, slot -> bits
    std::vector<uint8_t> counters(kDoraLinearCounterBytes, 0);
    for (int rows : {1, 2, 8, 13, 16, 32, 50, 100, 128, 200}) {
      if (argc > 2 && rows > std::atoi(argv[2])) continue;
      int columns = 8; while (columns < rows) columns *= 2;
      std::vector<RowSegment> segs; if (rows == 1) segs = {{1, 0, 1}}; else if (rows == 2) segs = {{2, 0, 2}}; else segs = {{-1, 0, rows / 5}, {0, rows / 5, rows / 3}, {2, rows / 3, rows * 2 / 3}, {1, rows * 2 / 3, rows}};
      segs.resize(256); int count = rows == 1 || rows == 2 ? 1 : 4;
      LinearArgs a = {}; a.p.shape = s; a.p.rows = rows; a.p.max_rank = maxr; a.p.x = x.data(); a.p.w = w.data(); a.p.bias = bias.data(); a.p.table = {table.data(), s.parts}; a.p.maps = maps.data(); a.p.segments = segs.data(); a.p.num_segments = &count;
      std::vector<float> y((size_t)rows * out, NAN); std::vector<__nv_bfloat16> yb((size_t)rows * out);
      a.plan = PlanLinear(s, c.processors, columns); if (std::getenv("MANY")) { a.plan.a_chunks = 1; a.plan.a_splits = a.plan.chunks; } for (int p = 0; p < 3; ++p) a.part_begin[p + 1] = a.part_begin[p] + (p < s.parts ? s.out[p] : 0);
      a.ldh = (maxr + 15) / 16 * 16; std::vector<__nv_bfloat16> h((size_t)s.parts * rows * a.ldh, __float2bfloat16(NAN)); std::vector<float4> hp((size_t)a.plan.a_splits * s.parts * a.ldh * columns / 4, float4{NAN, NAN, NAN, NAN}), yp((size_t)a.plan.Tiles() * a.plan.PanelRows() * columns / 4);
      a.counters = (LinearCounters*)counters.data(); a.h = h.data(); a.h_partial = hp.data(); a.y_partial = yp.data();
      int blocks = c.processors; a.clusters = clusters && a.plan.splits > 1 && a.plan.Tiles() <= blocks; if (a.clusters) blocks = a.plan.Tiles();
      CUtensorMap wm = Map(w.data(), out, in, in, a.plan.PanelRows()), xm = Map(x.data(), rows, in, in, columns);
      for (int bf = 0; bf < 2; ++bf) {
        a.p.y_fp32 = !bf; a.p.y = bf ? (void*)yb.data() : (void*)y.data();
        switch (columns) { case 8: Dispatch<8>(wm, xm, a, blocks); break; case 16: Dispatch<16>(wm, xm, a, blocks); break; case 32: Dispatch<32>(wm, xm, a, blocks); break; case 64: Dispatch<64>(wm, xm, a, blocks); break; case 128: Dispatch<128>(wm, xm, a, blocks); break; default: Dispatch<256>(wm, xm, a, blocks); }
        for (uint8_t b : counters) if (b) { std::printf("counters not zero\n"); ++bad; break; }
      }
      double worst = 0; int nb = 0, diff = 0;
      for (int i = 0; i < count; ++i) for (int t = segs[i].begin; t < segs[i].end; ++t) {
        if (rows > 32 && t % 7 && t != segs[i].begin && t != segs[i].end - 1) continue;
        std::vector<double> ref(out); double norm = 0, err = 0;
        for (int p = 0, n0 = 0; p < s.parts; n0 += s.out[p], ++p) { std::vector<double> hh; const DoraFactors* d = segs[i].slot < 0 ? nullptr : &table[segs[i].slot * s.parts + p]; if (d) for (int r = 0; r < d->rank; ++r) { double v = 0; for (int k = 0; k < in; ++k) v += (double)__bfloat162float(d->a[(size_t)r * in + k]) * __bfloat162float(x[(size_t)t * in + k]); hh.push_back(v * d->scale); }
          for (int n = 0; n < s.out[p]; ++n) { double v = 0; for (int k = 0; k < in; ++k) v += (double)__bfloat162float(w[(size_t)(n0 + n) * in + k]) * __bfloat162float(x[(size_t)t * in + k]); for (size_t r = 0; r < hh.size(); ++r) v += hh[r] * __bfloat162float(d->b[(size_t)n * d->ldb + r]); if (d && d->rank && d->g) v *= d->g[n]; ref[n0 + n] = v + bias[n0 + n]; } }
        for (int n = 0; n < out; ++n) { norm += ref[n] * ref[n]; double e = y[(size_t)t * out + n] - ref[n]; err += e * e; if (__bfloat162float(__float2bfloat16(y[(size_t)t * out + n])) != __bfloat162float(yb[(size_t)t * out + n])) ++nb; }
        double e = std::sqrt(err / norm); if (!(e <= worst)) worst = e;
        std::vector<float> line(y.begin() + (size_t)t * out, y.begin() + (size_t)(t + 1) * out); auto [it, fresh] = first.try_emplace({t, segs[i].slot}, line); if (!fresh && std::memcmp(it->second.data(), line.data(), out * 4)) ++diff;
      }
      bool ok = worst < 2e-3 && nb == 0 && diff == 0; if (!ok) ++bad;
      std::printf("in %d out %d rows %d groups %d splits %d tiles %d a_splits %d clusters %d: error %.1e bf16 differ %d bits differ %d %s\n", in, out, rows, a.plan.groups, a.plan.splits, a.plan.Tiles(), a.plan.a_splits, a.clusters, worst, nb, diff, ok ? "" : "BAD"); std::fflush(stdout);
    }
  }
  std::printf(bad ? "FAILED\n" : "all right\n"); return bad;
}
