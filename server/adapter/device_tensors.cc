#include "server/adapter/device_tensors.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/adapter/digest.h"
#include "server/adapter/violations.h"
#include "server/base/error.h"
#include "server/base/safetensors_header.h"
#include "server/base/sha256.h"

namespace dorad::adapter {
namespace {

constexpr char kSubject[] = "adapter_model.safetensors";
constexpr size_t kPieceBytes = 1 << 20;

}  // namespace

bool LiesOnDevice(const PeerTensors& peer) {
  return std::all_of(peer.tensors.begin(), peer.tensors.end(), [](const PeerTensor& tensor) {
    return tensor.memory->device_data() != nullptr;
  });
}

absl::Status CheckForm(const PeerTensors& peer, uint64_t max_bytes) {
  DORAD_ASSIGN_OR_RETURN(const uint64_t bytes, ImageBytes(peer, max_bytes));
  const std::string header = ImageHeader(peer);
  return ParseSafetensorsHeader(std::string_view(header).substr(kSafetensorsPrefixBytes),
                                bytes - header.size(), kSubject)
      .status();
}

absl::StatusOr<HostCopies> HostCopies::Bring(const DeviceTensors& device, AdapterTensors* tensors) {
  HostCopies host;
  for (BaseCopy& base : tensors->base_copies) {
    auto copy = std::make_unique<Copy>();
    copy->bytes.resize(base.tensor->bytes.size());
    DORAD_RETURN_IF_ERROR(device.Read(base.tensor->bytes.data(), absl::MakeSpan(copy->bytes)));
    copy->view = *base.tensor;
    copy->view.bytes = copy->bytes;
    base.tensor = &copy->view;
    host.copies_.push_back(std::move(copy));
  }
  return host;
}

absl::StatusOr<std::string> DigestOnDevice(const DeviceTensors& device, const PeerTensors& peer,
                                           const AdapterTensors& tensors,
                                           const BaseModules& modules) {
  std::map<const std::byte*, const PeerTensor*> by_place;
  for (const PeerTensor& tensor : peer.tensors) {
    by_place[device.tensors().at(tensor.name).bytes.data()] = &tensor;
  }
  std::vector<std::byte> piece(kPieceBytes);
  Violations violations;
  const auto read = [&](const TensorView& view, const TakeBytes& take) -> absl::Status {
    const PeerTensor& told = *by_place.at(view.bytes.data());
    Sha256 hash;
    for (size_t done = 0; done < view.bytes.size(); done += piece.size()) {
      const absl::Span<std::byte> to =
          absl::MakeSpan(piece).first(std::min(piece.size(), view.bytes.size() - done));
      DORAD_RETURN_IF_ERROR(device.Read(view.bytes.data() + done, to));
      take(to);
      if (!told.sha256.empty()) hash.Update(to.data(), to.size());
    }
    CheckTensorDigest(told, hash, &violations);
    return absl::OkStatus();
  };
  DORAD_ASSIGN_OR_RETURN(std::string digest, ContentDigest(tensors, modules, read));
  DORAD_RETURN_IF_ERROR(violations.ToStatus(kSubject));
  return digest;
}

}  // namespace dorad::adapter
