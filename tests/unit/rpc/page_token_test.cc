#include "server/rpc/page_token.h"

#include "absl/strings/escaping.h"
#include "tests/unit/support/test.h"

namespace dorad::rpc {
namespace {

TEST(PageToken, ReadsBackWhatItWrote) {
  for (const std::string filter : {"", "b"}) {
    const auto position = ParsePageToken(MakePageToken({filter, "b", 17}), filter);
    ASSERT_TRUE(position.ok());
    EXPECT_EQ(position->name, "b");
    EXPECT_EQ(position->version, 17);
  }
}

TEST(PageToken, IsRefusedForAnotherFilter) {
  const std::string token = MakePageToken({"a", "a", 1});
  for (const char* filter : {"b", ""}) {
    EXPECT_EQ(ReasonOf(ParsePageToken(token, filter).status()), "PAGE_TOKEN_INVALID") << filter;
  }
}

TEST(PageToken, RefusesAnythingElse) {
  for (const char* text : {"1//a/x", "2//a/1", "1//A/1", "1//a", "1//a/1/2", "\xff", ""}) {
    EXPECT_FALSE(ParsePageToken(absl::WebSafeBase64Escape(text), "").ok()) << text;
  }
  EXPECT_FALSE(ParsePageToken("!!", "").ok());
}

}  // namespace
}  // namespace dorad::rpc
