#include "server/rpc/call_context.h"

#include "tests/unit/support/test.h"

namespace dorad::rpc {
namespace {

const std::string kTrace = "0af7651916cd43dd8448eb211c80319c";
const std::string kParent = "b7ad6b7169203331";

TEST(RequestIdTest, TakesSafeCharactersUpToALength) {
  EXPECT_TRUE(IsRequestId("a"));
  EXPECT_TRUE(IsRequestId("Az09._-"));
  EXPECT_TRUE(IsRequestId(std::string(128, 'x')));
  EXPECT_FALSE(IsRequestId(""));
  EXPECT_FALSE(IsRequestId(std::string(129, 'x')));
  for (const char* text : {"a b", "a\nb", "a\"b", "a\\b", "a/b", "a:b", "\xc3\xa9", "a\x7f"}) {
    EXPECT_FALSE(IsRequestId(text)) << text;
  }
  EXPECT_FALSE(IsRequestId(std::string("a\0b", 3)));
}

TEST(TraceparentTest, GivesTheTraceId) {
  EXPECT_EQ(TraceIdOf("00-" + kTrace + "-" + kParent + "-01"), kTrace);
  EXPECT_EQ(TraceIdOf("00-" + kTrace + "-" + kParent + "-00"), kTrace);
}

TEST(TraceparentTest, ReadsWhatItKnowsOfLaterVersions) {
  EXPECT_EQ(TraceIdOf("01-" + kTrace + "-" + kParent + "-01"), kTrace);
  EXPECT_EQ(TraceIdOf("cc-" + kTrace + "-" + kParent + "-01-what-the-future-brings"), kTrace);
  EXPECT_EQ(TraceIdOf("cc-" + kTrace + "-" + kParent + "-01.future"), "");
}

TEST(TraceparentTest, IgnoresWhatIsNotOneToTheLetter) {
  const std::string good = "00-" + kTrace + "-" + kParent + "-01";
  EXPECT_EQ(TraceIdOf(""), "");
  EXPECT_EQ(TraceIdOf(good + "-more"), "") << "version 00 ends here";
  EXPECT_EQ(TraceIdOf(good + " "), "");
  EXPECT_EQ(TraceIdOf("ff" + good.substr(2)), "") << "no version";
  EXPECT_EQ(TraceIdOf("00-" + std::string(32, '0') + "-" + kParent + "-01"), "");
  EXPECT_EQ(TraceIdOf("00-" + kTrace + "-" + std::string(16, '0') + "-01"), "");
  for (size_t i = 0; i < good.size(); ++i) {
    EXPECT_EQ(TraceIdOf(good.substr(0, i)), "") << i;
    for (const char c : {'G', 'A', '\n', '"'}) {
      std::string bad = good;
      bad[i] = c;
      EXPECT_EQ(TraceIdOf(bad), "") << bad;
    }
  }
}

}  // namespace
}  // namespace dorad::rpc
