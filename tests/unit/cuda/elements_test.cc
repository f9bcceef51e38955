// The rounding of the host against that of CUDA.
#include "server/platform/files/elements.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <bit>
#include <numeric>

#include "tests/unit/support/test.h"

namespace dorad::cuda {
namespace {

// The bytes of values, one byte off any alignment, as files have them.
template <typename T>
std::vector<std::byte> Unaligned(const std::vector<T>& values) {
  std::vector<std::byte> bytes(values.size() * sizeof(T) + 1);
  std::memcpy(bytes.data() + 1, values.data(), values.size() * sizeof(T));
  return bytes;
}

std::vector<float> Rounded(DType dtype, absl::Span<const std::byte> bytes) {
  std::vector<uint16_t> out(bytes.size() / SizeOf(dtype));
  ToBf16(dtype, bytes, out.data());
  std::vector<float> values;
  for (const uint16_t bits : out) values.push_back(__bfloat162float(__ushort_as_bfloat16(bits)));
  return values;
}

TEST(Elements, RoundsToTheNearestEvenBf16) {
  // 1 + 2^-8 lies half way between 1 and 1 + 2^-7; 1 + 3·2^-8 between 1 + 2^-7 and 1 + 2^-6.
  const auto values =
      Unaligned<float>({1.0f + 0x1p-8f, 1.0f + 3 * 0x1p-8f, 1.0f + 0x1p-8f + 0x1p-20f, 3.4e38f});
  EXPECT_THAT(Rounded(DType::kF32, absl::MakeConstSpan(values).subspan(1)),
              ElementsAre(1.0f, 1.0f + 0x1p-6f, 1.0f + 0x1p-7f, INFINITY));
}

TEST(Elements, RoundsEveryHalf) {
  std::vector<uint16_t> bits(0x10000);
  std::iota(bits.begin(), bits.end(), 0);
  const auto bytes = Unaligned(bits);
  std::vector<uint16_t> out(bits.size());
  ToBf16(DType::kF16, absl::MakeConstSpan(bytes).subspan(1), out.data());
  for (size_t i = 0; i < bits.size(); ++i) {
    const float value = __half2float(__ushort_as_half(bits[i]));
    ASSERT_EQ(out[i], __bfloat16_as_ushort(__float2bfloat16_rn(value))) << i;
  }
}

TEST(Elements, RoundsEveryKindOfFloatAsTheCompilerDoes) {
  // All signs, exponents and first bits, with what lies below, at and above a half; NaNs too.
  std::vector<uint32_t> bits;
  for (uint32_t high = 0; high < 0x10000; ++high) {
    for (const uint32_t low : {0x0000, 0x0001, 0x7fff, 0x8000, 0x8001, 0xffff}) {
      bits.push_back(high << 16 | low);
    }
  }
  const auto bytes = Unaligned(bits);
  std::vector<uint16_t> out(bits.size());
  ToBf16(DType::kF32, absl::MakeConstSpan(bytes).subspan(1), out.data());
  for (size_t i = 0; i < bits.size(); ++i) {
    const __nv_bfloat16 expected = __float2bfloat16_rn(std::bit_cast<float>(bits[i]));
    ASSERT_EQ(out[i], __bfloat16_as_ushort(expected)) << bits[i];
  }
}

}  // namespace
}  // namespace dorad::cuda
