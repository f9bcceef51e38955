// The CPU backend's HostCopies. Weights already lie in host memory, so a host copy is one more
// reference to them: making and restoring it cost nothing.
#pragma once

#include <cstdint>
#include <memory>

#include "server/adapter/residency/host_copies.h"

namespace dorad::adapter {

std::unique_ptr<HostCopies> MakeCpuHostCopies(int64_t capacity_bytes);

}  // namespace dorad::adapter
