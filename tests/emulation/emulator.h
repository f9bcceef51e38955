// Runs the device code of a kernel on a CPU: every thread of every block is a fiber, switched at
// waits and barriers in a random but repeatable order. A wait that lasts costs a look at a number,
// not a switch. Finds wrong indices, missing or surplus arrivals, phases that are missed, copies to
// blocks that have left, deadlocks. Knows nothing of memory ordering (every write is seen at once)
// nor of time.
//
// The headers of kernels/isa are shadowed by the ones beside this file: units of kernels/ are
// compiled as they are, and launch what they launch in production.
// One Emulator at a time; single-threaded.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <setjmp.h>
#include <ucontext.h>
#include <vector_functions.h>
#include <vector_types.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

// The language's words for the compiler of device code.
#undef __launch_bounds__
#undef __grid_constant__
#undef __global__
#undef __shared__
#undef __noinline__
#define __launch_bounds__(...)
#define __grid_constant__
#define __global__
#define __shared__
#define __noinline__

namespace dorad::emulation {

class Grid;

// Ends the run: what it found goes to the test.
[[noreturn]] void Fail(const std::string& what);

// An mbarrier.
struct Barrier {
  int arrivals = 0;  // of a phase
  int pending = 0;
  int64_t bytes = 0;  // that copies still owe
  uint32_t phase = 0;
};

// A barrier of a number of threads, by who came.
struct Meeting {
  int arrived = 0;
  uint32_t generation = 0;
};

struct Warp {
  Meeting meeting;
  int64_t asleep_until = 0;  // in rounds: others run ahead
  // What lanes show each other, in turns: some may still read when others show what is next.
  alignas(16) unsigned char shown[2][32 * 64];
};

struct Block {
  unsigned char* At(uint32_t address);
  Barrier& BarrierAt(uint32_t address);

  int index = 0;
  int rank = 0;  // in its cluster
  int threads = 0;
  int alive = 0;
  bool lets_next_start = false;
  Grid* grid = nullptr;
  std::vector<Block*>* cluster = nullptr;
  Meeting* cluster_meeting = nullptr;
  std::vector<unsigned char> memory;
  unsigned char* shared = nullptr;  // address 0 of the block's shared memory
  uint32_t dynamic_bytes = 0;
  std::vector<Warp> warps;
  std::map<uint32_t, Barrier> barriers;  // by address
  Meeting named[16];
};

// What a fiber needs to run.
struct Fiber {
  bool started = false;
  jmp_buf left_at;       // of a started one
  ucontext_t beginning;  // of another one
  unsigned char stack[96 * 1024];
};

// Small, because each is looked at in each round.
struct Thread {
  bool Waits() const { return waits_on != nullptr && (*waits_on == value) != until; }

  const uint32_t* waits_on = nullptr;  // until it has the value, or another one
  bool until = false;
  bool done = false;
  uint32_t value = 0;
  Block* block = nullptr;
  unsigned index = 0;
  uint32_t cluster_arrival = 0;  // what ClusterWait waits for
  std::unique_ptr<Fiber> fiber;
};

// Where a block's dynamic shared memory begins: at the address that wastes most of an alignment
// above 128. The static one begins far behind it, so that accesses beyond either are found.
inline constexpr uint32_t kDynamicAt = 128;
inline constexpr uint32_t kStaticAt = 256 * 1024;
inline constexpr uint32_t kStaticBytes = 32 * 1024;

// What hosts ask of the device.
struct Device {
  int processors = 4;
  int dynamic_bytes = 227 * 1024;  // of a block's shared memory, at most
  int blocks_at_once = 8;
};

// One launch.
class Grid {
 public:
  bool done() const { return left_ == 0; }
  // Whether the launches before it are complete.
  bool CanFollow() { return previous_ == nullptr ? --delay_ < 0 : previous_->done(); }
  // Of one block, which so lets the next launch start, once all of the grid's have done so or
  // ended.
  void LetNextStart(Block* block) {
    if (!block->lets_next_start) --holding_;
    block->lets_next_start = true;
  }
  int columns() const { return columns_; }
  int lines() const { return static_cast<int>(blocks_.size()) / columns_; }

 private:
  friend class Emulator;
  Grid(dim3 size, int threads, int cluster, uint32_t dynamic_bytes, std::function<void()> body);
  static void Enter();

  Grid* previous_ = nullptr;
  int delay_ = 0;  // of the first one: looks until what comes before it is complete
  std::function<void()> body_;
  int columns_;
  std::vector<Block> blocks_;
  std::vector<std::vector<Block*>> clusters_;
  std::vector<Meeting> meetings_;
  std::vector<Thread> threads_;
  size_t left_ = 0;     // threads
  size_t holding_ = 0;  // blocks that keep the next launch from starting
};

// The state of a run.
class Emulator {
 public:
  explicit Emulator(uint32_t seed) : random_(seed) { current_ = this; }
  ~Emulator() { current_ = nullptr; }

  Device device;

  // Adds a launch of `size` blocks in x and y. body: the kernel, once a thread.
  void Launch(dim3 size, int threads, int cluster, uint32_t dynamic_bytes,
              std::function<void()> body);
  // Until all are done, side by side. Throws what it found.
  void Run();
  // Something that the copy engine does some time later.
  void Later(std::function<void()> work) { later_.push_back(std::move(work)); }
  void Progress() { ++progress_; }
  // Lets others run.
  void SwitchAway();
  // The same until a number has the value, or another one.
  void WaitUntil(const uint32_t& number, uint32_t value) { Wait(number, true, value); }
  void WaitWhile(const uint32_t& number, uint32_t value) { Wait(number, false, value); }
  Thread& thread() { return *thread_; }
  std::mt19937& random() { return random_; }
  static Emulator& Get() { return *current_; }

 private:
  friend class Grid;
  void SwitchTo(Thread& thread);
  void Wait(const uint32_t& number, bool until, uint32_t value);

  static Emulator* current_;
  std::mt19937 random_;
  std::vector<std::unique_ptr<Grid>> grids_;
  Thread* thread_ = nullptr;
  jmp_buf scheduler_;
  std::deque<std::function<void()>> later_;
  int64_t progress_ = 0;
};

inline Block& ThisBlock() { return *Emulator::Get().thread().block; }
// Until `count` threads have come; or in two steps, of which the first tells what to wait for.
void Meet(Meeting& meeting, int count);
uint32_t Arrive(Meeting& meeting, int count);
void Await(const Meeting& meeting, uint32_t generation);
// A phase ends when nobody is awaited and no copy owes bytes.
void CheckPhase(Barrier& barrier);

// Shows a lane's value to the others of its warp at their next meeting: all 32 values.
template <typename T>
T* Show(Warp& warp, const T& value) {
  static_assert(sizeof(T) <= sizeof(warp.shown[0]) / 32);
  T* all = reinterpret_cast<T*>(warp.shown[warp.meeting.generation % 2]);
  all[Emulator::Get().thread().index % 32] = value;
  return all;
}

inline Warp& ThisWarp() { return ThisBlock().warps[Emulator::Get().thread().index / 32]; }

// All lanes show a value; f of all 32 is what each of them gets.
template <typename T, typename F>
auto Exchange(const T& value, F f) {
  Warp& warp = ThisWarp();
  const T* all = Show(warp, value);
  Meet(warp.meeting, 32);
  return f(all);
}

// The same, and f does the work of all lanes at once.
template <typename T, typename F>
void Together(const T& value, F f) {
  Warp& warp = ThisWarp();
  const T* all = Show(warp, value);
  if (warp.meeting.arrived == 31) f(all);
  Meet(warp.meeting, 32);
}

struct Index {
  unsigned x;
  unsigned y = 0;
};
inline Index IndexOf(const Block& block) {
  const int columns = block.grid->columns();
  return {static_cast<unsigned>(block.index % columns),
          static_cast<unsigned>(block.index / columns)};
}
inline Index SizeOf(const Grid& grid) {
  return {static_cast<unsigned>(grid.columns()), static_cast<unsigned>(grid.lines())};
}

}  // namespace dorad::emulation

// What device code finds in the language.
#define threadIdx (dorad::emulation::Index{dorad::emulation::Emulator::Get().thread().index})
#define blockIdx (dorad::emulation::IndexOf(dorad::emulation::ThisBlock()))
#define blockDim \
  (dorad::emulation::Index{static_cast<unsigned>(dorad::emulation::ThisBlock().threads)})
#define gridDim (dorad::emulation::SizeOf(*dorad::emulation::ThisBlock().grid))

template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  return dorad::emulation::Exchange(value, [lane](const T* all) { return all[lane]; });
}
inline unsigned __ballot_sync(unsigned, bool value) {
  return dorad::emulation::Exchange(value, [](const bool* all) {
    unsigned bits = 0;
    for (int i = 0; i < 32; ++i) bits |= static_cast<unsigned>(all[i]) << i;
    return bits;
  });
}
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline void __threadfence() {}
template <typename T>
T __shfl_up_sync(unsigned, T value, int distance) {
  const int lane = static_cast<int>(dorad::emulation::Emulator::Get().thread().index % 32);
  return dorad::emulation::Exchange(
      value, [=](const T* all) { return all[lane < distance ? lane : lane - distance]; });
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  const int other = static_cast<int>(threadIdx.x % 32) ^ mask;
  return dorad::emulation::Exchange(value, [other](const T* all) { return all[other]; });
}
inline uint32_t __reduce_min_sync(unsigned, uint32_t value) {
  return dorad::emulation::Exchange(
      value, [](const uint32_t* all) { return *std::min_element(all, all + 32); });
}
inline uint32_t __reduce_or_sync(unsigned, uint32_t value) {
  return dorad::emulation::Exchange(value, [](const uint32_t* all) {
    return std::accumulate(all, all + 32, uint32_t{0}, std::bit_or<>());
  });
}
inline uint32_t __reduce_add_sync(unsigned, uint32_t value) {
  return dorad::emulation::Exchange(
      value, [](const uint32_t* all) { return std::accumulate(all, all + 32, uint32_t{0}); });
}
template <typename T>
T __reduce_max_sync(unsigned, T value) {
  return dorad::emulation::Exchange(value,
                                    [](const T* all) { return *std::max_element(all, all + 32); });
}
inline bool __any_sync(unsigned, bool value) {
  return dorad::emulation::Exchange(
      value, [](const bool* all) { return std::find(all, all + 32, true) != all + 32; });
}
inline bool __all_sync(unsigned, bool value) {
  return dorad::emulation::Exchange(value, [](const bool* all) {
    return std::all_of(all, all + 32, [](bool each) { return each; });
  });
}
void __syncwarp();
void __syncthreads();
// Nothing comes between the two steps of these.
template <typename T>
T atomicAdd(T* to, std::type_identity_t<T> value) {
  return std::exchange(*to, *to + value);
}
template <typename T>
T atomicMin(T* to, std::type_identity_t<T> value) {
  return std::exchange(*to, std::min(*to, value));
}
template <typename T>
T atomicMax(T* to, std::type_identity_t<T> value) {
  return std::exchange(*to, std::max(*to, value));
}
template <typename T>
T __ldg(const T* from) {
  return *from;
}
template <typename T>
T __ldcg(const T* from) {
  return *from;
}
template <typename T>
T __ldcs(const T* from) {
  return *from;
}
inline float __int_as_float(int bits) { return std::bit_cast<float>(bits); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline double __longlong_as_double(int64_t bits) { return std::bit_cast<double>(bits); }
inline int64_t __double_as_longlong(double x) { return std::bit_cast<int64_t>(x); }
inline double __ll2double_rn(int64_t x) { return static_cast<double>(x); }
inline unsigned long long __double2ull_rz(double x) { return static_cast<unsigned long long>(x); }
inline unsigned long long __float2ull_rn(float x) {
  return static_cast<unsigned long long>(std::nearbyint(x));
}
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline int __popc(unsigned bits) { return std::popcount(bits); }
inline float __uint_as_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline uint32_t __float_as_uint(float x) { return std::bit_cast<uint32_t>(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline uint32_t min(uint32_t a, uint32_t b) { return std::min(a, b); }
inline uint32_t max(uint32_t a, uint32_t b) { return std::max(a, b); }
inline unsigned long long min(unsigned long long a, unsigned long long b) { return std::min(a, b); }
inline unsigned long long max(unsigned long long a, unsigned long long b) { return std::max(a, b); }
template <typename T>
void __stcg(T* to, const T& value) {
  *to = value;
}
inline int min(int a, int b) { return std::min(a, b); }
inline int max(int a, int b) { return std::max(a, b); }
inline int64_t max(int64_t a, int64_t b) { return std::max(a, b); }
