// Options of the engine. Filled from configuration by App. Plain values.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "server/engine/types.h"

namespace dorad::engine {

struct EngineOptions {
  int64_t max_step_tokens = 512;  // rows of one forward pass
  int32_t max_running_sequences = 256;
  int64_t kv_min_pages = 0;  // never released; at least the pages of a sequence of full length
  // The KV cache does not grow for this long after a shrink: the caller needs time to allocate the
  // memory.
  absl::Duration kv_shrink_hold = absl::Seconds(3);
  bool prefix_cache = true;   // false: no request reads or fills it
  bool ngram_drafts = false;  // of requests that do not say
  // The largest share of time for steps; 1: they follow one another. REQUIRES: above 0, at most 1.
  double gpu_share = 1;
  std::vector<int32_t> eos_token_ids;
  // Gets the number of tokens that a step generated for a tenant, once a step and tenant, before
  // the tokens are delivered. Runs on the engine thread and must be short. Null: not counted.
  std::function<void(const std::string& tenant, int64_t tokens)> on_generated;
  // Limits checked at admission.
  int32_t vocab_size = 0;
  std::vector<int32_t> image_token_ids;
  ImageLimits images;
  int64_t image_cache_bytes = 0;  // of images' features that no sequence needs
  int64_t context_length = 0;
  int64_t max_tokens = 0;  // 0: the context length
  int32_t max_n = 128;
  int32_t max_logprobs_k = 64;
  int32_t max_chosen_ids = 4096;
  int32_t max_stop_ids = 64;
  int32_t max_stop_sequences = 64;
  int32_t max_stop_sequence_tokens = 64;
  int32_t max_logit_biases = 1024;
  int32_t max_allowed_ids = 4096;
  int32_t max_bad_word_tokens = 4096;
  int64_t max_draft_tokens = 1 << 18;
  int64_t max_score_tokens = 1 << 20;
  int32_t max_queued_requests = 4096;
  int64_t max_queued_tokens = 4 << 20;
};

}  // namespace dorad::engine
