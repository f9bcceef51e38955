#include "server/rpc/status.h"

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "server/platform/files/utf8.h"
#include "tests/unit/support/test.h"

namespace dorad::rpc {
namespace {

struct Details {
  google::rpc::ErrorInfo info;
  google::rpc::BadRequest bad;
  google::rpc::RetryInfo retry;
  bool has_bad = false;
  bool has_retry = false;
};

Details DetailsOf(const grpc::Status& status) {
  google::rpc::Status wire;
  EXPECT_TRUE(wire.ParseFromString(status.error_details()));
  EXPECT_EQ(wire.code(), status.error_code());
  EXPECT_EQ(wire.message(), status.error_message());
  Details details;
  for (const auto& any : wire.details()) {
    EXPECT_TRUE(any.UnpackTo(&details.info) || (details.has_bad |= any.UnpackTo(&details.bad)) ||
                (details.has_retry |= any.UnpackTo(&details.retry)));
  }
  return details;
}

TEST(ToGrpc, KeepsOkAsOk) { EXPECT_TRUE(ToGrpc(absl::OkStatus()).ok()); }

TEST(ToGrpc, CarriesCodeMessageReasonAndMetadata) {
  const grpc::Status status = ToGrpc(
      WithMetadata(MakeError(absl::StatusCode::kNotFound, "ADAPTER_NOT_FOUND", "no adapter x"),
                   "nearest", "y"),
      {{"request_id", "r-1"}});
  EXPECT_EQ(status.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(status.error_message(), "no adapter x");
  const Details details = DetailsOf(status);
  EXPECT_EQ(details.info.reason(), "ADAPTER_NOT_FOUND");
  EXPECT_EQ(details.info.domain(), "dorad");
  EXPECT_EQ(details.info.metadata().at("request_id"), "r-1");
  EXPECT_EQ(details.info.metadata().at("nearest"), "y");
  EXPECT_FALSE(details.has_bad);
  EXPECT_FALSE(details.has_retry);
}

TEST(ToGrpc, GivesEveryCodeAGenericReason) {
  for (int code = 1; code <= 16; ++code) {
    const absl::Status status(static_cast<absl::StatusCode>(code), "x");
    const grpc::Status wire = ToGrpc(status);
    EXPECT_EQ(wire.error_code(), code);
    EXPECT_EQ(DetailsOf(wire).info.reason(), CodeName(status.code()));
    EXPECT_STRNE(CodeName(status.code()), code == 2 ? "OK" : "UNKNOWN");
  }
}

TEST(ToGrpc, ListsEveryViolation) {
  const Details details =
      DetailsOf(ToGrpc(MakeInvalid("R", {{"a.b", "A_BAD", "first"}, {"c", "C_BAD", "second"}})));
  EXPECT_EQ(details.info.reason(), "A_BAD");
  ASSERT_EQ(details.bad.field_violations_size(), 2);
  EXPECT_EQ(details.bad.field_violations(0).field(), "a.b");
  EXPECT_EQ(details.bad.field_violations(1).reason(), "C_BAD");
  EXPECT_EQ(details.bad.field_violations(1).description(), "second");
}

TEST(ToGrpc, CutsALongListAndCountsTheRest) {
  std::vector<Violation> violations;
  for (int i = 0; i < 5000; ++i) {
    violations.push_back(
        {absl::StrCat("tensor.", i), "ADAPTER_TENSOR_SHAPE", std::string(100 + i % 700, 'x')});
  }
  const grpc::Status status = ToGrpc(MakeInvalid("adapter", violations));
  EXPECT_LE(status.error_details().size(), kMaxDetailsBytes);
  EXPECT_LE(status.error_message().size(), kMaxMessageBytes);
  const Details details = DetailsOf(status);
  const int shown = details.bad.field_violations_size() - 1;
  ASSERT_GT(shown, 3);
  EXPECT_EQ(details.bad.field_violations(shown).reason(), "MORE_VIOLATIONS");
  EXPECT_EQ(details.bad.field_violations(shown).description(),
            absl::StrCat("and ", 5000 - shown, " more"));
}

// A check that stops listing problems still counts them.
TEST(ToGrpc, CountsProblemsThatWereNeverListed) {
  const Details details =
      DetailsOf(ToGrpc(MakeInvalid("adapter", {{"a", "A_BAD", "first"}}, /*omitted=*/574)));
  ASSERT_EQ(details.bad.field_violations_size(), 2);
  EXPECT_EQ(details.bad.field_violations(1).reason(), "MORE_VIOLATIONS");
  EXPECT_EQ(details.bad.field_violations(1).description(), "and 574 more");
}

TEST(ToGrpc, BoundsHugeFields) {
  const grpc::Status status =
      ToGrpc(MakeInvalid("R", {{std::string(1 << 20, 'f'), "BAD", std::string(1 << 20, 'd')}}));
  EXPECT_LE(status.error_details().size(), kMaxDetailsBytes);
  EXPECT_EQ(DetailsOf(status).bad.field_violations_size(), 1);
}

TEST(ToGrpc, CarriesTheRetryHint) {
  const Details details = DetailsOf(
      ToGrpc(WithRetryAfter(MakeError(absl::StatusCode::kResourceExhausted, "QUEUE_FULL", "full"),
                            absl::Milliseconds(2250))));
  ASSERT_TRUE(details.has_retry);
  EXPECT_EQ(details.retry.retry_delay().seconds(), 2);
  EXPECT_EQ(details.retry.retry_delay().nanos(), 250'000'000);
}

TEST(RetryPushback, FollowsTheHintAndForbidsPointlessRetries) {
  const auto exhausted = MakeError(absl::StatusCode::kResourceExhausted, "X_FULL", "x");
  EXPECT_EQ(RetryPushback(WithRetryAfter(exhausted, absl::Milliseconds(700))), "700");
  EXPECT_EQ(RetryPushback(WithRetryAfter(exhausted, absl::Microseconds(10))), "1");
  EXPECT_EQ(RetryPushback(exhausted), "-1");
  EXPECT_EQ(RetryPushback(MakeError(absl::StatusCode::kUnavailable, "X_DOWN", "x")), std::nullopt);
  EXPECT_EQ(RetryPushback(absl::OkStatus()), std::nullopt);
}

TEST(Presentable, ReplacesWhatIsNotUtf8) {
  EXPECT_EQ(Presentable("a\xff\xc3(b\xc3\xa9", 64),
            "a?"
            "?(b\xc3\xa9");
  EXPECT_EQ(Presentable("", 64), "");
}

TEST(Presentable, ReplacesControlCharacters) {
  EXPECT_EQ(Presentable(std::string("a\nb\x7f\x1b[0m\0c", 10), 64), "a?b??[0m?c");
}

TEST(Presentable, CutsBetweenCharacters) {
  EXPECT_EQ(Presentable("0123456789", 10), "0123456789");
  EXPECT_EQ(Presentable("0123456789a", 10), "0123456...");
  for (size_t max = 3; max < 40; ++max) {
    const std::string cut = Presentable(
        "\xe2\x82\xac\xf0\x9f\x98\x80x\xe2\x82\xac\xe2\x82\xac\xe2"
        "\x82\xac\xe2\x82\xac\xf0\x9f\x98\x80\xf0\x9f\x98\x80",
        max);
    EXPECT_LE(cut.size(), max);
    EXPECT_TRUE(IsValidUtf8(cut)) << max;
  }
}

}  // namespace
}  // namespace dorad::rpc
