#include "server/backends/cuda/peer_memory.h"

#include <cuda.h>

#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/platform/check.h"
#include "server/platform/error.h"

namespace dorad::cuda {
namespace {

constexpr char kReading[] = "reading a trainer's memory";

absl::Status Invalid(const std::string& message) {
  return MakeError(absl::StatusCode::kInvalidArgument, "SHARED_MEMORY_MEMORY_INVALID", message);
}

// Bytes of the allocation that begins at `data`. Not the trainer's figure: a read beyond the
// allocation would break the CUDA context.
absl::StatusOr<uint64_t> SizeOfAllocation(void* data) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  DORAD_RETURN_IF_CUDA_ERROR(cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &function,
                                                              12000, cudaEnableDefault, &found),
                             kReading);
  if (function == nullptr || found != cudaDriverEntryPointSuccess) {
    return Invalid("the driver does not report the size of the memory");
  }
  CUdeviceptr begin = 0;
  size_t size = 0;
  const auto get_range =
      reinterpret_cast<CUresult (*)(CUdeviceptr*, size_t*, CUdeviceptr)>(function);
  if (get_range(&begin, &size, reinterpret_cast<CUdeviceptr>(data)) != CUDA_SUCCESS ||
      begin != reinterpret_cast<CUdeviceptr>(data)) {
    return Invalid("the handle does not refer to a whole allocation");
  }
  return size;
}

}  // namespace

class PeerMemories::Memory final : public adapter::PeerMemory {
 public:
  Memory(std::shared_ptr<const DeviceReader> reader, void* data, uint64_t size)
      : reader_(std::move(reader)), data_(static_cast<const std::byte*>(data)), size_(size) {}
  ~Memory() override { (void)cudaIpcCloseMemHandle(const_cast<std::byte*>(data_)); }

  uint64_t size() const override { return size_; }
  const std::byte* device_data() const override { return data_; }
  absl::Status Read(uint64_t offset, absl::Span<std::byte> to) const override {
    return reader_->Read(data_ + offset, to);
  }

 private:
  const std::shared_ptr<const DeviceReader> reader_;
  const std::byte* const data_;
  const uint64_t size_;
};

absl::StatusOr<std::unique_ptr<PeerMemories>> PeerMemories::Create() {
  DORAD_ASSIGN_OR_RETURN(std::shared_ptr<const DeviceReader> reader, DeviceReader::Create());
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
    return MakeError(absl::StatusCode::kFailedPrecondition, "SHARED_MEMORY_DEVICE_UNSUPPORTED",
                     "the memory lies on another GPU than the server");
  }
  std::memcpy(&handle, ipc_handle.data(), sizeof(handle));
  void* data = nullptr;
  const cudaError_t error = cudaIpcOpenMemHandle(&data, handle, cudaIpcMemLazyEnablePeerAccess);
  if (error != cudaSuccess) {
    (void)cudaGetLastError();  // the trainer's mistake, not this process's
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
