#include "server/platform/files/elements.h"

#include <bit>
#include <cstdint>
#include <cstring>

namespace dorad {
namespace {

float FromHalf(uint16_t bits) {
  const uint32_t sign = (bits & 0x8000u) << 16;
  const uint32_t magnitude = (bits & 0x7FFFu) << 13;
  if ((bits & 0x7C00) == 0x7C00) return std::bit_cast<float>(sign | magnitude | 0x7F800000u);
  // The exponent's bias is 127 instead of 15.
  const float value = std::bit_cast<float>(magnitude) * 0x1p112f;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(value));
}

// CUDA's __float2bfloat16_rn without a branch, so that the compiler makes vectors of it: an image
// in fp32 has millions of elements.
uint16_t RoundedBits(uint32_t bits) {
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  return static_cast<uint16_t>(is_nan ? 0x7fff : rounded);
}

float FromBf16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

}  // namespace

void ToFloat(DType dtype, absl::Span<const std::byte> bytes, float* out) {
  if (dtype == DType::kF32) {
    std::memcpy(out, bytes.data(), bytes.size());
    return;
  }
  for (size_t i = 0; i < bytes.size() / sizeof(uint16_t); ++i) {
    uint16_t bits;
    std::memcpy(&bits, bytes.data() + i * sizeof(bits), sizeof(bits));
    out[i] = dtype == DType::kF16 ? FromHalf(bits) : FromBf16(bits);
  }
}

void ToBf16(DType dtype, absl::Span<const std::byte> bytes, uint16_t* out) {
  switch (dtype) {
    case DType::kF32:
      for (size_t i = 0; i < bytes.size() / sizeof(uint32_t); ++i) {
        uint32_t bits;
        std::memcpy(&bits, bytes.data() + i * sizeof(bits), sizeof(bits));
        out[i] = RoundedBits(bits);
      }
      return;
    case DType::kF16:
      for (size_t i = 0; i < bytes.size() / sizeof(uint16_t); ++i) {
        uint16_t bits;
        std::memcpy(&bits, bytes.data() + i * sizeof(bits), sizeof(bits));
        out[i] = RoundedBits(std::bit_cast<uint32_t>(FromHalf(bits)));
      }
      return;
    case DType::kBF16:
      std::memcpy(out, bytes.data(), bytes.size());
      return;
  }
}

}  // namespace dorad
