#include "server/adapter/digest.h"

#include <algorithm>
#include <bit>
#include <vector>

#include "server/base/check.h"
#include "server/base/error.h"
#include "server/base/sha256.h"

namespace dorad::adapter {
namespace {

// Changes whenever the framing does.
constexpr char kFormat[] = "dorad-adapter-1";

absl::Status Add(Sha256& hash, const TensorView& tensor, const ReadBytes& read) {
  hash.UpdateFramed(NameOf(tensor.dtype));
  hash.UpdateU64(tensor.shape.size());
  for (const int64_t extent : tensor.shape) hash.UpdateU64(static_cast<uint64_t>(extent));
  hash.UpdateU64(tensor.bytes.size());
  return read(tensor, [&hash](absl::Span<const std::byte> bytes) {
    hash.Update(bytes.data(), bytes.size());
  });
}

}  // namespace

std::string ContentDigest(const AdapterTensors& tensors, const BaseModules& modules) {
  auto digest = ContentDigest(tensors, modules, [](const TensorView& view, const TakeBytes& take) {
    take(view.bytes);
    return absl::OkStatus();
  });
  DORAD_CHECK(digest.ok());
  return *std::move(digest);
}

absl::StatusOr<std::string> ContentDigest(const AdapterTensors& tensors, const BaseModules& modules,
                                          const ReadBytes& read) {
  std::vector<const ModuleTensors*> ordered;
  for (const ModuleTensors& module : tensors.modules) ordered.push_back(&module);
  const auto name_of = [&modules](const ModuleTensors* module) -> const std::string& {
    return modules.all()[module->target.module_id].name;
  };
  std::sort(ordered.begin(), ordered.end(),
            [&](const auto* x, const auto* y) { return name_of(x) < name_of(y); });
  Sha256 hash;
  hash.UpdateFramed(kFormat);
  hash.UpdateU64(ordered.size());
  for (const ModuleTensors* module : ordered) {
    hash.UpdateFramed(name_of(module));
    hash.UpdateU64(static_cast<uint64_t>(module->target.rank));
    hash.UpdateU64(std::bit_cast<uint64_t>(module->target.scale));
    hash.UpdateU64(module->magnitude != nullptr ? 3 : 2);
    DORAD_RETURN_IF_ERROR(Add(hash, module->a, read));
    DORAD_RETURN_IF_ERROR(Add(hash, module->b, read));
    if (module->magnitude != nullptr) DORAD_RETURN_IF_ERROR(Add(hash, *module->magnitude, read));
  }
  return ToHex(hash.Final());
}

}  // namespace dorad::adapter
