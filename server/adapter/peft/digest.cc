#include "server/adapter/peft/digest.h"

#include <algorithm>
#include <bit>
#include <map>
#include <vector>

#include "server/platform/error.h"
#include "server/platform/files/sha256.h"
#include "server/platform/parallel_for.h"

namespace dorad::adapter {
namespace {

constexpr int kMaxThreads = 8;
// Changes whenever the framing does.
constexpr char kFormat[] = "dorad-adapter-2";

void Add(Sha256& hash, const TensorView& tensor, const Digest& digest) {
  hash.UpdateFramed(NameOf(tensor.dtype));
  hash.UpdateU64(tensor.shape.size());
  for (const int64_t extent : tensor.shape) hash.UpdateU64(static_cast<uint64_t>(extent));
  hash.UpdateU64(tensor.bytes.size());
  hash.Update(digest.data(), digest.size());
}

}  // namespace

std::string ContentDigest(const AdapterTensors& tensors, const BaseModules& modules,
                          const std::function<Digest(const TensorView&)>& digest_of) {
  std::vector<const ModuleTensors*> ordered;
  for (const ModuleTensors& module : tensors.modules) ordered.push_back(&module);
  const auto name_of = [&modules](const ModuleTensors* module) -> const std::string& {
    return modules.all()[module->target.module_id].name;
  };
  std::sort(ordered.begin(), ordered.end(),
            [&](const auto* x, const auto* y) { return name_of(x) < name_of(y); });
  Sha256 hash;
  const auto add = [&](const TensorView& view) { Add(hash, view, digest_of(view)); };
  hash.UpdateFramed(kFormat);
  hash.UpdateU64(ordered.size());
  for (const ModuleTensors* module : ordered) {
    hash.UpdateFramed(name_of(module));
    hash.UpdateU64(static_cast<uint64_t>(module->target.rank));
    hash.UpdateU64(std::bit_cast<uint64_t>(module->target.scale));
    hash.UpdateU64(module->magnitude != nullptr ? 3 : 2);
    add(module->a);
    add(module->b);
    if (module->magnitude != nullptr) add(*module->magnitude);
  }
  return ToHex(hash.Final());
}

absl::StatusOr<std::string> ContentDigest(const AdapterTensors& tensors,
                                          const BaseModules& modules) {
  std::vector<const TensorView*> views;
  for (const ModuleTensors& module : tensors.modules) {
    views.push_back(&module.a);
    views.push_back(&module.b);
    if (module.magnitude != nullptr) views.push_back(module.magnitude);
  }
  std::vector<Digest> digests(views.size());
  DORAD_RETURN_IF_ERROR(ParallelFor(UsableCores(kMaxThreads), views.size(), [&](size_t i) {
    digests[i] = TreeSha256(views[i]->bytes);
    return absl::OkStatus();
  }));
  std::map<const TensorView*, const Digest*> by_view;
  for (size_t i = 0; i < views.size(); ++i) by_view[views[i]] = &digests[i];
  return ContentDigest(tensors, modules,
                       [&](const TensorView& view) { return *by_view.at(&view); });
}

}  // namespace dorad::adapter
