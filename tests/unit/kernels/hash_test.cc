#include <gtest/gtest.h>
#include <openssl/sha.h>

#include <random>
#include <vector>

#include "kernels/hash/sha256.h"
#include "tests/unit/kernels/device.h"

namespace dorad::kernels {
namespace {

class PieceHashesTest : public KernelTest {};

TEST_F(PieceHashesTest, AreThoseOfOpenSsl) {
  // The ends of blocks and of pieces, where the padding changes.
  const std::vector<int64_t> sizes = {1,     3,     55,    56,    57,     63,      64,     65,
                                      119,   120,   128,   16320, 16376,  16383,   16384,  16385,
                                      32768, 40000, 65536, 99999, 777777, 1 << 20, 5 << 20};
  std::mt19937 random(1);
  std::vector<uint8_t> bytes;
  std::vector<HashedTensor> tensors;
  std::vector<int64_t> begins;
  int64_t pieces = 0;
  for (const int64_t size : sizes) {
    begins.push_back(static_cast<int64_t>(bytes.size()));
    for (int64_t i = 0; i < (size + 15) / 16 * 16; ++i) {
      bytes.push_back(static_cast<uint8_t>(random()));
    }
    tensors.push_back({nullptr, size, pieces});
    pieces += (size + kHashPieceBytes - 1) / kHashPieceBytes;
  }
  const DeviceBuffer<uint8_t> data(bytes);
  for (size_t i = 0; i < sizes.size(); ++i) tensors[i].data = data.get() + begins[i];
  const DeviceBuffer<HashedTensor> table(tensors);
  const DeviceBuffer<uint8_t> digests(static_cast<size_t>(pieces * kHashBytes));
  DORAD_ASSERT_CUDA(
      PieceHashes(table.get(), static_cast<int>(tensors.size()), pieces, digests.get(), nullptr));
  const std::vector<uint8_t> got = digests.Read();
  for (size_t i = 0; i < sizes.size(); ++i) {
    for (int64_t at = 0; at < sizes[i]; at += kHashPieceBytes) {
      std::vector<uint8_t> expected(kHashBytes);
      SHA256(bytes.data() + begins[i] + at,
             static_cast<size_t>(std::min(kHashPieceBytes, sizes[i] - at)), expected.data());
      const auto* begin = got.data() + (tensors[i].first_piece + at / kHashPieceBytes) * kHashBytes;
      EXPECT_EQ(std::vector<uint8_t>(begin, begin + kHashBytes), expected)
          << sizes[i] << " bytes, from " << at;
    }
  }
}

TEST_F(PieceHashesTest, OfNothingAreNone) {
  EXPECT_EQ(PieceHashes(nullptr, 0, 0, nullptr, nullptr), cudaSuccess);
  EXPECT_EQ(PieceHashes(nullptr, -1, 0, nullptr, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace dorad::kernels
