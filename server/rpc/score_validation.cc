#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/rpc/field_validation.h"
#include "server/rpc/image_validation.h"
#include "server/rpc/request_validation.h"

namespace dorad::rpc {
namespace {

std::vector<std::vector<int32_t>> ReadSequences(const v1::ScoreRequest& request,
                                                const engine::EngineLimits& limits,
                                                Violations* violations) {
  std::vector<std::vector<int32_t>> sequences;
  if (request.sequences().empty()) {
    Add(violations, "sequences", "SCORE_EMPTY", "there is no sequence to score");
    return sequences;
  }
  const int64_t adapters = std::max(request.adapters_size(), 1);
  const int64_t tokens = CountTokens(request.sequences()) * adapters;
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
  for (int i = 0; i < request.sequences_size(); ++i) {
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

int64_t MaxScoreBytes(const RequestLimits& limits) {
  return kMaxRequestFraming +
         (limits.engine.max_score_tokens + limits.engine.max_chosen_ids) * kIdBytes +
         MaxImageBytes(limits.engine.images);
}

absl::StatusOr<ParsedScore> ParseScore(const v1::ScoreRequest& request, const RequestLimits& limits,
                                       RequestDefaults defaults,
                                       const shared_memory::Listener* listener) {
  Violations violations;
  ParsedScore parsed;
  engine::ScoreInput& input = parsed.input;
  input.request_id = ReadRequestId(request, std::move(defaults.request_id), &violations);
  parsed.adapters = ReadAdapters(request, &violations);
  input.sequences = ReadSequences(request, limits.engine, &violations);
  if (violations.empty()) {
    std::vector<ImageText> texts;
    for (size_t i = 0; i < input.sequences.size(); ++i) {
      texts.push_back({absl::StrCat("sequences[", i, "].token_ids"), &input.sequences[i]});
    }
    input.images = ReadImages(request.images(), texts, limits.engine, listener, &violations);
  }
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

}  // namespace dorad::rpc
