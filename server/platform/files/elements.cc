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

}  // namespace dorad
