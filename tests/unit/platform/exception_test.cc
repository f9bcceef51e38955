#include "server/platform/exception.h"

#include "tests/unit/support/test.h"

namespace dorad {
namespace {

// The log of an exception with this text.
std::string LogOf(const std::string& text, const std::string& reason) {
  ::testing::internal::CaptureStderr();
  try {
    throw std::runtime_error(text);
  } catch (...) {
    EXPECT_EQ(ReasonOf(StatusOfException("the step", "STEP_FAILED")), reason);
  }
  return ::testing::internal::GetCapturedStderr();
}

TEST(ExceptionTest, TheLogHasTheTextWithoutABacktrace) {
  const std::string step =
      LogOf("sizes differ\nException raised from f at a.cpp:1\nframe #0: f", "STEP_FAILED");
  EXPECT_THAT(step, HasSubstr("sizes differ"));
  EXPECT_THAT(step, Not(HasSubstr("frame #")));
  EXPECT_THAT(step, Not(HasSubstr("Exception raised")));
  const std::string memory = LogOf(
      "DefaultCPUAllocator: can't allocate memory\nframe #0: f\nframe #1: g", "OUT_OF_MEMORY");
  EXPECT_THAT(memory, HasSubstr("can't allocate memory"));
  EXPECT_THAT(memory, Not(HasSubstr("frame #")));
}

}  // namespace
}  // namespace dorad
