#include "server/engine/pauses.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "server/platform/error.h"

namespace dorad::engine {
namespace {

// Whether a pause of `whole` covers all requests of `part`.
bool Contains(const adapter::AdapterRef& whole, const adapter::AdapterRef& part) {
  if (whole.is_base() || whole == part) return true;
  return whole.name == part.name && whole.version == 0;
}

absl::Status Full(int most, std::string_view whose) {
  return MakeError(
      absl::StatusCode::kResourceExhausted, "PAUSES_FULL",
      absl::StrCat("there are ", most, " pauses of ", std::string(whose), "; Resume ends them"));
}

}  // namespace

std::string ShortTime(Instant from, Instant to) {
  return absl::FormatDuration(absl::Trunc(Between(from, to), absl::Milliseconds(100)));
}

Pauses::Pause& Pauses::FindOrAdd(const adapter::AdapterRef& scope,
                                 const std::optional<std::string>& tenant) {
  for (Pause& pause : pauses_) {
    if (pause.scope == scope) return pause;
  }
  Pause& pause = pauses_.emplace_back();
  pause.scope = scope;
  pause.tenant = tenant;
  pause.since = SteadyNow();
  return pause;
}

void Pauses::PutInForce(Pause& pause) {
  if (!pause.in_force) pause.since = SteadyNow();
  pause.in_force = true;
}

std::string Pauses::Explain(const Stop& stop, Instant now) {
  const std::string ref = stop.scope.ToString();
  const std::string subject = stop.scope.is_base() ? "the engine" : absl::StrCat("adapter ", ref);
  const std::string resume = stop.scope.is_base() ? "Resume" : absl::StrCat("Resume of ", ref);
  const std::string time = ShortTime(stop.since, now);
  if (stop.waits) {
    return absl::StrCat("a pause of ", subject, " has waited ", time,
                        " for running requests to end; ", resume, " ends the pause");
  }
  return absl::StrCat(subject, " has been paused for ", time, "; ", resume, " ends the pause");
}

absl::Status Pauses::CheckRoom(const adapter::AdapterRef& scope,
                               const std::optional<std::string>& tenant) const {
  if (scope.is_base()) return absl::OkStatus();
  int all = 0, own = 0;
  for (const Pause& pause : pauses_) {
    if (pause.scope == scope) return absl::OkStatus();
    if (pause.scope.is_base()) continue;
    ++all;
    own += pause.tenant == tenant;
  }
  if (tenant && own >= kMostOfTenant) return Full(kMostOfTenant, "yours");
  if (all >= kMost) return Full(kMost, "adapters");
  return absl::OkStatus();
}

void Pauses::Begin(const adapter::AdapterRef& scope, const std::optional<std::string>& tenant) {
  Pause& pause = FindOrAdd(scope, tenant);
  PutInForce(pause);
  pause.refuses = false;
  Update();
}

void Pauses::End(const adapter::AdapterRef& scope) {
  for (Pause& pause : pauses_) {
    if (scope.is_base() || pause.scope == scope) pause.in_force = pause.refuses = false;
  }
  Update();
}

void Pauses::Wait(const adapter::AdapterRef& scope, const std::optional<std::string>& tenant,
                  Waiter waiter) {
  FindOrAdd(scope, tenant).waiters.push_back(std::move(waiter));
  Update();
}

std::vector<Pauses::Waiter> Pauses::Complete(const IsOver& is_over) {
  return TakeIf([&](Pause& pause) {
    if (!is_over(pause.scope, &pause.witness)) return false;
    PutInForce(pause);
    pause.refuses = true;
    return true;
  });
}

std::vector<Pauses::Waiter> Pauses::RemoveWaitersWithin(const adapter::AdapterRef& scope) {
  return TakeIf([&](const Pause& pause) { return Contains(scope, pause.scope); });
}

std::vector<Pauses::Waiter> Pauses::RemoveWaiters(const adapter::AdapterRef& scope) {
  return TakeIf([&](const Pause& pause) { return scope.is_base() || pause.scope == scope; });
}

std::optional<Pauses::Waiter> Pauses::Cancel(uint64_t pause_id) {
  for (Pause& pause : pauses_) {
    const auto it = std::find_if(pause.waiters.begin(), pause.waiters.end(),
                                 [&](const Waiter& waiter) { return waiter.pause_id == pause_id; });
    if (it == pause.waiters.end()) continue;
    Waiter cancelled = std::move(*it);
    pause.waiters.erase(it);
    Update();
    return cancelled;
  }
  return std::nullopt;
}

bool Pauses::Freezes(const Request& request) const {
  const auto covers = [&](const adapter::AdapterRef& scope) { return Covers(scope, request); };
  return std::none_of(waiting_.begin(), waiting_.end(), covers) &&
         std::any_of(stopped_.begin(), stopped_.end(), covers);
}

bool Pauses::Stops(const Pause& pause) const {
  return pause.in_force && pause.waiters.empty() && !IsPartOfWait(pause.scope);
}

std::optional<Pauses::Stop> Pauses::StopOf(const Request& request) const {
  for (const Pause& pause : pauses_) {
    if (!Stops(pause) || !Covers(pause.scope, request)) continue;
    if (pause.scope.is_base() || Freezes(request)) return StopBy(pause);
  }
  return std::nullopt;
}

std::optional<Pauses::Stop> Pauses::RefusalOf(const Request& request) const {
  const auto it = std::find_if(refused_.begin(), refused_.end(),
                               [&](const Stop& stop) { return Covers(stop.scope, request); });
  return it == refused_.end() ? std::nullopt : std::optional<Stop>(*it);
}

bool Pauses::IsPartOfWait(const adapter::AdapterRef& scope) const {
  return std::any_of(waiting_.begin(), waiting_.end(), [&](const adapter::AdapterRef& waiting) {
    return waiting != scope && Contains(waiting, scope);
  });
}

template <typename Condition>
std::vector<Pauses::Waiter> Pauses::TakeIf(Condition condition) {
  std::vector<Waiter> taken;
  for (Pause& pause : pauses_) {
    if (pause.waiters.empty() || !condition(pause)) continue;
    std::move(pause.waiters.begin(), pause.waiters.end(), std::back_inserter(taken));
    pause.waiters.clear();
  }
  if (!taken.empty()) Update();
  return taken;
}

// Drops pauses that are neither in force nor waited for.
void Pauses::Update() {
  std::erase_if(pauses_,
                [](const Pause& pause) { return !pause.in_force && pause.waiters.empty(); });
  all_ = false;
  stopped_.clear();
  waiting_.clear();
  refused_.clear();
  for (const Pause& pause : pauses_) {
    const bool waits = !pause.waiters.empty();
    if (waits) waiting_.push_back(pause.scope);
    if (waits || pause.refuses) refused_.push_back(StopBy(pause));
  }
  for (const Pause& pause : pauses_) {
    if (!Stops(pause)) continue;
    if (pause.scope.is_base()) {
      all_ = true;
    } else {
      stopped_.push_back(pause.scope);
    }
  }
}

}  // namespace dorad::engine
