// What the tests of requests' validation share: limits, good requests, and a refusal in short.
#pragma once

#include "server/rpc/packing.h"
#include "server/rpc/request_validation.h"
#include "tests/unit/support/test.h"

namespace dorad::rpc {

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kInf = std::numeric_limits<float>::infinity();

inline RequestLimits Limits() {
  RequestLimits limits;
  limits.engine.vocab_size = 100;
  limits.engine.context_length = 32;
  limits.engine.max_tokens = 20;
  limits.engine.max_n = 4;
  limits.engine.max_logprobs_k = 5;
  limits.engine.max_chosen_ids = 6;
  limits.engine.max_stop_ids = 3;
  limits.engine.max_stop_sequences = 2;
  limits.engine.max_stop_sequence_tokens = 4;
  limits.engine.max_logit_biases = 4;
  limits.engine.max_allowed_ids = 5;
  limits.engine.max_bad_word_tokens = 6;
  limits.engine.max_draft_tokens = 12;
  limits.engine.max_score_tokens = 64;
  limits.max_message_bytes = 1 << 20;
  return limits;
}

inline std::string Ids(std::vector<int32_t> ids) { return Pack(ids); }

inline v1::GenerateRequest GoodGenerate() {
  v1::GenerateRequest request;
  request.set_prompt_token_ids(Pack<int32_t>({1, 2, 3}));
  return request;
}

inline v1::ScoreRequest GoodScore() {
  v1::ScoreRequest request;
  request.add_sequences()->set_token_ids(Pack<int32_t>({1, 2, 3}));
  return request;
}

inline std::vector<std::string> FieldsAndReasons(const absl::Status& status) {
  std::vector<std::string> out;
  for (const Violation& v : ViolationsOf(status)) out.push_back(v.field + " " + v.reason);
  return out;
}

}  // namespace dorad::rpc
