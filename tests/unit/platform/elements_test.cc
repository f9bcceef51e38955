#include "server/platform/files/elements.h"

#include "tests/unit/support/test.h"

namespace dorad {
namespace {

// The bytes of values, one byte off any alignment, as files have them.
template <typename T>
std::vector<float> Read(DType dtype, const std::vector<T>& values) {
  std::vector<std::byte> bytes(values.size() * sizeof(T) + 1);
  std::memcpy(bytes.data() + 1, values.data(), values.size() * sizeof(T));
  std::vector<float> out(values.size());
  ToFloat(dtype, absl::MakeConstSpan(bytes).subspan(1), out.data());
  return out;
}

TEST(ElementsTest, HalvesAreExact) {
  EXPECT_THAT(
      Read(DType::kF16,
           std::vector<uint16_t>{0x3E00, 0xFBFF, 0x0000, 0x8001, 0x03FF, 0x0400, 0x7C00, 0xFC00}),
      ElementsAre(1.5f, -65504.0f, 0.0f, -0x1p-24f, 0x3FFp-24f, 0x1p-14f, INFINITY, -INFINITY));
  EXPECT_TRUE(std::isnan(Read(DType::kF16, std::vector<uint16_t>{0x7E01})[0]));
  EXPECT_TRUE(std::signbit(Read(DType::kF16, std::vector<uint16_t>{0x8000})[0]));
}

TEST(ElementsTest, Bf16AndFp32AreExact) {
  EXPECT_THAT(Read(DType::kBF16, std::vector<uint16_t>{0x3FC0, 0xFF80, 0x0001}),
              ElementsAre(1.5f, -INFINITY, 0x1p-133f));
  EXPECT_THAT(Read(DType::kF32, std::vector<float>{0.1f, -2.0f}), ElementsAre(0.1f, -2.0f));
}

}  // namespace
}  // namespace dorad
