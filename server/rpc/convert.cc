#include "server/rpc/convert.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/rpc/packing.h"

namespace dorad::rpc {
namespace {

using Violations = std::vector<Violation>;

// Bad ids of one list that are named one by one; the rest is counted.
constexpr int kNamedIds = 8;
constexpr int64_t kIdBytes = sizeof(int32_t);
// All of a request but its tokens; more than the most sequences and adapters of a Score need.
constexpr int64_t kMaxRequestFraming = 1 << 20;

void Add(Violations* to, std::string field, const char* reason, std::string description) {
  to->push_back({std::move(field), reason, std::move(description)});
}

// NaN is in no range.
bool Within(float value, float low, float high) { return value >= low && value <= high; }

std::string FloatRange(const char* range, float value) {
  return absl::StrCat(value, " is not in ", range);
}

void CheckIds(const std::string& field, const std::vector<int32_t>& ids, int32_t vocab_size,
              Violations* violations) {
  int64_t bad = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] >= 0 && ids[i] < vocab_size) continue;
    if (++bad > kNamedIds) continue;
    Add(violations, absl::StrCat(field, "[", i, "]"), "TOKEN_ID_OUT_OF_RANGE",
        absl::StrCat("token id ", ids[i], " is not in [0, ", vocab_size, ")"));
  }
  if (bad > kNamedIds) {
    Add(violations, field, "TOKEN_ID_OUT_OF_RANGE",
        absl::StrCat(bad - kNamedIds, " more token ids are out of range"));
  }
}

// The ids of a bytes field, or nothing when its length is wrong or above max_ids.
std::vector<int32_t> ReadIds(const std::string& field, const std::string& bytes, int64_t max_ids,
                             const char* too_many_reason, int32_t vocab_size,
                             Violations* violations) {
  if (bytes.size() % kIdBytes != 0) {
    Add(violations, field, "TOKEN_BYTES_INVALID",
        absl::StrCat(bytes.size(), " bytes are not a list of packed int32"));
    return {};
  }
  const int64_t count = static_cast<int64_t>(bytes.size()) / kIdBytes;
  if (count > max_ids) {
    Add(violations, field, too_many_reason,
        absl::StrCat(count, " token ids are more than ", max_ids));
    return {};
  }
  std::vector<int32_t> ids = UnpackIds(bytes);
  CheckIds(field, ids, vocab_size, violations);
  return ids;
}

void CheckId(const char* field, const char* reason, const std::string& id, Violations* violations) {
  const bool printable =
      std::all_of(id.begin(), id.end(), [](char c) { return c > ' ' && c <= '~'; });
  if (id.empty() || id.size() > kMaxRequestIdBytes || !printable) {
    Add(violations, field, reason,
        absl::StrCat("an id has 1 to ", kMaxRequestIdBytes,
                     " printable ASCII characters without spaces"));
  }
}

// Both request types have an optional request_id.
template <typename Request>
std::string ReadRequestId(const Request& request, std::string fallback, Violations* violations) {
  if (!request.has_request_id()) return fallback;
  const std::string& id = request.request_id();
  CheckId("request_id", "REQUEST_ID_INVALID", id, violations);
  return id;
}

adapter::AdapterRef ReadAdapter(const std::string& field, const std::string& text,
                                Violations* violations) {
  absl::StatusOr<adapter::AdapterRef> ref = adapter::AdapterRef::Parse(text);
  if (ref.ok()) return *std::move(ref);
  for (Violation& violation : ViolationsOf(ref.status())) {
    violation.field = field;
    violations->push_back(std::move(violation));
  }
  return {};
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

engine::StopParams ReadStop(const v1::StopParams& wire, int64_t prompt_tokens,
                            const engine::EngineLimits& limits, Violations* violations) {
  engine::StopParams stop;
  // What the prompt leaves of the context; the engine cuts a larger max_tokens to it.
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
  return stop;
}

int32_t ReadTopLogprobs(const std::string& field, uint32_t k, const engine::EngineLimits& limits,
                        Violations* violations) {
  const uint32_t max = static_cast<uint32_t>(std::min(limits.max_logprobs_k, limits.vocab_size));
  if (k > max) {
    Add(violations, field, "LOGPROBS_K_OUT_OF_RANGE", absl::StrCat(k, " is not in [0, ", max, "]"));
    return 0;
  }
  return static_cast<int32_t>(k);
}

engine::LogprobParams ReadLogprobs(const v1::LogprobParams& wire,
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
    default:
      Add(violations, "logprobs.mode", "LOGPROB_MODE_INVALID",
          absl::StrCat("unknown mode ", static_cast<int>(wire.mode())));
  }
  logprobs.top_k = ReadTopLogprobs("logprobs.top_k", wire.top_k(), limits, violations);
  logprobs.chosen_ids =
      ReadIds("logprobs.chosen_token_ids", wire.chosen_token_ids(), limits.max_chosen_ids,
              "CHOSEN_IDS_TOO_MANY", limits.vocab_size, violations);
  return logprobs;
}

// Bytes of one position of a response: id, log-probability, top k, chosen.
int64_t BytesPerToken(int32_t top_k, size_t chosen_ids) {
  return 8 + 8 * int64_t{top_k} + 4 * static_cast<int64_t>(chosen_ids);
}

// cells: of a Score, 0 for a Generate.
void CheckResponseSize(const std::string& field, int64_t tokens, int64_t cells,
                       int64_t bytes_per_token, int64_t max_message_bytes, Violations* violations) {
  constexpr int64_t kFraming = 16 << 10;
  constexpr int64_t kCellFraming = 32;
  const int64_t room = max_message_bytes - kFraming - cells * kCellFraming;
  const int64_t max_tokens = std::max<int64_t>(room, 0) / bytes_per_token;
  if (tokens <= max_tokens) return;
  Add(violations, field, "RESPONSE_TOO_LARGE",
      absl::StrCat("with these log-probabilities a response may have ", max_tokens, " tokens, and ",
                   tokens, " are asked for"));
}

// What all samples together may hold of the server's memory.
void CheckResultSize(int64_t tokens, int64_t n, int64_t bytes_per_token, int64_t max_message_bytes,
                     Violations* violations) {
  const int64_t max_tokens = kMaxResultMessages * max_message_bytes / bytes_per_token;
  if (tokens <= max_tokens / n) return;
  Add(violations, "n", "RESPONSE_TOO_LARGE",
      absl::StrCat("with these log-probabilities all samples together may have ", max_tokens,
                   " tokens, and ", n, " times ", tokens, " are asked for"));
}

std::vector<int32_t> ReadPrompt(const std::string& bytes, const engine::EngineLimits& limits,
                                Violations* violations) {
  if (bytes.empty()) {
    Add(violations, "prompt_token_ids", "PROMPT_EMPTY", "a prompt has at least one token");
    return {};
  }
  // One token must remain to be generated.
  return ReadIds("prompt_token_ids", bytes, limits.context_length - 1, "PROMPT_TOO_LONG",
                 limits.vocab_size, violations);
}

std::vector<std::vector<int32_t>> ReadSequences(const v1::ScoreRequest& request,
                                                const engine::EngineLimits& limits,
                                                Violations* violations) {
  std::vector<std::vector<int32_t>> sequences;
  if (request.sequences().empty()) {
    Add(violations, "sequences", "SCORE_EMPTY", "there is no sequence to score");
    return sequences;
  }
  const int64_t adapters = std::max(request.adapters_size(), 1);
  int64_t tokens = 0;
  for (const v1::TokenSequence& sequence : request.sequences()) {
    tokens += static_cast<int64_t>(sequence.token_ids().size()) / kIdBytes * adapters;
  }
  if (tokens > limits.max_score_tokens || request.sequences_size() > limits.max_score_tokens) {
    Add(violations, "sequences", "SCORE_TOO_LARGE",
        absl::StrCat(request.sequences_size(), " sequences of ", tokens,
                     " tokens (counted once for each adapter) are more than ",
                     limits.max_score_tokens));
    return sequences;
  }
  if (request.sequences_size() * adapters > kMaxScoreCells) {
    Add(violations, "sequences", "SCORE_TOO_MANY_CELLS",
        absl::StrCat(request.sequences_size(), " sequences under ", adapters,
                     " adapters are more than ", kMaxScoreCells, " scores"));
    return sequences;
  }
  constexpr size_t kMaxViolations = 64;
  for (int i = 0; i < request.sequences_size() && violations->size() < kMaxViolations; ++i) {
    const std::string field = absl::StrCat("sequences[", i, "].token_ids");
    const std::string& bytes = request.sequences(i).token_ids();
    if (bytes.empty()) {
      Add(violations, field, "SEQUENCE_EMPTY", "a sequence has at least one token");
      continue;
    }
    sequences.push_back(ReadIds(field, bytes, limits.context_length, "SEQUENCE_TOO_LONG",
                                limits.vocab_size, violations));
  }
  return sequences;
}

std::vector<adapter::AdapterRef> ReadAdapters(const v1::ScoreRequest& request,
                                              Violations* violations) {
  std::vector<adapter::AdapterRef> adapters;
  if (request.adapters_size() > kMaxScoreAdapters) {
    Add(violations, "adapters", "ADAPTERS_TOO_MANY",
        absl::StrCat(request.adapters_size(), " adapters are more than ", kMaxScoreAdapters));
    return adapters;
  }
  for (int i = 0; i < request.adapters_size(); ++i) {
    adapters.push_back(
        ReadAdapter(absl::StrCat("adapters[", i, "]"), request.adapters(i), violations));
  }
  if (adapters.empty()) adapters.emplace_back();
  return adapters;
}

}  // namespace

int64_t MaxGenerateBytes(const RequestLimits& limits) {
  const engine::EngineLimits& engine = limits.engine;
  const int64_t ids = engine.context_length + engine.max_stop_ids + engine.max_chosen_ids;
  return kMaxRequestFraming + ids * kIdBytes;
}

int64_t MaxScoreBytes(const RequestLimits& limits) {
  return kMaxRequestFraming +
         (limits.engine.max_score_tokens + limits.engine.max_chosen_ids) * kIdBytes;
}

absl::StatusOr<engine::GenerateInput> ParseGenerate(const v1::GenerateRequest& request,
                                                    const RequestLimits& limits,
                                                    RequestDefaults defaults) {
  Violations violations;
  engine::GenerateInput input;
  input.request_id = ReadRequestId(request, std::move(defaults.request_id), &violations);
  input.prompt = ReadPrompt(request.prompt_token_ids(), limits.engine, &violations);
  input.adapter = ReadAdapter("adapter", request.adapter(), &violations);
  input.in_flight = ReadInFlightPolicy(request.in_flight_policy(), input.adapter, &violations);
  const uint32_t n = request.has_n() ? request.n() : 1;
  if (n < 1 || n > static_cast<uint32_t>(limits.engine.max_n)) {
    Add(&violations, "n", "N_OUT_OF_RANGE",
        absl::StrCat(n, " is not in [1, ", limits.engine.max_n, "]"));
  } else {
    input.n = static_cast<int32_t>(n);
  }
  input.sampling =
      ReadSampling(request.sampling(), limits.engine.vocab_size, defaults.seed, &violations);
  input.stop = ReadStop(request.stop(), static_cast<int64_t>(input.prompt.size()), limits.engine,
                        &violations);
  if (request.has_logprobs()) {
    input.logprobs = ReadLogprobs(request.logprobs(), limits.engine, &violations);
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
    const int64_t room = limits.engine.context_length - static_cast<int64_t>(input.prompt.size());
    const int64_t tokens = std::min(input.stop.max_tokens, room);
    const int64_t bytes = BytesPerToken(input.logprobs.top_k, input.logprobs.chosen_ids.size());
    CheckResponseSize("logprobs", tokens, 0, bytes, limits.max_message_bytes, &violations);
    CheckResultSize(tokens, input.n, bytes, limits.max_message_bytes, &violations);
  }
  if (!violations.empty()) return MakeInvalid("GenerateRequest", std::move(violations));
  input.cache_salt = request.cache_salt();
  input.bypass_prefix_cache = request.bypass_prefix_cache();
  input.priority = request.priority();
  return input;
}

absl::StatusOr<ParsedScore> ParseScore(const v1::ScoreRequest& request, const RequestLimits& limits,
                                       RequestDefaults defaults) {
  Violations violations;
  ParsedScore parsed;
  engine::ScoreInput& input = parsed.input;
  input.request_id = ReadRequestId(request, std::move(defaults.request_id), &violations);
  parsed.adapters = ReadAdapters(request, &violations);
  input.sequences = ReadSequences(request, limits.engine, &violations);
  if (request.has_temperature()) input.temperature = request.temperature();
  if (!(input.temperature > 0.0f && input.temperature <= 100.0f)) {
    Add(&violations, "temperature", "TEMPERATURE_OUT_OF_RANGE",
        FloatRange("(0, 100]", input.temperature));
  }
  input.top_k = ReadTopLogprobs("top_k", request.top_k(), limits.engine, &violations);
  input.chosen_ids =
      ReadIds("chosen_token_ids", request.chosen_token_ids(), limits.engine.max_chosen_ids,
              "CHOSEN_IDS_TOO_MANY", limits.engine.vocab_size, &violations);
  if (violations.empty()) {
    int64_t tokens = 0;
    for (const auto& sequence : input.sequences) tokens += static_cast<int64_t>(sequence.size());
    const int64_t adapters = static_cast<int64_t>(parsed.adapters.size());
    CheckResponseSize(
        "sequences", tokens * adapters, static_cast<int64_t>(input.sequences.size()) * adapters,
        BytesPerToken(input.top_k, input.chosen_ids.size()), limits.max_message_bytes, &violations);
  }
  if (!violations.empty()) return MakeInvalid("ScoreRequest", std::move(violations));
  input.adapter = parsed.adapters.front();
  input.priority = request.priority();
  return parsed;
}

absl::StatusOr<engine::AbortTarget> ParseAbort(const v1::AbortRequest& request) {
  Violations violations;
  engine::AbortTarget target;
  switch (request.target_case()) {
    case v1::AbortRequest::kRequests: {
      const auto& ids = request.requests().request_ids();
      if (ids.empty() || ids.size() > kMaxAbortIds) {
        Add(&violations, "requests.request_ids", "ABORT_TARGET_INVALID",
            absl::StrCat(ids.size(), " ids are not in [1, ", kMaxAbortIds, "]"));
      } else if (std::any_of(ids.begin(), ids.end(), [](const std::string& id) {
                   return id.size() > kMaxRequestIdBytes;
                 })) {
        Add(&violations, "requests.request_ids", "ABORT_TARGET_INVALID",
            absl::StrCat("an id has at most ", kMaxRequestIdBytes, " bytes"));
      } else {
        target.request_ids.assign(ids.begin(), ids.end());
      }
      break;
    }
    case v1::AbortRequest::kAdapter:
      target.adapter = ReadAdapter("adapter", request.adapter(), &violations);
      if (request.adapter().empty()) {
        Add(&violations, "adapter", "ABORT_TARGET_INVALID", "the base model is no adapter");
      }
      break;
    case v1::AbortRequest::kAll:
      target.all = request.all();
      if (!target.all) Add(&violations, "all", "ABORT_TARGET_INVALID", "must be true");
      break;
    case v1::AbortRequest::TARGET_NOT_SET:
      Add(&violations, "target", "ABORT_TARGET_INVALID", "say requests, adapter or all");
  }
  if (!violations.empty()) return MakeInvalid("AbortRequest", std::move(violations));
  return target;
}

absl::StatusOr<ParsedPause> ParsePause(const v1::PauseRequest& request) {
  Violations violations;
  ParsedPause parsed;
  switch (request.mode()) {
    case v1::PAUSE_MODE_ABORT:
      parsed.mode = engine::PauseMode::kAbort;
      break;
    case v1::PAUSE_MODE_WAIT:
      parsed.mode = engine::PauseMode::kWait;
      break;
    case v1::PAUSE_MODE_UNSPECIFIED:
    case v1::PAUSE_MODE_KEEP:
      break;
    default:
      Add(&violations, "mode", "PAUSE_MODE_INVALID",
          absl::StrCat("unknown mode ", static_cast<int>(request.mode())));
  }
  parsed.scope = ReadAdapter("adapter", request.adapter(), &violations);
  if (!violations.empty()) return MakeInvalid("PauseRequest", std::move(violations));
  return parsed;
}

absl::StatusOr<engine::Engine::YieldOptions> ParseYield(const v1::YieldRequest& request) {
  Violations violations;
  CheckId("yield_id", "YIELD_ID_INVALID", request.yield_id(), &violations);
  const double share = request.gpu_share();
  if (!request.has_gpu_share() || !(share >= kMinGpuShare && share <= 1)) {
    Add(&violations, "gpu_share", "GPU_SHARE_OUT_OF_RANGE",
        absl::StrCat(share, " is not in [", kMinGpuShare, ", 1]"));
  }
  const absl::Duration time = absl::Seconds(request.time_to_live().seconds()) +
                              absl::Nanoseconds(request.time_to_live().nanos());
  if (time <= absl::ZeroDuration() || time > kMaxYieldTime) {
    Add(&violations, "time_to_live", "TIME_TO_LIVE_OUT_OF_RANGE",
        absl::StrCat(absl::FormatDuration(time), " is not above 0 and at most ",
                     absl::FormatDuration(kMaxYieldTime)));
  }
  if (!violations.empty()) return MakeInvalid("YieldRequest", std::move(violations));
  return engine::Engine::YieldOptions{request.yield_id(), share, time};
}

absl::Status CheckYieldId(const v1::EndYieldRequest& request) {
  Violations violations;
  CheckId("yield_id", "YIELD_ID_INVALID", request.yield_id(), &violations);
  if (!violations.empty()) return MakeInvalid("EndYieldRequest", std::move(violations));
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> ParseSleepTags(
    const google::protobuf::RepeatedPtrField<std::string>& tags) {
  for (const std::string& tag : tags) {
    if (tags.size() <= kMaxSleepTags && tag.size() <= kMaxSleepTagBytes) continue;
    return MakeInvalid("the request",
                       {{"tags", "SLEEP_TAG_INVALID", "a tag is one of weights, kv and adapters"}});
  }
  return std::vector<std::string>(tags.begin(), tags.end());
}

void CheckAdapterName(const std::string& name, std::vector<Violation>* violations) {
  for (Violation& violation : ViolationsOf(adapter::CheckAdapterName(name))) {
    violations->push_back(std::move(violation));
  }
}

void CheckAdapterVersion(int64_t version, std::vector<Violation>* violations) {
  if (version >= 1) return;
  Add(violations, "version", "ADAPTER_VERSION_INVALID",
      absl::StrCat(version, " is not a version number: they start with 1"));
}

}  // namespace dorad::rpc
