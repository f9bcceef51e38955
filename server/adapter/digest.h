// The identity of an adapter's content: SHA-256 over what decides its results and nothing else.
// docs/adapters.md states the exact bytes. Functions are thread-safe.
#pragma once

#include <string>

#include "server/adapter/base_modules.h"
#include "server/adapter/tensors.h"

namespace dorad::adapter {

// Lower-case hex. The same for the same tensors, ranks and scales, however the file orders or names
// them and whatever else the configuration says; different in all other cases.
std::string ContentDigest(const AdapterTensors& tensors, const BaseModules& modules);

}  // namespace dorad::adapter
