#include "server/platform/log.h"

#include "absl/strings/escaping.h"
#include "nlohmann/json.hpp"
#include "server/platform/files/utf8.h"
#include "tests/unit/support/test.h"

namespace dorad {
namespace {

using nlohmann::json;

class LogTest : public ::testing::Test {
 protected:
  LogTest() { SetLogging(LogLevel::kInfo, true); }
  ~LogTest() override { SetLogging(LogLevel::kInfo, true); }

  template <typename Function>
  static std::string Captured(Function function) {
    ::testing::internal::CaptureStderr();
    function();
    return ::testing::internal::GetCapturedStderr();
  }
};

TEST_F(LogTest, WritesOneJsonObjectALine) {
  const std::string line = Captured([] {
    LogInfo("loaded", {{"adapter", std::string("a@1")},
                       {"bytes", int64_t{1} << 40},
                       {"seconds", 0.25},
                       {"dora", true}});
  });
  ASSERT_EQ(std::count(line.begin(), line.end(), '\n'), 1);
  EXPECT_EQ(line.back(), '\n');
  const json object = json::parse(line);
  EXPECT_EQ(object["level"], "info");
  EXPECT_EQ(object["msg"], "loaded");
  EXPECT_EQ(object["adapter"], "a@1");
  EXPECT_EQ(object["bytes"], int64_t{1} << 40);
  EXPECT_EQ(object["seconds"], 0.25);
  EXPECT_EQ(object["dora"], true);
  absl::Time time;
  std::string error;
  EXPECT_TRUE(absl::ParseTime(absl::RFC3339_full, object["ts"].get<std::string>(), &time, &error));
  EXPECT_LT(absl::AbsDuration(absl::Now() - time), absl::Minutes(1));
  EXPECT_THAT(object["ts"].get<std::string>(), MatchesRegex(".*:..[.]......Z"));
}

TEST_F(LogTest, LevelsBelowTheSetOneAreDropped) {
  SetLogging(LogLevel::kWarning, true);
  EXPECT_EQ(Captured([] { LogInfo("quiet"); }), "");
  EXPECT_THAT(Captured([] { LogWarning("heard"); }), HasSubstr("\"level\":\"warning\""));
  EXPECT_THAT(Captured([] { LogError("heard"); }), HasSubstr("\"level\":\"error\""));
  SetLogging(LogLevel::kDebug, true);
  EXPECT_THAT(Captured([] { Log(LogLevel::kDebug, "heard"); }), HasSubstr("\"level\":\"debug\""));
}

// What a caller sends must neither start a line, nor steer a terminal, nor break a parser.
TEST_F(LogTest, TextOfStrangersStaysInItsString) {
  const std::vector<std::string> texts = {
      "a\n{\"level\":\"error\"}",
      "tab\t cr\r esc\x1b[31m bell\x07 del\x7f",
      "quote\" slash\\",
      std::string("nul\0byte", 8),
      std::string("c1 \xc2\x9b") + "31m",
      "separators \xe2\x80\xa8 \xe2\x80\xa9",
      "caf\xc3\xa9 \xf0\x9f\x98\x80",
  };
  for (const std::string& text : texts) {
    for (const bool as_json : {true, false}) {
      SetLogging(LogLevel::kInfo, as_json);
      const std::string line = Captured([&] { LogInfo(text, {{"field", text}}); });
      EXPECT_EQ(std::count(line.begin(), line.end(), '\n'), 1) << text;
      for (const char* raw : {"\x1b", "\x07", "\x7f", "\r", "\xc2\x9b", "\xe2\x80\xa8"}) {
        EXPECT_THAT(line, Not(HasSubstr(raw))) << text;
      }
      if (!as_json) continue;
      EXPECT_EQ(json::parse(line)["msg"], text);
      EXPECT_EQ(json::parse(line)["field"], text);
    }
  }
}

TEST_F(LogTest, BytesThatAreNotUtf8BecomeReplacementCharacters) {
  const std::string line = Captured([] { LogInfo("a\xff\xc3(\xed\xa0\x80", {}); });
  EXPECT_TRUE(IsValidUtf8(line));
  EXPECT_EQ(json::parse(line)["msg"],
            "a\xef\xbf\xbd\xef\xbf\xbd(\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd");
}

TEST_F(LogTest, NumbersThatJsonLacksBecomeStrings) {
  const json object = json::parse(Captured([] {
    LogInfo("x", {{"nan", std::nan("")}, {"inf", HUGE_VAL}, {"minus", -HUGE_VAL}, {"tiny", 1e-9}});
  }));
  EXPECT_EQ(object["nan"], "NaN");
  EXPECT_EQ(object["inf"], "Infinity");
  EXPECT_EQ(object["minus"], "-Infinity");
  EXPECT_EQ(object["tiny"], 1e-9);
}

TEST_F(LogTest, TextFormIsForPeople) {
  SetLogging(LogLevel::kInfo, false);
  const std::string line = Captured([] { LogWarning("slow step", {{"seconds", 1.5}}); });
  EXPECT_THAT(line, HasSubstr("Z warning slow step seconds=1.5\n"));
}

TEST_F(LogTest, LinesOfManyThreadsStayWhole) {
  constexpr int kThreads = 8, kLines = 200;
  const std::string text = Captured([] {
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([t] {
        for (int i = 0; i < kLines; ++i) {
          LogInfo(std::string(300, static_cast<char>('a' + t)), {{"i", int64_t{i}}});
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  });
  const std::vector<std::string> lines = absl::StrSplit(text, '\n', absl::SkipEmpty());
  ASSERT_EQ(lines.size(), kThreads * kLines);
  for (const std::string& line : lines) {
    const json object = json::parse(line, nullptr, false);
    ASSERT_TRUE(object.is_object()) << line;
    const std::string message = object["msg"];
    EXPECT_EQ(message, std::string(300, message[0]));
  }
}

TEST(LogLevelTest, ParsesItsNames) {
  LogLevel level = LogLevel::kInfo;
  EXPECT_TRUE(ParseLogLevel("debug", &level));
  EXPECT_EQ(level, LogLevel::kDebug);
  EXPECT_TRUE(ParseLogLevel("warning", &level));
  EXPECT_EQ(level, LogLevel::kWarning);
  EXPECT_FALSE(ParseLogLevel("Warning", &level));
  EXPECT_FALSE(ParseLogLevel("", &level));
  EXPECT_EQ(level, LogLevel::kWarning);
}

TEST(Utf8Test, TellsSequencesFromOtherBytes) {
  EXPECT_EQ(Utf8SequenceLength(""), 0);
  EXPECT_EQ(Utf8SequenceLength("ab"), 1);
  EXPECT_EQ(Utf8SequenceLength("\xc3\xa9x"), 2);
  EXPECT_EQ(Utf8SequenceLength("\xe2\x82\xac"), 3);
  EXPECT_EQ(Utf8SequenceLength("\xf4\x8f\xbf\xbf"), 4);
  for (const char* bad :
       {"\x80", "\xc0\x80", "\xc1\xbf", "\xc3", "\xc3(", "\xe0\x9f\xbf", "\xe2\x82", "\xed\xa0\x80",
        "\xf0\x8f\xbf\xbf", "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xff"}) {
    EXPECT_EQ(Utf8SequenceLength(bad), 0) << absl::BytesToHexString(bad);
  }
  EXPECT_TRUE(IsValidUtf8("caf\xc3\xa9"));
  EXPECT_FALSE(IsValidUtf8("caf\xc3"));
}

}  // namespace
}  // namespace dorad
