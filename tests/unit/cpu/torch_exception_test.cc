#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include "server/platform/exception.h"
#include "tests/unit/support/test.h"

namespace dorad {
namespace {

template <typename Work>
absl::Status Caught(Work work) {
  try {
    work();
  } catch (...) {
    return StatusOfException("the step", "STEP_FAILED");
  }
  return absl::OkStatus();
}

void ExpectOutOfMemory(const absl::Status& status) {
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(status), "OUT_OF_MEMORY");
  EXPECT_EQ(status.message(), "the step ran out of memory");
}

void ExpectFailed(const absl::Status& status) {
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(ReasonOf(status), "STEP_FAILED");
  EXPECT_EQ(status.message(), "the step failed; see the server's log");
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
// Sanitizers end the program at such a size.
TEST(TorchExceptionTest, ATensorLargerThanTheAddressSpaceIsOutOfMemory) {
  ExpectOutOfMemory(Caught([] { at::empty({int64_t{1} << 50}, at::kFloat); }));
}
#endif

TEST(TorchExceptionTest, EveryKindOfMissingMemoryIsOutOfMemory) {
  ExpectOutOfMemory(Caught([] { throw std::bad_alloc(); }));
  ExpectOutOfMemory(Caught([] {
    TORCH_CHECK(false, "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes");
  }));
}

TEST(TorchExceptionTest, OtherExceptionsKeepTheReasonAndTheirTextToTheLog) {
  ExpectFailed(Caught([] { at::mm(at::ones({2, 3}), at::ones({2, 3})); }));
  ExpectFailed(Caught([] { throw std::runtime_error("secret"); }));
  ExpectFailed(Caught([] { throw 7; }));
}

}  // namespace
}  // namespace dorad
