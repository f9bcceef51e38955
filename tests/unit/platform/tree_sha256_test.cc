#include "server/platform/files/tree_sha256.h"

#include "server/platform/files/sha256.h"
#include "tests/unit/support/test.h"

namespace dorad {
namespace {

std::vector<std::byte> Bytes(size_t size) {
  std::vector<std::byte> bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i * 7 + i / 256);
  return bytes;
}

Digest Hashed(absl::Span<const std::byte> bytes) {
  Sha256 hash;
  hash.Update(bytes.data(), bytes.size());
  return hash.Final();
}

TEST(TreeSha256Test, IsTheHashOfThePiecesHashes) {
  const std::vector<std::byte> bytes = Bytes(2 * kTreePieceBytes + 5);
  std::vector<std::byte> hashes;
  for (const auto& [begin, size] : std::vector<std::pair<size_t, size_t>>{
           {0, kTreePieceBytes}, {kTreePieceBytes, kTreePieceBytes}, {2 * kTreePieceBytes, 5}}) {
    const Digest digest = Hashed(absl::MakeConstSpan(bytes).subspan(begin, size));
    const auto* data = reinterpret_cast<const std::byte*>(digest.data());
    hashes.insert(hashes.end(), data, data + digest.size());
  }
  EXPECT_EQ(TreeSha256(bytes), Hashed(hashes));
  EXPECT_EQ(TreeRoot(hashes), Hashed(hashes));
}

TEST(TreeSha256Test, KnowsNothingFromAPieceOfNothing) {
  EXPECT_EQ(ToHex(TreeSha256({})),
            "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_NE(TreeSha256({}), TreeSha256(Bytes(1)));
}

TEST(TreeSha256Test, EveryByteCounts) {
  std::vector<std::byte> bytes = Bytes(kTreePieceBytes + 70);
  const Digest digest = TreeSha256(bytes);
  for (const size_t at : {size_t{0}, kTreePieceBytes - 1, kTreePieceBytes, bytes.size() - 1}) {
    bytes[at] ^= std::byte{1};
    EXPECT_NE(TreeSha256(bytes), digest) << at;
    bytes[at] ^= std::byte{1};
  }
}

}  // namespace
}  // namespace dorad
