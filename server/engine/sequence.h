// One token sequence on its way through the scheduler: a sample of a request, or one cell of a
// Score. Confined to the engine thread; owned by its Request.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "server/engine/kv_pages.h"
#include "server/engine/types.h"
#include "server/platform/check.h"

namespace dorad::engine {

struct Request;

// The version that computes keys and values from a position on.
struct KvSpan {
  int64_t begin = 0;
  const adapter::LoadedAdapter* adapter = nullptr;  // nullptr: the base
};

struct Sequence {
  enum class State { kWaiting, kRunning, kEnded };

  Request* request = nullptr;
  // Ascending, the first from position 0 on, each up to the next one. There are more than one after
  // a switch of versions that kept the KV: pages that were given back are computed again as they
  // were.
  absl::InlinedVector<KvSpan, 1> kv_spans = {KvSpan()};
  // Order of scheduling: lower priority values first, then arrival.
  uint64_t arrival = 0;
  int32_t priority = 0;
  int32_t index = 0;  // of the sample, or of the score cell
  State state = State::kWaiting;
  bool is_score = false;
  bool frozen = false;  // gets no rows until it thaws
  // Of the weights of all kv_spans, while it runs or has rows in flight.
  std::vector<adapter::WeightsPin> pins;
  bool has_pins = false;
  bool use_prefix_cache = true;

  // Of steps that have begun and not finished:
  int32_t chunk_index = 0;  // of its chunk in the step that began last with it
  int in_flight = 0;        // chunks of this sequence
  int64_t sampling = 0;     // tokens that they will bring

  std::vector<TokenId> tokens;  // prompt, then what was generated
  int64_t prompt_tokens = 0;
  int64_t most_tokens = std::numeric_limits<int64_t>::max();  // it ends when it has so many
  int64_t scored = 0;  // rows of a score whose results have come
  // Positions whose keys and values are in pages when all steps have finished.
  int64_t computed = 0;
  std::vector<int32_t> pages;

  // Sample 0 of the request when this is another sample: it computes the prompt for all.
  const Sequence* leader = nullptr;

  PrefixNode root;
  PrefixNode node;               // of the last registered page
  int64_t registered_pages = 0;  // of `pages`, from the front
  int64_t cached_tokens = 0;     // of the first admission, shared with its leader or cached
  bool looked_up = false;        // these in the prefix cache
  uint32_t preemptions = 0;

  // The version of the next token.
  const adapter::LoadedAdapter* adapter() const { return kv_spans.back().adapter; }
  // The version of a position's row.
  const adapter::LoadedAdapter* adapter_at(int64_t position) const {
    return SpanAt(position)->adapter;
  }
  // Positions from this one up to the result have one version.
  int64_t same_adapter_until(int64_t position) const {
    const KvSpan* const next = SpanAt(position) + 1;
    return next == kv_spans.data() + kv_spans.size() ? std::numeric_limits<int64_t>::max()
                                                     : next->begin;
  }
  void DropPins() {
    pins.clear();
    has_pins = false;
  }
  // The next token and all after it come from another version; the KV of those before stays.
  // REQUIRES: the last token is sampled and its row not computed; nothing is in flight.
  void SwitchKeepingKv(const adapter::LoadedAdapter* adapter) {
    const int64_t begin = static_cast<int64_t>(tokens.size()) - 1;
    DORAD_CHECK(in_flight == 0 && computed <= begin);
    if (kv_spans.back().begin == begin) kv_spans.pop_back();
    kv_spans.push_back({begin, adapter});
  }

  // Positions to compute for all tokens that are there or on their way. The last token of all
  // predicts nothing that is wanted.
  int64_t goal() const {
    return std::min(static_cast<int64_t>(tokens.size()) + sampling, most_tokens - 1);
  }
  int64_t pending() const { return goal() - computed; }
  int64_t generated() const { return static_cast<int64_t>(tokens.size()) - prompt_tokens; }
  bool prompt_done() const { return computed >= prompt_tokens; }
  // Positions whose rows produce nothing that is still wanted, so that their keys and values may
  // come from elsewhere. REQUIRES: nothing is in flight.
  int64_t reusable() const {
    return std::min(is_score ? scored : goal() - 1, same_adapter_until(0));
  }

 private:
  const KvSpan* SpanAt(int64_t position) const {
    const KvSpan* span = &kv_spans.back();
    while (span->begin > position) --span;
    return span;
  }
};

// Some tokens of a sequence in a step.
struct Chunk {
  Sequence* sequence = nullptr;
  int64_t position = 0;  // of the first
  int64_t count = 0;
  bool samples = false;  // the last row samples the sequence's next token
  // >= 0: the one token is not there yet; the chunk of this index in the step before samples it.
  int32_t follows = -1;

  int64_t end() const { return position + count; }
};

}  // namespace dorad::engine
