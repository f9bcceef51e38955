#include "tests/emulation/emulator.h"

#include <stdexcept>

namespace dorad::emulation {
namespace {

// Rounds without progress after which all wait for each other.
constexpr int kPatience = 4000;
// Now and then a warp of a block is left out for some rounds.
constexpr int kSleepEvery = 200;
constexpr int kMostSleep = 500;

}  // namespace

Emulator* Emulator::current_ = nullptr;

void Fail(const std::string& what) { throw std::runtime_error(what); }

unsigned char* Block::At(uint32_t address) {
  const uint32_t first = address < kStaticAt ? kDynamicAt : kStaticAt;
  const uint32_t size = address < kStaticAt ? dynamic_bytes : kStaticBytes;
  if (address - first >= size) Fail("shared address " + std::to_string(address));
  return shared + address;
}

Barrier& Block::BarrierAt(uint32_t address) {
  const auto found = barriers.find(address);
  if (found == barriers.end()) Fail("no barrier at " + std::to_string(address));
  return found->second;
}

Grid::Grid(dim3 size, int threads, int cluster, uint32_t dynamic_bytes, std::function<void()> body)
    : body_(std::move(body)),
      columns_(static_cast<int>(size.x)),
      blocks_(size.x * size.y),
      clusters_(blocks_.size() / cluster),
      meetings_(clusters_.size()),
      threads_(blocks_.size() * threads),
      left_(threads_.size()),
      holding_(blocks_.size()) {
  constexpr size_t kAlignment = 1024;
  for (int i = 0; i < static_cast<int>(blocks_.size()); ++i) {
    Block& block = blocks_[i];
    block.index = i;
    block.rank = i % cluster;
    block.threads = block.alive = threads;
    block.grid = this;
    block.cluster = &clusters_[i / cluster];
    block.cluster_meeting = &meetings_[i / cluster];
    block.cluster->push_back(&block);
    block.memory.assign(kStaticAt + kStaticBytes + kAlignment, 0xFF);  // NaN, should anybody use it
    const auto base = reinterpret_cast<uintptr_t>(block.memory.data());
    block.shared = block.memory.data() + (kAlignment - base % kAlignment) % kAlignment;
    block.dynamic_bytes = dynamic_bytes;
    block.warps.resize(threads / 32);
  }
  for (size_t i = 0; i < threads_.size(); ++i) {
    Thread& thread = threads_[i];
    thread.block = &blocks_[i / threads];
    thread.index = static_cast<unsigned>(i % threads);
    thread.fiber = std::make_unique_for_overwrite<Fiber>();
    ucontext_t& beginning = thread.fiber->beginning;
    getcontext(&beginning);
    beginning.uc_stack.ss_sp = thread.fiber->stack;
    beginning.uc_stack.ss_size = sizeof(thread.fiber->stack);
    makecontext(&beginning, &Grid::Enter, 0);
  }
}

void Grid::Enter() {
  Emulator& emulator = Emulator::Get();
  Thread& thread = emulator.thread();
  std::string failure;
  try {
    thread.block->grid->body_();
  } catch (const std::exception& error) {
    failure = error.what();
  }
  if (!failure.empty()) {
    // Nothing can be thrown from one stack to another.
    emulator.Later([failure] { Fail(failure); });
  }
  thread.done = true;
  if (--thread.block->alive == 0) thread.block->grid->LetNextStart(thread.block);
  emulator.Progress();
  emulator.SwitchAway();
}

// setcontext makes a system call, for the signal mask. So it only starts a fiber; longjmp resumes
// it.
void Emulator::SwitchTo(Thread& thread) {
  thread_ = &thread;
  if (_setjmp(scheduler_) != 0) return;
  Fiber& fiber = *thread.fiber;
  if (fiber.started) _longjmp(fiber.left_at, 1);
  fiber.started = true;
  setcontext(&fiber.beginning);
}

void Emulator::SwitchAway() {
  if (_setjmp(thread_->fiber->left_at) == 0) _longjmp(scheduler_, 1);
}

void Emulator::Wait(const uint32_t& number, bool until, uint32_t value) {
  Thread& thread = *thread_;
  thread.waits_on = &number;
  thread.until = until;
  thread.value = value;
  while (thread.Waits()) SwitchAway();
  thread.waits_on = nullptr;
}

void Emulator::Launch(dim3 size, int threads, int cluster, uint32_t dynamic_bytes,
                      std::function<void()> body) {
  auto* const grid = new Grid(size, threads, cluster, dynamic_bytes, std::move(body));
  if (!grids_.empty()) grid->previous_ = grids_.back().get();
  grid->delay_ = static_cast<int>(random_() % 200);
  grids_.emplace_back(grid);
}

void Emulator::Run() {
  const auto grids = std::move(grids_);
  grids_.clear();
  int64_t last = -1;
  int64_t round = 0;
  int idle = 0;
  const auto running = [&] {
    return std::any_of(grids.begin(), grids.end(), [](const auto& grid) { return !grid->done(); });
  };
  while (running()) {
    for (const auto& grid : grids) {
      if (grid->previous_ != nullptr && grid->previous_->holding_ > 0) break;
      if (random_() % 4 == 0) continue;
      for (Block& block : grid->blocks_) {
        if (random_() % kSleepEvery != 0) continue;
        block.warps[random_() % block.warps.size()].asleep_until = round + random_() % kMostSleep;
      }
      std::vector<Thread>& threads = grid->threads_;
      auto next = threads.begin() + random_() % threads.size();
      for (size_t i = 0; i < threads.size(); ++i) {
        if (next == threads.end()) next = threads.begin();
        Thread& thread = *next++;
        if (thread.done || thread.Waits()) continue;
        if (thread.block->warps[thread.index / 32].asleep_until > round) continue;
        SwitchTo(thread);
        if (!thread.done) continue;
        --grid->left_;
        if (grid->done() && !grid->CanFollow()) Fail("a kernel ended before the one before it");
      }
    }
    for (int i = 0; i < 64; ++i) {
      while (!later_.empty() && random_() % 3 != 0) {
        const std::function<void()> work = std::move(later_.front());
        later_.pop_front();
        work();
        ++progress_;
      }
    }
    idle = progress_ == last ? idle + 1 : 0;
    last = progress_;
    ++round;
    if (idle > kPatience) Fail("all threads wait for each other");
  }
  for (const auto& grid : grids) {
    for (const Block& block : grid->blocks_) {
      for (const auto& [address, barrier] : block.barriers) {
        if (barrier.bytes != 0) Fail("a barrier was left with bytes to come");
        if (barrier.pending != barrier.arrivals) Fail("a barrier was left within a phase");
      }
    }
  }
}

uint32_t Arrive(Meeting& meeting, int count) {
  const uint32_t generation = meeting.generation;
  if (++meeting.arrived == count) {
    meeting.arrived = 0;
    ++meeting.generation;
    Emulator::Get().Progress();
  }
  return generation;
}

void Await(const Meeting& meeting, uint32_t generation) {
  Emulator::Get().WaitWhile(meeting.generation, generation);
}

void Meet(Meeting& meeting, int count) { Await(meeting, Arrive(meeting, count)); }

void CheckPhase(Barrier& barrier) {
  if (barrier.pending < 0) Fail("more arrivals than a phase takes");
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  barrier.phase ^= 1;
  barrier.pending = barrier.arrivals;
  Emulator::Get().Progress();
}

}  // namespace dorad::emulation

using dorad::emulation::Emulator;
using dorad::emulation::ThisBlock;

void __syncwarp() {
  dorad::emulation::Meet(ThisBlock().warps[Emulator::Get().thread().index / 32].meeting, 32);
}

void __syncthreads() { dorad::emulation::Meet(ThisBlock().named[0], ThisBlock().threads); }
