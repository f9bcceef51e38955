#include "server/cuda/device_tensors.h"

#include <utility>
#include <vector>

#include "server/base/error.h"

namespace dorad::cuda {
namespace {

constexpr char kCopying[] = "copying a trainer's tensors";

class CopiedTensors final : public adapter::DeviceTensors {
 public:
  CopiedTensors(std::shared_ptr<const DeviceReader> reader, DeviceBuffer memory)
      : reader_(std::move(reader)), memory_(std::move(memory)) {}

  // `offsets`: of each tensor in the memory.
  absl::Status Copy(const adapter::PeerTensors& peer, const std::vector<int64_t>& offsets) {
    const Stream& stream = reader_->stream();
    absl::Status status;
    for (size_t i = 0; i < peer.tensors.size() && status.ok(); ++i) {
      const adapter::PeerTensor& tensor = peer.tensors[i];
      auto* const to = memory_.as<std::byte>(offsets[i]);
      tensors_[tensor.name] = {tensor.dtype, tensor.shape, {to, tensor.bytes}};
      status = ToStatus(cudaMemcpyAsync(to, tensor.memory->device_data() + tensor.offset,
                                        tensor.bytes, cudaMemcpyDeviceToDevice, stream.get()),
                        kCopying);
    }
    // Also after a failure: what has begun writes to memory that goes.
    const absl::Status done = stream.Synchronize(kCopying);
    return status.ok() ? done : status;
  }

  absl::Status Read(const std::byte* from, absl::Span<std::byte> to) const override {
    return reader_->Read(from, to);
  }

 private:
  const std::shared_ptr<const DeviceReader> reader_;
  const DeviceBuffer memory_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<adapter::DeviceTensors>> CopyTensors(
    const adapter::PeerTensors& peer, std::shared_ptr<const DeviceReader> reader,
    MemoryLedger* ledger) {
  Layout layout;
  std::vector<int64_t> offsets;
  offsets.reserve(peer.tensors.size());
  for (const adapter::PeerTensor& tensor : peer.tensors) {
    offsets.push_back(layout.Add(static_cast<int64_t>(tensor.bytes)));
  }
  DORAD_ASSIGN_OR_RETURN(DeviceBuffer memory,
                         DeviceBuffer::Allocate(ledger, "loading", layout.bytes()));
  auto copies = std::make_unique<CopiedTensors>(std::move(reader), std::move(memory));
  DORAD_RETURN_IF_ERROR(copies->Copy(peer, offsets));
  return copies;
}

}  // namespace dorad::cuda
