// A request inside the engine: its input, its sequences and its output.
//
// A request ends exactly once, through End: unfinished samples get their finish, the stream or
// ticket is closed, and the leases are released. Its rows may be in flight between the decision to
// end it and End. Confined to the engine thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "server/engine/draft_trial.h"
#include "server/engine/drafter.h"
#include "server/engine/model_runner.h"
#include "server/engine/ngram_index.h"
#include "server/engine/scheduler.h"
#include "server/engine/sequence.h"
#include "server/engine/token_stream.h"
#include "server/engine/token_uses.h"
#include "server/engine/types.h"
#include "server/platform/instant.h"

namespace dorad {
class Metrics;
}

namespace dorad::engine {

// The model's stop rules; a request may add its own.
struct StopRules {
  std::vector<TokenId> eos_token_ids;
  int64_t max_length = 0;  // tokens of a sequence, prompt included
};

struct Request {
  Request(GenerateInput input, std::shared_ptr<TokenStream> stream, Instant admitted);
  Request(ScoreInput input, std::shared_ptr<ScoreTicket> ticket, Instant admitted);

  // Makes the sequences. A score may need none (all of length 1). Any thread, before Enter.
  void MakeSequences(const StopRules& rules, bool prefix_cache);
  // Numbers the sequences from *arrival on, in the order in which requests enter the engine.
  void Enter(uint64_t* arrival);

  const RequestBase& base() const {
    return generate ? static_cast<const RequestBase&>(*generate) : *score;
  }
  // The adapter of a generation ("name" or "name@version"), or the names of a score's adapters;
  // empty for the base. Stays the same until the request ends.
  std::vector<std::string> adapters() const;
  // Unique among all requests: two tenants may choose the same id. No id has a space.
  std::string key() const { return base().tenant + ' ' + base().request_id; }
  // Whether its next tokens or its KV pages use the version (0: any of the name).
  bool Holds(const adapter::AdapterRef& adapter) const;
  // The version that it uses and that was retired by force, or nullptr.
  const adapter::LoadedAdapter* Revoked() const;

  // A lease on the active version, if the request follows it and uses another one; else an empty
  // lease.
  adapter::AdapterLease NewerVersion() const;
  // Continues under another version, by the request's policy. REQUIRES: none of its chunks is in
  // flight.
  void Switch(adapter::AdapterLease lease, Scheduler* scheduler);
  // When to judge whether the deadline will come while the request is stopped.
  Instant ExplainAt() const;
  // Load for the queue limit: prompt tokens times samples, or sequence tokens times adapters.
  int64_t load_tokens() const;

  // The output that a chunk needs from the runner. Neither: the chunk only fills the KV cache.
  struct Want {
    absl::InlinedVector<SampleWant, 1> samples;
    std::optional<ScoreWant> score;
    // What `samples` name, one of each: moves with them.
    std::vector<std::vector<TokenId>> banned;
    std::vector<std::vector<ConditionalBan>> conditional_bans;
    std::vector<std::vector<TokenUse>> uses;
    std::vector<TokenId> tokens;  // of a chunk with a draft
  };
  Want WantOf(const Chunk& chunk) const;

  // The end of a chunk's step.
  struct StepEnd {
    const StopRules& rules;
    Instant now;
    Metrics* metrics = nullptr;
    DraftPrice price;
    DraftTrial* trial = nullptr;
  };
  // Cuts a chunk with a draft, and its output, after the first token that differs from the draft or
  // ends the sample.
  void CutDraft(Chunk* chunk, StepOutput* output, const StepEnd& step) const;
  // The sequence's draft gets no rows: it is compared with the tokens that come.
  void CompareDraft(Sequence* sequence);
  // Takes a chunk's output. True when it ends the sequence.
  bool Accept(const Chunk& chunk, StepOutput output, const StepEnd& step);

  // How a request ends.
  struct Ending {
    absl::Status status;  // OK: all samples have finished, or are aborted; else the stream fails
    // The reason of an abort: unfinished samples end with kAborted, a score fails with ABORTED.
    std::optional<std::string> aborted;
  };
  void End(const Ending& how, Instant now, Metrics* metrics);

  // Exactly one of generate and score is set.
  std::optional<GenerateInput> generate;
  std::shared_ptr<TokenStream> stream;
  std::optional<ScoreInput> score;
  std::shared_ptr<ScoreTicket> ticket;

  uint64_t number = 0;   // RequestHandle's
  bool entered = false;  // the engine thread has taken it
  std::vector<std::unique_ptr<Sequence>> sequences;
  bool frozen = false;  // by a pause of an adapter
  // Sequences that have not ended or still have a chunk in flight.
  int64_t unfinished_sequences = 0;
  // Set when something other than its last token ends the request: it gets no more rows, and ends
  // when its rows in flight have landed.
  std::optional<Ending> ending;

  Instant admitted;
  Instant deadline;
  Instant wake_up;                 // the engine's next look at the deadline
  std::optional<Instant> started;  // first scheduled
  std::optional<Instant> first_token;

 private:
  // Rows of a step that one sample verifies.
  static constexpr int64_t kLongestDraft = 256;
  static constexpr int64_t kLongestNgramDraft = 16;
  // Where a row costs much host time.
  static constexpr int64_t kLongestDraftWithLogitParams = 16;

  // State of each sample of a generation, indexed like sequences.
  struct Sample {
    std::vector<TokenId> banned;  // until min_tokens
    TokenUses uses;               // with penalties
    ExpectedAnswer answer{{}};
    DraftPace answer_pace{kLongestDraft, /*trusts=*/true};
    DraftPace ngram_pace{kLongestNgramDraft, /*trusts=*/false};
    Usage::Drafts drafts;
    Instant last_token;
    FinishReason reason = FinishReason::kNone;
  };

  Sequence* AddSequence(const std::vector<TokenId>& tokens,
                        const std::shared_ptr<const PromptImages>& images,
                        const adapter::LoadedAdapter* adapter, const PrefixNode& root,
                        bool use_prefix_cache);
  // As the caller gave it.
  const std::vector<TokenId>& PromptOf(const Sequence& sequence) const {
    return generate ? generate->prompt : score->sequences[sequence.index / score->leases.size()];
  }
  // Why the sample ends with its last token; kNone: it continues.
  Finish FinishOf(const Sequence& sequence, const StopRules& rules, Instant now) const;
  int32_t MatchStopSequence(const Sequence& sequence) const;
  Finish MakeFinish(const Sequence& sequence, FinishReason reason, Instant now) const;
  // The result that gets a sequence's log-probabilities of given tokens.
  Logprobs* ScoresOf(const Sequence& sequence);
  Logprobs FirstRow() const;
  bool AcceptTokens(const Chunk& chunk, StepOutput output, const StepEnd& step);
  void AppendDraftWants(const Chunk& chunk, Want* to) const;
  // Of the chunk's next row that samples, after the generated tokens; uses: theirs.
  void AppendSampleWant(const Chunk& chunk, const TokenUses& uses,
                        absl::Span<const TokenId> generated, Want* to) const;
  // Counts the right tokens of a chunk's draft, and makes the next one.
  void Draft(const Chunk& chunk, int64_t tokens, const StepEnd& step);
  bool AcceptScores(const Chunk& chunk, StepOutput output, const StepEnd& step);
  // Ends a sample whose logits are not finite.
  void PushNonFinite(const Sequence& sequence, const std::string& detail, Instant now,
                     Metrics* metrics);
  template <typename Condition>
  const adapter::LoadedAdapter* FirstHeld(Condition condition) const;
  void AbortSamples(const std::string& detail, Instant now, Metrics* metrics);
  void CountUse(Metrics* metrics) const;
  // Fills in the engine's fields and releases the log.
  void LogEnd(Instant now);

  void DropUnusedLeases();

  std::vector<Sample> samples_;
  std::optional<NgramIndex> ngrams_;
  // Leases on earlier versions whose keys and values are still in use.
  std::vector<adapter::AdapterLease> earlier_;
  ScoreResult result_;
  Logprobs prompt_logprobs_;  // of a generation, until its first token
  bool score_finite_ = true;
};

}  // namespace dorad::engine
