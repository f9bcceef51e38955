#include "server/adapter/pattern.h"

#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "re2/re2.h"
#include "server/adapter/violations.h"
#include "server/base/error.h"

namespace dorad::adapter {
namespace {

absl::Status Unsupported(const std::string& why) {
  return MakeError(absl::StatusCode::kInvalidArgument, "ADAPTER_PATTERN_UNSUPPORTED", why);
}

// Finds what RE2 and Python both accept and read differently. Both have escapes, so a backslash
// takes the next character with it.
const char* AmbiguousNotation(const std::string& expression) {
  for (size_t i = 0; i + 1 < expression.size(); ++i) {
    if (expression[i] == '\\') {
      ++i;
    } else if (expression.compare(i, 2, "[:") == 0) {
      return "[:";  // POSIX class for RE2, ordinary characters for Python
    } else if (expression.compare(i, 2, "{,") == 0) {
      return "{,";  // ordinary characters for RE2, "at most n" for Python
    }
  }
  return nullptr;
}

}  // namespace

Pattern::Pattern(std::unique_ptr<re2::RE2> re) : re_(std::move(re)) {}
Pattern::Pattern(Pattern&&) noexcept = default;
Pattern& Pattern::operator=(Pattern&&) noexcept = default;
Pattern::~Pattern() = default;

absl::StatusOr<Pattern> Pattern::Compile(const std::string& expression) {
  if (expression.size() > kMaxLength) {
    return Unsupported(absl::StrCat("the pattern has ", expression.size(), " bytes; at most ",
                                    kMaxLength, " are read"));
  }
  if (const char* notation = AmbiguousNotation(expression)) {
    return Unsupported(absl::StrCat("the pattern ", Quoted(expression), " uses \"", notation,
                                    "\", which regular expression engines read differently"));
  }
  re2::RE2::Options options;
  options.set_log_errors(false);
  auto re = std::make_unique<re2::RE2>(expression, options);
  if (!re->ok()) {
    return Unsupported(absl::StrCat("the pattern ", Quoted(expression),
                                    " is not supported: ", absl::CEscape(re->error())));
  }
  return Pattern(std::move(re));
}

bool Pattern::FullMatch(const std::string& text) const { return re2::RE2::FullMatch(text, *re_); }

bool Pattern::MatchStart(const std::string& text) const {
  return re_->Match(text, 0, text.size(), re2::RE2::ANCHOR_START, nullptr, 0);
}

bool Pattern::MatchIndex(const std::string& text, int* index) const {
  const auto& groups = re_->NamedCapturingGroups();
  const auto named = groups.find("idx");
  const int group = named == groups.end() ? 0 : named->second;
  std::vector<re2::StringPiece> matches(static_cast<size_t>(group) + 1);
  if (!re_->Match(text, 0, text.size(), re2::RE2::ANCHOR_START, matches.data(), group + 1)) {
    return false;
  }
  if (group == 0 || !absl::SimpleAtoi(std::string(matches[group]), index)) *index = -1;
  return true;
}

}  // namespace dorad::adapter
