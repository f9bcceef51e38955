#include "server/platform/process/sealed_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "tests/unit/support/test.h"

namespace dorad {
namespace {

constexpr size_t kBytes = 10000;
constexpr char kText[] = "weights";

SealedMemory Make() {
  auto memory = SealedMemory::Create("test", kBytes);
  EXPECT_TRUE(memory.ok()) << memory.status();
  std::memcpy(memory->data() + 5000, kText, sizeof(kText));
  return *std::move(memory);
}

TEST(SealedMemoryTest, KeepsItsAddressAndContentWhenItIsSealed) {
  SealedMemory memory = Make();
  EXPECT_EQ(memory.data()[0], std::byte{0});
  const std::byte* const data = memory.data();
  ASSERT_TRUE(memory.Seal().ok());
  const SealedMemory moved = std::move(memory);
  EXPECT_EQ(moved.data(), data);
  EXPECT_EQ(moved.size(), kBytes);
  EXPECT_STREQ(reinterpret_cast<const char*>(data + 5000), kText);
}

TEST(SealedMemoryTest, OthersSeeTheSameMemoryAlsoWhenItsMakerIsGone) {
  UniqueFd fd;
  {
    SealedMemory memory = Make();
    ASSERT_TRUE(memory.Seal().ok());
    auto shared = memory.Share();
    ASSERT_TRUE(shared.ok()) << shared.status();
    fd = *std::move(shared);
  }
  void* mapped = mmap(nullptr, kBytes, PROT_READ, MAP_SHARED, fd.get(), 0);
  ASSERT_NE(mapped, MAP_FAILED);
  EXPECT_STREQ(static_cast<const char*>(mapped) + 5000, kText);
  EXPECT_EQ(munmap(mapped, kBytes), 0);
}

TEST(SealedMemoryTest, NobodyCanChangeWhatIsSealed) {
  SealedMemory memory = Make();
  ASSERT_TRUE(memory.Seal().ok());
  const UniqueFd fd = *memory.Share();
  EXPECT_EQ(pwrite(fd.get(), "x", 1, 0), -1);
  EXPECT_EQ(mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0), MAP_FAILED);
  EXPECT_EQ(mmap(nullptr, kBytes, PROT_WRITE, MAP_SHARED, fd.get(), 0), MAP_FAILED);
  // Who opens it anew for writing, as its user may, meets the seals.
  const UniqueFd writer(open(absl::StrCat("/proc/self/fd/", fd.get()).c_str(), O_RDWR | O_CLOEXEC));
  ASSERT_TRUE(writer.ok());
  EXPECT_EQ(pwrite(writer.get(), "x", 1, 0), -1);
  EXPECT_EQ(errno, EPERM);
  EXPECT_EQ(ftruncate(writer.get(), 10), -1);
  EXPECT_EQ(mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, writer.get(), 0), MAP_FAILED);
  EXPECT_DEATH(memory.data()[0] = std::byte{1}, "");  // SIGSEGV, or what a sanitizer makes of it
}

TEST(SealedMemoryTest, RefusesMoreThanThereAreAddresses) {
  const auto memory = SealedMemory::Create("test", size_t{1} << 60);
  EXPECT_EQ(memory.status().code(), absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace dorad
