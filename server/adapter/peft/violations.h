// Collects the problems of one object, bounded in number and in the length of quoted text.
// Thread-compatible.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "server/platform/error.h"

namespace dorad::adapter {

// A caller's text in double quotes: escaped, and shortened after 80 bytes.
inline std::string Quoted(std::string_view text) {
  constexpr size_t kShown = 80;
  const std::string head(text.substr(0, kShown));
  return absl::StrCat("\"", absl::CEscape(head), text.size() > kShown ? "..." : "", "\"");
}

class Violations {
 public:
  // Further problems are counted, not listed: every tensor of another model's adapter is a problem.
  static constexpr size_t kMaxListed = 64;

  void Add(std::string field, std::string reason, std::string description) {
    ++total_;
    if (listed_.size() < kMaxListed) {
      listed_.push_back({std::move(field), std::move(reason), std::move(description)});
    }
  }

  // Adds the problems of a refusal that MakeInvalid made.
  void AddAll(const absl::Status& refusal) {
    total_ += OmittedViolationsOf(refusal);
    for (Violation& violation : ViolationsOf(refusal)) {
      Add(std::move(violation.field), std::move(violation.reason),
          std::move(violation.description));
    }
  }

  bool empty() const { return total_ == 0; }
  size_t total() const { return total_; }

  // OK without problems. `subject` names the checked object ("adapter_config.json").
  absl::Status ToStatus(const std::string& subject) const {
    if (empty()) return absl::OkStatus();
    return MakeInvalid(subject, listed_, total_ - listed_.size());
  }

 private:
  std::vector<Violation> listed_;
  size_t total_ = 0;
};

}  // namespace dorad::adapter
