#include "server/engine/pauses.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/error.h"

namespace dorad::engine {

bool Pauses::Freezes(const Request& request) const {
  return std::any_of(adapters_.begin(), adapters_.end(),
                     [&](const adapter::AdapterRef& ref) { return request.Holds(ref); });
}

absl::Status Pauses::CheckRoom(const adapter::AdapterRef& scope) const {
  const bool is_known =
      scope.is_base() || std::count(adapters_.begin(), adapters_.end(), scope) > 0;
  if (is_known || adapters_.size() + waiting_.size() < kMost) return absl::OkStatus();
  return MakeError(absl::StatusCode::kResourceExhausted, "PAUSES_FULL",
                   absl::StrCat("there are ", kMost, " pauses of adapters; Resume ends them"));
}

void Pauses::Begin(const adapter::AdapterRef& scope) {
  if (scope.is_base()) {
    all_ = true;
  } else if (std::find(adapters_.begin(), adapters_.end(), scope) == adapters_.end()) {
    adapters_.push_back(scope);
  }
}

void Pauses::End(const adapter::AdapterRef& scope) {
  if (scope.is_base()) {
    all_ = false;
    adapters_.clear();
  } else {
    adapters_.erase(std::remove(adapters_.begin(), adapters_.end(), scope), adapters_.end());
  }
}

std::vector<Pauses::Waiting> Pauses::TakeOver(
    const std::function<bool(const adapter::AdapterRef&)>& is_over) {
  return Take([&](const Waiting& waiting) { return is_over(waiting.scope); });
}

std::vector<Pauses::Waiting> Pauses::TakeOvertaken(const adapter::AdapterRef& scope) {
  return Take([&](const Waiting& waiting) { return scope.is_base() || waiting.scope == scope; });
}

bool Pauses::everything_waits() const {
  return std::any_of(waiting_.begin(), waiting_.end(),
                     [](const Waiting& waiting) { return waiting.scope.is_base(); });
}

template <typename Condition>
std::vector<Pauses::Waiting> Pauses::Take(Condition condition) {
  const auto first = std::stable_partition(waiting_.begin(), waiting_.end(),
                                           [&](const Waiting& w) { return !condition(w); });
  std::vector<Waiting> taken(std::make_move_iterator(first),
                             std::make_move_iterator(waiting_.end()));
  waiting_.erase(first, waiting_.end());
  return taken;
}

}  // namespace dorad::engine
