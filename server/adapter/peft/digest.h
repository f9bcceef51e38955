// The identity of an adapter's content: SHA-256 over everything that decides its results, and
// nothing else. docs/guides/adapters.md states the exact bytes. Functions are thread-safe.
#pragma once

#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "server/adapter/peft/base_modules.h"
#include "server/adapter/peft/tensors.h"
#include "server/platform/files/tree_sha256.h"

namespace dorad::adapter {

// Lower-case hex. Equal for equal tensors, ranks and scales, whatever their order and names in the
// file and the rest of the configuration; different in all other cases.
// digest_of returns the TreeSha256 of a view's bytes.
std::string ContentDigest(const AdapterTensors& tensors, const BaseModules& modules,
                          const std::function<Digest(const TensorView&)>& digest_of);

// The same of tensors in host memory, which several threads hash. Errors: memory runs out.
absl::StatusOr<std::string> ContentDigest(const AdapterTensors& tensors,
                                          const BaseModules& modules);

}  // namespace dorad::adapter
