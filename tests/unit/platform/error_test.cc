#include "server/platform/error.h"

#include "tests/unit/support/test.h"

namespace dorad {
namespace {

TEST(ErrorTest, CarriesItsReason) {
  const absl::Status status =
      MakeError(absl::StatusCode::kNotFound, "ADAPTER_NOT_FOUND", "no adapter 'x'");
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(std::string(status.message()), "no adapter 'x'");
  EXPECT_EQ(ReasonOf(status), "ADAPTER_NOT_FOUND");
  EXPECT_TRUE(ViolationsOf(status).empty());
  EXPECT_FALSE(RetryAfterOf(status).has_value());
}

TEST(ErrorTest, CarriesFactsBesideItsReason) {
  absl::Status status = MakeError(absl::StatusCode::kAborted, "GENERATION_MISMATCH", "moved");
  EXPECT_TRUE(MetadataOf(status).empty());
  status = WithMetadata(WithMetadata(status, "b", "1"), "a", "");
  EXPECT_EQ(MetadataOf(status), (std::map<std::string, std::string>{{"a", ""}, {"b", "1"}}));
  EXPECT_EQ(ReasonOf(status), "GENERATION_MISMATCH");
}

TEST(ErrorTest, OtherStatusesCarryNothing) {
  for (const absl::Status& status : {absl::OkStatus(), absl::InternalError("x")}) {
    EXPECT_EQ(ReasonOf(status), "");
    EXPECT_TRUE(ViolationsOf(status).empty());
    EXPECT_FALSE(RetryAfterOf(status).has_value());
  }
}

TEST(ErrorTest, ListsEveryViolationAndNamesTheFirstOnes) {
  std::vector<Violation> violations;
  for (int i = 0; i < 20; ++i) {
    violations.push_back({"field" + std::to_string(i), "REASON_" + std::to_string(i), "bad"});
  }
  const absl::Status status = MakeInvalid("config", violations);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReasonOf(status), "REASON_0");
  const std::string message(status.message());
  EXPECT_THAT(message, HasSubstr("config: field0: bad; field1: bad"));
  EXPECT_THAT(message, HasSubstr("field7"));
  EXPECT_THAT(message, Not(HasSubstr("field8")));
  EXPECT_THAT(message, HasSubstr("and 12 more"));
  const std::vector<Violation> read = ViolationsOf(status);
  ASSERT_EQ(read.size(), 20);
  EXPECT_EQ(read[19].field, "field19");
  EXPECT_EQ(read[19].reason, "REASON_19");
  EXPECT_EQ(read[19].description, "bad");
}

TEST(ErrorTest, ViolationsSurviveSeparatorsAndEmptyTexts) {
  const absl::Status status = MakeInvalid("x", {{"a\x1f"
                                                 "b\x1e",
                                                 "R", ""},
                                                {"", "S", "line\nbreak \xff"}});
  const std::vector<Violation> read = ViolationsOf(status);
  ASSERT_EQ(read.size(), 2);
  EXPECT_EQ(read[0].field, "a b ");
  EXPECT_EQ(read[0].description, "");
  EXPECT_EQ(read[1].field, "");
  EXPECT_EQ(read[1].description, "line\nbreak \xff");
}

TEST(ErrorTest, KeepsTheRetryHintBesideTheRest) {
  const absl::Status status =
      WithRetryAfter(MakeError(absl::StatusCode::kResourceExhausted, "QUEUE_FULL", "full"),
                     absl::Milliseconds(1500));
  EXPECT_EQ(RetryAfterOf(status), absl::Milliseconds(1500));
  EXPECT_EQ(ReasonOf(status), "QUEUE_FULL");
}

absl::StatusOr<int> Half(int number) {
  if (number % 2 != 0) return MakeError(absl::StatusCode::kInvalidArgument, "ODD", "odd");
  return number / 2;
}

absl::StatusOr<int> Quarter(int number) {
  DORAD_ASSIGN_OR_RETURN(const int half, Half(number));
  DORAD_ASSIGN_OR_RETURN(const int quarter, Half(half));
  DORAD_RETURN_IF_ERROR(absl::OkStatus());
  return quarter;
}

TEST(ErrorTest, MacrosPassValuesAndFailuresOn) {
  ASSERT_TRUE(Quarter(12).ok());
  EXPECT_EQ(*Quarter(12), 3);
  EXPECT_EQ(ReasonOf(Quarter(6).status()), "ODD");
}

}  // namespace
}  // namespace dorad
