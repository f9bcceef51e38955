#include "server/backends/cuda/device.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/platform/error.h"
#include "server/platform/log.h"

namespace dorad::cuda {
namespace {

// The least compute capability of the kernels: cp.async, mma.sync of bf16 and mbarriers.
constexpr int kLeastMajor = 8;

struct Gpu {
  std::string name;
  int major = 0;
  std::string capability;  // "8.9"
};

absl::StatusOr<Gpu> ReadGpu() {
  cudaDeviceProp properties;
  DORAD_RETURN_IF_CUDA_ERROR(cudaGetDeviceProperties(&properties, 0), "opening the GPU");
  return Gpu{properties.name, properties.major,
             absl::StrCat(properties.major, ".", properties.minor)};
}

std::string Gigabytes(int64_t bytes) { return absl::StrFormat("%.2f GB", 1e-9 * bytes); }

// " (kv 40.00 GB, weights 16.38 GB)", or nothing.
std::string List(const MemoryLedger::Kinds& kinds) {
  std::string list;
  for (const auto& [kind, bytes] : kinds) {
    if (bytes == 0) continue;
    absl::StrAppend(&list, list.empty() ? " (" : ", ", kind, " ", Gigabytes(bytes));
  }
  return list.empty() ? list : list + ")";
}

}  // namespace

absl::Status ToStatus(cudaError_t error, std::string_view what) {
  if (error == cudaSuccess) return absl::OkStatus();
  const std::string text = cudaGetErrorString(error);
  LogError("a CUDA call failed", {{"what", std::string(what)}, {"error", text}});
  (void)cudaGetLastError();  // clears it: later checks must not see it again
  if (error == cudaErrorMemoryAllocation) {
    return MakeError(absl::StatusCode::kResourceExhausted, "OUT_OF_MEMORY",
                     absl::StrCat(std::string(what), " ran out of GPU memory"));
  }
  return MakeError(absl::StatusCode::kInternal, "CUDA_ERROR",
                   absl::StrCat(std::string(what), " failed on the GPU: ", text));
}

absl::StatusOr<DeviceMemory> MemoryOfDevice() {
  constexpr char kAsking[] = "asking for the GPU's memory";
  size_t free = 0, total = 0;
  DORAD_RETURN_IF_CUDA_ERROR(cudaMemGetInfo(&free, &total), kAsking);
  cudaMemPool_t pool = nullptr;
  DORAD_RETURN_IF_CUDA_ERROR(cudaDeviceGetDefaultMemPool(&pool, 0), kAsking);
  uint64_t reserved = 0, used = 0;
  DORAD_RETURN_IF_CUDA_ERROR(
      cudaMemPoolGetAttribute(pool, cudaMemPoolAttrReservedMemCurrent, &reserved), kAsking);
  DORAD_RETURN_IF_CUDA_ERROR(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrUsedMemCurrent, &used),
                             kAsking);
  // `reserved` and `used` are two queries, and other threads change them meanwhile.
  const uint64_t pooled = reserved - std::min(reserved, used);
  return DeviceMemory{static_cast<int64_t>(free), static_cast<int64_t>(total),
                      static_cast<int64_t>(pooled)};
}

absl::StatusOr<std::string> FindGpu() {
  const auto unavailable = [](const std::string& why) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "DEVICE_UNAVAILABLE",
                     absl::StrCat("no GPU can be used: ", why));
  };
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  if (error != cudaSuccess) return unavailable(cudaGetErrorString(error));
  if (devices == 0) return unavailable("there is none");
  DORAD_ASSIGN_OR_RETURN(const Gpu gpu, ReadGpu());
  const std::string has = absl::StrCat(gpu.name, " has compute capability ", gpu.capability);
  if (gpu.major < kLeastMajor) {
    return unavailable(absl::StrCat(has, "; the kernels need ", kLeastMajor, ".0 or later"));
  }
  // Opens it: that may fail for other reasons than the kernels'.
  if (const cudaError_t opened = cudaFree(nullptr); opened != cudaSuccess) {
    return unavailable(absl::StrCat(gpu.name, " cannot be opened: ", cudaGetErrorString(opened)));
  }
  if (!kernels::HasKernels(kernels::BestIsa())) {
    return unavailable(absl::StrCat(has, ", for which this build has no kernels (KERNEL_ARCHS)"));
  }
  return gpu.name;
}

std::string_view NameOf(kernels::KernelIsa isa) {
  return isa == kernels::KernelIsa::kSm90 ? "sm90" : "mma";
}

absl::StatusOr<kernels::KernelIsa> ChooseIsa(std::string_view setting) {
  if (setting == "auto") return kernels::BestIsa();
  const kernels::KernelIsa isa =
      setting == "sm90" ? kernels::KernelIsa::kSm90 : kernels::KernelIsa::kMma;
  if (kernels::HasKernels(isa)) return isa;
  DORAD_ASSIGN_OR_RETURN(const Gpu gpu, ReadGpu());
  return MakeInvalid("engine",
                     {{"engine.instruction_set", "INSTRUCTION_SET_UNSUPPORTED",
                       absl::StrCat("this build has no kernels of ", std::string(setting), " for ",
                                    gpu.name, ", whose compute capability is ", gpu.capability)}});
}

absl::StatusOr<DeviceMemory> OpenDevice() {
  DORAD_RETURN_IF_ERROR(FindGpu().status());
  DORAD_RETURN_IF_CUDA_ERROR(cudaSetDevice(0), "opening the GPU");
  // Freed memory stays in the pool: returning it to the driver waits for the whole device.
  cudaMemPool_t pool = nullptr;
  DORAD_RETURN_IF_CUDA_ERROR(cudaDeviceGetDefaultMemPool(&pool, 0), "opening the GPU");
  uint64_t keep = UINT64_MAX;
  DORAD_RETURN_IF_CUDA_ERROR(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep),
                             "opening the GPU");
  return MemoryOfDevice();
}

void TrimFreedMemory() {
  cudaMemPool_t pool = nullptr;
  absl::Status status = ToStatus(cudaDeviceSynchronize(), "returning freed memory");
  if (status.ok()) status = ToStatus(cudaDeviceGetDefaultMemPool(&pool, 0), "finding the pool");
  if (status.ok()) (void)ToStatus(cudaMemPoolTrimTo(pool, 0), "returning freed memory");
}

absl::StatusOr<Stream> Stream::Create(Priority priority) {
  constexpr char kWhat[] = "making a stream";
  int least = 0, greatest = 0;  // the greatest has the smallest number
  DORAD_RETURN_IF_CUDA_ERROR(cudaDeviceGetStreamPriorityRange(&least, &greatest), kWhat);
  const int number = priority == Priority::kHigh     ? greatest
                     : priority == Priority::kNormal ? (least + greatest) / 2
                                                     : least;
  cudaStream_t stream = nullptr;
  DORAD_RETURN_IF_CUDA_ERROR(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, number),
                             kWhat);
  return Stream(stream);
}

Stream::~Stream() {
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

absl::Status Stream::Synchronize(std::string_view what) const {
  return ToStatus(cudaStreamSynchronize(stream_), what);
}

absl::StatusOr<Event> Event::Create(Wait wait) {
  cudaEvent_t event = nullptr;
  const unsigned flags =
      cudaEventDisableTiming | (wait == Wait::kSleeping ? cudaEventBlockingSync : 0);
  DORAD_RETURN_IF_CUDA_ERROR(cudaEventCreateWithFlags(&event, flags), "making an event");
  return Event(event);
}

Event::~Event() {
  if (event_ == nullptr) return;
  (void)cudaEventSynchronize(event_);
  cudaEventDestroy(event_);
}

absl::Status Event::Record(const Stream& stream, std::string_view what) const {
  return ToStatus(cudaEventRecord(event_, stream.get()), what);
}

absl::Status Event::Synchronize(std::string_view what) const {
  return ToStatus(cudaEventSynchronize(event_), what);
}

absl::Status Event::Hold(const Stream& stream, std::string_view what) const {
  return ToStatus(cudaStreamWaitEvent(stream.get(), event_), what);
}

void MemoryLedger::set_limit(int64_t limit) {
  absl::MutexLock lock(&mu_);
  limit_ = limit;
}

void MemoryLedger::SetReserve(int64_t bytes, Probe probe) {
  absl::MutexLock lock(&mu_);
  reserve_ = bytes;
  probe_ = std::move(probe);
}

void MemoryLedger::SetGivesWay(Kinds all_but) {
  absl::MutexLock lock(&mu_);
  gives_way_ = std::move(all_but);
}

void MemoryLedger::set_low_water(int64_t bytes) {
  absl::MutexLock lock(&mu_);
  low_water_ = bytes;
}

int64_t MemoryLedger::Sum() const {
  int64_t sum = 0;
  for (const auto& [kind, bytes] : by_kind_) sum += bytes;
  return sum;
}

int64_t MemoryLedger::Staying() const {
  int64_t staying = 0;
  for (const auto& [kind, bytes] : by_kind_) {
    const auto found = gives_way_.find(kind);
    staying += found == gives_way_.end() ? bytes : std::min(bytes, found->second);
  }
  return staying;
}

absl::Status MemoryLedger::Reserve(const std::string& kind, int64_t bytes, Source source) {
  DORAD_RETURN_IF_ERROR(TakeWithinLimit(kind, bytes, source));
  absl::Status status = CheckDevice(kind, bytes, source);
  if (!status.ok()) Release(kind, bytes);
  return status;
}

absl::Status MemoryLedger::TakeWithinLimit(const std::string& kind, int64_t bytes, Source source) {
  absl::MutexLock lock(&mu_);
  const int64_t held = Sum();
  // Not held + bytes: the sum may overflow.
  if (bytes > limit_ - held) {
    refusals_.limit += source == Source::kSpare ? 0 : 1;
    absl::Status status = MakeError(
        absl::StatusCode::kResourceExhausted, "OUT_OF_MEMORY",
        absl::StrCat(kind, " need ", Gigabytes(bytes), " of GPU memory, but memory.vram_limit is ",
                     Gigabytes(limit_), " and ", Gigabytes(held), " are held", List(by_kind_)));
    if (bytes <= limit_ - Staying()) return status;
    return WithMetadata(std::move(status), kNeverFits, "true");
  }
  by_kind_[kind] += bytes;
  return absl::OkStatus();
}

absl::Status MemoryLedger::CheckDevice(const std::string& kind, int64_t bytes, Source source) {
  Probe probe;
  {
    absl::MutexLock lock(&mu_);
    probe = probe_;
  }
  if (probe == nullptr || source == Source::kGranted || kind == kWorkspace) return absl::OkStatus();
  // Without the lock: the driver may be slow.
  DORAD_ASSIGN_OR_RETURN(const DeviceMemory device, probe());
  const int64_t at_hand = device.free + (source == Source::kPool ? device.pooled : 0);
  absl::MutexLock lock(&mu_);
  bool is_there = bytes <= at_hand - reserve_;
  if (source == Source::kSpare) {
    is_there = is_there && bytes <= low_water_ - (device.total - device.free) &&
               device.pooled <= limit_ - Sum();
  } else {
    refusals_.reserve += is_there ? 0 : 1;
  }
  if (is_there) return absl::OkStatus();
  Kinds held = by_kind_;
  held[kind] -= bytes;
  return MakeError(
      absl::StatusCode::kResourceExhausted, "OUT_OF_MEMORY",
      absl::StrCat(kind, " need ", Gigabytes(bytes), " of GPU memory, but ", Gigabytes(at_hand),
                   " of the GPU's ", Gigabytes(device.total), " are free, of which memory.reserve ",
                   "leaves ", Gigabytes(reserve_), " to others; this server holds ",
                   Gigabytes(Sum() - bytes), List(held)));
}

void MemoryLedger::Release(const std::string& kind, int64_t bytes) { Add(kind, -bytes); }

void MemoryLedger::Add(const std::string& kind, int64_t bytes) {
  absl::MutexLock lock(&mu_);
  by_kind_[kind] += bytes;
}

absl::Status MemoryLedger::CheckPlan(const Kinds& plan, const DeviceMemory& device) const {
  absl::MutexLock lock(&mu_);
  int64_t needed = 0;
  for (const auto& [kind, bytes] : plan) needed += bytes;
  if (needed <= limit_ - Sum() && needed <= device.free - reserve_) return absl::OkStatus();
  return MakeError(absl::StatusCode::kResourceExhausted, "OUT_OF_MEMORY",
                   absl::StrCat("at least ", Gigabytes(needed), " of GPU memory are needed",
                                List(plan), "; memory.vram_limit is ", Gigabytes(limit_), ", and ",
                                Gigabytes(device.free), " of the GPU's ", Gigabytes(device.total),
                                " are free, of which memory.reserve leaves ", Gigabytes(reserve_),
                                " to others"));
}

MemoryLedger::Kinds MemoryLedger::by_kind() const {
  absl::MutexLock lock(&mu_);
  return by_kind_;
}

int64_t MemoryLedger::bytes(const std::string& kind) const {
  absl::MutexLock lock(&mu_);
  const auto found = by_kind_.find(kind);
  return found == by_kind_.end() ? 0 : found->second;
}

int64_t MemoryLedger::total() const {
  absl::MutexLock lock(&mu_);
  return Sum();
}

int64_t MemoryLedger::limit() const {
  absl::MutexLock lock(&mu_);
  return limit_;
}

MemoryLedger::Refusals MemoryLedger::refusals() const {
  absl::MutexLock lock(&mu_);
  return refusals_;
}

absl::StatusOr<DeviceBuffer> DeviceBuffer::Allocate(MemoryLedger* ledger, std::string kind,
                                                    int64_t bytes) {
  DORAD_RETURN_IF_ERROR(ledger->Reserve(kind, bytes, MemoryLedger::Source::kPool));
  DeviceBuffer buffer;
  // The per-thread stream has no other work: this waits for the pool alone.
  cudaError_t error =
      cudaMallocAsync(&buffer.data_, std::max<int64_t>(bytes, 1), cudaStreamPerThread);
  if (error == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();  // not sticky: later calls may succeed
    ledger->Release(kind, bytes);
    DORAD_ASSIGN_OR_RETURN(const DeviceMemory device, MemoryOfDevice());
    return MakeError(
        absl::StatusCode::kResourceExhausted, "OUT_OF_MEMORY",
        absl::StrCat(kind, " need ", Gigabytes(bytes), ", but the GPU has ", Gigabytes(device.free),
                     " free of ", Gigabytes(device.total), " and this server holds ",
                     Gigabytes(ledger->total()), List(ledger->by_kind())));
  }
  const std::string what = absl::StrCat("allocating ", bytes, " bytes for ", kind);
  if (error != cudaSuccess) {
    ledger->Release(kind, bytes);
    return ToStatus(error, what);
  }
  buffer.ledger_ = ledger;
  buffer.kind_ = std::move(kind);
  buffer.bytes_ = bytes;
  DORAD_RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(cudaStreamPerThread), what);
  return buffer;
}

DeviceBuffer::~DeviceBuffer() {
  if (data_ == nullptr) return;
  (void)ToStatus(cudaFreeAsync(data_, cudaStreamPerThread), "freeing GPU memory");
  ledger_->Release(kind_, bytes_);
}

void DeviceBuffer::Swap(DeviceBuffer& other) noexcept {
  std::swap(ledger_, other.ledger_);
  std::swap(kind_, other.kind_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
}

absl::StatusOr<PinnedBuffer> PinnedBuffer::Allocate(int64_t bytes) {
  PinnedBuffer buffer;
  DORAD_RETURN_IF_CUDA_ERROR(
      cudaHostAlloc(&buffer.data_, static_cast<size_t>(bytes), cudaHostAllocDefault),
      absl::StrCat("pinning ", bytes, " bytes of host memory"));
  buffer.bytes_ = bytes;
  return buffer;
}

PinnedBuffer::~PinnedBuffer() {
  if (data_ != nullptr) cudaFreeHost(data_);
}

absl::Status Grow(PinnedBuffer* buffer, int64_t bytes) {
  if (buffer->bytes() >= bytes) return absl::OkStatus();
  DORAD_ASSIGN_OR_RETURN(*buffer, PinnedBuffer::Allocate(bytes));
  return absl::OkStatus();
}

absl::Status Grow(DeviceBuffer* buffer, MemoryLedger* ledger, const char* kind, int64_t bytes) {
  if (buffer->bytes() >= bytes) return absl::OkStatus();
  *buffer = DeviceBuffer();  // first: the ledger need not have room for both
  DORAD_ASSIGN_OR_RETURN(*buffer, DeviceBuffer::Allocate(ledger, kind, bytes));
  return absl::OkStatus();
}

}  // namespace dorad::cuda
