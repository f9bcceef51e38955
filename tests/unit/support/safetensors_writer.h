// Builds images of safetensors files in memory, for tests.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "server/platform/files/byte_buffer.h"

namespace dorad::test {

struct TestTensor {
  std::string dtype = "F32";
  std::vector<int64_t> shape;
  ByteBuffer bytes;
};

// fp32 values in the given dtype; bf16 and fp16 are cut, not rounded, so choose values they hold
// (fp16: normal numbers only).
inline TestTensor MakeTensor(const std::string& dtype, std::vector<int64_t> shape,
                             const std::vector<float>& values) {
  TestTensor tensor{dtype, std::move(shape), {}};
  const size_t width = dtype == "F32" ? 4 : 2;
  tensor.bytes.resize(values.size() * width);
  for (size_t i = 0; i < values.size(); ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(values[i]);
    uint32_t word = bits;
    if (dtype == "BF16") word = bits >> 16;
    if (dtype == "F16") {
      const uint32_t exponent = (bits >> 23) & 0xff;
      const uint32_t half = exponent == 0      ? 0
                            : exponent == 0xff ? 0x1fu << 10
                                               : (exponent - 112) << 10;
      word = ((bits >> 16) & 0x8000) | half | ((bits >> 13) & 0x3ff);
    }
    std::memcpy(tensor.bytes.data() + i * width, &word, width);
  }
  return tensor;
}

// Tensors are laid out in the order of their names.
inline ByteBuffer WriteSafetensors(const std::map<std::string, TestTensor>& tensors) {
  nlohmann::json header = {{"__metadata__", {{"format", "pt"}}}};
  ByteBuffer data;
  for (const auto& [name, tensor] : tensors) {
    header[name] = {{"dtype", tensor.dtype},
                    {"shape", tensor.shape},
                    {"data_offsets", {data.size(), data.size() + tensor.bytes.size()}}};
    data.insert(data.end(), tensor.bytes.begin(), tensor.bytes.end());
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t size = text.size();
  ByteBuffer image(sizeof(size) + text.size());
  std::memcpy(image.data(), &size, sizeof(size));
  std::memcpy(image.data() + sizeof(size), text.data(), text.size());
  image.insert(image.end(), data.begin(), data.end());
  return image;
}

}  // namespace dorad::test
