// The GPU: statuses of CUDA calls, streams, and memory with an account by purpose. The caller owns
// the objects; thread-safe where a comment says so.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "kernels/isa/isa.h"

namespace dorad::cuda {

// RESOURCE_EXHAUSTED (OUT_OF_MEMORY) or INTERNAL (CUDA_ERROR); OK for cudaSuccess. `what` begins
// the message: "the step".
absl::Status ToStatus(cudaError_t error, std::string_view what);

// Memory of a GPU, with the use by all processes.
struct DeviceMemory {
  int64_t free = 0;
  int64_t total = 0;
  // Freed by DeviceBuffers and kept in their pool: unavailable to other processes and to
  // MappedMemory until TrimFreedMemory.
  int64_t pooled = 0;
};

absl::StatusOr<DeviceMemory> MemoryOfDevice();

// The name of the GPU. FAILED_PRECONDITION (DEVICE_UNAVAILABLE) unless this build has kernels for
// it.
absl::StatusOr<std::string> FindGpu();
// Makes that GPU this process's. FAILED_PRECONDITION (DEVICE_UNAVAILABLE) as FindGpu.
absl::StatusOr<DeviceMemory> OpenDevice();

// The instruction set that engine.instruction_set asks for: "auto", or one by its name.
// INVALID_ARGUMENT (INSTRUCTION_SET_UNSUPPORTED) if there is no code of it for this GPU. REQUIRES:
// OpenDevice.
absl::StatusOr<kernels::KernelIsa> ChooseIsa(std::string_view setting);
std::string_view NameOf(kernels::KernelIsa isa);  // "sm90", "mma"

// Returns the pool of DeviceBuffers to the device. Waits for the device's work.
void TrimFreedMemory();

// The stream priority in this process; loaders use kLow. Other processes on the GPU take turns
// regardless of it, unless MPS joins them.
enum class Priority { kHigh, kNormal, kLow };

// A non-blocking stream of its own. Move-only.
class Stream {
 public:
  static absl::StatusOr<Stream> Create(Priority priority = Priority::kHigh);
  Stream(Stream&& other) noexcept : stream_(std::exchange(other.stream_, nullptr)) {}
  Stream& operator=(Stream&&) = delete;
  ~Stream();

  cudaStream_t get() const { return stream_; }
  absl::Status Synchronize(std::string_view what) const;

 private:
  explicit Stream(cudaStream_t stream) : stream_(stream) {}
  cudaStream_t stream_;
};

// A position in a stream's work; the host or another stream can wait for it. Move-only; the
// destructor waits.
class Event {
 public:
  // The host's kind of wait: a sleeping thread frees its core and wakes up some 50 µs late.
  enum class Wait { kSpinning, kSleeping };
  static absl::StatusOr<Event> Create(Wait wait = Wait::kSpinning);
  Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  Event& operator=(Event&&) = delete;
  ~Event();

  cudaEvent_t get() const { return event_; }
  // Marks the end of `stream`'s work so far.
  absl::Status Record(const Stream& stream, std::string_view what) const;
  // Returns at once when nothing was recorded.
  absl::Status Synchronize(std::string_view what) const;
  // Makes later work of `stream` wait for the event.
  absl::Status Hold(const Stream& stream, std::string_view what) const;

 private:
  explicit Event(cudaEvent_t event) : event_(event) {}
  cudaEvent_t event_;
};

// Counts bytes on the device by kind, and refuses an allocation beyond the server's limit or the
// memory that other processes leave free. Thread-safe; outlives the buffers that it counts.
class MemoryLedger {
 public:
  using Kinds = std::map<std::string, int64_t>;
  static constexpr int64_t kNoLimit = INT64_MAX;
  // Activations and the batches of steps: they may use the reserve, so that running requests can
  // continue.
  static constexpr char kWorkspace[] = "workspace";
  // The source of memory: the device, or first the pool of DeviceBuffers. kGranted: already
  // checked, or already held. kSpare: the device, if it need not be released again soon: below the
  // low water mark, and within the limit even with the pool's memory.
  enum class Source { kDevice, kPool, kGranted, kSpare };
  // The device's memory at this moment.
  using Probe = std::function<absl::StatusOr<DeviceMemory>()>;

  explicit MemoryLedger(int64_t limit = kNoLimit) : limit_(limit) {}

  // Applies to later allocations only; held memory stays.
  void set_limit(int64_t limit);
  // From now on the device is checked before any kind but kWorkspace grows, and `bytes` of it are
  // left to other processes.
  void SetReserve(int64_t bytes, Probe probe);
  // The bytes of each kind that cannot be released; other kinds cannot be released at all.
  void SetGivesWay(Kinds all_but);
  // Limit on the device's use by all processes.
  void set_low_water(int64_t bytes);
  // RESOURCE_EXHAUSTED (OUT_OF_MEMORY) with the need, the bytes of each kind and the limit, or the
  // device's free memory and the reserve; with metadata kNeverFits when even the release of all
  // that can be released would not suffice. Errors of the probe.
  absl::Status Reserve(const std::string& kind, int64_t bytes, Source source);
  void Release(const std::string& kind, int64_t bytes);
  // Counts memory that is already allocated, without checks.
  void Add(const std::string& kind, int64_t bytes);
  // Checks that all of `plan` fits beside the reserve, on this device; otherwise OUT_OF_MEMORY that
  // lists the plan.
  absl::Status CheckPlan(const Kinds& plan, const DeviceMemory& device) const;

  Kinds by_kind() const;
  int64_t bytes(const std::string& kind) const;
  int64_t total() const;
  int64_t limit() const;
  // The number of refusals by Reserve, without kSpare, by cause.
  struct Refusals {
    int64_t limit = 0;
    int64_t reserve = 0;
  };
  Refusals refusals() const;

 private:
  int64_t Sum() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  int64_t Staying() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status TakeWithinLimit(const std::string& kind, int64_t bytes, Source source);
  absl::Status CheckDevice(const std::string& kind, int64_t bytes, Source source);

  mutable absl::Mutex mu_;
  int64_t limit_ ABSL_GUARDED_BY(mu_);
  int64_t reserve_ ABSL_GUARDED_BY(mu_) = 0;
  Kinds gives_way_ ABSL_GUARDED_BY(mu_);
  int64_t low_water_ ABSL_GUARDED_BY(mu_) = kNoLimit;
  Probe probe_ ABSL_GUARDED_BY(mu_);  // nullptr: the device is not asked
  Refusals refusals_ ABSL_GUARDED_BY(mu_);
  Kinds by_kind_ ABSL_GUARDED_BY(mu_);
};

// Device memory, 256-byte aligned, not initialised. Move-only. Uses CUDA's stream-ordered pool, so
// that neither allocation nor free waits for other streams; at its destruction no work may still
// use it.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  // RESOURCE_EXHAUSTED (OUT_OF_MEMORY) as MemoryLedger::Reserve, and when the device has no more.
  static absl::StatusOr<DeviceBuffer> Allocate(MemoryLedger* ledger, std::string kind,
                                               int64_t bytes);
  DeviceBuffer(DeviceBuffer&& other) noexcept { Swap(other); }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    DeviceBuffer taken(std::move(other));
    Swap(taken);
    return *this;
  }
  ~DeviceBuffer();

  template <typename T = void>
  T* as(int64_t offset_bytes = 0) const {
    return reinterpret_cast<T*>(static_cast<char*>(data_) + offset_bytes);
  }
  int64_t bytes() const { return bytes_; }

 private:
  void Swap(DeviceBuffer& other) noexcept;

  MemoryLedger* ledger_ = nullptr;
  std::string kind_;
  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

// Page-locked host memory, so that copies are asynchronous. Move-only.
class PinnedBuffer {
 public:
  PinnedBuffer() = default;
  static absl::StatusOr<PinnedBuffer> Allocate(int64_t bytes);
  PinnedBuffer(PinnedBuffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  PinnedBuffer& operator=(PinnedBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~PinnedBuffer();

  template <typename T = std::byte>
  T* as(int64_t offset_bytes = 0) const {
    return reinterpret_cast<T*>(static_cast<char*>(data_) + offset_bytes);
  }
  int64_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

// Allocates anew unless the buffer has so many bytes; the old ones are lost.
absl::Status Grow(PinnedBuffer* buffer, int64_t bytes);
absl::Status Grow(DeviceBuffer* buffer, MemoryLedger* ledger, const char* kind, int64_t bytes);

inline int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Packs arrays into one buffer, each 256-byte aligned: add all, allocate, then ask for offsets.
class Layout {
 public:
  // Returns the array's offset in bytes.
  int64_t Add(int64_t bytes) {
    const int64_t offset = bytes_;
    bytes_ += RoundUp(bytes, kAlignment);
    return offset;
  }
  int64_t bytes() const { return bytes_; }

 private:
  static constexpr int64_t kAlignment = 256;
  int64_t bytes_ = 0;
};

}  // namespace dorad::cuda

// Returns from the enclosing function with ToStatus when a CUDA call fails.
#define DORAD_RETURN_IF_CUDA_ERROR(expression, what)                                \
  do {                                                                              \
    if (const cudaError_t cuda_error_ = (expression); cuda_error_ != cudaSuccess) { \
      return ::dorad::cuda::ToStatus(cuda_error_, what);                            \
    }                                                                               \
  } while (false)
