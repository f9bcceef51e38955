// A key of rank_pattern or alpha_pattern that is a module's name or the end of one, as PEFT writes
// them. PEFT reads every key as a regular expression, "(.*\.)?(key)$" from the start of the name;
// this class gives the same answer for names of ASCII characters without compiling one. Immutable
// and therefore thread-safe.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace dorad::adapter {

class ModuleKey {
 public:
  // nullopt for a key with other notation than "^" at the front, "." (any character) and "\.".
  static std::optional<ModuleKey> Parse(std::string_view key);

  bool Fits(std::string_view name) const;

 private:
  bool whole_ = false;  // began with "^": only whole names
  std::string text_;    // NUL stands for any character
};

}  // namespace dorad::adapter
