// The identity of an adapter's content: SHA-256 over what decides its results and nothing else.
// docs/adapters.md states the exact bytes. Functions are thread-safe.
#pragma once

#include <cstddef>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/adapter/base_modules.h"
#include "server/adapter/tensors.h"

namespace dorad::adapter {

// Lower-case hex. The same for the same tensors, ranks and scales, however the file orders or names
// them and whatever else the configuration says; different in all other cases.
std::string ContentDigest(const AdapterTensors& tensors, const BaseModules& modules);

// The same of tensors whose bytes cannot be read here: read(view, take) hands a view's bytes to
// `take`, in order, in pieces of any size. Fails as `read` does.
using TakeBytes = std::function<void(absl::Span<const std::byte>)>;
using ReadBytes = std::function<absl::Status(const TensorView&, const TakeBytes& take)>;
absl::StatusOr<std::string> ContentDigest(const AdapterTensors& tensors, const BaseModules& modules,
                                          const ReadBytes& read);

}  // namespace dorad::adapter
