#include "server/adapter/registry/event_log.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "server/platform/check.h"
#include "server/platform/error.h"

namespace dorad::adapter {

EventLog::EventLog(int max_events) : max_events_(static_cast<size_t>(max_events)) {
  DORAD_CHECK(max_events >= 1);
}

void EventLog::ContinueAfter(int64_t generation) {
  DORAD_CHECK(generation_ == 0);
  generation_ = compacted_ = generation;
}

void EventLog::Append(const std::vector<EventType>& types, const AdapterRecord& adapter) {
  for (const EventType type : types) events_.push_back({++generation_, type, adapter});
  while (events_.size() > max_events_) {
    compacted_ = events_.front().generation;
    events_.pop_front();
  }
}

absl::StatusOr<std::vector<RegistryEvent>> EventLog::After(int64_t generation, int limit) const {
  if (generation > generation_) {
    return MakeError(absl::StatusCode::kOutOfRange, "GENERATION_UNKNOWN",
                     absl::StrCat("generation ", generation,
                                  " has not been reached; the registry is at ", generation_));
  }
  if (generation < compacted_) {
    return MakeError(
        absl::StatusCode::kOutOfRange, "GENERATION_COMPACTED",
        absl::StrCat("events after generation ", generation,
                     " are no longer kept; the oldest can be read after ", compacted_));
  }
  const auto first = std::partition_point(
      events_.begin(), events_.end(),
      [generation](const RegistryEvent& event) { return event.generation <= generation; });
  const auto most = std::min<std::ptrdiff_t>(events_.end() - first, std::max(limit, 1));
  return std::vector<RegistryEvent>(first, first + most);
}

}  // namespace dorad::adapter
