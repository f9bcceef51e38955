// The CPU backend's WeightsImages. There the tiers lie in the same RAM, so an image is one more
// reference to the weights: making and restoring it cost nothing.
#pragma once

#include <cstdint>
#include <memory>

#include "server/adapter/weights_images.h"

namespace dorad::adapter {

std::unique_ptr<WeightsImages> MakeCpuWeightsImages(int64_t capacity_bytes);

}  // namespace dorad::adapter
