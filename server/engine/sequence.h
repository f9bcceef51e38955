// One token sequence in the scheduler: a sample of a request, or one cell of a Score. Confined to
// the engine thread; owned by its Request.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "server/engine/images.h"
#include "server/engine/kv_pages.h"
#include "server/engine/types.h"
#include "server/platform/check.h"
#include "server/platform/metrics/metrics.h"

namespace dorad::engine {

struct Request;
struct TenantShare;

// The version of keys and values from a position on.
struct KvSpan {
  int64_t begin = 0;
  const adapter::LoadedAdapter* adapter = nullptr;  // nullptr: the base
};

struct Sequence {
  enum class State { kWaiting, kRunning, kEnded };

  Request* request = nullptr;
  std::string_view tenant;       // the request's
  TenantShare* share = nullptr;  // the tenant's, while the sequence is in the scheduler
  // Ascending from position 0; each span ends where the next one begins. A switch that keeps the KV
  // adds a span: after a preemption each span is recomputed with its own version.
  absl::InlinedVector<KvSpan, 1> kv_spans = {KvSpan()};
  // Order of scheduling: lower priority values first, then tenants by turns, then arrival.
  uint64_t arrival = 0;
  int32_t priority = 0;
  int32_t index = 0;  // of the sample, or of the score cell
  State state = State::kWaiting;
  bool frozen = false;  // gets no rows until it thaws
  // On the weights of all kv_spans, while it runs or has rows in flight.
  std::vector<adapter::WeightsPin> pins;
  bool has_pins = false;
  // A guess at the tokens after the known ones: verified beside the next row if a step has room.
  std::vector<TokenId> draft;
  DraftSource draft_source = DraftSource::kAnswer;
  // Of the prompt, or nullptr; and what is held of each: while its rows are not landed.
  std::shared_ptr<const PromptImages> images;
  std::vector<std::shared_ptr<const ImageFeatures>> features;
  bool use_prefix_cache = true;

  // Over the steps in flight:
  int32_t chunk_index = 0;  // of its chunk in the step that began last with it
  int in_flight = 0;        // chunks of this sequence
  int64_t sampling = 0;     // tokens that they will bring, without those of a draft
  bool verifies = false;    // one of them has a draft

  std::vector<TokenId> tokens;  // prompt (an image's key in each of its places), then generated
  int64_t prompt_tokens = 0;
  int64_t most_tokens = std::numeric_limits<int64_t>::max();  // it ends at this length
  // Leading rows whose log-probabilities are wanted: of a score, or of a generation's prompt.
  int64_t to_score = 0;
  int64_t scored = 0;  // of them, those with results
  // Positions with keys and values in pages once all steps in flight have finished; those of a
  // draft do not count until it has been verified.
  int64_t computed = 0;
  // Of them, those before the last row of its own that has landed: with a copied page's.
  int64_t landed = 0;
  // StepSequence::pages. The pages of a window move on with it: those behind it are given back, and
  // those ahead come step by step.
  std::vector<int32_t> pages;
  // Pages with the state of a recurrence after all steps in flight, of a model that has one. And
  // those that the next chunk reads in their place, held until it is scheduled; empty: the same.
  std::vector<int32_t> recurrent;
  std::vector<int32_t> recurrent_from;
  // Where its prompt parts from that of another sequence: the state is cached there, too. 0:
  // nowhere.
  int64_t branch = 0;

  // Sample 0 of the request, for other samples: it computes the prompt for all.
  const Sequence* leader = nullptr;

  PrefixNode root;
  PrefixNode node;                  // of the last registered block
  int64_t registered_blocks = 0;    // of `pages`, from the front
  int64_t cached_tokens = 0;        // of the first admission, shared with others or cached
  std::optional<PrefixKey> writes;  // its entry of PrefixWriters
  // While it waits for another sequence: the tokens that this one writes, and the position up to
  // which both are equal.
  std::optional<PrefixKey> awaits;
  int64_t awaited_end = 0;
  // Held for its next chunk until that is scheduled: Chunk::copy_from.
  std::vector<int32_t> copy_from;
  int64_t planned = 0;     // end of its chunk in the step under construction; 0: none
  bool looked_up = false;  // cached_tokens is from the prefix cache
  uint32_t preemptions = 0;

  // The version of the next token.
  const adapter::LoadedAdapter* adapter() const { return kv_spans.back().adapter; }
  // The version of a position's row.
  const adapter::LoadedAdapter* adapter_at(int64_t position) const {
    return SpanAt(position)->adapter;
  }
  // The end of the span at this position.
  int64_t same_adapter_until(int64_t position) const {
    const KvSpan* const next = SpanAt(position) + 1;
    return next == kv_spans.data() + kv_spans.size() ? std::numeric_limits<int64_t>::max()
                                                     : next->begin;
  }
  // It does not run for now.
  void DropPins() {
    pins.clear();
    has_pins = false;
    features.clear();
  }
  // The next token and all later ones use another version; earlier KV stays. REQUIRES: the last
  // token is sampled and its row not computed; nothing is in flight.
  void SwitchKeepingKv(const adapter::LoadedAdapter* adapter) {
    const int64_t begin = static_cast<int64_t>(tokens.size()) - 1;
    DORAD_CHECK(in_flight == 0 && computed <= begin);
    if (kv_spans.back().begin == begin) kv_spans.pop_back();
    kv_spans.push_back({begin, adapter});
  }

  // Positions to compute for all known tokens and those in flight. The last possible token needs no
  // row.
  int64_t goal() const {
    return std::min(static_cast<int64_t>(tokens.size()) + sampling, most_tokens - 1);
  }
  int64_t pending() const { return goal() - computed; }
  int64_t generated() const { return static_cast<int64_t>(tokens.size()) - prompt_tokens; }
  bool has_scored() const { return scored == to_score; }
  bool prompt_done() const { return computed >= prompt_tokens; }
  // The end of the last state of a recurrence that is cached for other sequences: those with the
  // same prompt compute at least its last token. 0: none is.
  int64_t cached_state_end() const {
    const bool generates = most_tokens > prompt_tokens;
    return use_prefix_cache && generates ? (prompt_tokens - 1) / kKvPageTokens * kKvPageTokens : 0;
  }
  bool caches_state_at(int64_t end) const {
    return end > 0 && (end == branch || end == cached_state_end());
  }
  // Leading positions whose rows have no pending output, so that their keys and values may be
  // shared. REQUIRES: nothing is in flight.
  int64_t reusable() const {
    return std::min(has_scored() ? goal() - 1 : scored, same_adapter_until(0));
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
  // The pages, one of each group, with the keys and values of the first position's block before it,
  // to be copied: held until the chunk has landed. Empty: none.
  std::vector<int32_t> copy_from;
  // Of a recurrence, held until the chunk has landed: the pages with the state before the first
  // position (empty: those that the chunk writes), and the chunk's own if they are to be cached.
  std::vector<int32_t> state_from;
  std::vector<int32_t> cached_state;
  // Without rows: the sequence with the same prompt whose last row in this step is its last row.
  const Sequence* row_of = nullptr;
  bool samples = false;  // the last row samples the sequence's next token
  // The tokens of the last rows, of those counted: a guess. These rows and the one before them
  // sample; a row counts if the tokens sampled before it are those of the guess.
  std::vector<TokenId> draft;
  DraftSource draft_source = DraftSource::kAnswer;
  // >= 0: the first token is not known yet; it is the first that the chunk of this index in the
  // last step samples. If that chunk's draft is right, this one has become superfluous.
  int32_t follows = -1;

  int64_t end() const { return position + count; }
};

}  // namespace dorad::engine
