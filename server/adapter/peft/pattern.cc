#include "server/adapter/peft/pattern.h"

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "re2/re2.h"
#include "server/adapter/peft/violations.h"
#include "server/platform/error.h"

namespace dorad::adapter {
namespace {

// Memory limit of one expression, compiled and matching: some thousand instructions.
constexpr int64_t kMaxMemory = 256 << 10;

absl::Status Unsupported(const std::string& why) {
  return MakeError(absl::StatusCode::kInvalidArgument, "ADAPTER_PATTERN_UNSUPPORTED", why);
}

absl::Status TooCostly() {
  return MakeError(
      absl::StatusCode::kInvalidArgument, "ADAPTER_PATTERNS_TOO_COSTLY",
      absl::StrCat("the regular expressions of one configuration may be ",
                   PatternBudget::kMaxExpressions, ", with ", PatternBudget::kMaxBytes,
                   " bytes and ", PatternBudget::kMaxInstructions,
                   " compiled instructions together; plain names of modules do not count"));
}

// Finds notation that RE2 and Python both accept and read differently. Both have escapes: a
// backslash includes the next character.
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

bool PatternBudget::TakeExpression(size_t bytes) {
  if (expressions_ == 0 || bytes > static_cast<size_t>(bytes_)) return false;
  --expressions_;
  bytes_ -= static_cast<int>(bytes);
  return true;
}

bool PatternBudget::TakeInstructions(int count) {
  if (count > instructions_) return false;
  instructions_ -= count;
  return true;
}

absl::StatusOr<Pattern> Pattern::Compile(const std::string& expression, PatternBudget& budget) {
  if (!budget.TakeExpression(expression.size())) return TooCostly();
  if (const char* notation = AmbiguousNotation(expression)) {
    return Unsupported(absl::StrCat("the pattern ", Quoted(expression), " uses \"", notation,
                                    "\", which regular expression engines read differently"));
  }
  re2::RE2::Options options;
  options.set_log_errors(false);
  options.set_max_mem(kMaxMemory);
  auto re = std::make_unique<re2::RE2>(expression, options);
  if (re->error_code() == re2::RE2::ErrorPatternTooLarge) return TooCostly();
  if (!re->ok()) {
    return Unsupported(absl::StrCat("the pattern ", Quoted(expression),
                                    " is not supported: ", absl::CEscape(re->error())));
  }
  if (!budget.TakeInstructions(re->ProgramSize())) return TooCostly();
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
