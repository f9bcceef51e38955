#include "server/engine/image_gate.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "absl/container/flat_hash_set.h"
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
  const size_t before = missing_.size();
  for (size_t i = 0; i < places.size(); ++i) {
    if (places[i].end() <= sequence->computed || sequence->features[i] != nullptr) continue;
    const adapter::LoadedAdapter* const adapter = AdapterOf(*sequence, places[i], runner_);
    std::string name = places[i].image->identity();
    if (adapter != nullptr) name += adapter->digest();
    sequence->features[i] = Find(name);
    if (sequence->features[i] != nullptr) continue;
    missing_.push_back({sequence, std::move(name), places[i].image.get(), adapter});
  }
  if (missing_.size() == before) return true;
  // An image that has begun goes on: the order of sequences may change between its pieces.
  Sequence* const first = waiting();
  const auto begun = std::find_if(missing_.begin() + before, missing_.end(),
                                  [&](const Missing& m) { return m.name == pieces_.name; });
  if (begun != missing_.end() && missing_.front().name != pieces_.name) {
    std::rotate(missing_.begin(), begun, begun + 1);
  }
  for (Sequence* const s : {first, sequence}) {
    if (s != waiting()) s->features.clear();
  }
  return false;
}

absl::Status ImageGate::Encode(bool alone) {
  DORAD_CHECK(!missing_.empty());
  const adapter::LoadedAdapter* const adapter = missing_.front().adapter;
  std::vector<const Image*> images;
  std::vector<std::pair<std::string, Features>> computed;
  absl::flat_hash_set<std::string_view> names;
  for (const Missing& missing : missing_) {
    if (missing.adapter != adapter || !names.insert(missing.name).second) continue;
    images.push_back(missing.image);
    computed.emplace_back(missing.name, nullptr);
    if (!alone) break;
  }
  const Instant begin = SteadyNow();
  DORAD_ASSIGN_OR_RETURN(std::vector<Features> features,
                         runner_.EncodeImages(images, adapter, alone));
  if (pieces_.name != computed[0].first) pieces_ = {computed[0].first, absl::ZeroDuration()};
  pieces_.time += Between(begin, SteadyNow());
  if (features.empty()) return absl::OkStatus();
  computed.resize(features.size());
  for (size_t i = 0; i < features.size(); ++i) {
    computed[i].second = std::move(features[i]);
    metrics_.ImageEncoded(pieces_.time / static_cast<int64_t>(features.size()));
  }
  pieces_ = {};
  Store(std::move(computed));
  return absl::OkStatus();
}

void ImageGate::Store(std::vector<std::pair<std::string, Features>> computed) {
  const size_t kept = computed.size();
  for (auto& [name, features] : computed) {
    bytes_ += features->bytes();
    entries_[name] = {std::move(features), order_.insert(order_.end(), name)};
  }
  while (bytes_ > max_bytes_ && entries_.size() > kept) {
    const auto oldest = entries_.find(order_.front());
    bytes_ -= oldest->second.features->bytes();
    entries_.erase(oldest);
    order_.pop_front();
  }
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
