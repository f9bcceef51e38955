#include "server/backends/cpu/ops/thread_team.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>
#include <vector>

#include "server/backends/cpu/simd/pause.h"
#include "server/platform/check.h"

namespace dorad::ops {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

// A region is published as one 64-bit ticket: its epoch (high half) and the number of untaken tasks
// (low half). Taking a task is a compare-and-set on the whole ticket, so a late worker can never
// take a task of a region it has not seen, and a region can end without waiting for workers that
// are parked or not scheduled.
struct ThreadTeam::State {
  explicit State(int64_t spin_microseconds) : spin(spin_microseconds) {}

  const std::chrono::microseconds spin;
  std::mutex run_mutex;

  alignas(64) std::atomic<uint64_t> ticket{0};
  // Written before the ticket is published and stable while any task is taken and not finished.
  int64_t tasks = 0;
  const absl::FunctionRef<void(int64_t)>* work = nullptr;

  alignas(64) std::atomic<int64_t> finished{0};

  alignas(64) std::atomic<int> parked{0};
  std::atomic<uint32_t> wake{0};
  std::atomic<bool> stop{false};
  std::vector<std::thread> workers;

  // Runs tasks of `epoch` until none is left. Returns their number.
  int64_t Drain(uint32_t epoch) {
    int64_t done = 0;
    uint64_t seen = ticket.load(std::memory_order_acquire);
    while (static_cast<uint32_t>(seen >> 32) == epoch && static_cast<uint32_t>(seen) != 0) {
      if (!ticket.compare_exchange_weak(seen, seen - 1, std::memory_order_acquire)) continue;
      (*work)(tasks - static_cast<int64_t>(static_cast<uint32_t>(seen)));
      ++done;
      seen = ticket.load(std::memory_order_acquire);
    }
    return done;
  }

  // Waits until a task can be taken; false when the team ends.
  bool AwaitRegion() {
    Clock::time_point deadline{};
    for (uint32_t i = 1;; ++i) {
      if (static_cast<uint32_t>(ticket.load(std::memory_order_acquire)) != 0) return true;
      if (stop.load(std::memory_order_relaxed)) return false;
      Pause();
      if (i % 64 != 0) continue;  // the clock costs more than a look at the ticket
      const Clock::time_point now = Clock::now();
      if (deadline == Clock::time_point{}) deadline = now + spin;
      if (now < deadline) continue;
      Park();
      deadline = {};
    }
  }

  // The order "announce, look again, sleep" against Run's "publish, look for the announced" makes a
  // lost wake-up impossible.
  void Park() {
    const uint32_t before = wake.load();
    parked.fetch_add(1);
    if (static_cast<uint32_t>(ticket.load()) == 0 && !stop.load()) wake.wait(before);
    parked.fetch_sub(1);
  }

  void WakeParked() {
    if (parked.load() == 0) return;
    wake.fetch_add(1);
    wake.notify_all();
  }

  void Work() {
    while (AwaitRegion()) {
      const uint32_t epoch = static_cast<uint32_t>(ticket.load(std::memory_order_acquire) >> 32);
      const int64_t done = Drain(epoch);
      if (done != 0) finished.fetch_add(done, std::memory_order_release);
    }
  }
};

ThreadTeam::ThreadTeam(int threads, int64_t spin_microseconds)
    : state_(std::make_unique<State>(spin_microseconds)) {
  DORAD_CHECK(threads >= 1);
  for (int i = 1; i < threads; ++i) {
    state_->workers.emplace_back([state = state_.get()] { state->Work(); });
  }
}

ThreadTeam::~ThreadTeam() {
  state_->stop.store(true);
  state_->wake.fetch_add(1);
  state_->wake.notify_all();
  for (std::thread& worker : state_->workers) worker.join();
}

int ThreadTeam::threads() const { return static_cast<int>(state_->workers.size()) + 1; }

void ThreadTeam::Run(int64_t tasks, absl::FunctionRef<void(int64_t)> work) {
  DORAD_CHECK(tasks >= 0 && tasks <= int64_t{UINT32_MAX});
  if (tasks <= 1 || state_->workers.empty()) {
    for (int64_t i = 0; i < tasks; ++i) work(i);
    return;
  }
  State& state = *state_;
  std::lock_guard<std::mutex> lock(state.run_mutex);
  state.tasks = tasks;
  state.work = &work;
  state.finished.store(0, std::memory_order_relaxed);
  const uint32_t epoch =
      static_cast<uint32_t>(state.ticket.load(std::memory_order_relaxed) >> 32) + 1;
  state.ticket.store(uint64_t{epoch} << 32 | static_cast<uint64_t>(tasks));
  state.WakeParked();
  const int64_t others = tasks - state.Drain(epoch);
  for (uint32_t i = 1; state.finished.load(std::memory_order_acquire) != others; ++i) {
    Pause();
    // More threads than cores: let the worker that holds the last task run.
    if (i % 4096 == 0) std::this_thread::yield();
  }
}

namespace {
std::mutex g_team_mutex;
int g_threads = 0;
ThreadTeam* g_team = nullptr;
}  // namespace

void SetThreads(int threads) {
  DORAD_CHECK(threads >= 1);
  std::lock_guard<std::mutex> lock(g_team_mutex);
  DORAD_CHECK(g_team == nullptr || g_team->threads() == threads);
  g_threads = threads;
}

ThreadTeam& Team() {
  // Never destroyed: a thread that still computes while the process exits must not lose its team.
  static ThreadTeam& team = *[] {
    std::lock_guard<std::mutex> lock(g_team_mutex);
    const int hardware = static_cast<int>(std::thread::hardware_concurrency());
    g_team = new ThreadTeam(g_threads > 0 ? g_threads : std::max(1, hardware));
    return g_team;
  }();
  return team;
}

}  // namespace dorad::ops
