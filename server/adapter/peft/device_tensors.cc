#include "server/adapter/peft/device_tensors.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/adapter/peft/digest.h"
#include "server/adapter/peft/violations.h"
#include "server/platform/error.h"
#include "server/platform/files/safetensors_header.h"

namespace dorad::adapter {
namespace {

constexpr char kSubject[] = "adapter_model.safetensors";

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

absl::StatusOr<BaseCopiesOnHost> BaseCopiesOnHost::Bring(const DeviceTensors& device,
                                                         AdapterTensors* tensors) {
  BaseCopiesOnHost host;
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
  DORAD_ASSIGN_OR_RETURN(const auto digests, device.Digests());
  Violations violations;
  for (const PeerTensor& tensor : peer.tensors) {
    CheckTensorDigest(tensor, digests.at(device.tensors().at(tensor.name).bytes.data()),
                      &violations);
  }
  DORAD_RETURN_IF_ERROR(violations.ToStatus(kSubject));
  return ContentDigest(tensors, modules,
                       [&](const TensorView& view) { return digests.at(view.bytes.data()); });
}

}  // namespace dorad::adapter
