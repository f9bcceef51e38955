#include "server/platform/files/sha256.h"

#include "tests/unit/support/test.h"

namespace dorad {
namespace {

TEST(Sha256Test, MatchesPublishedDigests) {
  EXPECT_EQ(ToHex(Sha256().Final()),
            "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  Sha256 abc;
  abc.Update("a", 1);
  abc.Update("bc", 2);
  EXPECT_EQ(ToHex(abc.Final()), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

TEST(Sha256Test, FramesTextsSoThatTheirBordersCount) {
  Sha256 first, second;
  first.UpdateFramed("ab");
  first.UpdateFramed("c");
  second.UpdateFramed("a");
  second.UpdateFramed("bc");
  EXPECT_NE(first.Final(), second.Final());
}

TEST(Sha256Test, WritesIntegersLittleEndian) {
  Sha256 integer, bytes;
  integer.UpdateU64(0x0102030405060708);
  bytes.Update("\x08\x07\x06\x05\x04\x03\x02\x01", 8);
  EXPECT_EQ(integer.Final(), bytes.Final());
}

}  // namespace
}  // namespace dorad
