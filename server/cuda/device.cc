#include "server/cuda/device.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "server/base/error.h"
#include "server/base/log.h"

namespace dorad::cuda {
namespace {

// Kernels are compiled for this compute capability only (sm_90a).
constexpr int kMajor = 9;

}  // namespace

absl::Status ToStatus(cudaError_t error, std::string_view what) {
  if (error == cudaSuccess) return absl::OkStatus();
  const std::string text = cudaGetErrorString(error);
  LogError("a CUDA call failed", {{"what", std::string(what)}, {"error", text}});
  if (error == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();  // not sticky: later calls may succeed
    return MakeError(absl::StatusCode::kResourceExhausted, "OUT_OF_MEMORY",
                     absl::StrCat(std::string(what), " ran out of GPU memory"));
  }
  return MakeError(absl::StatusCode::kInternal, "CUDA_ERROR",
                   absl::StrCat(std::string(what), " failed on the GPU: ", text));
}

absl::Status OpenDevice() {
  const auto unavailable = [](const std::string& why) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "DEVICE_UNAVAILABLE",
                     absl::StrCat("model.device is cuda, but ", why));
  };
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  if (error != cudaSuccess) return unavailable(cudaGetErrorString(error));
  if (devices == 0) return unavailable("there is no GPU");
  cudaDeviceProp properties;
  DORAD_RETURN_IF_CUDA_ERROR(cudaGetDeviceProperties(&properties, 0), "opening the GPU");
  if (properties.major != kMajor) {
    return unavailable(absl::StrCat(properties.name, " has compute capability ", properties.major,
                                    ".", properties.minor, "; the kernels need 9.0 (Hopper)"));
  }
  DORAD_RETURN_IF_CUDA_ERROR(cudaSetDevice(0), "opening the GPU");
  // Freed memory stays in the pool: giving it back to the driver waits for the whole device.
  cudaMemPool_t pool = nullptr;
  DORAD_RETURN_IF_CUDA_ERROR(cudaDeviceGetDefaultMemPool(&pool, 0), "opening the GPU");
  uint64_t keep = UINT64_MAX;
  DORAD_RETURN_IF_CUDA_ERROR(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep),
                             "opening the GPU");
  return absl::OkStatus();
}

absl::StatusOr<Stream> Stream::Create() {
  cudaStream_t stream = nullptr;
  DORAD_RETURN_IF_CUDA_ERROR(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking),
                             "making a stream");
  return Stream(stream);
}

Stream::~Stream() {
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

absl::Status Stream::Synchronize(std::string_view what) const {
  return ToStatus(cudaStreamSynchronize(stream_), what);
}

absl::StatusOr<Event> Event::Create() {
  cudaEvent_t event = nullptr;
  DORAD_RETURN_IF_CUDA_ERROR(cudaEventCreateWithFlags(&event, cudaEventDisableTiming),
                             "making an event");
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

void MemoryLedger::Add(const std::string& kind, int64_t bytes) {
  absl::MutexLock lock(&mu_);
  by_kind_[kind] += bytes;
}

std::map<std::string, int64_t> MemoryLedger::by_kind() const {
  absl::MutexLock lock(&mu_);
  return by_kind_;
}

int64_t MemoryLedger::bytes(const std::string& kind) const {
  absl::MutexLock lock(&mu_);
  const auto found = by_kind_.find(kind);
  return found == by_kind_.end() ? 0 : found->second;
}

absl::StatusOr<DeviceBuffer> DeviceBuffer::Allocate(MemoryLedger* ledger, std::string kind,
                                                    int64_t bytes) {
  DeviceBuffer buffer;
  const std::string what = absl::StrCat("allocating ", bytes, " bytes for ", kind);
  // The per-thread stream has no other work, so the wait is for the pool alone.
  DORAD_RETURN_IF_CUDA_ERROR(
      cudaMallocAsync(&buffer.data_, std::max<int64_t>(bytes, 1), cudaStreamPerThread), what);
  buffer.ledger_ = ledger;
  buffer.kind_ = std::move(kind);
  buffer.bytes_ = bytes;
  ledger->Add(buffer.kind_, bytes);
  DORAD_RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(cudaStreamPerThread), what);
  return buffer;
}

DeviceBuffer::~DeviceBuffer() {
  if (data_ == nullptr) return;
  (void)ToStatus(cudaFreeAsync(data_, cudaStreamPerThread), "freeing GPU memory");
  ledger_->Add(kind_, -bytes_);
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

}  // namespace dorad::cuda
