// The numbers that a model's image processor makes of a picture's bytes, so that requests may bring
// bytes. A plain value and a pure function of files and therefore thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace dorad::model {

struct BytePixels {
  static constexpr int64_t kValues = 256;

  // [channels, kValues]: (byte * rescale_factor - image_mean) / image_std, in fp32 as transformers
  // computes it with Pillow. Empty: unknown.
  std::vector<float> numbers;
  std::string problem;  // why they are unknown
};

// Of the image_processor in DIR/processor_config.json, else of DIR/preprocessor_config.json.
BytePixels ReadBytePixels(const std::string& dir, int64_t channels);

}  // namespace dorad::model
