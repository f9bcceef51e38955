#include "tests/unit/rpc/validation_fixture.h"

namespace dorad::rpc {
namespace {

TEST(ParseGenerate, FillsDefaults) {
  const auto input = ParseGenerate(GoodGenerate(), Limits(), {"r-7", 99});
  ASSERT_TRUE(input.ok()) << input.status();
  EXPECT_EQ(input->request_id, "r-7");
  EXPECT_THAT(input->prompt, ElementsAre(1, 2, 3));
  EXPECT_TRUE(input->adapter.is_base());
  EXPECT_EQ(input->n, 1);
  EXPECT_EQ(input->sampling.temperature, 1.0f);
  EXPECT_EQ(input->sampling.top_k, 0);
  EXPECT_EQ(input->sampling.top_p, 1.0f);
  EXPECT_EQ(input->sampling.min_p, 0.0f);
  EXPECT_EQ(input->sampling.seed, 99u);
  EXPECT_EQ(input->stop.max_tokens, 20);
  EXPECT_EQ(input->stop.min_tokens, 0);
  EXPECT_FALSE(input->stop.ignore_eos);
  EXPECT_EQ(input->logprobs.mode, engine::LogprobMode::kNone);
  EXPECT_EQ(input->priority, 0);
}

TEST(ParseGenerate, CarriesEveryField) {
  v1::GenerateRequest request = GoodGenerate();
  request.set_request_id("mine");
  request.set_adapter("pirate@3");
  request.set_n(4);
  request.mutable_sampling()->set_temperature(0.0f);
  request.mutable_sampling()->set_top_k(7);
  request.mutable_sampling()->set_top_p(0.5f);
  request.mutable_sampling()->set_min_p(0.25f);
  request.mutable_sampling()->set_seed(0);
  request.mutable_stop()->set_max_tokens(9);
  request.mutable_stop()->set_min_tokens(9);
  request.mutable_stop()->set_stop_token_ids(Pack<int32_t>({0, 99}));
  request.mutable_stop()->set_ignore_eos(true);
  request.mutable_stop()->add_stop_sequences()->set_token_ids(Pack<int32_t>({4, 5, 6, 7}));
  request.mutable_stop()->add_stop_sequences()->set_token_ids(Pack<int32_t>({8}));
  request.mutable_logprobs()->set_mode(v1::LOGPROB_MODE_PROCESSED);
  request.mutable_logprobs()->set_top_k(5);
  request.mutable_logprobs()->set_chosen_token_ids(Pack<int32_t>({4}));
  request.mutable_logprobs()->set_prompt(true);
  request.set_cache_salt("salt");
  request.set_bypass_prefix_cache(true);
  request.set_priority(-5);
  const auto input = ParseGenerate(request, Limits(), {"r-7", 99});
  ASSERT_TRUE(input.ok()) << input.status();
  EXPECT_EQ(input->request_id, "mine");
  EXPECT_EQ(input->adapter.name, "pirate");
  EXPECT_EQ(input->adapter.version, 3);
  EXPECT_EQ(input->n, 4);
  EXPECT_EQ(input->sampling.temperature, 0.0f);
  EXPECT_EQ(input->sampling.top_k, 7);
  EXPECT_EQ(input->sampling.top_p, 0.5f);
  EXPECT_EQ(input->sampling.min_p, 0.25f);
  EXPECT_EQ(input->sampling.seed, 0u) << "an explicit zero is not the default";
  EXPECT_EQ(input->stop.max_tokens, 9);
  EXPECT_EQ(input->stop.min_tokens, 9);
  EXPECT_THAT(input->stop.stop_token_ids, ElementsAre(0, 99));
  EXPECT_TRUE(input->stop.ignore_eos);
  EXPECT_THAT(input->stop.stop_sequences, ElementsAre(ElementsAre(4, 5, 6, 7), ElementsAre(8)));
  EXPECT_EQ(input->logprobs.mode, engine::LogprobMode::kProcessed);
  EXPECT_EQ(input->logprobs.top_k, 5);
  EXPECT_THAT(input->logprobs.chosen_ids, ElementsAre(4));
  EXPECT_TRUE(input->logprobs.prompt);
  EXPECT_EQ(input->cache_salt, "salt");
  EXPECT_TRUE(input->bypass_prefix_cache);
  EXPECT_EQ(input->priority, -5);
}

TEST(ParseGenerate, CarriesChangesOfLogits) {
  const engine::LogitParams none = ParseGenerate(GoodGenerate(), Limits(), {"r", 1})->logits;
  EXPECT_FALSE(none.any() || none.has_penalties() || !none.bad_words.empty());
  v1::GenerateRequest request = GoodGenerate();
  v1::SamplingParams& sampling = *request.mutable_sampling();
  sampling.set_presence_penalty(-2.0f);
  sampling.set_frequency_penalty(2.0f);
  sampling.set_repetition_penalty(100.0f);
  sampling.set_logit_bias_token_ids(Pack<int32_t>({7, 3}));
  sampling.set_logit_biases(Pack<float>({-100.0f, 0.5f}));
  sampling.set_allowed_token_ids(Pack<int32_t>({9, 4, 9}));
  sampling.add_bad_words()->set_token_ids(Pack<int32_t>({1, 2}));
  sampling.add_bad_words()->set_token_ids(Pack<int32_t>({3}));
  const auto input = ParseGenerate(request, Limits(), {"r", 1});
  ASSERT_TRUE(input.ok()) << input.status();
  EXPECT_EQ(input->logits.presence_penalty, -2.0f);
  EXPECT_EQ(input->logits.frequency_penalty, 2.0f);
  EXPECT_EQ(input->logits.repetition_penalty, 100.0f);
  EXPECT_THAT(input->logits.bias_ids, ElementsAre(7, 3));
  EXPECT_THAT(input->logits.biases, ElementsAre(-100.0f, 0.5f));
  EXPECT_THAT(input->logits.allowed_ids, ElementsAre(4, 9));
  EXPECT_THAT(input->logits.bad_words, ElementsAre(ElementsAre(1, 2), ElementsAre(3)));
}

TEST(ParseGenerate, RefusesChangesOfLogitsThatAreOutOfRange) {
  v1::GenerateRequest request = GoodGenerate();
  v1::SamplingParams& sampling = *request.mutable_sampling();
  sampling.set_presence_penalty(2.5f);
  sampling.set_frequency_penalty(kNan);
  sampling.set_repetition_penalty(0.0f);
  sampling.set_logit_bias_token_ids(Pack<int32_t>({7, 7, 100}));
  sampling.set_logit_biases(Pack<float>({1.0f, kInf, 101.0f}));
  sampling.set_allowed_token_ids(Pack<int32_t>({1, -1}));
  sampling.add_bad_words();
  sampling.add_bad_words()->set_token_ids(Pack<int32_t>({3, 100}));
  sampling.add_bad_words()->set_token_ids("xyz");
  EXPECT_THAT(FieldsAndReasons(ParseGenerate(request, Limits(), {}).status()),
              ElementsAre("sampling.presence_penalty PENALTY_OUT_OF_RANGE",
                          "sampling.frequency_penalty PENALTY_OUT_OF_RANGE",
                          "sampling.repetition_penalty PENALTY_OUT_OF_RANGE",
                          "sampling.logit_bias_token_ids[2] TOKEN_ID_OUT_OF_RANGE",
                          "sampling.logit_bias_token_ids LOGIT_BIAS_INVALID",
                          "sampling.logit_biases[1] LOGIT_BIAS_INVALID",
                          "sampling.allowed_token_ids[1] TOKEN_ID_OUT_OF_RANGE",
                          "sampling.bad_words[0] BAD_WORD_EMPTY",
                          "sampling.bad_words[1][1] TOKEN_ID_OUT_OF_RANGE",
                          "sampling.bad_words[2] TOKEN_BYTES_INVALID"));
}

TEST(ParseGenerate, RefusesTooManyChangesOfLogits) {
  v1::GenerateRequest request = GoodGenerate();
  v1::SamplingParams& sampling = *request.mutable_sampling();
  sampling.set_logit_bias_token_ids(Pack<int32_t>({1, 2, 3, 4, 5}));
  sampling.set_logit_biases(Pack<float>({1, 1, 1, 1, 1}));
  sampling.set_allowed_token_ids(Pack<int32_t>({1, 2, 3, 4, 5, 6}));
  sampling.add_bad_words()->set_token_ids(Pack<int32_t>({1, 2, 3, 4}));
  sampling.add_bad_words()->set_token_ids(Pack<int32_t>({1, 2, 3}));
  EXPECT_THAT(FieldsAndReasons(ParseGenerate(request, Limits(), {}).status()),
              ElementsAre("sampling.logit_bias_token_ids LOGIT_BIASES_TOO_MANY",
                          "sampling.allowed_token_ids ALLOWED_IDS_TOO_MANY",
                          "sampling.bad_words BAD_WORDS_TOO_MANY"));
  // Empty words are too many, too: a refusal names each of a few.
  sampling.Clear();
  for (int i = 0; i < 7; ++i) sampling.add_bad_words();
  sampling.set_logit_biases(Pack<float>({1}));
  EXPECT_THAT(FieldsAndReasons(ParseGenerate(request, Limits(), {}).status()),
              ElementsAre("sampling.logit_biases LOGIT_BIAS_INVALID",
                          "sampling.bad_words BAD_WORDS_TOO_MANY"));
}

TEST(ParseGenerate, ReadsDraftsOfTheFirstSamples) {
  RequestLimits limits = Limits();
  v1::GenerateRequest request = GoodGenerate();
  request.set_n(3);
  request.add_drafts()->set_token_ids(Pack<int32_t>({4, 5}));
  request.add_drafts();
  const auto input = ParseGenerate(request, limits, {});
  ASSERT_TRUE(input.ok());
  EXPECT_THAT(input->drafts, ElementsAre(ElementsAre(4, 5), ElementsAre()));
  EXPECT_FALSE(input->ngram_drafts);
  limits.engine.ngram_drafts = true;
  EXPECT_TRUE(ParseGenerate(request, limits, {})->ngram_drafts);
  request.set_ngram_drafts(false);
  EXPECT_FALSE(ParseGenerate(request, limits, {})->ngram_drafts);
}

TEST(ParseGenerate, RefusesBadDrafts) {
  const auto refusal = [](uint32_t n, std::vector<std::string> drafts) {
    v1::GenerateRequest request = GoodGenerate();
    request.set_n(n);
    for (const std::string& draft : drafts) request.add_drafts()->set_token_ids(draft);
    return FieldsAndReasons(ParseGenerate(request, Limits(), {}).status());
  };
  EXPECT_THAT(refusal(1, {"", ""}), ElementsAre("drafts DRAFTS_TOO_MANY"));
  EXPECT_THAT(refusal(2, {Ids(std::vector<int32_t>(7)), Ids(std::vector<int32_t>(6))}),
              ElementsAre("drafts DRAFTS_TOO_MANY"));
  EXPECT_THAT(refusal(2, {Ids({1}), Ids({2, 100})}),
              ElementsAre("drafts[1].token_ids[1] TOKEN_ID_OUT_OF_RANGE"));
  EXPECT_THAT(refusal(1, {"abc"}), ElementsAre("drafts[0].token_ids TOKEN_BYTES_INVALID"));
}

TEST(ParseGenerate, ARequestByNameMayFollowTheActiveVersion) {
  v1::GenerateRequest request = GoodGenerate();
  request.set_adapter("policy");
  const auto in_flight = [&] { return ParseGenerate(request, Limits(), {"r", 1})->in_flight; };
  EXPECT_EQ(in_flight(), engine::InFlightPolicy::kPin);
  request.set_in_flight_policy(v1::IN_FLIGHT_POLICY_SWITCH_KEEP_KV);
  EXPECT_EQ(in_flight(), engine::InFlightPolicy::kSwitchKeepKv);
  request.set_in_flight_policy(v1::IN_FLIGHT_POLICY_SWITCH_RECOMPUTE);
  EXPECT_EQ(in_flight(), engine::InFlightPolicy::kSwitchRecompute);
}

TEST(ParseGenerate, AsksForRawLogprobsUnlessSaidOtherwise) {
  v1::GenerateRequest request = GoodGenerate();
  request.mutable_logprobs();
  const auto input = ParseGenerate(request, Limits(), {});
  ASSERT_TRUE(input.ok());
  EXPECT_EQ(input->logprobs.mode, engine::LogprobMode::kRaw);
}

TEST(ParseGenerate, DefaultsMaxTokensToTheRestOfTheContext) {
  v1::GenerateRequest request = GoodGenerate();
  request.set_prompt_token_ids(Pack(std::vector<int32_t>(25, 1)));
  EXPECT_EQ(ParseGenerate(request, Limits(), {})->stop.max_tokens, 7);
  // An explicit one may exceed what is left: the engine ends with LENGTH.
  request.mutable_stop()->set_max_tokens(20);
  EXPECT_EQ(ParseGenerate(request, Limits(), {})->stop.max_tokens, 20);
}

TEST(ParseGenerate, TakesATopKAboveTheVocabularyAsAll) {
  v1::GenerateRequest request = GoodGenerate();
  request.mutable_sampling()->set_top_k(100);
  EXPECT_EQ(ParseGenerate(request, Limits(), {})->sampling.top_k, 0);
}

struct BadGenerate {
  const char* expected;  // "field REASON" of the only violation
  std::function<void(v1::GenerateRequest*)> spoil;
};

std::vector<BadGenerate> BadGenerates() {
  using R = v1::GenerateRequest;
  return {
      {"prompt_token_ids PROMPT_EMPTY", [](R* r) { r->clear_prompt_token_ids(); }},
      {"prompt_token_ids TOKEN_BYTES_INVALID", [](R* r) { r->set_prompt_token_ids("abcde"); }},
      {"prompt_token_ids[1] TOKEN_ID_OUT_OF_RANGE",
       [](R* r) {
         r->set_prompt_token_ids(Ids({0, -1}));
       }},
      {"prompt_token_ids[2] TOKEN_ID_OUT_OF_RANGE",
       [](R* r) {
         r->set_prompt_token_ids(Ids({0, 99, 100}));
       }},
      {"prompt_token_ids PROMPT_TOO_LONG",
       [](R* r) { r->set_prompt_token_ids(Ids(std::vector<int32_t>(32, 1))); }},
      {"adapter ADAPTER_NAME_INVALID", [](R* r) { r->set_adapter("../x"); }},
      {"adapter ADAPTER_NAME_INVALID", [](R* r) { r->set_adapter("a@0"); }},
      {"n N_OUT_OF_RANGE", [](R* r) { r->set_n(0); }},
      {"n N_OUT_OF_RANGE", [](R* r) { r->set_n(5); }},
      {"n N_OUT_OF_RANGE", [](R* r) { r->set_n(0xFFFFFFFFu); }},
      {"stop.max_tokens MAX_TOKENS_OUT_OF_RANGE",
       [](R* r) { r->mutable_stop()->set_max_tokens(0); }},
      {"stop.max_tokens MAX_TOKENS_OUT_OF_RANGE",
       [](R* r) { r->mutable_stop()->set_max_tokens(21); }},
      {"stop.max_tokens MAX_TOKENS_OUT_OF_RANGE",
       [](R* r) { r->mutable_stop()->set_max_tokens(0x80000000u); }},
      {"stop.min_tokens MIN_TOKENS_OUT_OF_RANGE",
       [](R* r) {
         r->mutable_stop()->set_max_tokens(5);
         r->mutable_stop()->set_min_tokens(6);
       }},
      {"stop.stop_token_ids TOKEN_BYTES_INVALID",
       [](R* r) { r->mutable_stop()->set_stop_token_ids("a"); }},
      {"stop.stop_token_ids STOP_IDS_TOO_MANY",
       [](R* r) {
         r->mutable_stop()->set_stop_token_ids(Ids({1, 2, 3, 4}));
       }},
      {"stop.stop_token_ids[0] TOKEN_ID_OUT_OF_RANGE",
       [](R* r) { r->mutable_stop()->set_stop_token_ids(Ids({100})); }},
      {"stop.stop_sequences STOP_SEQUENCES_TOO_MANY",
       [](R* r) {
         for (int i = 0; i < 3; ++i) {
           r->mutable_stop()->add_stop_sequences()->set_token_ids(Ids({1}));
         }
       }},
      {"stop.stop_sequences[0].token_ids STOP_SEQUENCE_EMPTY",
       [](R* r) { r->mutable_stop()->add_stop_sequences(); }},
      {"stop.stop_sequences[0].token_ids STOP_SEQUENCE_TOO_LONG",
       [](R* r) {
         r->mutable_stop()->add_stop_sequences()->set_token_ids(Ids({1, 2, 3, 4, 5}));
       }},
      {"stop.stop_sequences[0].token_ids TOKEN_BYTES_INVALID",
       [](R* r) { r->mutable_stop()->add_stop_sequences()->set_token_ids("abc"); }},
      {"stop.stop_sequences[0].token_ids[1] TOKEN_ID_OUT_OF_RANGE",
       [](R* r) {
         r->mutable_stop()->add_stop_sequences()->set_token_ids(Ids({1, 100}));
       }},
      {"sampling.temperature TEMPERATURE_OUT_OF_RANGE",
       [](R* r) { r->mutable_sampling()->set_temperature(-0.1f); }},
      {"sampling.temperature TEMPERATURE_OUT_OF_RANGE",
       [](R* r) { r->mutable_sampling()->set_temperature(100.5f); }},
      {"sampling.temperature TEMPERATURE_OUT_OF_RANGE",
       [](R* r) { r->mutable_sampling()->set_temperature(kNan); }},
      {"sampling.temperature TEMPERATURE_OUT_OF_RANGE",
       [](R* r) { r->mutable_sampling()->set_temperature(kInf); }},
      {"sampling.top_k TOP_K_OUT_OF_RANGE", [](R* r) { r->mutable_sampling()->set_top_k(0); }},
      {"sampling.top_k TOP_K_OUT_OF_RANGE",
       [](R* r) { r->mutable_sampling()->set_top_k(0x80000000u); }},
      {"sampling.top_p TOP_P_OUT_OF_RANGE", [](R* r) { r->mutable_sampling()->set_top_p(0.0f); }},
      {"sampling.top_p TOP_P_OUT_OF_RANGE", [](R* r) { r->mutable_sampling()->set_top_p(1.01f); }},
      {"sampling.top_p TOP_P_OUT_OF_RANGE", [](R* r) { r->mutable_sampling()->set_top_p(kNan); }},
      {"sampling.min_p MIN_P_OUT_OF_RANGE", [](R* r) { r->mutable_sampling()->set_min_p(-0.01f); }},
      {"sampling.min_p MIN_P_OUT_OF_RANGE", [](R* r) { r->mutable_sampling()->set_min_p(kNan); }},
      {"logprobs.mode LOGPROB_MODE_INVALID",
       [](R* r) { r->mutable_logprobs()->set_mode(static_cast<v1::LogprobMode>(9)); }},
      {"logprobs.mode LOGPROB_MODE_INVALID",
       [](R* r) {
         r->mutable_logprobs()->set_mode(v1::LOGPROB_MODE_SCALED);
         r->mutable_sampling()->set_temperature(0.0f);
       }},
      {"logprobs.top_k LOGPROBS_K_OUT_OF_RANGE", [](R* r) { r->mutable_logprobs()->set_top_k(6); }},
      {"logprobs.chosen_token_ids CHOSEN_IDS_TOO_MANY",
       [](R* r) {
         r->mutable_logprobs()->set_chosen_token_ids(Ids({1, 2, 3, 4, 5, 6, 7}));
       }},
      {"logprobs.chosen_token_ids[1] TOKEN_ID_OUT_OF_RANGE",
       [](R* r) {
         r->mutable_logprobs()->set_chosen_token_ids(Ids({1, 1000}));
       }},
      {"truncate_prompt_tokens TRUNCATE_PROMPT_TOKENS_OUT_OF_RANGE",
       [](R* r) { r->set_truncate_prompt_tokens(0); }},
      {"truncate_prompt_tokens TRUNCATE_PROMPT_TOKENS_OUT_OF_RANGE",
       [](R* r) { r->set_truncate_prompt_tokens(32); }},
      {"truncate_prompt_tokens TRUNCATE_PROMPT_TOKENS_OUT_OF_RANGE",
       [](R* r) { r->set_truncate_prompt_tokens(0xFFFFFFFFu); }},
      {"response_mode RESPONSE_MODE_INVALID",
       [](R* r) { r->set_response_mode(static_cast<v1::ResponseMode>(5)); }},
      {"in_flight_policy IN_FLIGHT_POLICY_INVALID",
       [](R* r) { r->set_in_flight_policy(static_cast<v1::InFlightPolicy>(9)); }},
      {"in_flight_policy IN_FLIGHT_POLICY_INVALID",
       [](R* r) { r->set_in_flight_policy(v1::IN_FLIGHT_POLICY_SWITCH_KEEP_KV); }},
      {"in_flight_policy IN_FLIGHT_POLICY_INVALID",
       [](R* r) {
         r->set_adapter("a@2");
         r->set_in_flight_policy(v1::IN_FLIGHT_POLICY_SWITCH_RECOMPUTE);
       }},
      {"request_id REQUEST_ID_INVALID", [](R* r) { r->set_request_id(""); }},
      {"request_id REQUEST_ID_INVALID", [](R* r) { r->set_request_id("a b"); }},
      {"request_id REQUEST_ID_INVALID", [](R* r) { r->set_request_id("a\nb"); }},
      {"request_id REQUEST_ID_INVALID", [](R* r) { r->set_request_id("\xc3\xa9"); }},
      {"request_id REQUEST_ID_INVALID", [](R* r) { r->set_request_id(std::string(129, 'x')); }},
      {"cache_salt CACHE_SALT_TOO_LONG", [](R* r) { r->set_cache_salt(std::string(257, 'x')); }},
  };
}

TEST(ParseGenerate, NamesTheOneThingThatIsWrong) {
  for (const BadGenerate& bad : BadGenerates()) {
    v1::GenerateRequest request = GoodGenerate();
    bad.spoil(&request);
    const auto input = ParseGenerate(request, Limits(), {});
    EXPECT_EQ(input.status().code(), absl::StatusCode::kInvalidArgument) << bad.expected;
    EXPECT_THAT(FieldsAndReasons(input.status()), ElementsAre(bad.expected));
  }
}

TEST(ParseGenerate, ListsEverythingThatIsWrong) {
  v1::GenerateRequest request;
  request.set_n(0);
  request.mutable_sampling()->set_temperature(kNan);
  request.mutable_stop()->set_max_tokens(0);
  request.mutable_stop()->add_stop_sequences();
  request.set_adapter("UPPER");
  const absl::Status status = ParseGenerate(request, Limits(), {}).status();
  EXPECT_THAT(FieldsAndReasons(status),
              UnorderedElementsAre("prompt_token_ids PROMPT_EMPTY", "n N_OUT_OF_RANGE",
                                   "sampling.temperature TEMPERATURE_OUT_OF_RANGE",
                                   "stop.max_tokens MAX_TOKENS_OUT_OF_RANGE",
                                   "stop.stop_sequences[0].token_ids STOP_SEQUENCE_EMPTY",
                                   "adapter ADAPTER_NAME_INVALID"));
  EXPECT_EQ(ReasonOf(status), "PROMPT_EMPTY");
}

TEST(ParseGenerate, CountsBadIdsBeyondTheFirstFew) {
  v1::GenerateRequest request;
  request.set_prompt_token_ids(Pack(std::vector<int32_t>(30, 500)));
  const auto violations = ViolationsOf(ParseGenerate(request, Limits(), {}).status());
  ASSERT_EQ(violations.size(), 9u);
  EXPECT_THAT(violations.back().description, HasSubstr("22 more"));
}

TEST(ParseGenerate, RefusesThePlaceholdersOfImages) {
  RequestLimits limits = Limits();
  limits.engine.image_token_ids = {98, 99};
  v1::GenerateRequest request = GoodGenerate();
  EXPECT_TRUE(ParseGenerate(request, limits, {}).ok());
  request.set_prompt_token_ids(Ids({1, 99, 99}));
  EXPECT_THAT(FieldsAndReasons(ParseGenerate(request, limits, {}).status()),
              ElementsAre("prompt_token_ids[1] IMAGE_UNSUPPORTED"));
  v1::ScoreRequest score;
  score.add_sequences()->set_token_ids(Ids({98}));
  EXPECT_THAT(FieldsAndReasons(ParseScore(score, limits, {}).status()),
              ElementsAre("sequences[0].token_ids[0] IMAGE_UNSUPPORTED"));
}

TEST(ParseGenerate, RefusesAResponseThatCouldExceedAMessage) {
  RequestLimits limits = Limits();
  // 8 + 8*5 bytes a token and 16 KiB of framing.
  limits.max_message_bytes = (16 << 10) + 48 * 10;
  v1::GenerateRequest request = GoodGenerate();
  request.mutable_logprobs()->set_top_k(5);
  request.mutable_stop()->set_max_tokens(10);
  EXPECT_TRUE(ParseGenerate(request, limits, {}).ok());
  request.mutable_stop()->set_max_tokens(11);
  EXPECT_THAT(FieldsAndReasons(ParseGenerate(request, limits, {}).status()),
              ElementsAre("logprobs RESPONSE_TOO_LARGE"));
}

TEST(ParseGenerate, CountsThePromptsLogprobsIntoTheResponse) {
  RequestLimits limits = Limits();
  limits.max_message_bytes = (16 << 10) + 8 * 20;
  v1::GenerateRequest request = GoodGenerate();
  request.set_prompt_token_ids(Pack(std::vector<int32_t>(11, 1)));
  request.mutable_stop()->set_max_tokens(10);
  request.mutable_logprobs();
  EXPECT_TRUE(ParseGenerate(request, limits, {}).ok());
  request.mutable_logprobs()->set_prompt(true);
  EXPECT_THAT(FieldsAndReasons(ParseGenerate(request, limits, {}).status()),
              ElementsAre("logprobs RESPONSE_TOO_LARGE"));
  request.set_truncate_prompt_tokens(10);
  EXPECT_TRUE(ParseGenerate(request, limits, {}).ok());
}

TEST(ParseGenerate, BoundsAScoredPromptLikeAScore) {
  RequestLimits limits = Limits();
  limits.engine.max_score_tokens = 5;
  v1::GenerateRequest request = GoodGenerate();
  request.mutable_logprobs()->set_prompt(true);
  request.set_prompt_token_ids(Ids({1, 2, 3, 4, 5}));
  EXPECT_TRUE(ParseGenerate(request, limits, {}).ok());
  request.set_prompt_token_ids(Ids({1, 2, 3, 4, 5, 6}));
  EXPECT_THAT(FieldsAndReasons(ParseGenerate(request, limits, {}).status()),
              ElementsAre("logprobs.prompt SCORE_TOO_LARGE"));
}

TEST(ParseGenerate, KeepsTheEndOfAPromptToBeTruncated) {
  v1::GenerateRequest request = GoodGenerate();
  request.set_prompt_token_ids(Ids({1, 2, 3, 4, 5}));
  for (const auto& [kept, expected] : std::map<uint32_t, std::vector<int32_t>>{
           {1, {5}}, {4, {2, 3, 4, 5}}, {5, {1, 2, 3, 4, 5}}, {31, {1, 2, 3, 4, 5}}}) {
    request.set_truncate_prompt_tokens(kept);
    const auto input = ParseGenerate(request, Limits(), {});
    ASSERT_TRUE(input.ok()) << input.status();
    EXPECT_EQ(input->prompt, expected);
    EXPECT_EQ(input->stop.max_tokens, std::min<int64_t>(20, 32 - expected.size()));
  }
  // A longer prompt than the context.
  std::vector<int32_t> longer(100, 1);
  longer.back() = 2;
  request.set_prompt_token_ids(Pack(longer));
  request.set_truncate_prompt_tokens(2);
  EXPECT_THAT(ParseGenerate(request, Limits(), {})->prompt, ElementsAre(1, 2));
  // The ids that are dropped count, too: a wrong one is the caller's mistake.
  longer[3] = 100;
  request.set_prompt_token_ids(Pack(longer));
  EXPECT_THAT(FieldsAndReasons(ParseGenerate(request, Limits(), {}).status()),
              ElementsAre("prompt_token_ids[3] TOKEN_ID_OUT_OF_RANGE"));
}

TEST(ParseGenerate, RefusesSamplesThatTogetherTakeTooMuchMemory) {
  RequestLimits limits = Limits();
  limits.engine.max_n = 100;
  limits.engine.context_length = 1 << 20;
  limits.engine.max_tokens = 1 << 20;
  limits.max_message_bytes = 1 << 20;
  // Half a message each, at 8 bytes a token.
  v1::GenerateRequest request = GoodGenerate();
  request.mutable_stop()->set_max_tokens(1 << 16);
  request.set_n(32);
  EXPECT_TRUE(ParseGenerate(request, limits, {}).ok());
  request.set_n(33);
  EXPECT_THAT(FieldsAndReasons(ParseGenerate(request, limits, {}).status()),
              ElementsAre("n RESPONSE_TOO_LARGE"));
}

}  // namespace
}  // namespace dorad::rpc
