#include "server/rpc/logit_validation.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "server/rpc/packing.h"

namespace dorad::rpc {
namespace {

constexpr float kMaxPenalty = 2.0f;
constexpr float kMaxRepetitionPenalty = 100.0f;
constexpr float kMaxBias = 100.0f;

void ReadPenalties(const v1::SamplingParams& wire, engine::LogitParams* to,
                   Violations* violations) {
  const auto is_bad = [](float penalty) {
    return !(penalty >= -kMaxPenalty && penalty <= kMaxPenalty);  // NaN is in no range
  };
  to->presence_penalty = wire.presence_penalty();
  if (is_bad(to->presence_penalty)) {
    Add(violations, "sampling.presence_penalty", "PENALTY_OUT_OF_RANGE",
        FloatRange("[-2, 2]", to->presence_penalty));
  }
  to->frequency_penalty = wire.frequency_penalty();
  if (is_bad(to->frequency_penalty)) {
    Add(violations, "sampling.frequency_penalty", "PENALTY_OUT_OF_RANGE",
        FloatRange("[-2, 2]", to->frequency_penalty));
  }
  if (wire.has_repetition_penalty()) to->repetition_penalty = wire.repetition_penalty();
  if (!(to->repetition_penalty > 0.0f && to->repetition_penalty <= kMaxRepetitionPenalty)) {
    Add(violations, "sampling.repetition_penalty", "PENALTY_OUT_OF_RANGE",
        FloatRange("(0, 100]", to->repetition_penalty));
  }
}

void ReadBiases(const v1::SamplingParams& wire, const engine::EngineLimits& limits,
                engine::LogitParams* to, Violations* violations) {
  constexpr char kIds[] = "sampling.logit_bias_token_ids";
  constexpr char kBiases[] = "sampling.logit_biases";
  if (wire.logit_bias_token_ids().size() != wire.logit_biases().size()) {
    Add(violations, kBiases, "LOGIT_BIAS_INVALID",
        absl::StrCat(wire.logit_biases().size(), " bytes of biases do not match ",
                     wire.logit_bias_token_ids().size(), " bytes of token ids"));
    return;
  }
  to->bias_ids = ReadIds(kIds, wire.logit_bias_token_ids(), limits.max_logit_biases,
                         "LOGIT_BIASES_TOO_MANY", limits.vocab_size, violations);
  if (to->bias_ids.empty()) return;
  std::vector<int32_t> sorted = to->bias_ids;
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end()) {
    Add(violations, kIds, "LOGIT_BIAS_INVALID", absl::StrCat("token id ", *twice, " occurs twice"));
  }
  to->biases = UnpackFloats(wire.logit_biases());
  for (size_t i = 0; i < to->biases.size(); ++i) {
    if (to->biases[i] >= -kMaxBias && to->biases[i] <= kMaxBias) continue;
    Add(violations, absl::StrCat(kBiases, "[", i, "]"), "LOGIT_BIAS_INVALID",
        FloatRange("[-100, 100]", to->biases[i]));
    break;  // one of many is enough
  }
}

void ReadBadWords(const v1::SamplingParams& wire, const engine::EngineLimits& limits,
                  engine::LogitParams* to, Violations* violations) {
  constexpr char kField[] = "sampling.bad_words";
  const int64_t tokens = CountTokens(wire.bad_words());
  // Also bounds the number of empty words that are named.
  if (std::max<int64_t>(tokens, wire.bad_words_size()) > limits.max_bad_word_tokens) {
    Add(violations, kField, "BAD_WORDS_TOO_MANY",
        absl::StrCat(wire.bad_words_size(), " bad words of ", tokens, " tokens are more than ",
                     limits.max_bad_word_tokens));
    return;
  }
  for (int i = 0; i < wire.bad_words_size(); ++i) {
    const std::string field = absl::StrCat(kField, "[", i, "]");
    const std::string& word = wire.bad_words(i).token_ids();
    if (word.empty()) {
      Add(violations, field, "BAD_WORD_EMPTY", "a bad word has at least one token");
      continue;
    }
    to->bad_words.push_back(ReadIds(field, word, limits.max_bad_word_tokens, "BAD_WORDS_TOO_MANY",
                                    limits.vocab_size, violations));
  }
}

}  // namespace

engine::LogitParams ReadLogitParams(const v1::SamplingParams& wire,
                                    const engine::EngineLimits& limits, Violations* violations) {
  engine::LogitParams logits;
  ReadPenalties(wire, &logits, violations);
  ReadBiases(wire, limits, &logits, violations);
  std::vector<int32_t>& allowed = logits.allowed_ids;
  allowed = ReadIds("sampling.allowed_token_ids", wire.allowed_token_ids(), limits.max_allowed_ids,
                    "ALLOWED_IDS_TOO_MANY", limits.vocab_size, violations);
  std::sort(allowed.begin(), allowed.end());
  allowed.erase(std::unique(allowed.begin(), allowed.end()), allowed.end());
  ReadBadWords(wire, limits, &logits, violations);
  return logits;
}

}  // namespace dorad::rpc
