// An image for the decoder, on the GPU. Immutable and therefore thread-safe; shared by the
// sequences that hold it.
#pragma once

#include <cstdint>
#include <utility>

#include "server/backends/cuda/device.h"
#include "server/engine/images.h"

namespace dorad::cuda {

struct CudaImageFeatures final : engine::ImageFeatures {
  CudaImageFeatures(DeviceBuffer memory, int64_t tokens, int64_t width)
      : memory(std::move(memory)), tokens(tokens), width(width) {}
  int64_t bytes() const override { return memory.bytes(); }
  // Level 0 replaces the embeddings; level i is added to the residual after decoder layer i - 1.
  int64_t levels() const { return bytes() / (tokens * width * 4); }
  const float* Row(int64_t level, int64_t token) const {
    return memory.as<float>() + (level * tokens + token) * width;
  }

  const DeviceBuffer memory;  // [levels, tokens, width] fp32
  const int64_t tokens;
  const int64_t width;
};

// Rows [begin, begin + count) of a step are the tokens from `first` on of an image.
struct ImageRows {
  int64_t begin = 0;
  int64_t count = 0;
  int64_t first = 0;
  const CudaImageFeatures* features = nullptr;
};

}  // namespace dorad::cuda
