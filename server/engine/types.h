// The engine's input and output types. Plain values, no torch, no protobuf. rpc/request_validation
// builds the inputs and has validated them against Limits.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/adapter/registry/version.h"
#include "server/model/byte_pixels.h"
#include "server/platform/metrics/request_log.h"

namespace dorad::engine {

using TokenId = int32_t;

enum class FinishReason { kNone, kStop, kLength, kAborted, kNonFinite };
const char* NameOf(FinishReason reason);  // "stop", "length", ...

enum class LogprobMode { kNone, kRaw, kProcessed, kScaled };

// Behaviour of a request when its adapter's active version moves: it stays on its version; or it
// uses the new one from the next token on and keeps or recomputes the KV of earlier tokens. A
// sample without tokens restarts in both cases.
enum class InFlightPolicy { kPin, kSwitchKeepKv, kSwitchRecompute };

struct SamplingParams {
  float temperature = 1.0f;
  int32_t top_k = 0;  // 0: all
  float top_p = 1.0f;
  float min_p = 0.0f;
  uint64_t seed = 0;
};

// Changes of the logits before the temperature: see the order at v1::SamplingParams.
struct LogitParams {
  float presence_penalty = 0.0f;
  float frequency_penalty = 0.0f;
  float repetition_penalty = 1.0f;
  std::vector<TokenId> bias_ids;     // distinct
  std::vector<float> biases;         // one for each of bias_ids
  std::vector<TokenId> allowed_ids;  // ascending, distinct; empty: all
  std::vector<std::vector<TokenId>> bad_words;

  bool has_penalties() const {
    return presence_penalty != 0.0f || frequency_penalty != 0.0f || repetition_penalty != 1.0f;
  }
  // Whether any logit changes. Bad words do not count: they become banned ids.
  bool any() const { return has_penalties() || !bias_ids.empty() || !allowed_ids.empty(); }
};

struct StopParams {
  int64_t max_tokens = 0;
  int64_t min_tokens = 0;
  std::vector<TokenId> stop_token_ids;
  bool ignore_eos = false;
  // None is empty. No sequence ends a sample within its first min_tokens tokens.
  std::vector<std::vector<TokenId>> stop_sequences;
};

struct LogprobParams {
  LogprobMode mode = LogprobMode::kNone;
  int32_t top_k = 0;
  std::vector<TokenId> chosen_ids;
  // Also of the prompt's tokens: raw, with the same top_k and chosen_ids.
  bool prompt = false;
};

// Fields of every kind of request.
struct RequestBase {
  std::string tenant;  // separates ids and prefixes; "": no tenants
  std::string request_id;
  adapter::AdapterRef adapter;  // as requested, for logs
  int32_t priority = 0;
  absl::Time deadline = absl::InfiniteFuture();
  std::shared_ptr<RequestLog> log;  // gets the final counts and times; nullptr: no log
};

struct Image;

// An image in a prompt, and the position of its first token.
struct PlacedImage {
  int64_t begin = 0;
  std::shared_ptr<const Image> image;

  int64_t end() const;
};

struct GenerateInput : RequestBase {
  std::vector<TokenId> prompt;
  std::vector<PlacedImage> images;  // of the prompt, ascending; from ImageStore::Resolve
  adapter::AdapterLease lease;
  InFlightPolicy in_flight = InFlightPolicy::kPin;
  // Returns a lease on the active version. Set unless in_flight is kPin; called on the engine
  // thread, must not block.
  std::function<absl::StatusOr<adapter::AdapterLease>()> follow;
  int32_t n = 1;
  SamplingParams sampling;
  LogitParams logits;
  StopParams stop;
  LogprobParams logprobs;
  std::string cache_salt;
  bool bypass_prefix_cache = false;
  // Guesses at the tokens of the first samples.
  std::vector<std::vector<TokenId>> drafts;
  bool ngram_drafts = false;  // also guess from the prompt's and the samples' own texts
};

struct ScoreInput : RequestBase {
  std::vector<std::vector<TokenId>> sequences;
  std::vector<std::vector<PlacedImage>> images;  // of each sequence, as GenerateInput::images
  // One lease for each adapter; scores are [sequence][adapter].
  std::vector<adapter::AdapterLease> leases;
  float temperature = 1.0f;
  int32_t top_k = 0;
  std::vector<TokenId> chosen_ids;
};

// Identifies one request for the engine's lifetime: after its end another request may have its key.
struct RequestHandle {
  std::string key;  // tenant and id
  uint64_t number = 0;
};

struct VersionSpan {
  // adapter: nullptr: the base.
  static VersionSpan Of(const adapter::LoadedAdapter* adapter, uint32_t begin, uint32_t end);

  std::string adapter;  // empty: base
  int64_t version = 0;
  std::string digest;
  uint32_t begin = 0;
  uint32_t end = 0;
};

// Log-probabilities at consecutive positions. Empty vectors where not requested.
struct Logprobs {
  std::vector<float> logprobs;      // [positions]
  std::vector<TokenId> top_ids;     // [positions, k]
  std::vector<float> top_logprobs;  // [positions, k]
  std::vector<float> chosen;        // [positions, chosen ids]

  void Append(Logprobs&& other);
  // Keeps the first `count` of `positions` positions.
  void Keep(size_t count, size_t positions);
};

struct Usage {
  struct Drafts {
    uint32_t tokens = 0;    // verified
    uint32_t accepted = 0;  // of them, those that were right
  };

  uint32_t prompt_tokens = 0;
  uint32_t cached_prompt_tokens = 0;
  uint32_t generated_tokens = 0;
  uint32_t preemptions = 0;
  Drafts drafts;
  absl::Duration queue_time, time_to_first_token, total_time;
};

struct Finish {
  FinishReason reason = FinishReason::kNone;
  TokenId stop_token_id = -1;  // with kStop: the stop token; -1: a stop sequence
  int32_t stop_sequence = -1;  // with kStop: the index of the stop sequence; -1: a stop token
  std::string detail;
  Usage usage;
};

// New tokens of one sample. `finish.reason` is kNone unless this is the sample's last delta.
struct SampleDelta {
  int32_t sample_index = 0;
  std::vector<TokenId> token_ids;
  Logprobs logprobs;
  // With the first token of sample 0, if requested; row 0 is NaN (top ids: -1).
  Logprobs prompt_logprobs;
  std::vector<VersionSpan> spans;
  Finish finish;

  bool finished() const { return finish.reason != FinishReason::kNone; }
  // Adds a later delta of the same sample; adjoining spans of one version become one.
  void Append(SampleDelta&& later);
};

struct ScoreResult {
  std::vector<std::vector<Logprobs>> scores;  // [sequence][adapter]; row 0 is NaN (top ids: -1)
  std::vector<VersionSpan> versions;          // [adapter]
};

// Adapters of admitted requests, as Request::adapters names them, sorted. A name may be in both.
struct AdaptersInUse {
  std::vector<std::string> running;  // of requests that have started
  std::vector<std::string> waiting;
};

// Images as the model's tower reads them.
struct ImageLimits {
  int32_t token_id = -1;       // stands for each token of an image; -1: no images are served
  int64_t patch_elements = 0;  // pixels of one patch, all channels
  int64_t merge = 0;           // merge x merge patches are one token
  int64_t max_images = 0;      // of a prompt
  int64_t max_tokens = 0;      // of an image
  bool row_breaks = false;     // Image::row_breaks
  // Never nullptr.
  std::shared_ptr<const model::BytePixels> byte_pixels =
      std::make_shared<const model::BytePixels>();
  bool bidirectional = false;  // Image::bidirectional
  int64_t fixed_side = 0;      // of every image, in patches; 0: any
  bool rounds_pixels = false;  // to bf16: the backend computes with nothing else

  bool served() const { return token_id >= 0; }
  int64_t max_bytes() const;  // of an image's pixels
  // Of the largest bidirectional image; 0: there is none.
  int64_t block_rows() const;
};

struct EngineLimits {
  int32_t vocab_size = 0;
  // Of a model of several parts: they stand for images and videos, and no text has them.
  std::vector<int32_t> image_token_ids;
  ImageLimits images;
  int64_t context_length = 0;
  int64_t max_tokens = 0;
  int32_t max_n = 0;
  int32_t max_logprobs_k = 0;
  int32_t max_chosen_ids = 0;
  int32_t max_stop_ids = 0;
  int32_t max_stop_sequences = 0;
  int32_t max_stop_sequence_tokens = 0;  // of each
  int32_t max_logit_biases = 0;
  int32_t max_allowed_ids = 0;
  int32_t max_bad_word_tokens = 0;
  int64_t max_draft_tokens = 0;  // of all samples
  bool ngram_drafts = false;     // of requests that do not say
  int64_t max_score_tokens = 0;  // sum over sequences × adapters of one Score
  int32_t max_queued_requests = 0;
  int64_t max_queued_tokens = 0;
};

struct EngineStats {
  int requests = 0;  // admitted and not ended
  int running_sequences = 0;
  int64_t waiting_sequences = 0;  // for a place in a step: not begun, preempted, further samples
  int queued_requests = 0;
  int64_t queued_tokens = 0;
  int64_t kv_pages_total = 0;
  int64_t kv_pages_used = 0;      // held by sequences
  int64_t kv_pages_cached = 0;    // hold reusable prefixes only
  int64_t kv_pages_released = 0;  // without memory; neither used nor available
  int64_t kv_shrinkable_bytes = 0;
  bool kv_short = false;   // requests wait for pages that are released
  int kv_page_tokens = 0;  // in the layers of one group
  int kv_layer_groups = 0;
  uint64_t steps = 0;
  bool paused = false;  // everything
  bool asleep = false;
  double gpu_share = 1;  // the largest share of time for steps
  std::vector<adapter::AdapterRef> paused_adapters;
  std::vector<adapter::AdapterRef> pending_pauses;  // scopes of kWaits that are not in effect yet
  int frozen_requests = 0;                          // by pauses of adapters
};

}  // namespace dorad::engine
