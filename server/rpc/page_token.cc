#include "server/rpc/page_token.h"

#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "server/adapter/registry/version.h"
#include "server/platform/error.h"

namespace dorad::rpc {
namespace {

constexpr char kFormat[] = "1";
constexpr size_t kMaxBytes = 1024;  // two names and a number are shorter
// Occurs in no adapter name.
constexpr char kSeparator[] = "/";

}  // namespace

std::string MakePageToken(const PagePosition& last) {
  return absl::WebSafeBase64Escape(absl::StrCat(kFormat, kSeparator, last.filter, kSeparator,
                                                last.name, kSeparator, last.version));
}

absl::StatusOr<PagePosition> ParsePageToken(const std::string& token, const std::string& filter) {
  std::string text;
  PagePosition position;
  if (token.size() <= kMaxBytes && absl::WebSafeBase64Unescape(token, &text)) {
    const std::vector<std::string> parts = absl::StrSplit(text, kSeparator);
    if (parts.size() == 4 && parts[0] == kFormat && parts[1] == filter &&
        adapter::IsValidAdapterName(parts[2]) && absl::SimpleAtoi(parts[3], &position.version)) {
      position.filter = parts[1];
      position.name = parts[2];
      return position;
    }
  }
  return MakeInvalid("ListRequest", {{"page_token", "PAGE_TOKEN_INVALID",
                                      "not a next_page_token of a List with the same name"}});
}

}  // namespace dorad::rpc
