// A model without a model: the "keys and values" of a position are a hash of everything before it,
// kept in KV pages like the real ones. A wrong page, a stale prefix, a lost or repeated row change
// the tokens that come out, so tests of the scheduler see such faults. With a recurrence its state
// is the hash of the last position, in each of its pages. With groups of layers each one keeps the
// hash, and a row checks it wherever the group's window lets it look.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/engine/model_runner.h"
#include "server/platform/check.h"

namespace dorad::engine {

inline constexpr TokenId kFakeVocab = 1000;

inline uint64_t FakeMix(uint64_t a, uint64_t b) {
  uint64_t x = a * 0x9E3779B97F4A7C15ull + b + 0x7F4A7C15ull;
  x ^= x >> 31;
  x *= 0xD6E8FEB86659FD93ull;
  return x ^ (x >> 29);
}

inline uint64_t FakeSeed(const adapter::LoadedAdapter* adapter) {
  return adapter == nullptr ? 1 : std::hash<std::string>()(adapter->digest());
}

// The "keys and values" of a position: of those before it (0: of none), its token and the version
// that computes it.
inline uint64_t FakeKv(uint64_t before, TokenId token, const adapter::LoadedAdapter* adapter) {
  return FakeMix(FakeMix(before, static_cast<uint64_t>(token)), FakeSeed(adapter));
}

inline uint64_t FakeHash(const adapter::LoadedAdapter* adapter, absl::Span<const TokenId> tokens) {
  uint64_t h = 0;
  for (TokenId token : tokens) h = FakeKv(h, token, adapter);
  return h;
}

inline TokenId FakeNext(uint64_t hash, const SamplingParams& sampling, uint32_t sample_index) {
  return static_cast<TokenId>(
      FakeMix(hash, sampling.temperature == 0 ? 0 : FakeMix(sampling.seed, sample_index)) %
      kFakeVocab);
}

inline float FakeLogprob(uint64_t hash, TokenId token) {
  return -static_cast<float>(FakeMix(hash, static_cast<uint64_t>(token)) % 10000) / 1000.0f;
}

// An image's features: the token that stands for it under the version that computed them.
struct FakeFeatures final : ImageFeatures {
  FakeFeatures(const Image& image, const adapter::LoadedAdapter* adapter)
      : token(static_cast<TokenId>(
            FakeMix(std::hash<std::string>()(image.identity()), FakeSeed(adapter)) % kFakeVocab)) {}
  int64_t bytes() const override { return kBytes; }

  static constexpr int64_t kBytes = 100;
  const TokenId token;
};

// Adapters of the tower have names with a t.
inline bool FakeChangesImages(const adapter::LoadedAdapter* adapter) {
  return adapter != nullptr && adapter->name()[0] == 't';
}

// Computes a step when it is asked for its outputs, as late as its contract allows, from copies of
// what Begin was given.
class FakeModelRunner final : public ModelRunner, private KvChunks {
 public:
  // chunk_pages: 0: the cache's memory stays. state_pages: 0: there is no recurrence.
  // windows: above 1, or 0.
  explicit FakeModelRunner(int64_t pages, int max_steps_in_flight = 2, int64_t chunk_pages = 0,
                           int64_t state_pages = 0, std::vector<int64_t> windows = {0})
      : kv_(static_cast<size_t>(pages * kKvPageTokens)),
        max_steps_in_flight_(max_steps_in_flight),
        chunk_pages_(chunk_pages),
        state_pages_(state_pages),
        windows_(std::move(windows)) {}

  int64_t kv_pages() const override { return static_cast<int64_t>(kv_.size()) / kKvPageTokens; }
  std::vector<int64_t> windows() const override { return windows_; }
  int64_t state_pages() const override { return state_pages_; }
  KvChunks* kv_chunks() override { return chunk_pages_ > 0 ? this : nullptr; }
  int max_steps_in_flight() const override { return max_steps_in_flight_; }

  absl::Status Begin(absl::Span<const StepSequence> sequences) override {
    DORAD_CHECK(static_cast<int>(in_flight_.size()) < max_steps_in_flight_ && !released_);
    if (on_begin) {
      if (absl::Status status = on_begin(sequences); !status.ok()) return status;
    }
    begun_alone += in_flight_.empty() ? 1 : 0;
    std::vector<Rows>& step = in_flight_.emplace_back();
    for (const StepSequence& s : sequences) {
      DORAD_CHECK(s.adapter == nullptr || s.adapter->resident());
      CheckCopy(s, sequences);
      DORAD_CHECK(static_cast<int64_t>(s.state.size()) == state_pages_);
      DORAD_CHECK(s.state_from.empty() || s.state_from.size() == s.state.size());
      DORAD_CHECK(state_pages_ == 0 || (s.row_of < 0 && s.copy_from.empty()));
      DORAD_CHECK(s.copy_from.empty() || s.copy_from.size() == windows_.size());
      step.push_back(Rows(s));
    }
    if (in_flight_.size() == 1) previous_.clear();
    return absl::OkStatus();
  }

  absl::StatusOr<std::vector<StepOutput>> Finish() override {
    DORAD_CHECK(!in_flight_.empty());
    std::vector<Rows> step = std::move(in_flight_.front());
    in_flight_.pop_front();
    for (const Rows& rows : step) {
      for (size_t group = 0; group < rows.copy_from.size(); ++group) {
        const auto from = kv_.begin() + rows.copy_from[group] * kKvPageTokens;
        std::copy(from, from + rows.position % kKvPageTokens,
                  &At(rows, rows.position / kKvPageTokens * kKvPageTokens, group));
      }
    }
    std::vector<StepOutput> outputs(step.size());
    for (size_t i = 0; i < step.size(); ++i) {
      Rows& rows = step[i];
      if (rows.follows >= 0) rows.tokens[0] = previous_.at(rows.follows);
      RunRows(rows, &outputs[i]);
    }
    for (size_t i = 0; i < step.size(); ++i) {
      const Rows& rows = step[i].row_of >= 0 ? step[step[i].row_of] : step[i];
      DORAD_CHECK(rows.row_of < 0 && step[i].tokens.empty() == (step[i].row_of >= 0));
      SampleRows(step[i], rows, &outputs[i]);
    }
    previous_.clear();
    for (const StepOutput& output : outputs)
      previous_.push_back(output.tokens.empty() ? -1 : output.tokens.front());
    if (on_step) {
      if (absl::Status status = on_step(); !status.ok()) return status;
    }
    return outputs;
  }

  bool ChangesImages(const adapter::LoadedAdapter& adapter) const override {
    return FakeChangesImages(&adapter);
  }
  absl::StatusOr<std::vector<std::shared_ptr<const ImageFeatures>>> EncodeImages(
      absl::Span<const Image* const> images, const adapter::LoadedAdapter* adapter,
      bool alone) override {
    DORAD_CHECK(!released_ && (adapter == nullptr || FakeChangesImages(adapter)));
    DORAD_CHECK(adapter == nullptr || adapter->resident());
    DORAD_CHECK(alone == in_flight_.empty());
    if (images[0]->key != begun_.first || adapter != begun_.second) pieces_done_ = 0;
    begun_ = {images[0]->key, adapter};
    std::vector<std::shared_ptr<const ImageFeatures>> features;
    for (const Image* image : images.first(alone ? std::min(images.size(), most_at_once) : 1)) {
      if (on_encode) {
        if (absl::Status status = on_encode(*image); !status.ok()) return status;
      }
      if (++pieces_done_ < pieces_of_image) break;
      begun_ = {};
      pieces_done_ = 0;
      ++images_encoded;
      features.push_back(std::make_shared<const FakeFeatures>(*image, adapter));
    }
    return features;
  }

  absl::StatusOr<int64_t> ReleaseKv(absl::Span<const int32_t> keep) override {
    DORAD_CHECK(in_flight_.empty() && !released_);
    if (fail_release) return absl::InternalError("injected");
    std::vector<Kv> kept(kv_.size(), kLost);
    for (const int32_t page : keep) {
      const auto begin = kv_.begin() + page * kKvPageTokens;
      std::copy(begin, begin + kKvPageTokens, kept.begin() + page * kKvPageTokens);
    }
    kv_ = std::move(kept);
    released_ = true;
    return static_cast<int64_t>(kv_.size());
  }
  absl::Status RestoreKv() override {
    DORAD_CHECK(in_flight_.empty() && released_);
    if (fail_restore) return absl::ResourceExhaustedError("injected");
    released_ = false;
    return absl::OkStatus();
  }

  static constexpr int64_t kChunkBytes = 100;
  std::atomic<bool> fail_release{false}, fail_restore{false};
  // Other processes have taken the released memory.
  std::atomic<bool> fail_map{false};
  std::atomic<int> chunks_released{0};
  // Steps that began when none was in flight: a device would have had nothing to do until then.
  std::atomic<int> begun_alone{0};
  // Called when a step begins and when its outputs are asked for; a failure fails it.
  std::function<absl::Status(absl::Span<const StepSequence>)> on_begin;
  std::function<absl::Status()> on_step;
  std::function<absl::Status(const Image&)> on_encode;
  std::atomic<int> images_encoded{0};
  int pieces_of_image = 1;
  size_t most_at_once = 1;  // images of a call, if nothing else runs
  // This token's appearance in a row makes its logits non-finite.
  TokenId poison = -1;
  // > 0: the token after t is t + 1 modulo this, so that texts repeat themselves.
  TokenId cycle = 0;

 private:
  // A SampleWant that owns what it names.
  struct Sample {
    SampleWant want;
    std::vector<TokenId> banned;
    std::vector<ConditionalBan> conditional_bans;
    std::vector<TokenUse> uses;
    bool logprobs = false;
  };

  // A StepSequence that owns what it names.
  struct Rows {
    explicit Rows(const StepSequence& s)
        : tokens(s.tokens.begin(), s.tokens.end()),
          follows(s.follows),
          row_of(s.row_of),
          position(s.position),
          pages(s.pages.begin(), s.pages.end()),
          copy_from(s.copy_from.begin(), s.copy_from.end()),
          state(s.state.begin(), s.state.end()),
          state_from(s.state_from.begin(), s.state_from.end()),
          adapter(s.adapter) {
      for (const SampleWant& want : s.samples) {
        samples.push_back({want,
                           {want.banned.begin(), want.banned.end()},
                           {want.conditional_bans.begin(), want.conditional_bans.end()},
                           {want.uses.begin(), want.uses.end()},
                           want.logprobs->mode != LogprobMode::kNone});
      }
      DORAD_CHECK(samples.size() <= std::max<size_t>(tokens.size(), 1));
      if (s.score != nullptr) targets.assign(s.score->targets.begin(), s.score->targets.end());
      if (s.images != nullptr) PlaceImages(s);
      for (const TokenId token : tokens) DORAD_CHECK(token >= Image::kNoToken);
    }

    void PlaceImages(const StepSequence& s) {
      for (size_t i = 0; i < s.images->places().size(); ++i) {
        const PlacedImage& place = s.images->places()[i];
        const int64_t end = position + static_cast<int64_t>(tokens.size());
        for (int64_t p = std::max(place.begin, position); p < std::min(place.end(), end); ++p) {
          DORAD_CHECK(tokens[p - position] == place.image->key && s.features[i] != nullptr);
          tokens[p - position] = static_cast<const FakeFeatures&>(*s.features[i]).token;
        }
      }
    }

    std::vector<TokenId> tokens;
    int32_t follows;
    int32_t row_of;
    int64_t position;
    std::vector<int32_t> pages;
    std::vector<int32_t> copy_from;
    std::vector<int32_t> state;
    std::vector<int32_t> state_from;
    const adapter::LoadedAdapter* adapter;
    std::vector<Sample> samples;
    std::vector<TokenId> targets;
  };

  int64_t pages() const override { return chunk_pages_; }
  int64_t lead() const override { return 1; }
  int64_t bytes() const override { return kChunkBytes; }
  void Unmap(int32_t chunk) override {
    DORAD_CHECK(in_flight_.empty() && !released_ && chunk > 0 && lent_.insert(chunk).second);
    ++chunks_released;
    const int64_t tokens = chunk_pages_ * kKvPageTokens;
    const int64_t end = std::min<int64_t>((chunk + 1) * tokens - kKvPageTokens, kv_.size());
    std::fill(kv_.begin() + chunk * tokens - kKvPageTokens, kv_.begin() + end, kLost);
  }
  absl::Status Map(int32_t chunk) override {
    DORAD_CHECK(!released_);
    if (fail_map) return absl::ResourceExhaustedError("injected");
    DORAD_CHECK(lent_.erase(chunk) == 1);
    --chunks_released;
    return absl::OkStatus();
  }

  // Of a position in a page of one group.
  struct Kv {
    uint64_t hash = 0;
    uint64_t before = 0;  // of the position before
    size_t group = 0;
  };
  static constexpr Kv kLost = {0xDEAD, 0xDEAD, 99};

  Kv& At(const Rows& s, int64_t position, size_t group) {
    const int32_t page = s.pages[position / kKvPageTokens * windows_.size() + group];
    DORAD_CHECK(page >= 0);
    DORAD_CHECK(chunk_pages_ == 0 || lent_.count((page + 1) / chunk_pages_) == 0);
    return kv_[page * kKvPageTokens + position % kKvPageTokens];
  }

  // Each group has what it had when the positions before were computed.
  void CheckWindows(const Rows& s, int64_t position, uint64_t before) {
    if (windows_ == std::vector<int64_t>{0}) return;
    for (size_t group = 0; group < windows_.size(); ++group) {
      const int64_t window = windows_[group];
      uint64_t hash = before;
      for (int64_t p = position;
           p-- > (window > 0 ? std::max<int64_t>(0, position - window + 1) : 0);) {
        const Kv& kv = At(s, p, group);
        DORAD_CHECK(kv.hash == hash && kv.group == group);
        hash = kv.before;
      }
    }
  }

  // What is copied is in its page when the step begins: the step neither copies nor computes it.
  static void CheckCopy(const StepSequence& s, absl::Span<const StepSequence> step) {
    const size_t groups = s.copy_from.size();
    for (size_t group = 0; group < groups; ++group) {
      for (const StepSequence& other : step) {
        if (other.tokens.empty()) continue;
        const int64_t first = other.position / kKvPageTokens;
        if (other.pages[first * groups + group] == s.copy_from[group]) {
          DORAD_CHECK(other.copy_from.empty());
          DORAD_CHECK(other.position % kKvPageTokens >= s.position % kKvPageTokens);
        }
        const int64_t end = other.position + static_cast<int64_t>(other.tokens.size());
        for (int64_t block = first + 1; block * kKvPageTokens < end; ++block) {
          DORAD_CHECK(other.pages[block * groups + group] != s.copy_from[group]);
        }
      }
    }
  }

  // followed: the token that was not known.
  static bool IsBanned(const Sample& s, TokenId followed, TokenId token) {
    const auto applies = [&](const ConditionalBan& ban) {
      return ban.token == token && ban.after == followed;
    };
    return std::find(s.banned.begin(), s.banned.end(), token) != s.banned.end() ||
           std::any_of(s.conditional_bans.begin(), s.conditional_bans.end(), applies);
  }

  void RunRows(const Rows& s, StepOutput* output) {
    const int64_t count = static_cast<int64_t>(s.tokens.size());
    for (int64_t i = 0; i < count; ++i) {
      const int64_t position = s.position + i;
      const uint64_t before = position == 0 ? 0 : At(s, position - 1, 0).hash;
      if (i == 0) CheckState(s, before);
      CheckWindows(s, position, before);
      const uint64_t hash = FakeKv(before, s.tokens[i], s.adapter);
      for (size_t group = 0; group < windows_.size(); ++group) {
        At(s, position, group) = {hash, before, group};
      }
      if (s.tokens[i] == poison) output->finite = false;
      if (!s.targets.empty()) output->logprobs.logprobs.push_back(FakeLogprob(hash, s.targets[i]));
    }
    for (const int32_t page : s.state) {
      std::fill_n(&StateAt(page), kKvPageTokens, At(s, s.position + count - 1, 0));
    }
  }

  Kv& StateAt(int32_t page) {
    DORAD_CHECK(chunk_pages_ == 0 || lent_.count((page + 1) / chunk_pages_) == 0);
    return kv_[page * kKvPageTokens];
  }

  // The state before the rows is that of the keys and values.
  void CheckState(const Rows& s, uint64_t before) {
    if (s.position == 0) return DORAD_CHECK(s.state_from.empty());
    for (const int32_t page : s.state_from.empty() ? s.state : s.state_from) {
      const Kv* const content = &StateAt(page);
      const auto is_state = [before](const Kv& kv) { return kv.hash == before; };
      DORAD_CHECK(std::all_of(content, content + kKvPageTokens, is_state));
    }
  }

  // Of the tokens so far with penalties, else 0. followed: the one that `uses` lacks; -1: none.
  static uint64_t UsesHash(const Sample& s, TokenId followed) {
    if (s.want.logits == nullptr || !s.want.logits->has_penalties()) return 0;
    std::map<TokenId, uint32_t> counts;
    for (const TokenUse& use : s.uses) counts[use.id] += use.count;
    if (followed >= 0) counts[followed] += TokenUse::kGenerated;
    uint64_t hash = 0;
    for (const auto& [id, count] : counts) hash = FakeMix(FakeMix(hash, id), count);
    return hash;
  }

  // rows: those of the sequence, or of the one whose last row it samples from.
  void SampleRows(const Rows& s, const Rows& rows, StepOutput* output) {
    const size_t first = rows.tokens.size() - s.samples.size();
    const TokenId followed = rows.tokens.front();
    for (size_t i = 0; i < s.samples.size(); ++i) {
      const Sample& sample = s.samples[i];
      const int64_t position = rows.position + static_cast<int64_t>(first + i);
      DORAD_CHECK(sample.want.position == position + 1);
      const uint64_t hash = At(rows, position, 0).hash;
      TokenId token = FakeNext(hash, sample.want.sampling, sample.want.sample_index);
      const TokenId last = rows.tokens[first + i];
      const uint64_t uses = UsesHash(sample, rows.follows >= 0 ? followed : -1);
      token = static_cast<TokenId>((static_cast<uint64_t>(token) + uses) % kFakeVocab);
      if (cycle > 0) token = (last + 1) % cycle;
      while (IsBanned(sample, followed, token)) token = (token + 1) % kFakeVocab;
      const auto begin = rows.tokens.begin();
      const bool poisoned = std::count(begin, begin + first + i + 1, poison) > 0;
      output->tokens.push_back(poisoned ? StepOutput::kNotFinite : token);
      if (sample.logprobs) output->logprobs.logprobs.push_back(FakeLogprob(hash, token));
    }
  }

  std::vector<Kv> kv_;
  const int max_steps_in_flight_;
  const int64_t chunk_pages_;
  const int64_t state_pages_;
  const std::vector<int64_t> windows_;
  std::set<int32_t> lent_;
  bool released_ = false;
  // The image whose first pieces are done.
  std::pair<TokenId, const adapter::LoadedAdapter*> begun_ = {};
  int pieces_done_ = 0;
  std::deque<std::vector<Rows>> in_flight_;
  std::vector<TokenId> previous_;  // what the step that finished last sampled
};

}  // namespace dorad::engine
