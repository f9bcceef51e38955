// A regular expression as PEFT uses them on module names, matched in linear time.
//
// PEFT runs Python's `re`; we run RE2, which means the same for the syntax common to both. Refused
// are syntax unknown to RE2 (look-around, back references, atomic groups) and two notations with
// different meanings ("[[:alpha:]]" and "{,n}").
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace re2 {
class RE2;
}  // namespace re2

namespace dorad::adapter {

// The cost limit of all expressions of one configuration. A dozen bytes can stand for hundreds of
// thousands of instructions ("(?:\pL){240}"), and compiling, keeping and matching an expression
// costs in proportion to them. Within this budget the worst configuration takes seconds with a
// large model, and tens of MiB. Thread-compatible.
class PatternBudget {
 public:
  static constexpr int kMaxExpressions = 256;
  static constexpr int kMaxBytes = 16384;
  static constexpr int kMaxInstructions = 16384;

  // False when the expression or its instructions exceed the budget.
  bool TakeExpression(size_t bytes);
  bool TakeInstructions(int count);

 private:
  int expressions_ = kMaxExpressions;
  int bytes_ = kMaxBytes;
  int instructions_ = kMaxInstructions;
};

// Immutable and therefore thread-safe.
class Pattern {
 public:
  // INVALID_ARGUMENT with one line: ADAPTER_PATTERN_UNSUPPORTED, or ADAPTER_PATTERNS_TOO_COSTLY
  // when the budget is exceeded.
  static absl::StatusOr<Pattern> Compile(const std::string& expression, PatternBudget& budget);
  Pattern(Pattern&&) noexcept;
  Pattern& operator=(Pattern&&) noexcept;
  ~Pattern();

  // Python's re.fullmatch(expression, text).
  bool FullMatch(const std::string& text) const;
  // Python's re.match(expression, text): anchored at the start only.
  bool MatchStart(const std::string& text) const;
  // As MatchStart. *index: the group named "idx" as a number; -1 when the group is empty or not a
  // number that fits.
  bool MatchIndex(const std::string& text, int* index) const;

 private:
  explicit Pattern(std::unique_ptr<re2::RE2> re);
  std::unique_ptr<re2::RE2> re_;
};

}  // namespace dorad::adapter
