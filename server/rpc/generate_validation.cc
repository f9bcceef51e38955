#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/rpc/field_validation.h"
#include "server/rpc/image_validation.h"
#include "server/rpc/logit_validation.h"
#include "server/rpc/request_validation.h"

namespace dorad::rpc {
namespace {

// NaN is in no range.
bool Within(float value, float low, float high) { return value >= low && value <= high; }

std::string FloatRange(const char* range, float value) {
  return absl::StrCat(value, " is not in ", range);
}

engine::InFlightPolicy ReadInFlightPolicy(v1::InFlightPolicy policy,
                                          const adapter::AdapterRef& adapter,
                                          Violations* violations) {
  engine::InFlightPolicy read = engine::InFlightPolicy::kPin;
  switch (policy) {
    case v1::IN_FLIGHT_POLICY_UNSPECIFIED:
    case v1::IN_FLIGHT_POLICY_PIN:
      return read;
    case v1::IN_FLIGHT_POLICY_SWITCH_KEEP_KV:
      read = engine::InFlightPolicy::kSwitchKeepKv;
      break;
    case v1::IN_FLIGHT_POLICY_SWITCH_RECOMPUTE:
      read = engine::InFlightPolicy::kSwitchRecompute;
      break;
    default:
      Add(violations, "in_flight_policy", "IN_FLIGHT_POLICY_INVALID",
          absl::StrCat("unknown policy ", static_cast<int>(policy)));
      return read;
  }
  if (adapter.is_base() || adapter.version != 0) {
    Add(violations, "in_flight_policy", "IN_FLIGHT_POLICY_INVALID",
        "only a request that names an adapter without a version can follow its active one");
  }
  return read;
}

engine::SamplingParams ReadSampling(const v1::SamplingParams& wire, int32_t vocab_size,
                                    uint64_t default_seed, Violations* violations) {
  engine::SamplingParams sampling;
  if (wire.has_temperature()) sampling.temperature = wire.temperature();
  if (!Within(sampling.temperature, 0.0f, 100.0f)) {
    Add(violations, "sampling.temperature", "TEMPERATURE_OUT_OF_RANGE",
        FloatRange("[0, 100]", sampling.temperature));
  }
  if (wire.has_top_k()) {
    constexpr uint32_t kMax = std::numeric_limits<int32_t>::max();
    if (wire.top_k() == 0 || wire.top_k() > kMax) {
      Add(violations, "sampling.top_k", "TOP_K_OUT_OF_RANGE",
          absl::StrCat(wire.top_k(), " is not in [1, ", kMax,
                       "]; leave it out to keep all tokens"));
    } else if (wire.top_k() < static_cast<uint32_t>(vocab_size)) {
      sampling.top_k = static_cast<int32_t>(wire.top_k());
    }
  }
  if (wire.has_top_p()) sampling.top_p = wire.top_p();
  if (!(sampling.top_p > 0.0f && sampling.top_p <= 1.0f)) {
    Add(violations, "sampling.top_p", "TOP_P_OUT_OF_RANGE", FloatRange("(0, 1]", sampling.top_p));
  }
  if (wire.has_min_p()) sampling.min_p = wire.min_p();
  if (!Within(sampling.min_p, 0.0f, 1.0f)) {
    Add(violations, "sampling.min_p", "MIN_P_OUT_OF_RANGE", FloatRange("[0, 1]", sampling.min_p));
  }
  sampling.seed = wire.has_seed() ? wire.seed() : default_seed;
  return sampling;
}

std::vector<std::vector<int32_t>> ReadStopSequences(const v1::StopParams& wire,
                                                    const engine::EngineLimits& limits,
                                                    Violations* violations) {
  std::vector<std::vector<int32_t>> sequences;
  if (wire.stop_sequences_size() > limits.max_stop_sequences) {
    Add(violations, "stop.stop_sequences", "STOP_SEQUENCES_TOO_MANY",
        absl::StrCat(wire.stop_sequences_size(), " stop sequences are more than ",
                     limits.max_stop_sequences));
    return sequences;
  }
  for (int i = 0; i < wire.stop_sequences_size(); ++i) {
    const std::string field = absl::StrCat("stop.stop_sequences[", i, "].token_ids");
    const std::string& bytes = wire.stop_sequences(i).token_ids();
    if (bytes.empty()) {
      Add(violations, field, "STOP_SEQUENCE_EMPTY", "a stop sequence has at least one token");
    }
    sequences.push_back(ReadIds(field, bytes, limits.max_stop_sequence_tokens,
                                "STOP_SEQUENCE_TOO_LONG", limits.vocab_size, violations));
  }
  return sequences;
}

engine::StopParams ReadStop(const v1::StopParams& wire, int64_t prompt_tokens,
                            const engine::EngineLimits& limits, Violations* violations) {
  engine::StopParams stop;
  // The context left after the prompt; the engine reduces a larger max_tokens to it.
  const int64_t room = std::max<int64_t>(limits.context_length - prompt_tokens, 1);
  stop.max_tokens = std::min(limits.max_tokens, room);
  if (wire.has_max_tokens()) {
    stop.max_tokens = wire.max_tokens();
    if (stop.max_tokens < 1 || stop.max_tokens > limits.max_tokens) {
      Add(violations, "stop.max_tokens", "MAX_TOKENS_OUT_OF_RANGE",
          absl::StrCat(stop.max_tokens, " is not in [1, ", limits.max_tokens, "]"));
    }
  }
  stop.min_tokens = wire.min_tokens();
  if (stop.min_tokens > stop.max_tokens) {
    Add(violations, "stop.min_tokens", "MIN_TOKENS_OUT_OF_RANGE",
        absl::StrCat(stop.min_tokens, " is greater than max_tokens, ", stop.max_tokens));
  }
  stop.stop_token_ids = ReadIds("stop.stop_token_ids", wire.stop_token_ids(), limits.max_stop_ids,
                                "STOP_IDS_TOO_MANY", limits.vocab_size, violations);
  stop.ignore_eos = wire.ignore_eos();
  stop.stop_sequences = ReadStopSequences(wire, limits, violations);
  return stop;
}

engine::LogprobParams ReadLogprobs(const v1::LogprobParams& wire, int64_t prompt_tokens,
                                   const engine::EngineLimits& limits, Violations* violations) {
  engine::LogprobParams logprobs;
  switch (wire.mode()) {
    case v1::LOGPROB_MODE_UNSPECIFIED:
    case v1::LOGPROB_MODE_RAW:
      logprobs.mode = engine::LogprobMode::kRaw;
      break;
    case v1::LOGPROB_MODE_PROCESSED:
      logprobs.mode = engine::LogprobMode::kProcessed;
      break;
    case v1::LOGPROB_MODE_SCALED:
      logprobs.mode = engine::LogprobMode::kScaled;
      break;
    default:
      Add(violations, "logprobs.mode", "LOGPROB_MODE_INVALID",
          absl::StrCat("unknown mode ", static_cast<int>(wire.mode())));
  }
  logprobs.top_k = ReadTopLogprobs("logprobs.top_k", wire.top_k(), limits, violations);
  logprobs.chosen_ids =
      ReadIds("logprobs.chosen_token_ids", wire.chosen_token_ids(), limits.max_chosen_ids,
              "CHOSEN_IDS_TOO_MANY", limits.vocab_size, violations);
  logprobs.prompt = wire.prompt();
  if (logprobs.prompt && prompt_tokens > limits.max_score_tokens) {
    Add(violations, "logprobs.prompt", "SCORE_TOO_LARGE",
        absl::StrCat("a prompt of ", prompt_tokens, " tokens has more than ",
                     limits.max_score_tokens));
  }
  return logprobs;
}

// Bounds the memory of all samples together; scored: tokens of the prompt with log-probabilities.
void CheckResultSize(int64_t tokens, int64_t n, int64_t scored, int64_t bytes_per_token,
                     int64_t max_message_bytes, Violations* violations) {
  const int64_t max_tokens = kMaxResultMessages * max_message_bytes / bytes_per_token - scored;
  if (tokens <= max_tokens / n) return;
  Add(violations, "n", "RESPONSE_TOO_LARGE",
      absl::StrCat("with these log-probabilities all samples together may have ", max_tokens,
                   " tokens, and ", n, " times ", tokens, " are asked for"));
}

std::vector<int32_t> ReadPrompt(const v1::GenerateRequest& request,
                                const engine::EngineLimits& limits, Violations* violations) {
  const std::string& bytes = request.prompt_token_ids();
  // One token must remain to be generated.
  const int64_t longest = limits.context_length - 1;
  const bool truncate = request.has_truncate_prompt_tokens();
  const int64_t kept = truncate ? int64_t{request.truncate_prompt_tokens()} : longest;
  if (kept < 1 || kept > longest) {
    Add(violations, "truncate_prompt_tokens", "TRUNCATE_PROMPT_TOKENS_OUT_OF_RANGE",
        absl::StrCat(kept, " is not in [1, ", longest, "]"));
  }
  if (bytes.empty()) {
    Add(violations, "prompt_token_ids", "PROMPT_EMPTY", "a prompt has at least one token");
    return {};
  }
  // The size of the request bounds a prompt to be truncated.
  const int64_t max_ids = truncate ? static_cast<int64_t>(bytes.size()) : longest;
  std::vector<int32_t> ids =
      ReadIds("prompt_token_ids", bytes, max_ids, "PROMPT_TOO_LONG", limits.vocab_size, violations);
  if (static_cast<int64_t>(ids.size()) > kept) ids.erase(ids.begin(), ids.end() - kept);
  return ids;
}

std::vector<std::vector<int32_t>> ReadDrafts(const v1::GenerateRequest& request, int64_t n,
                                             const engine::EngineLimits& limits,
                                             Violations* violations) {
  std::vector<std::vector<int32_t>> drafts;
  const int64_t tokens = CountTokens(request.drafts());
  if (request.drafts_size() > n) {
    Add(violations, "drafts", "DRAFTS_TOO_MANY",
        absl::StrCat(request.drafts_size(), " drafts are more than ", n, " samples"));
  } else if (tokens > limits.max_draft_tokens) {
    Add(violations, "drafts", "DRAFTS_TOO_MANY",
        absl::StrCat(tokens, " tokens of drafts are more than ", limits.max_draft_tokens));
  } else {
    for (int i = 0; i < request.drafts_size(); ++i) {
      drafts.push_back(ReadIds(absl::StrCat("drafts[", i, "].token_ids"),
                               request.drafts(i).token_ids(), limits.max_draft_tokens,
                               "DRAFTS_TOO_MANY", limits.vocab_size, violations));
    }
  }
  return drafts;
}

}  // namespace

int64_t MaxGenerateBytes(const RequestLimits& limits) {
  const engine::EngineLimits& engine = limits.engine;
  // A bias is an id and a number; a bad word of one token has a few bytes around it.
  const int64_t ids = engine.context_length + engine.max_stop_ids + engine.max_chosen_ids +
                      int64_t{engine.max_stop_sequences} * engine.max_stop_sequence_tokens +
                      2 * engine.max_logit_biases + engine.max_allowed_ids +
                      3 * engine.max_bad_word_tokens + engine.max_draft_tokens;
  return kMaxRequestFraming + ids * kIdBytes + MaxImageBytes(engine.images);
}

absl::StatusOr<engine::GenerateInput> ParseGenerate(const v1::GenerateRequest& request,
                                                    const RequestLimits& limits,
                                                    RequestDefaults defaults,
                                                    const shared_memory::Listener* listener) {
  Violations violations;
  engine::GenerateInput input;
  input.request_id = ReadRequestId(request, std::move(defaults.request_id), &violations);
  input.prompt = ReadPrompt(request, limits.engine, &violations);
  if (request.has_truncate_prompt_tokens() && !request.images().empty()) {
    Add(&violations, "truncate_prompt_tokens", "TRUNCATE_PROMPT_TOKENS_OUT_OF_RANGE",
        "a prompt with images is not truncated");
  } else {
    const ImageText prompt{"prompt_token_ids", &input.prompt};
    input.images = std::move(
        ReadImages(request.images(), {&prompt, 1}, limits.engine, listener, &violations).front());
  }
  const auto prompt_tokens = static_cast<int64_t>(input.prompt.size());
  input.adapter = ReadAdapter("adapter", request.adapter(), &violations);
  input.in_flight = ReadInFlightPolicy(request.in_flight_policy(), input.adapter, &violations);
  const uint32_t n = request.has_n() ? request.n() : 1;
  if (n < 1 || n > static_cast<uint32_t>(limits.engine.max_n)) {
    Add(&violations, "n", "N_OUT_OF_RANGE",
        absl::StrCat(n, " is not in [1, ", limits.engine.max_n, "]"));
  } else {
    input.n = static_cast<int32_t>(n);
  }
  input.drafts = ReadDrafts(request, input.n, limits.engine, &violations);
  input.sampling =
      ReadSampling(request.sampling(), limits.engine.vocab_size, defaults.seed, &violations);
  input.logits = ReadLogitParams(request.sampling(), limits.engine, &violations);
  input.stop = ReadStop(request.stop(), prompt_tokens, limits.engine, &violations);
  if (request.has_logprobs()) {
    input.logprobs = ReadLogprobs(request.logprobs(), prompt_tokens, limits.engine, &violations);
    if (input.logprobs.mode == engine::LogprobMode::kScaled && input.sampling.temperature == 0.0f) {
      Add(&violations, "logprobs.mode", "LOGPROB_MODE_INVALID",
          "SCALED divides by the temperature, which is 0");
    }
  }
  if (!v1::ResponseMode_IsValid(request.response_mode())) {
    Add(&violations, "response_mode", "RESPONSE_MODE_INVALID",
        absl::StrCat("unknown mode ", static_cast<int>(request.response_mode())));
  }
  if (request.cache_salt().size() > kMaxCacheSaltBytes) {
    Add(&violations, "cache_salt", "CACHE_SALT_TOO_LONG",
        absl::StrCat(request.cache_salt().size(), " bytes are more than ", kMaxCacheSaltBytes));
  }
  if (violations.empty()) {
    const int64_t room = limits.engine.context_length - prompt_tokens;
    const int64_t tokens = std::min(input.stop.max_tokens, room);
    const int64_t scored = input.logprobs.prompt ? prompt_tokens : 0;
    const int64_t bytes = BytesPerToken(input.logprobs.top_k, input.logprobs.chosen_ids.size());
    CheckResponseSize("logprobs", tokens + scored, 0, bytes, limits.max_message_bytes, &violations);
    CheckResultSize(tokens, input.n, scored, bytes, limits.max_message_bytes, &violations);
  }
  if (!violations.empty()) return MakeInvalid("GenerateRequest", std::move(violations));
  input.cache_salt = request.cache_salt();
  input.bypass_prefix_cache = request.bypass_prefix_cache();
  input.ngram_drafts =
      request.has_ngram_drafts() ? request.ngram_drafts() : limits.engine.ngram_drafts;
  input.priority = request.priority();
  return input;
}

}  // namespace dorad::rpc
