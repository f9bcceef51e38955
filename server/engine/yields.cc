#include "server/engine/yields.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "server/base/check.h"
#include "server/base/error.h"

namespace dorad::engine {

absl::Status Yields::Set(const std::string& id, double share, Instant until) {
  DORAD_CHECK(share > 0 && share <= 1);
  const auto found = yields_.find(id);
  if (found == yields_.end() && yields_.size() >= kMost) {
    return MakeError(absl::StatusCode::kResourceExhausted, "TOO_MANY_YIELDS",
                     absl::StrCat(kMost, " yields are in effect; one has to end first"));
  }
  yields_.insert_or_assign(id, Yield{share, until});
  return absl::OkStatus();
}

void Yields::EndOverdue(Instant now) {
  std::erase_if(yields_, [now](const auto& entry) { return entry.second.until <= now; });
}

double Yields::share() const {
  double share = 1;
  for (const auto& [id, yield] : yields_) share = std::min(share, yield.share);
  return share;
}

Instant Yields::next_end() const {
  DORAD_CHECK(!empty());
  Instant next = Instant::max();
  for (const auto& [id, yield] : yields_) next = std::min(next, yield.until);
  return next;
}

}  // namespace dorad::engine
