// A request inside the engine: its input, its sequences, and the way its results leave.
//
// A request ends exactly once, through End: pending samples get their finish, the stream or
// pause_id is closed, and the leases are given back. Between the decision to end it and End it may
// have rows in flight. Confined to the engine thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "server/engine/model_runner.h"
#include "server/engine/scheduler.h"
#include "server/engine/sequence.h"
#include "server/engine/token_stream.h"
#include "server/engine/types.h"
#include "server/platform/instant.h"

namespace dorad {
class Metrics;
}

namespace dorad::engine {

// What ends samples, besides what their request says.
struct StopRules {
  std::vector<TokenId> eos_token_ids;
  int64_t max_length = 0;  // tokens of a sequence, prompt included
};

struct Request {
  Request(GenerateInput input, std::shared_ptr<TokenStream> stream, Instant admitted);
  Request(ScoreInput input, std::shared_ptr<ScoreTicket> pause_id, Instant admitted);

  // Makes the sequences. A score may need none (all of length 1). Any thread, before Enter.
  void MakeSequences(const StopRules& rules, bool prefix_cache);
  // Numbers the sequences from *arrival on, in the order in which requests enter the engine.
  void Enter(uint64_t* arrival);

  const RequestBase& base() const {
    return generate ? static_cast<const RequestBase&>(*generate) : *score;
  }
  // What a generation asked for ("name" or "name@version"), or the names of what a score did; the
  // base is none. Stays the same until the request ends.
  std::vector<std::string> adapters() const;
  // Unique among all requests: two tenants may choose the same id. No id has a space.
  std::string key() const { return base().tenant + ' ' + base().request_id; }
  // Whether tokens to come or keys and values stand on the version (0: any of the name).
  bool Holds(const adapter::AdapterRef& adapter) const;
  // Likewise, on one that was retired by force.
  bool HoldsRevoked() const;

  // A lease on the version that is active now, when the request follows the active one and it is
  // another than the request's; else an empty one.
  adapter::AdapterLease NewerVersion() const;
  // Goes on under another version, as the request's policy says. REQUIRES: of none of its sequences
  // is a chunk in flight.
  void Switch(adapter::AdapterLease lease, Scheduler* scheduler);
  // Prompt tokens times samples, or sequence tokens times adapters: what the queue limit counts.
  int64_t load_tokens() const;

  // What the engine asks of the runner for a chunk of one of the sequences. neither sample nor
  // score: the chunk only fills the KV cache.
  struct Want {
    std::optional<SampleWant> sample;
    std::optional<ScoreWant> score;
  };
  Want WantOf(const Chunk& chunk) const;

  // Takes a chunk's output. True when the sequence has ended by it.
  bool Accept(const Chunk& chunk, StepOutput output, const StopRules& rules, Instant now,
              Metrics* metrics);

  // How a request ends.
  struct Ending {
    absl::Status status;  // OK: all samples have finished, or are aborted; else the stream fails
    // Why it is aborted: samples that have not finished end with kAborted, a score fails with
    // ABORTED.
    std::optional<std::string> aborted;
  };
  void End(const Ending& how, Instant now, Metrics* metrics);

  // Exactly one of the two kinds.
  std::optional<GenerateInput> generate;
  std::shared_ptr<TokenStream> stream;
  std::optional<ScoreInput> score;
  std::shared_ptr<ScoreTicket> pause_id;

  uint64_t number = 0;   // RequestHandle's
  bool entered = false;  // the engine thread has it
  std::vector<std::unique_ptr<Sequence>> sequences;
  bool frozen = false;  // by a pause of an adapter
  // Sequences that have not ended, or of which a chunk is still in flight.
  int64_t unfinished_sequences = 0;
  // Set when something else than its last token ends the request: it gets no more rows, and ends
  // when those in flight have landed.
  std::optional<Ending> ending;

  Instant admitted;
  Instant deadline;
  std::optional<Instant> started;  // first scheduled
  std::optional<Instant> first_token;

 private:
  // Per sample of a generation, indexed like sequences.
  struct Sample {
    std::vector<TokenId> banned;  // before min_tokens
    Instant last_token;
    FinishReason reason = FinishReason::kNone;
  };

  Sequence* AddSequence(const std::vector<TokenId>& tokens, const adapter::LoadedAdapter* adapter,
                        const PrefixNode& root, bool use_prefix_cache);
  FinishReason StopReason(const Sequence& sequence, const StopRules& rules) const;
  Finish MakeFinish(const Sequence& sequence, FinishReason reason, Instant now) const;
  bool AcceptToken(Sequence* sequence, StepOutput output, const StopRules& rules, Instant now,
                   Metrics* metrics);
  bool AcceptScores(const Chunk& chunk, StepOutput output);
  template <typename Condition>
  bool HoldsAny(Condition condition) const;
  void AbortSamples(const std::string& detail, Instant now, Metrics* metrics);
  void CountUse(Metrics* metrics) const;
  // Says what the engine knows, and lets go of the log.
  void LogEnd(Instant now);

  void DropUnusedLeases();

  std::vector<Sample> samples_;
  // On earlier versions that keys and values still stand on.
  std::vector<adapter::AdapterLease> earlier_;
  ScoreResult result_;
  bool score_finite_ = true;
};

}  // namespace dorad::engine
