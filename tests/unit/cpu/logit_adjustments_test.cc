#include "server/backends/cpu/logit_adjustments.h"

#include <cmath>

#include "server/backends/cpu/ops/sampling.h"
#include "tests/unit/support/test.h"

namespace dorad::engine {
namespace {

using ::testing::FloatEq;

const std::vector<float> kLogits = {2.0f, -1.0f, 0.5f, 3.0f, -4.0f};

TEST(AdjustedLogits, AllowedTokensKeepTheirLogits) {
  LogitParams params;
  params.allowed_ids = {1, 3};
  SampleWant want;
  want.logits = &params;
  EXPECT_THAT(AdjustedLogits(kLogits, want),
              ElementsAre(-INFINITY, -1.0f, -INFINITY, 3.0f, -INFINITY));
}

TEST(AdjustedLogits, BiasesComeBeforePenalties) {
  LogitParams params;
  params.bias_ids = {1, 4};
  params.biases = {5.0f, -0.5f};
  params.repetition_penalty = 2.0f;
  const std::vector<TokenUse> uses = {{1, TokenUse::kInPrompt}, {3, TokenUse::kGenerated}};
  SampleWant want;
  want.logits = &params;
  want.uses = uses;
  EXPECT_THAT(AdjustedLogits(kLogits, want), ElementsAre(2.0f, 2.0f, 0.5f, 1.5f, -4.5f));
}

TEST(AdjustedLogits, PenaltiesCountGeneratedTokensOnly) {
  LogitParams params;
  params.presence_penalty = 0.25f;
  params.frequency_penalty = 0.5f;
  params.repetition_penalty = 4.0f;
  const std::vector<TokenUse> uses = {{0, TokenUse::kInPrompt},
                                      {1, 3 * TokenUse::kGenerated | TokenUse::kInPrompt},
                                      {3, TokenUse::kGenerated}};
  SampleWant want;
  want.logits = &params;
  want.uses = uses;
  EXPECT_THAT(AdjustedLogits(kLogits, want),
              ElementsAre(0.5f, FloatEq(-4.0f - 1.5f - 0.25f), 0.5f, 0.75f - 0.5f - 0.25f, -4.0f));
}

TEST(SampleAdjusted, RawLogprobsStayThoseOfTheModel) {
  const at::Tensor logits = at::from_blob(const_cast<float*>(kLogits.data()), {1, 5}, at::kFloat);
  const std::vector<float> adjusted = {-INFINITY, 1.0f, -INFINITY, 0.0f, -INFINITY};
  const std::vector<int32_t> all = {0, 1, 2, 3, 4};
  ops::SampleSpec spec;
  spec.temperature = 0.0f;
  spec.logprob_mode = ops::LogprobMode::kRaw;
  spec.chosen_ids = all;
  const ops::SampleResult plain = ops::Sample(logits, {&spec, 1})[0];
  spec.adjusted = adjusted;
  const ops::SampleResult result = ops::Sample(logits, {&spec, 1})[0];
  EXPECT_EQ(plain.token, 3);
  EXPECT_EQ(result.token, 1);
  EXPECT_EQ(result.chosen_logprobs, plain.chosen_logprobs);
  EXPECT_EQ(result.logprob, plain.chosen_logprobs[1]);
  spec.temperature = 1.0f;
  spec.logprob_mode = ops::LogprobMode::kProcessed;
  const ops::SampleResult processed = ops::Sample(logits, {&spec, 1})[0];
  EXPECT_NEAR(processed.chosen_logprobs[1], -std::log1p(std::exp(-1.0)), 1e-6);
  EXPECT_EQ(processed.chosen_logprobs[0], -INFINITY);
}

TEST(SampleAdjusted, AnAdjustmentDoesNotHideLogitsThatAreNotFinite) {
  const at::Tensor logits = at::zeros({1, 3});
  logits[0][2] = NAN;
  const std::vector<float> adjusted = {0.0f, 1.0f, -INFINITY};
  ops::SampleSpec spec;
  spec.adjusted = adjusted;
  EXPECT_FALSE(ops::Sample(logits, {&spec, 1})[0].finite);
}

}  // namespace
}  // namespace dorad::engine
