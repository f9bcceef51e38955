#include "server/backends/cuda/device_reader.h"

#include <algorithm>
#include <cstring>

#include "server/platform/error.h"

namespace dorad::cuda {
namespace {

constexpr char kReading[] = "reading the GPU's memory";
constexpr int64_t kPieceBytes = 1 << 20;

}  // namespace

absl::StatusOr<std::shared_ptr<const DeviceReader>> DeviceReader::Create() {
  DORAD_ASSIGN_OR_RETURN(Stream stream, Stream::Create(Priority::kLow));
  DORAD_ASSIGN_OR_RETURN(PinnedBuffer piece, PinnedBuffer::Allocate(kPieceBytes));
  return std::shared_ptr<const DeviceReader>(new DeviceReader(std::move(stream), std::move(piece)));
}

absl::Status DeviceReader::Read(const std::byte* from, absl::Span<std::byte> to) const {
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

}  // namespace dorad::cuda
