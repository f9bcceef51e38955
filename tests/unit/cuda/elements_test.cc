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

std::vector<float> Rounded(DType dtype, absl::Span<const std::byte> bytes) {
  std::vector<__nv_bfloat16> out(bytes.size() / SizeOf(dtype));
  ToBf16(dtype, bytes, out.data());
  std::vector<float> values;
  for (const __nv_bfloat16 value : out) values.push_back(__bfloat162float(value));
  return values;
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
