#include "server/engine/image_gate.h"

#include <utility>

#include "server/platform/check.h"
#include "server/platform/error.h"
#include "server/platform/instant.h"
#include "server/platform/metrics/metrics.h"

namespace dorad::engine {
namespace {

// Features depend on the adapter only if it changes the tower.
const adapter::LoadedAdapter* AdapterOf(const Sequence& sequence, const PlacedImage& place,
                                        const ModelRunner& runner) {
  const adapter::LoadedAdapter* const adapter = sequence.adapter_at(place.begin);
  return adapter != nullptr && runner.ChangesImages(*adapter) ? adapter : nullptr;
}

}  // namespace

bool ImageGate::MayRun(Sequence* sequence) {
  if (sequence->images == nullptr) return true;
  if (sequence->landed >= sequence->images->end()) {
    sequence->features.clear();
    return true;
  }
  const absl::Span<const PlacedImage> places = sequence->images->places();
  sequence->features.resize(places.size());
  Waiting missing;
  for (size_t i = 0; i < places.size(); ++i) {
    if (places[i].end() <= sequence->computed || sequence->features[i] != nullptr) continue;
    const adapter::LoadedAdapter* const adapter = AdapterOf(*sequence, places[i], runner_);
    std::string name = places[i].image->identity();
    if (adapter != nullptr) name += adapter->digest();
    sequence->features[i] = Find(name);
    if (sequence->features[i] != nullptr || missing.sequence != nullptr) continue;
    missing = {sequence, std::move(name), places[i].image.get(), adapter};
  }
  if (missing.sequence == nullptr) return true;
  // An image that has begun goes on: the order of sequences may change between its pieces.
  const bool begun = missing.name == pieces_.name && first_.name != pieces_.name;
  if (first_.sequence != nullptr && !begun) {
    sequence->features.clear();
    return false;
  }
  if (first_.sequence != nullptr) first_.sequence->features.clear();
  first_ = std::move(missing);
  return false;
}

absl::Status ImageGate::Encode() {
  DORAD_CHECK(first_.sequence != nullptr);
  const Instant begin = SteadyNow();
  DORAD_ASSIGN_OR_RETURN(Features features, runner_.EncodeImage(*first_.image, first_.adapter));
  if (pieces_.name != first_.name) pieces_ = {first_.name, absl::ZeroDuration()};
  pieces_.time += Between(begin, SteadyNow());
  if (features == nullptr) return absl::OkStatus();
  metrics_.ImageEncoded(pieces_.time);
  pieces_ = {};
  bytes_ += features->bytes();
  entries_[first_.name] = {std::move(features), order_.insert(order_.end(), first_.name)};
  while (bytes_ > max_bytes_ && order_.front() != first_.name) {
    const auto oldest = entries_.find(order_.front());
    bytes_ -= oldest->second.features->bytes();
    entries_.erase(oldest);
    order_.pop_front();
  }
  return absl::OkStatus();
}

ImageGate::Features ImageGate::Find(const std::string& name) {
  const auto found = entries_.find(name);
  if (found == entries_.end()) return nullptr;
  order_.splice(order_.end(), order_, found->second.place);
  return found->second.features;
}

void ImageGate::Clear() {
  pieces_ = {};
  entries_.clear();
  order_.clear();
  bytes_ = 0;
}

}  // namespace dorad::engine
