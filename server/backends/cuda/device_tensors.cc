#include "server/backends/cuda/device_tensors.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "kernels/hash/sha256.h"
#include "server/platform/error.h"

namespace dorad::cuda {
namespace {

using kernels::HashedTensor;
using kernels::kHashBytes;
using kernels::kHashPieceBytes;
static_assert(kHashPieceBytes == kTreePieceBytes);

constexpr char kCopying[] = "copying a trainer's tensors";
constexpr char kHashing[] = "hashing a trainer's tensors";

// Layout of the copies' memory.
struct Places {
  std::vector<int64_t> tensors;
  std::vector<int64_t> first_pieces;
  int64_t table = 0;  // of HashedTensor
  int64_t hashes = 0;
  int64_t pieces = 0;
};

class CopiedTensors final : public adapter::DeviceTensors {
 public:
  CopiedTensors(std::shared_ptr<const DeviceReader> reader, DeviceBuffer memory, Places places)
      : reader_(std::move(reader)), memory_(std::move(memory)), places_(std::move(places)) {}

  absl::Status Copy(const adapter::PeerTensors& peer) {
    const Stream& stream = reader_->stream();
    absl::Status status;
    for (size_t i = 0; i < peer.tensors.size() && status.ok(); ++i) {
      const adapter::PeerTensor& tensor = peer.tensors[i];
      auto* const to = memory_.as<std::byte>(places_.tensors[i]);
      tensors_[tensor.name] = {tensor.dtype, tensor.shape, {to, tensor.bytes}};
      first_pieces_[to] = places_.first_pieces[i];
      status = ToStatus(cudaMemcpyAsync(to, tensor.memory->device_data() + tensor.offset,
                                        tensor.bytes, cudaMemcpyDeviceToDevice, stream.get()),
                        kCopying);
    }
    // Also after a failure: running copies write to this memory.
    const absl::Status done = stream.Synchronize(kCopying);
    return status.ok() ? done : status;
  }

  absl::Status Read(const std::byte* from, absl::Span<std::byte> to) const override {
    return reader_->Read(from, to);
  }

  absl::StatusOr<std::map<const std::byte*, Digest>> Digests() const override {
    std::vector<HashedTensor> table;
    for (const auto& [name, view] : tensors_) {
      if (view.bytes.empty()) continue;
      table.push_back({view.bytes.data(), static_cast<int64_t>(view.bytes.size()),
                       first_pieces_.at(view.bytes.data())});
    }
    std::sort(table.begin(), table.end(), [](const HashedTensor& x, const HashedTensor& y) {
      return x.first_piece < y.first_piece;
    });
    const Stream& stream = reader_->stream();
    auto* const on_device = memory_.as<HashedTensor>(places_.table);
    DORAD_RETURN_IF_CUDA_ERROR(
        cudaMemcpyAsync(on_device, table.data(), table.size() * sizeof(HashedTensor),
                        cudaMemcpyHostToDevice, stream.get()),
        kHashing);
    DORAD_RETURN_IF_CUDA_ERROR(
        kernels::PieceHashes(on_device, static_cast<int>(table.size()), places_.pieces,
                             memory_.as<>(places_.hashes), stream.get()),
        kHashing);
    std::vector<std::byte> hashes(static_cast<size_t>(places_.pieces * kHashBytes));
    DORAD_RETURN_IF_ERROR(
        reader_->Read(memory_.as<std::byte>(places_.hashes), absl::MakeSpan(hashes)));
    std::map<const std::byte*, Digest> digests;
    for (const auto& [name, view] : tensors_) {
      const auto size = static_cast<int64_t>(view.bytes.size());
      const int64_t pieces = (size + kHashPieceBytes - 1) / kHashPieceBytes;
      digests[view.bytes.data()] = TreeRoot(absl::MakeConstSpan(hashes).subspan(
          static_cast<size_t>(first_pieces_.at(view.bytes.data()) * kHashBytes),
          static_cast<size_t>(pieces * kHashBytes)));
    }
    return digests;
  }

 private:
  const std::shared_ptr<const DeviceReader> reader_;
  const DeviceBuffer memory_;
  const Places places_;
  std::map<const std::byte*, int64_t> first_pieces_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<adapter::DeviceTensors>> CopyTensors(
    const adapter::PeerTensors& peer, std::shared_ptr<const DeviceReader> reader,
    MemoryLedger* ledger) {
  Layout layout;
  Places places;
  for (const adapter::PeerTensor& tensor : peer.tensors) {
    const auto bytes = static_cast<int64_t>(tensor.bytes);
    // At least one byte: two empty tensors must not share an address.
    places.tensors.push_back(layout.Add(std::max<int64_t>(bytes, 1)));
    places.first_pieces.push_back(places.pieces);
    places.pieces += (bytes + kHashPieceBytes - 1) / kHashPieceBytes;
  }
  places.table = layout.Add(static_cast<int64_t>(peer.tensors.size() * sizeof(HashedTensor)));
  places.hashes = layout.Add(places.pieces * kHashBytes);
  DORAD_ASSIGN_OR_RETURN(DeviceBuffer memory,
                         DeviceBuffer::Allocate(ledger, "loading", layout.bytes()));
  auto copies =
      std::make_unique<CopiedTensors>(std::move(reader), std::move(memory), std::move(places));
  DORAD_RETURN_IF_ERROR(copies->Copy(peer));
  return copies;
}

}  // namespace dorad::cuda
