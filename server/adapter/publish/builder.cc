#include "server/adapter/publish/builder.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "server/platform/check.h"
#include "server/platform/error.h"

namespace dorad::adapter {

absl::StatusOr<std::unique_ptr<DeviceTensors>> AdapterBuilder::CopyOnDevice(const PeerTensors&) {
  DORAD_CHECK(false);  // only a GPU builder gets GPU memory
}

absl::Status AdapterBuilder::CheckBaseCopies(const AdapterTensors& tensors) const {
  Violations violations;
  for (const BaseCopy& copy : tensors.base_copies) {
    DORAD_ASSIGN_OR_RETURN(const bool equal, EqualsBase(copy));
    if (equal) continue;
    violations.Add(copy.key, "ADAPTER_BASE_DIFFERS",
                   absl::StrCat("the file's copy of ", modules_.all()[copy.module_id].name,
                                " differs from the base model's weight: the adapter was trained on "
                                "other weights or with a resized vocabulary"));
  }
  return violations.ToStatus("adapter_model.safetensors");
}

void CheckNorms(const BaseModule& module, absl::Span<const float> magnitude,
                absl::Span<const float> norms, absl::Span<const float> g, double eps,
                Violations* violations) {
  int64_t first = -1, count = 0;
  for (size_t i = 0; i < g.size(); ++i) {
    const bool fine =
        std::isfinite(norms[i]) && std::isfinite(g[i]) && (norms[i] > eps || magnitude[i] == 0);
    if (fine) continue;
    if (count++ == 0) first = static_cast<int64_t>(i);
  }
  if (count == 0) return;
  violations->Add(absl::StrCat("base_model.model.", module.name), "ADAPTER_NORM_DEGENERATE",
                  absl::StrCat(count, " of ", g.size(),
                               " rows of W + s*B*A have no usable norm; the first is row ", first,
                               " with norm ", norms[first], " and magnitude ", magnitude[first]));
}

}  // namespace dorad::adapter
