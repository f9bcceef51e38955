#include "tests/unit/rpc/validation_fixture.h"

namespace dorad::rpc {
namespace {

TEST(ParseScore, RefusesTooManyCells) {
  RequestLimits limits = Limits();
  limits.engine.max_score_tokens = 1 << 20;
  limits.max_message_bytes = 64 << 20;
  v1::ScoreRequest request;
  for (int i = 0; i < kMaxScoreCells / 2; ++i) request.add_sequences()->set_token_ids(Ids({1}));
  request.add_adapters("a");
  request.add_adapters("b");
  EXPECT_TRUE(ParseScore(request, limits, {}).ok());
  request.add_sequences()->set_token_ids(Ids({1}));
  EXPECT_THAT(FieldsAndReasons(ParseScore(request, limits, {}).status()),
              ElementsAre("sequences SCORE_TOO_MANY_CELLS"));
}

TEST(ParseScore, CountsTheFramingOfEveryCell) {
  RequestLimits limits = Limits();
  // One token of 8 bytes in a cell of 32.
  limits.max_message_bytes = (16 << 10) + 3 * (8 + 32);
  v1::ScoreRequest request;
  for (int i = 0; i < 3; ++i) request.add_sequences()->set_token_ids(Ids({1}));
  EXPECT_TRUE(ParseScore(request, limits, {}).ok());
  request.add_sequences()->set_token_ids(Ids({1}));
  EXPECT_THAT(FieldsAndReasons(ParseScore(request, limits, {}).status()),
              ElementsAre("sequences RESPONSE_TOO_LARGE"));
}

TEST(ParseScore, MeansTheBaseByAnEmptyListOfAdapters) {
  const auto parsed = ParseScore(GoodScore(), Limits(), {"r-1", 0});
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  ASSERT_EQ(parsed->adapters.size(), 1u);
  EXPECT_TRUE(parsed->adapters[0].is_base());
  EXPECT_EQ(parsed->input.temperature, 1.0f);
  EXPECT_THAT(parsed->input.sequences, ElementsAre(ElementsAre(1, 2, 3)));
}

TEST(ParseScore, AcceptsASequenceThatFillsTheContext) {
  v1::ScoreRequest request;
  request.add_sequences()->set_token_ids(Pack(std::vector<int32_t>(32, 1)));
  EXPECT_TRUE(ParseScore(request, Limits(), {}).ok());
}

struct BadScore {
  const char* expected;
  std::function<void(v1::ScoreRequest*)> spoil;
};

TEST(ParseScore, NamesTheOneThingThatIsWrong) {
  using R = v1::ScoreRequest;
  const std::vector<BadScore> cases = {
      {"sequences SCORE_EMPTY", [](R* r) { r->clear_sequences(); }},
      {"sequences[1].token_ids SEQUENCE_EMPTY", [](R* r) { r->add_sequences(); }},
      {"sequences[1].token_ids SEQUENCE_TOO_LONG",
       [](R* r) { r->add_sequences()->set_token_ids(Ids(std::vector<int32_t>(33, 1))); }},
      {"sequences[1].token_ids TOKEN_BYTES_INVALID",
       [](R* r) { r->add_sequences()->set_token_ids("abc"); }},
      {"sequences[0].token_ids[1] TOKEN_ID_OUT_OF_RANGE",
       [](R* r) {
         r->mutable_sequences(0)->set_token_ids(Ids({1, -7}));
       }},
      {"sequences SCORE_TOO_LARGE",
       [](R* r) {
         for (int i = 0; i < 22; ++i) r->add_adapters("");
       }},
      {"sequences SCORE_TOO_LARGE",
       [](R* r) {
         for (int i = 0; i < 65; ++i) r->add_sequences();
       }},
      {"adapters[1] ADAPTER_NAME_INVALID",
       [](R* r) {
         r->add_adapters("good");
         r->add_adapters("b@d");
       }},
      {"temperature TEMPERATURE_OUT_OF_RANGE", [](R* r) { r->set_temperature(0.0f); }},
      {"temperature TEMPERATURE_OUT_OF_RANGE", [](R* r) { r->set_temperature(kNan); }},
      {"top_k LOGPROBS_K_OUT_OF_RANGE", [](R* r) { r->set_top_k(6); }},
      {"chosen_token_ids CHOSEN_IDS_TOO_MANY",
       [](R* r) {
         r->set_chosen_token_ids(Ids({1, 2, 3, 4, 5, 6, 7}));
       }},
      {"request_id REQUEST_ID_INVALID", [](R* r) { r->set_request_id("\x01"); }},
  };
  for (const BadScore& bad : cases) {
    v1::ScoreRequest request = GoodScore();
    bad.spoil(&request);
    const auto parsed = ParseScore(request, Limits(), {});
    EXPECT_THAT(FieldsAndReasons(parsed.status()), ElementsAre(bad.expected));
  }
}

TEST(ParseScore, RefusesTooManyAdapters) {
  v1::ScoreRequest request = GoodScore();
  for (int i = 0; i < 65; ++i) request.add_adapters("a");
  EXPECT_THAT(FieldsAndReasons(ParseScore(request, Limits(), {}).status()),
              Contains("adapters ADAPTERS_TOO_MANY"));
}

}  // namespace
}  // namespace dorad::rpc
