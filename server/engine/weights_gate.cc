#include "server/engine/weights_gate.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "server/platform/metrics/metrics.h"

namespace dorad::engine {

bool WeightsGate::MayRun(Sequence* sequence) {
  if (sequence->has_pins) return true;
  Entries entries;
  for (const KvSpan& span : sequence->kv_spans) {
    if (span.adapter == nullptr || span.adapter->entry() == nullptr) continue;
    entries.push_back(span.adapter->entry());
  }
  std::sort(entries.begin(), entries.end());
  entries.erase(std::unique(entries.begin(), entries.end()), entries.end());
  // Many may wait for the same weights: one of them asks in each step.
  if (away_.contains(entries)) {
    NoteStalled(sequence);
    return false;
  }
  absl::StatusOr<std::optional<adapter::Residency::Pins>> pins =
      adapter::Residency::PinAll(entries);
  if (!pins.ok() || !pins->has_value()) {
    if (!pins.ok()) failures_.emplace(entries, pins.status());
    away_.insert(std::move(entries));
    NoteStalled(sequence);
    return false;
  }
  sequence->pins = **std::move(pins);
  sequence->has_pins = true;
  EndStall(sequence, now_);
  return true;
}

void WeightsGate::NoteGone(const Sequence* sequence) { EndStall(sequence, SteadyNow()); }

std::optional<Instant> WeightsGate::StalledSince(const Request& request) const {
  std::optional<Instant> since;
  for (const auto& sequence : request.sequences) {
    const auto found = stalled_.find(sequence.get());
    if (found == stalled_.end()) continue;
    since = since ? std::min(*since, found->second) : found->second;
  }
  return since;
}

void WeightsGate::EndStall(const Sequence* sequence, Instant now) {
  const auto found = stalled_.find(sequence);
  if (found == stalled_.end()) return;
  metrics_.AdapterStall(Between(found->second, now));
  stalled_.erase(found);
}

std::map<WeightsGate::Entries, absl::Status> WeightsGate::TakeFailures() {
  return std::exchange(failures_, {});
}

bool WeightsGate::IsConcerned(const Request& request, const Entries& entries) {
  for (const auto& sequence : request.sequences) {
    if (sequence->state == Sequence::State::kEnded || sequence->has_pins || sequence->frozen) {
      continue;
    }
    for (const KvSpan& span : sequence->kv_spans) {
      if (span.adapter == nullptr) continue;
      if (std::find(entries.begin(), entries.end(), span.adapter->entry()) != entries.end()) {
        return true;
      }
    }
  }
  return false;
}

}  // namespace dorad::engine
