#include <limits>

#include "server/rpc/request_validation.h"
#include "tests/unit/support/test.h"

namespace dorad::rpc {
namespace {

std::vector<std::string> FieldsAndReasons(const absl::Status& status) {
  std::vector<std::string> out;
  for (const Violation& v : ViolationsOf(status)) out.push_back(v.field + " " + v.reason);
  return out;
}

TEST(ParseAbort, NeedsOneClearTarget) {
  v1::AbortRequest request;
  EXPECT_EQ(ReasonOf(ParseAbort(request).status()), "ABORT_TARGET_INVALID");
  request.set_all(false);
  EXPECT_EQ(ReasonOf(ParseAbort(request).status()), "ABORT_TARGET_INVALID");
  request.mutable_requests();
  EXPECT_EQ(ReasonOf(ParseAbort(request).status()), "ABORT_TARGET_INVALID");
  request.set_adapter("");
  EXPECT_EQ(ReasonOf(ParseAbort(request).status()), "ABORT_TARGET_INVALID");
  request.set_adapter("a@2");
  EXPECT_EQ(ParseAbort(request)->adapter.version, 2);
  request.set_all(true);
  EXPECT_TRUE(ParseAbort(request)->all);
  request.mutable_requests()->add_request_ids("x");
  EXPECT_THAT(ParseAbort(request)->request_ids, ElementsAre("x"));
}

v1::PauseRequest PauseOf(v1::PauseMode mode, const std::string& adapter = "") {
  v1::PauseRequest request;
  request.set_mode(mode);
  request.set_adapter(adapter);
  return request;
}

TEST(ParsePause, KeepsEverythingByDefault) {
  const ParsedPause parsed = *ParsePause(v1::PauseRequest());
  EXPECT_EQ(parsed.mode, engine::PauseMode::kKeep);
  EXPECT_TRUE(parsed.scope.is_base());
}

TEST(ParsePause, ReadsModeAndAdapter) {
  EXPECT_EQ(ParsePause(PauseOf(v1::PAUSE_MODE_ABORT))->mode, engine::PauseMode::kAbort);
  const ParsedPause parsed = *ParsePause(PauseOf(v1::PAUSE_MODE_WAIT, "policy@3"));
  EXPECT_EQ(parsed.mode, engine::PauseMode::kWait);
  EXPECT_EQ(parsed.scope, (adapter::AdapterRef{"policy", 3}));
}

TEST(ParsePause, RefusesTheUnknown) {
  EXPECT_EQ(
      ViolationsOf(ParsePause(PauseOf(static_cast<v1::PauseMode>(17), "No!")).status()).size(), 2u);
}

v1::LimitGpuShareRequest GpuShareLimitOf(const std::string& id, double share, int64_t seconds) {
  v1::LimitGpuShareRequest request;
  request.set_limit_id(id);
  request.set_gpu_share(share);
  request.mutable_time_to_live()->set_seconds(seconds);
  return request;
}

TEST(ParseGpuShareLimit, ReadsAllOfIt) {
  v1::LimitGpuShareRequest request = GpuShareLimitOf("trainer-1", 0.01, 3);
  request.mutable_time_to_live()->set_nanos(500'000'000);
  const auto options = ParseGpuShareLimit(request);
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->id, "trainer-1");
  EXPECT_EQ(options->share, 0.01);
  EXPECT_EQ(options->time, absl::Seconds(3.5));
  EXPECT_TRUE(ParseGpuShareLimit(GpuShareLimitOf(std::string(128, 'x'), 1, 24 * 3600)).ok());
}

TEST(ParseGpuShareLimit, ListsEveryViolation) {
  EXPECT_THAT(FieldsAndReasons(ParseGpuShareLimit(v1::LimitGpuShareRequest()).status()),
              ElementsAre("limit_id GPU_SHARE_LIMIT_ID_INVALID", "gpu_share GPU_SHARE_OUT_OF_RANGE",
                          "time_to_live TIME_TO_LIVE_OUT_OF_RANGE"));
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  constexpr double kInf = std::numeric_limits<double>::infinity();
  for (const double share : {0.0, 0.009, -1.0, 1.001, kNan, kInf}) {
    EXPECT_EQ(ReasonOf(ParseGpuShareLimit(GpuShareLimitOf("a", share, 3)).status()),
              "GPU_SHARE_OUT_OF_RANGE");
  }
  for (const int64_t seconds : {int64_t{-1}, int64_t{0}, int64_t{24 * 3600 + 1}, INT64_MAX}) {
    EXPECT_EQ(ReasonOf(ParseGpuShareLimit(GpuShareLimitOf("a", 0.5, seconds)).status()),
              "TIME_TO_LIVE_OUT_OF_RANGE");
  }
  for (const char* id : {"", "a b", "\n", "\xff"}) {
    EXPECT_EQ(ReasonOf(ParseGpuShareLimit(GpuShareLimitOf(id, 0.5, 3)).status()),
              "GPU_SHARE_LIMIT_ID_INVALID");
    v1::EndGpuShareLimitRequest end;
    end.set_limit_id(id);
    EXPECT_EQ(ReasonOf(CheckLimitId(end)), "GPU_SHARE_LIMIT_ID_INVALID");
  }
}

}  // namespace
}  // namespace dorad::rpc
