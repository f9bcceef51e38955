#include "server/cuda/peer_memory.h"

#include <cuda.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/check.h"
#include "server/base/error.h"

namespace dorad::cuda {
namespace {

constexpr char kReading[] = "reading a trainer's memory";
// What is copied at a time: on its way to the host it passes through page-locked memory.
constexpr int64_t kPieceBytes = 1 << 20;

absl::Status Invalid(std::string message) {
  return MakeError(absl::StatusCode::kInvalidArgument, "HANDOVER_MEMORY_INVALID",
                   std::move(message));
}

// Bytes of the allocation that begins at `data`. To read beyond it would lose the GPU, so nobody is
// taken at their word.
absl::StatusOr<uint64_t> SizeOfAllocation(void* data) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  DORAD_RETURN_IF_CUDA_ERROR(cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &function,
                                                              12000, cudaEnableDefault, &found),
                             kReading);
  if (function == nullptr || found != cudaDriverEntryPointSuccess) {
    return Invalid("the driver does not tell how large the memory is");
  }
  CUdeviceptr begin = 0;
  size_t size = 0;
  const auto get_range =
      reinterpret_cast<CUresult (*)(CUdeviceptr*, size_t*, CUdeviceptr)>(function);
  if (get_range(&begin, &size, reinterpret_cast<CUdeviceptr>(data)) != CUDA_SUCCESS ||
      begin != reinterpret_cast<CUdeviceptr>(data)) {
    return Invalid("the handle is not that of a whole allocation");
  }
  return size;
}

}  // namespace

// Copies from the device, one piece after the other. Thread-safe.
class PeerMemories::Reader {
 public:
  static absl::StatusOr<std::shared_ptr<Reader>> Create() {
    DORAD_ASSIGN_OR_RETURN(Stream stream, Stream::Create(Priority::kLoading));
    DORAD_ASSIGN_OR_RETURN(PinnedBuffer piece, PinnedBuffer::Allocate(kPieceBytes));
    return std::shared_ptr<Reader>(new Reader(std::move(stream), std::move(piece)));
  }

  absl::Status Read(const std::byte* from, absl::Span<std::byte> to) const
      ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    while (!to.empty()) {
      const size_t count = std::min(to.size(), static_cast<size_t>(kPieceBytes));
      DORAD_RETURN_IF_CUDA_ERROR(
          cudaMemcpyAsync(piece_.as<>(), from, count, cudaMemcpyDeviceToHost, stream_.get()),
          kReading);
      DORAD_RETURN_IF_ERROR(stream_.Synchronize(kReading));
      std::memcpy(to.data(), piece_.as<>(), count);
      from += count;
      to.remove_prefix(count);
    }
    return absl::OkStatus();
  }

 private:
  Reader(Stream stream, PinnedBuffer piece)
      : stream_(std::move(stream)), piece_(std::move(piece)) {}

  const Stream stream_;
  mutable absl::Mutex mu_;
  const PinnedBuffer piece_ ABSL_GUARDED_BY(mu_);
};

class PeerMemories::Memory final : public adapter::PeerMemory {
 public:
  Memory(std::shared_ptr<const Reader> reader, void* data, uint64_t size)
      : reader_(std::move(reader)), data_(static_cast<const std::byte*>(data)), size_(size) {}
  ~Memory() override { (void)cudaIpcCloseMemHandle(const_cast<std::byte*>(data_)); }

  uint64_t size() const override { return size_; }
  absl::Status Read(uint64_t offset, absl::Span<std::byte> to) const override {
    return reader_->Read(data_ + offset, to);
  }

 private:
  const std::shared_ptr<const Reader> reader_;
  const std::byte* const data_;
  const uint64_t size_;
};

absl::StatusOr<std::unique_ptr<PeerMemories>> PeerMemories::Create() {
  DORAD_ASSIGN_OR_RETURN(std::shared_ptr<Reader> reader, Reader::Create());
  return std::unique_ptr<PeerMemories>(new PeerMemories(std::move(reader)));
}

PeerMemories::~PeerMemories() = default;

absl::StatusOr<std::shared_ptr<const adapter::PeerMemory>> PeerMemories::Open(
    absl::Span<const std::byte> ipc_handle, absl::Span<const std::byte> device_uuid,
    uint64_t size) const {
  int device = 0;
  cudaDeviceProp properties;
  cudaIpcMemHandle_t handle;
  DORAD_CHECK(ipc_handle.size() == sizeof(handle) && device_uuid.size() == sizeof(properties.uuid));
  DORAD_RETURN_IF_CUDA_ERROR(cudaGetDevice(&device), kReading);
  DORAD_RETURN_IF_CUDA_ERROR(cudaGetDeviceProperties(&properties, device), kReading);
  if (std::memcmp(device_uuid.data(), &properties.uuid, device_uuid.size()) != 0) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "HANDOVER_DEVICE_UNSUPPORTED",
                     "the memory lies on another GPU than the server");
  }
  std::memcpy(&handle, ipc_handle.data(), sizeof(handle));
  void* data = nullptr;
  const cudaError_t error = cudaIpcOpenMemHandle(&data, handle, cudaIpcMemLazyEnablePeerAccess);
  if (error != cudaSuccess) {
    (void)cudaGetLastError();  // the peer's mistake, not this process's
    return Invalid(absl::StrCat("the memory cannot be opened: ", cudaGetErrorString(error)));
  }
  auto memory = std::make_shared<const Memory>(reader_, data, size);
  DORAD_ASSIGN_OR_RETURN(const uint64_t found, SizeOfAllocation(data));
  if (size > found) {
    return Invalid(absl::StrCat("the allocation has ", found, " bytes, not ", size));
  }
  return memory;
}

}  // namespace dorad::cuda
