#include "kernels/dora/import.h"

#include <cuda_fp16.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "gtest/gtest.h"
#include "tests/unit/kernels/device.h"

namespace dorad::kernels {
namespace {

using Bf16 = __nv_bfloat16;

class ImportTest : public KernelTest {};

std::vector<float> Numbers(int64_t size) {
  std::vector<float> values(static_cast<size_t>(size));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = std::sin(static_cast<float>(i) * 0.7f) * static_cast<float>(i % 97);
  }
  return values;
}

// In a type, from its `skip`-th element on: any alignment.
template <typename T>
std::vector<T> In(const std::vector<float>& values, int64_t skip) {
  std::vector<T> out(values.size() + static_cast<size_t>(skip));
  for (size_t i = 0; i < values.size(); ++i) out[i + static_cast<size_t>(skip)] = T(values[i]);
  return out;
}

template <typename T>
constexpr FloatType kType = FloatType::kF32;
template <>
constexpr FloatType kType<Bf16> = FloatType::kBF16;
template <>
constexpr FloatType kType<__half> = FloatType::kF16;

uint16_t Bits(Bf16 value) {
  uint16_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// The whole matrix in pieces of `piece` elements.
template <typename T>
void Check(int64_t rows, int64_t columns, int64_t ld, int64_t piece, int64_t skip) {
  SCOPED_TRACE(testing::Message() << rows << " x " << columns << ", ld " << ld << ", pieces of "
                                  << piece << ", " << skip << " elements off");
  const std::vector<T> values = In<T>(Numbers(rows * columns), skip);
  const DeviceBuffer<T> from(values);
  const DeviceBuffer<Bf16> to(static_cast<size_t>(rows * ld));
  const DeviceBuffer<uint32_t> flag(std::vector<uint32_t>{0});
  for (int64_t first = 0; first < rows * columns; first += piece) {
    ImportParams params;
    params.from = from.get() + skip + first;
    params.type = kType<T>;
    params.first = first;
    params.count = std::min(piece, rows * columns - first);
    params.columns = columns;
    params.to = to.get();
    params.ld = ld;
    params.not_finite = flag.get();
    DORAD_ASSERT_CUDA(ImportFactor(params, nullptr));
  }
  const std::vector<Bf16> got = to.Read();
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < ld; ++column) {
      const auto value =
          static_cast<float>(values[skip + row * columns + std::min(column, columns - 1)]);
      const Bf16 expected = __float2bfloat16_rn(column < columns ? value : 0.0f);
      ASSERT_EQ(Bits(got[row * ld + column]), Bits(expected)) << row << ", " << column;
    }
  }
  EXPECT_EQ(flag.Read()[0], 0u);
}

template <typename T>
void CheckAll() {
  Check<T>(7, 64, 64, 1 << 20, 0);
  Check<T>(7, 64, 64, 104, 0);
  Check<T>(3, 37, 37, 1 << 20, 0);  // a tail
  Check<T>(3, 64, 64, 1 << 20, 1);  // unaligned
  Check<T>(50, 5, 8, 1 << 20, 0);   // padded
  Check<T>(50, 5, 8, 33, 1);
  Check<T>(1100, 1024, 1024, 1 << 24, 0);  // more than one round of the grid
}

TEST_F(ImportTest, RoundsPadsAndKeepsTheOrder) {
  CheckAll<float>();
  CheckAll<__half>();
  CheckAll<Bf16>();
}

TEST_F(ImportTest, NotesWhatIsNotFiniteOnceRounded) {
  for (const int64_t ld : {16, 24}) {
    for (const float bad : {3.4e38f, -INFINITY, NAN}) {
      std::vector<float> values = Numbers(64);
      const DeviceBuffer<uint32_t> flag(std::vector<uint32_t>{0});
      const DeviceBuffer<Bf16> to(4 * 24);
      ImportParams params;
      params.type = FloatType::kF32;
      params.count = 64;
      params.columns = 16;
      params.to = to.get();
      params.ld = ld;
      params.not_finite = flag.get();
      for (const bool planted : {false, true}) {
        if (planted) values[37] = bad;
        const DeviceBuffer<float> from(values);
        params.from = from.get();
        DORAD_ASSERT_CUDA(ImportFactor(params, nullptr));
        EXPECT_EQ(flag.Read()[0], planted ? 1u : 0u) << ld << ": " << bad;
      }
    }
  }
}

template <typename T>
void CheckVector() {
  const std::vector<T> values = In<T>(Numbers(1000), 0);
  const DeviceBuffer<T> from(values);
  const DeviceBuffer<float> to(1000);
  DORAD_ASSERT_CUDA(ImportVector(from.get(), kType<T>, 1000, to.get(), nullptr));
  const std::vector<float> got = to.Read();
  for (size_t i = 0; i < values.size(); ++i) ASSERT_EQ(got[i], static_cast<float>(values[i])) << i;
}

TEST_F(ImportTest, WidensExactly) {
  CheckVector<float>();
  CheckVector<__half>();
  CheckVector<Bf16>();
}

TEST_F(ImportTest, Transposes) {
  for (const auto& [rows, columns] : std::vector<std::pair<int64_t, int64_t>>{
           {1, 1}, {5, 70}, {64, 32}, {33, 1000}, {384, 1001}}) {
    const std::vector<Bf16> values = In<Bf16>(Numbers(rows * columns), 0);
    const DeviceBuffer<Bf16> from(values);
    const DeviceBuffer<Bf16> to(values.size());
    DORAD_ASSERT_CUDA(Transpose(from.get(), rows, columns, to.get(), nullptr));
    const std::vector<Bf16> got = to.Read();
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t column = 0; column < columns; ++column) {
        ASSERT_EQ(Bits(got[column * rows + row]), Bits(values[row * columns + column]));
      }
    }
  }
}

TEST_F(ImportTest, RefusesWhatCannotBe) {
  ImportParams params;
  params.columns = 8;
  params.ld = 7;
  EXPECT_EQ(ImportFactor(params, nullptr), cudaErrorInvalidValue);
  params.columns = 0;
  EXPECT_EQ(ImportFactor(params, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(ImportVector(nullptr, FloatType::kF32, -1, nullptr, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(Transpose(nullptr, -1, 1, nullptr, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace dorad::kernels
