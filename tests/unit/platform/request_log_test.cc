#include "server/platform/metrics/request_log.h"

#include "nlohmann/json.hpp"
#include "tests/unit/support/test.h"

namespace dorad {
namespace {

using nlohmann::json;

class RequestLogTest : public ::testing::Test {
 protected:
  RequestLogTest() { SetLogging(LogLevel::kInfo, true); }
  ~RequestLogTest() override { SetLogging(LogLevel::kInfo, true); }

  template <typename Function>
  static std::string Captured(Function function) {
    ::testing::internal::CaptureStderr();
    function();
    return ::testing::internal::GetCapturedStderr();
  }
};

TEST_F(RequestLogTest, WritesOneLineWhenTheLastHolderLetsGo) {
  auto log = std::make_shared<RequestLog>();
  auto other = log;
  const std::string before = Captured([&] {
    log->Set("code", std::string("OK"));
    log.reset();
  });
  EXPECT_EQ(before, "");
  const std::string line = Captured([&] {
    other->Set("generated_tokens", int64_t{7});
    other.reset();
  });
  ASSERT_EQ(std::count(line.begin(), line.end(), '\n'), 1);
  const json object = json::parse(line);
  EXPECT_EQ(object["msg"], "request ended");
  EXPECT_EQ(object["level"], "info");
  EXPECT_EQ(object["code"], "OK");
  EXPECT_EQ(object["generated_tokens"], 7);
}

TEST_F(RequestLogTest, ReplacesTheValueOfAField) {
  const std::string line = Captured([] {
    RequestLog log;
    log.Set("request_id", std::string("chosen"));
    log.Set("adapter", std::string("a"));
    log.Set("request_id", std::string("the message's"));
  });
  EXPECT_EQ(line.find("chosen"), std::string::npos);
  EXPECT_LT(line.find("request_id"), line.find("adapter"));
  EXPECT_EQ(json::parse(line)["request_id"], "the message's");
}

TEST_F(RequestLogTest, IsSilentWhenRequestsAreNotLogged) {
  SetLogging(LogLevel::kInfo, true, /*requests=*/false);
  EXPECT_EQ(Captured([] { RequestLog().Set("code", std::string("OK")); }), "");
  EXPECT_NE(Captured([] { LogInfo("heard"); }), "");
}

TEST_F(RequestLogTest, TakesFieldsFromManyThreads) {
  static constexpr const char* kKeys[] = {"a", "b", "c", "d"};
  const std::string line = Captured([] {
    RequestLog log;
    std::vector<std::thread> threads;
    for (const char* key : kKeys) {
      threads.emplace_back([&log, key] {
        for (int64_t i = 0; i <= 1000; ++i) log.Set(key, i);
      });
    }
    for (std::thread& thread : threads) thread.join();
  });
  const json object = json::parse(line);
  for (const char* key : kKeys) EXPECT_EQ(object[key], 1000);
}

}  // namespace
}  // namespace dorad
