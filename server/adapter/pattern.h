// A regular expression as PEFT uses them on module names, matched in linear time.
//
// PEFT runs Python's `re`; we run RE2, which means the same for the syntax both know. What RE2 does
// not know (look-around, back references, atomic groups) and the two notations that both know with
// different meanings ("[[:alpha:]]" and "{,n}") are refused. Immutable, hence thread-safe.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace re2 {
class RE2;
}  // namespace re2

namespace dorad::adapter {

class Pattern {
 public:
  static constexpr size_t kMaxLength = 8192;

  // INVALID_ARGUMENT (ADAPTER_PATTERN_UNSUPPORTED) with one line that says what is wrong.
  static absl::StatusOr<Pattern> Compile(const std::string& expression);
  Pattern(Pattern&&) noexcept;
  Pattern& operator=(Pattern&&) noexcept;
  ~Pattern();

  // Python's re.fullmatch(expression, text).
  bool FullMatch(const std::string& text) const;
  // Python's re.match(expression, text): anchored at the start only.
  bool MatchStart(const std::string& text) const;
  // As MatchStart. *index is then the group named "idx" as a number, -1 when the group took no part
  // or is not a number that fits.
  bool MatchIndex(const std::string& text, int* index) const;

 private:
  explicit Pattern(std::unique_ptr<re2::RE2> re);
  std::unique_ptr<re2::RE2> re_;
};

}  // namespace dorad::adapter
