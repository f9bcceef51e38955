// The identity of an adapter's content: SHA-256 over what decides its results and nothing else.
// docs/guides/adapters.md states the exact bytes. Functions are thread-safe.
#pragma once

#include <functional>
#include <string>

#include "server/adapter/peft/base_modules.h"
#include "server/adapter/peft/tensors.h"
#include "server/platform/files/tree_sha256.h"

namespace dorad::adapter {

// Lower-case hex. The same for the same tensors, ranks and scales, however the file orders or names
// them and whatever else the configuration says; different in all other cases.
std::string ContentDigest(const AdapterTensors& tensors, const BaseModules& modules);

// The same of tensors whose bytes were hashed elsewhere: digest_of gives TreeSha256 of a view's.
std::string ContentDigest(const AdapterTensors& tensors, const BaseModules& modules,
                          const std::function<Digest(const TensorView&)>& digest_of);

}  // namespace dorad::adapter
