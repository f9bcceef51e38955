// The CPU backend's HostCopies. There the tiers lie in the same RAM, so an image is one more
// reference to the weights: making and restoring it cost nothing.
#pragma once

#include <cstdint>
#include <memory>

#include "server/adapter/residency/host_copies.h"

namespace dorad::adapter {

std::unique_ptr<HostCopies> MakeCpuHostCopies(int64_t capacity_bytes);

}  // namespace dorad::adapter
