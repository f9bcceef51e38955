#include "server/backends/cpu/ops/sampling.h"

#include <ATen/ATen.h>

#include "tests/unit/cpu/variants.h"

namespace dorad::ops {
namespace {

class SamplingTest : public VariantTest {};

SampleResult SampleOne(const at::Tensor& logits, const SampleSpec& spec) {
  return Sample(logits.view({1, -1}), {&spec, 1})[0];
}

at::Tensor LogSoftmax(const at::Tensor& logits, double temperature = 1.0) {
  return at::log_softmax(logits.to(at::kDouble) / temperature, -1);
}

// How often each token is drawn.
std::map<int32_t, int> Count(const at::Tensor& logits, SampleSpec spec, int draws) {
  std::map<int32_t, int> counts;
  for (int i = 0; i < draws; ++i) {
    spec.position = static_cast<uint64_t>(i);
    ++counts[SampleOne(logits, spec).token];
  }
  return counts;
}

TEST_P(SamplingTest, GreedyTakesTheSmallestIdOfTheLargest) {
  at::Tensor logits = at::randn({1000});
  logits[700] = 9.0f;
  logits[300] = 9.0f;
  SampleSpec spec;
  spec.temperature = 0.0f;
  spec.logprob_mode = LogprobMode::kProcessed;
  spec.top_logprobs = 2;
  const std::vector<int32_t> chosen = {300, 700};
  spec.chosen_ids = chosen;
  const SampleResult r = SampleOne(logits, spec);
  EXPECT_EQ(r.token, 300);
  EXPECT_EQ(r.logprob, 0.0f);
  EXPECT_THAT(r.top_ids, ElementsAre(300, -1));
  EXPECT_THAT(r.top_logprobs, ElementsAre(0.0f, -INFINITY));
  EXPECT_THAT(r.chosen_logprobs, ElementsAre(0.0f, -INFINITY));
}

TEST_P(SamplingTest, RawLogprobsAreTheLogSoftmax) {
  at::manual_seed(1);
  for (int64_t vocabulary : {1, 5, 64, 1000, 49152}) {
    const at::Tensor logits = at::randn({vocabulary}) * 4;
    const at::Tensor expected = LogSoftmax(logits);
    SampleSpec spec;
    spec.temperature = 0.6f;
    spec.top_k = 3;
    spec.logprob_mode = LogprobMode::kRaw;
    spec.top_logprobs = 4;
    const std::vector<int32_t> chosen = {0, static_cast<int32_t>(vocabulary - 1)};
    spec.chosen_ids = chosen;
    const SampleResult r = SampleOne(logits, spec);
    EXPECT_NEAR(r.logprob, expected[r.token].item<double>(), 2e-6);
    EXPECT_NEAR(r.chosen_logprobs[1], expected[vocabulary - 1].item<double>(), 2e-6);
    const auto [values, ids] = expected.topk(std::min<int64_t>(4, vocabulary));
    for (int64_t i = 0; i < 4; ++i) {
      const bool present = i < vocabulary;
      EXPECT_EQ(r.top_ids[i], present ? ids[i].item<int64_t>() : -1);
      if (!present) continue;
      EXPECT_NEAR(r.top_logprobs[i], values[i].item<double>(), 2e-6);
    }
  }
}

TEST_P(SamplingTest, RawSampleAndScoreAgreeToTheBit) {
  at::manual_seed(2);
  const at::Tensor logits = at::randn({30, 5000}) * 3;
  std::vector<SampleSpec> sample(30);
  for (size_t i = 0; i < sample.size(); ++i) {
    sample[i].temperature = 0.1f * static_cast<float>(i);
    sample[i].logprob_mode = LogprobMode::kRaw;
    sample[i].top_logprobs = 5;
  }
  const auto sampled = Sample(logits, sample);
  std::vector<ScoreSpec> score(30);
  for (size_t i = 0; i < score.size(); ++i) score[i] = {sampled[i].token, 1.0f, 5, {}};
  const auto scored = Score(logits, score);
  for (size_t i = 0; i < score.size(); ++i) {
    EXPECT_EQ(sampled[i].logprob, scored[i].logprob);
    EXPECT_EQ(sampled[i].top_ids, scored[i].top_ids);
    EXPECT_EQ(sampled[i].top_logprobs, scored[i].top_logprobs);
  }
}

TEST_P(SamplingTest, ScaledSampleAndScoreAgreeToTheBitWhateverIsSampledFrom) {
  at::manual_seed(4);
  const at::Tensor logits = at::randn({12, 5000}) * 3;
  const std::vector<int32_t> banned = {7, static_cast<int32_t>(logits[3].argmax().item<int64_t>())};
  const std::vector<int32_t> chosen = {banned[1], 0, 4999};
  const std::vector<float> adjusted(5000, 0.25f);
  std::vector<SampleSpec> sample(12);
  for (size_t i = 0; i < sample.size(); ++i) {
    sample[i].temperature = 0.4f + 0.3f * static_cast<float>(i);
    sample[i].logprob_mode = LogprobMode::kScaled;
    sample[i].top_logprobs = 5;
    sample[i].chosen_ids = chosen;
    if (i % 4 == 1) sample[i].top_p = 0.8f;
    if (i % 3 == 1) sample[i].banned = banned;
    if (i % 5 == 1) sample[i].adjusted = adjusted;
  }
  const auto sampled = Sample(logits, sample);
  std::vector<ScoreSpec> score(12);
  for (size_t i = 0; i < score.size(); ++i) {
    score[i] = {sampled[i].token, sample[i].temperature, 5, chosen};
  }
  const auto scored = Score(logits, score);
  for (size_t i = 0; i < score.size(); ++i) {
    EXPECT_EQ(sampled[i].logprob, scored[i].logprob);
    EXPECT_EQ(sampled[i].top_ids, scored[i].top_ids);
    EXPECT_EQ(sampled[i].top_logprobs, scored[i].top_logprobs);
    EXPECT_EQ(sampled[i].chosen_logprobs, scored[i].chosen_logprobs);
  }
}

TEST_P(SamplingTest, UntruncatedProcessedLogprobsEqualScoreAtThatTemperature) {
  at::manual_seed(3);
  const at::Tensor logits = at::randn({1, 3000}) * 3;
  SampleSpec spec;
  spec.temperature = 0.7f;
  spec.logprob_mode = LogprobMode::kProcessed;
  const SampleResult r = Sample(logits, {&spec, 1})[0];
  const ScoreSpec score{r.token, 0.7f, 0, {}};
  EXPECT_EQ(Score(logits, {&score, 1})[0].logprob, r.logprob);
  EXPECT_NEAR(r.logprob, LogSoftmax(logits[0], 0.7)[r.token].item<double>(), 1e-5);
}

// What a specification keeps, by sorting all of the vocabulary in double.
std::vector<int32_t> ExpectedKept(const at::Tensor& logits, const SampleSpec& spec) {
  // In fp32 like the implementation: neighbours may become equal, and then rank by id.
  const at::Tensor z = ((logits - logits.max()) / spec.temperature).to(at::kDouble);
  const at::Tensor order = std::get<1>(at::sort(z, /*stable=*/true, 0, /*descending=*/true));
  at::Tensor p = at::softmax(z.index_select(0, order), 0);
  if (spec.top_k > 0 && spec.top_k < p.numel()) p = p.slice(0, 0, spec.top_k);
  p = p / p.sum();
  std::vector<int32_t> kept;
  double before = 0.0;
  for (int64_t i = 0; i < p.numel(); ++i) {
    const double value = p[i].item<double>();
    if (i > 0 && (before >= spec.top_p || value < spec.min_p * p[0].item<double>())) break;
    before += value;
    kept.push_back(static_cast<int32_t>(order[i].item<int64_t>()));
  }
  return kept;
}

TEST_P(SamplingTest, TruncationKeepsWhatSortingEverythingWouldKeep) {
  at::manual_seed(4);
  struct Setting {
    int32_t top_k;
    float top_p, min_p, temperature;
  };
  for (int64_t vocabulary : {10, 900, 20000}) {
    for (Setting s : {Setting{5, 1.0f, 0.0f, 1.0f},
                      {0, 0.9f, 0.0f, 1.0f},
                      {0, 1.0f, 0.1f, 1.0f},
                      {50, 0.8f, 0.0f, 0.7f},
                      {0, 0.5f, 0.02f, 1.5f},
                      {800, 0.95f, 0.01f, 2.0f},
                      {1, 1.0f, 0.0f, 1.0f},
                      {0, 0.0f, 0.0f, 1.0f},
                      {0, 0.99f, 0.0f, 5.0f}}) {
      const at::Tensor logits = at::randn({vocabulary}) * 4;
      SampleSpec spec;
      spec.top_k = s.top_k;
      spec.top_p = s.top_p;
      spec.min_p = s.min_p;
      spec.temperature = s.temperature;
      spec.logprob_mode = LogprobMode::kProcessed;
      spec.top_logprobs = static_cast<int32_t>(vocabulary);
      const std::vector<int32_t> expected = ExpectedKept(logits, spec);
      const SampleResult r = SampleOne(logits, spec);
      std::vector<int32_t> kept;
      double total = 0.0;
      for (size_t i = 0; i < r.top_ids.size() && r.top_ids[i] >= 0; ++i) {
        kept.push_back(r.top_ids[i]);
        total += std::exp(r.top_logprobs[i]);
      }
      // The last one may stand or fall with the rounding of the cumulative sum.
      ASSERT_NEAR(static_cast<double>(kept.size()), static_cast<double>(expected.size()),
                  1 + expected.size() / 1000)
          << vocabulary << " " << s.top_k << " " << s.top_p << " " << s.min_p;
      const size_t common = std::min(kept.size(), expected.size());
      EXPECT_TRUE(std::equal(kept.begin(), kept.begin() + common, expected.begin()));
      EXPECT_NEAR(total, 1.0, 1e-4);
      EXPECT_TRUE(std::count(kept.begin(), kept.end(), r.token) == 1);
    }
  }
}

// Far from rounding, unlike the random rows above: the number of candidates is exact.
TEST_P(SamplingTest, TopPKeepsTheCandidateThatReachesTheMass) {
  const at::Tensor logits = at::tensor({0.1f, 0.4f, 0.2f, 0.3f}).log();
  const std::vector<int32_t> order = {1, 3, 2, 0};
  for (const auto& [top_k, top_p, size] :
       {std::tuple(0, 0.2f, 1), {0, 0.65f, 2}, {0, 0.85f, 3}, {0, 0.95f, 4}, {3, 0.5f, 2}}) {
    SampleSpec spec;
    spec.top_k = top_k;
    spec.top_p = top_p;
    spec.logprob_mode = LogprobMode::kProcessed;
    spec.top_logprobs = 4;
    std::vector<int32_t> expected(order.begin(), order.begin() + size);
    expected.resize(4, -1);
    EXPECT_EQ(SampleOne(logits, spec).top_ids, expected) << top_k << " " << top_p;
  }
}

TEST_P(SamplingTest, EqualCandidatesAreRankedById) {
  const at::Tensor logits = at::zeros({500});
  SampleSpec spec;
  spec.top_k = 3;
  const auto counts = Count(logits, spec, 300);
  EXPECT_EQ(counts.size(), 3u);
  EXPECT_EQ(counts.rbegin()->first, 2);
}

TEST_P(SamplingTest, BannedTokensAreNeverDrawnButKeepTheirRawLogprob) {
  at::Tensor logits = at::zeros({64});
  logits[7] = 20.0f;
  const std::vector<int32_t> banned = {7};
  for (float temperature : {0.0f, 1.0f, 0.5f}) {
    for (int32_t top_k : {0, 5}) {
      SampleSpec spec;
      spec.temperature = temperature;
      spec.top_k = top_k;
      spec.banned = banned;
      spec.logprob_mode = LogprobMode::kRaw;
      spec.chosen_ids = banned;
      const SampleResult r = SampleOne(logits, spec);
      EXPECT_NE(r.token, 7);
      EXPECT_NEAR(r.chosen_logprobs[0], LogSoftmax(logits)[7].item<double>(), 1e-6);
      spec.logprob_mode = LogprobMode::kProcessed;
      EXPECT_EQ(SampleOne(logits, spec).chosen_logprobs[0], -INFINITY);
    }
  }
}

TEST_P(SamplingTest, NonFiniteRowsAreReportedAndLeaveOthersAlone) {
  at::Tensor logits = at::randn({5, 300});
  logits[1][299] = NAN;
  logits[2][0] = INFINITY;
  logits[3].fill_(-INFINITY);
  logits[4][10] = -INFINITY;
  std::vector<SampleSpec> specs(5);
  for (SampleSpec& s : specs) s.top_logprobs = 2, s.logprob_mode = LogprobMode::kRaw;
  const auto results = Sample(logits, specs);
  for (int i = 0; i < 5; ++i) {
    const bool good = i == 0 || i == 4;
    EXPECT_EQ(results[i].finite, good) << i;
    EXPECT_EQ(results[i].token >= 0, good) << i;
    EXPECT_EQ(results[i].top_ids.size(), 2u);
  }
  const std::vector<int32_t> all = {0, 1};
  SampleSpec nothing_left;
  nothing_left.banned = all;
  EXPECT_FALSE(SampleOne(at::zeros({2}), nothing_left).finite);
}

TEST_P(SamplingTest, ADrawDependsOnSeedSampleAndPositionOnly) {
  at::manual_seed(5);
  const at::Tensor logits = at::randn({1, 2000});
  std::set<int32_t> tokens;
  for (uint64_t seed : {1, 2}) {
    for (uint32_t sample : {0, 1}) {
      for (uint64_t position : {uint64_t{5}, uint64_t{5} << 32}) {
        SampleSpec spec;
        spec.seed = seed, spec.sample_index = sample, spec.position = position;
        const int32_t alone = Sample(logits, {&spec, 1})[0].token;
        const std::vector<SampleSpec> batch = {SampleSpec{}, spec};
        EXPECT_EQ(Sample(logits.expand({2, 2000}).contiguous(), batch)[1].token, alone);
        tokens.insert(alone);
      }
    }
  }
  EXPECT_GE(tokens.size(), 7u);
}

TEST_P(SamplingTest, ATinyTemperatureIsGreedy) {
  at::Tensor logits = at::randn({400});
  logits[123] = 50.0f;
  SampleSpec spec;
  spec.temperature = 1e-38f;
  EXPECT_EQ(SampleOne(logits, spec).token, 123);
}

TEST_P(SamplingTest, ScoreWithoutATargetHasNoLogprob) {
  const ScoreSpec spec;
  const SampleResult r = Score(at::zeros({1, 4}), {&spec, 1})[0];
  EXPECT_TRUE(r.finite);
  EXPECT_TRUE(std::isnan(r.logprob));
}

DORAD_INSTANTIATE_VARIANTS(SamplingTest);

}  // namespace
}  // namespace dorad::ops
