// One token sequence on its way through the scheduler: a sample of a request, or one cell of a
// Score. Confined to the engine thread; owned by its Request.
#pragma once

#include <cstdint>
#include <vector>

#include "server/engine/kv_pages.h"
#include "server/engine/types.h"

namespace dorad::engine {

struct Request;

struct Sequence {
  enum class State { kWaiting, kRunning, kEnded };

  Request* request = nullptr;
  int32_t index = 0;  // of the sample, or of the score cell
  const adapter::LoadedAdapter* adapter = nullptr;

  // Order of scheduling: lower priority values first, then arrival.
  int32_t priority = 0;
  uint64_t arrival = 0;
  State state = State::kWaiting;

  std::vector<TokenId> tokens;  // prompt, then what was generated
  int64_t prompt_tokens = 0;
  bool is_score = false;
  int64_t scored = 0;    // rows of a score that are done
  int64_t computed = 0;  // positions whose keys and values are in pages
  std::vector<int32_t> pages;

  // Sample 0 of the request when this is another sample: it computes the prompt for all.
  const Sequence* leader = nullptr;

  bool use_prefix_cache = true;
  PrefixNode root;
  PrefixNode node;               // of the last registered page
  int64_t registered_pages = 0;  // of `pages`, from the front

  uint32_t preemptions = 0;
  int64_t cached_tokens = 0;  // of the first admission

  // Positions that must be computed before the next token can be sampled (the last token of a
  // score predicts nothing).
  int64_t goal() const { return static_cast<int64_t>(tokens.size()) - (is_score ? 1 : 0); }
  int64_t pending() const { return goal() - computed; }
  int64_t generated() const { return static_cast<int64_t>(tokens.size()) - prompt_tokens; }
  bool prompt_done() const { return computed >= prompt_tokens; }
  // Positions whose rows produce nothing that is still wanted, so that their keys and values may
  // come from elsewhere.
  int64_t reusable() const { return is_score ? scored : goal() - 1; }
};

}  // namespace dorad::engine
