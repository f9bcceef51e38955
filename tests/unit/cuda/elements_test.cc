#include "server/backends/cuda/elements.h"

#include <cuda_fp16.h>

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

std::vector<float> Floats(DType dtype, absl::Span<const std::byte> bytes) {
  std::vector<float> out(bytes.size() / SizeOf(dtype));
  ToFloat(dtype, bytes, out.data());
  return out;
}

std::vector<float> Rounded(DType dtype, absl::Span<const std::byte> bytes) {
  std::vector<__nv_bfloat16> out(bytes.size() / SizeOf(dtype));
  ToBf16(dtype, bytes, out.data());
  std::vector<float> values;
  for (const __nv_bfloat16 value : out) values.push_back(__bfloat162float(value));
  return values;
}

TEST(Elements, WideningIsExact) {
  const auto halves = Unaligned<__half>({__float2half(1.5f), __float2half(-65504.0f)});
  EXPECT_THAT(Floats(DType::kF16, absl::MakeConstSpan(halves).subspan(1)),
              ElementsAre(1.5f, -65504.0f));
  const auto brains = Unaligned<__nv_bfloat16>({__float2bfloat16_rn(3e38f)});
  EXPECT_THAT(Floats(DType::kBF16, absl::MakeConstSpan(brains).subspan(1)),
              ElementsAre(__bfloat162float(__float2bfloat16_rn(3e38f))));
  const auto singles = Unaligned<float>({0.1f, -2.0f});
  EXPECT_THAT(Floats(DType::kF32, absl::MakeConstSpan(singles).subspan(1)),
              ElementsAre(0.1f, -2.0f));
}

TEST(Elements, RoundsToTheNearestEvenBf16) {
  // 1 + 2^-8 lies half way between 1 and 1 + 2^-7; 1 + 3·2^-8 between 1 + 2^-7 and 1 + 2^-6.
  const auto values =
      Unaligned<float>({1.0f + 0x1p-8f, 1.0f + 3 * 0x1p-8f, 1.0f + 0x1p-8f + 0x1p-20f, 3.4e38f});
  EXPECT_THAT(Rounded(DType::kF32, absl::MakeConstSpan(values).subspan(1)),
              ElementsAre(1.0f, 1.0f + 0x1p-6f, 1.0f + 0x1p-7f, INFINITY));
}

}  // namespace
}  // namespace dorad::cuda
