#include "server/adapter/peft/module_key.h"

#include <algorithm>

#include "absl/strings/ascii.h"

namespace dorad::adapter {
namespace {

constexpr char kAny = '\0';

}  // namespace

std::optional<ModuleKey> ModuleKey::Parse(std::string_view key) {
  ModuleKey parsed;
  if (!key.empty() && key.front() == '^') {
    parsed.whole_ = true;
    key.remove_prefix(1);
  }
  for (size_t i = 0; i < key.size(); ++i) {
    const char c = key[i];
    if (absl::ascii_isalnum(c) || c == '_' || c == '-') {
      parsed.text_.push_back(c);
    } else if (c == '.') {
      parsed.text_.push_back(kAny);
    } else if (key.substr(i, 2) == "\\.") {
      parsed.text_.push_back('.');
      ++i;
    } else {
      return std::nullopt;
    }
  }
  return parsed;
}

bool ModuleKey::Fits(std::string_view name) const {
  if (name.size() < text_.size()) return false;
  const size_t begin = name.size() - text_.size();
  if (begin > 0 && (whole_ || name[begin - 1] != '.')) return false;
  return std::equal(text_.begin(), text_.end(), name.begin() + begin,
                    [](char expected, char c) { return expected == kAny || expected == c; });
}

}  // namespace dorad::adapter
