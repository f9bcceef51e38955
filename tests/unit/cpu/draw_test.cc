// The noise of sampling, and draws against all keys, against the distribution, and against draws of
// another distribution.
#include "server/backends/cpu/ops/draw.h"

#include <ATen/ATen.h>

#include <cmath>

#include "server/backends/cpu/ops/sampling.h"
#include "tests/unit/cpu/variants.h"

namespace dorad::ops {
namespace {

class DrawTest : public VariantTest {};

TEST(PhiloxTest, GivesThePublishedVectors) {
  EXPECT_THAT(Philox4x32({0, 0, 0, 0}, {0, 0}),
              ElementsAre(0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8));
  EXPECT_THAT(
      Philox4x32({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}),
      ElementsAre(0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd));
  EXPECT_THAT(
      Philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
      ElementsAre(0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1));
}

TEST_P(DrawTest, PhiloxIsThatOfOneCall) {
  const PhiloxWords counter = {0x243f6a88, 0x85a308d3, 0x13198a2e, 0xfffffffc};
  const PhiloxKey key = {0xa4093822, 0x299f31d0};
  std::vector<uint32_t> words(4 * 24);
  GetParam()->philox(counter.data(), key.data(), 24, words.data());
  for (uint32_t call = 0; call < 24; ++call) {
    const PhiloxWords expected =
        Philox4x32({counter[0], counter[1], counter[2], counter[3] + call}, key);
    for (int i = 0; i < 4; ++i) EXPECT_EQ(words[4 * call + i], expected[i]) << call;
  }
}

TEST_P(DrawTest, MaximaAreThoseOfGroups) {
  at::manual_seed(1);
  for (const int64_t count : {1, 63, 64, 65, 700, 1024, 1025, 5000}) {
    const at::Tensor x = at::randn({count});
    const float* const data = x.const_data_ptr<float>();
    std::vector<float> maxima((count + 1023) / 1024 * 32, NAN);
    std::vector<float> expected(maxima.size(), -INFINITY);
    const cpu::LogitStats stats = GetParam()->group_max(data, count, maxima.data());
    for (int64_t id = 0; id < count; ++id) {
      EXPECT_EQ(IdOf(GroupOf(id), MemberOf(id)), id);
      expected[GroupOf(id)] = std::max(expected[GroupOf(id)], data[id]);
    }
    EXPECT_EQ(maxima, expected) << count;
    EXPECT_EQ(stats.maximum, x.max().item<float>());
    EXPECT_TRUE(stats.finite);
  }
}

// The numbers of ids below `count` at some positions, in one array.
std::vector<double> Exponentials(int positions, int32_t count) {
  std::vector<double> numbers;
  for (int position = 0; position < positions; ++position) {
    const Noise noise(7, 1, static_cast<uint64_t>(position));
    for (int32_t id = 0; id < count; ++id) numbers.push_back(noise.Exponential(id));
  }
  return numbers;
}

// The largest distance of the distribution function from that of exponential numbers, times the
// root of their number: above 1.95 in one of 1000 cases.
double Kolmogorov(std::vector<double> numbers) {
  std::sort(numbers.begin(), numbers.end());
  const auto size = static_cast<double>(numbers.size());
  double distance = 0.0;
  for (size_t i = 0; i < numbers.size(); ++i) {
    const double p = -std::expm1(-numbers[i]);
    distance = std::max(
        {distance, (static_cast<double>(i) + 1.0) / size - p, p - static_cast<double>(i) / size});
  }
  return distance * std::sqrt(size);
}

TEST(NoiseTest, NumbersAreExponential) {
  EXPECT_LT(Kolmogorov(Exponentials(100, 2048)), 1.95);
  // Those of one id, of its group's smallest, and of a large vocabulary's smallest.
  std::vector<double> of_id, of_group, of_all;
  for (uint64_t position = 0; position < 4000; ++position) {
    const Noise noise(position * 77, 3, position << 30);
    of_id.push_back(noise.Exponential(1234));
    double least = INFINITY;
    for (int64_t member = 0; member < kGroupSize; ++member) {
      least = std::min(least, noise.Exponential(static_cast<int32_t>(IdOf(40, member))));
    }
    of_group.push_back(least * kGroupSize);
    least = INFINITY;
    for (int64_t group = 0; group < 512; ++group) {
      const int64_t champion = Noise::Champion(noise.GroupWord(group));
      least = std::min(least, noise.Exponential(static_cast<int32_t>(IdOf(group, champion))));
    }
    of_all.push_back(least * 512 * kGroupSize);
  }
  EXPECT_LT(Kolmogorov(of_id), 1.95);
  EXPECT_LT(Kolmogorov(of_group), 1.95);
  EXPECT_LT(Kolmogorov(of_all), 1.95);
}

TEST(NoiseTest, NumbersOfAGroupAreIndependent) {
  // Products less 1 have variance 3 and mean 0; each member is a champion as often as others.
  constexpr int kPositions = 20000;
  double products = 0.0;
  std::vector<int> champions(kGroupSize);
  for (int position = 0; position < kPositions; ++position) {
    const Noise noise(11, 0, static_cast<uint64_t>(position));
    products += noise.Exponential(2) * noise.Exponential(3 + 64 * (position % 8)) - 1.0;
    ++champions[Noise::Champion(noise.GroupWord(1))];
  }
  EXPECT_LT(std::abs(products), 4.0 * std::sqrt(3.0 * kPositions));
  double statistic = 0.0;
  for (const int count : champions) {
    const double expected = kPositions / 32.0;
    statistic += (count - expected) * (count - expected) / expected;
  }
  EXPECT_LT(statistic, 31.0 + 4.0 * std::sqrt(62.0));
}

// The definition with the library's logarithms, which round otherwise.
TEST(NoiseTest, KeysAreThoseOfTheDefinition) {
  const auto exponential = [](uint64_t n) {  // n + 1/2 has 60 bits: a long double takes them
    return static_cast<double>(-std::log1p(-std::ldexp(static_cast<long double>(n) + 0.5L, -59)));
  };
  double worst = 0.0;
  for (uint64_t position = 0; position < 2000; ++position) {
    for (const int32_t id : {0, 1, 65, 1023, 1024, 77777}) {
      const Noise noise(1, 2, position << 31);
      const uint32_t group = static_cast<uint32_t>(id / 1024 * 32 + id % 64 / 2);
      const uint32_t member = static_cast<uint32_t>(id % 1024 / 64 * 2 + id % 2);
      const auto word = [&](uint32_t kind, uint32_t at) -> uint64_t {
        const auto high = static_cast<uint32_t>(position << 31 >> 32);
        return Philox4x32({static_cast<uint32_t>(position << 31), high, 2, kind << 30 | at / 4},
                          {1, 0})[at % 4];
      };
      const uint64_t high = word(0, group);
      double number = exponential(high / 32 << 32 | word(2, group)) / 32;
      if (high % 32 != member) {
        number +=
            exponential((word(1, 32 * group + member) << 32 | word(3, 32 * group + member)) / 32);
      }
      EXPECT_NEAR(noise.Exponential(id) / number, 1.0, 1e-14);
      const double key = -1.25 - std::log(number);
      worst = std::max(worst, std::abs(Noise::ValueOf(noise.Key(id, -1.25)) - key));
    }
  }
  EXPECT_LT(worst, 0x1p-36);
  EXPECT_EQ(Noise(1, 2, 3).Key(5, -1e30), 0);
  EXPECT_EQ(Noise(1, 2, 3).Key(5, -INFINITY), 0);
}

// Golden values: other backends and later versions draw the same tokens.
TEST(NoiseTest, IsWhatItWas) {
  const Noise noise(5, 1, 9);
  std::vector<int64_t> keys;
  for (const int32_t id : {0, 1, 2, 1000, 50000, 151935}) keys.push_back(noise.Key(id, 0.0));
  EXPECT_THAT(keys, ElementsAre(8819782727361, 9305175429862, 8736339521834, 8812754285878,
                                8613105791573, 9149953918663));
}

SampleResult SampleOne(const at::Tensor& logits, const SampleSpec& spec) {
  return Sample(logits.view({1, -1}), {&spec, 1})[0];
}

struct Setting {
  float temperature, top_p, min_p;
  int32_t top_k;
  std::vector<int32_t> banned;

  SampleSpec Spec() const {
    SampleSpec spec;
    spec.temperature = temperature;
    spec.top_p = top_p;
    spec.min_p = min_p;
    spec.top_k = top_k;
    spec.banned = banned;
    return spec;
  }
};

const std::vector<Setting>& Settings() {
  static const std::vector<Setting> settings = {
      {1.0f, 1.0f, 0.0f, 0, {}},          {0.5f, 1.0f, 0.0f, 0, {}},  {1.0f, 1.0f, 0.0f, 20, {}},
      {1.3f, 0.8f, 0.0f, 0, {}},          {1.0f, 1.0f, 0.2f, 0, {}},  {0.8f, 0.9f, 0.05f, 30, {}},
      {1.0f, 1.0f, 0.0f, 0, {3, 17, 59}}, {0.7f, 0.9f, 0.0f, 0, {5}}, {1.0f, 0.99f, 0.0f, 300, {}}};
  return settings;
}

// The candidate with the largest key, taken from the reported log-probabilities.
int32_t Largest(const at::Tensor& logits, SampleSpec spec) {
  spec.logprob_mode = LogprobMode::kProcessed;
  spec.top_logprobs = static_cast<int32_t>(logits.numel());
  const SampleResult all = SampleOne(logits, spec);
  const cpu::LogitRow row({logits.const_data_ptr<float>(), static_cast<size_t>(logits.numel())},
                          spec.temperature, spec.banned);
  const Noise noise(spec.seed, spec.sample_index, spec.position);
  int64_t best = -1;
  int32_t token = -1;
  for (const int32_t id : all.top_ids) {
    if (id < 0) break;
    const int64_t key = noise.Key(id, static_cast<double>(row[id]) - row.maximum());
    if (key > best || (key == best && id < token)) best = key, token = id;
  }
  return token;
}

TEST_P(DrawTest, TheLargestKeyWins) {
  at::manual_seed(2);
  for (const int64_t vocabulary : {60, 1100, 20000}) {
    for (const double deviation : {0.0, 0.3, 2.0, 8.0}) {
      const at::Tensor logits = at::randn({vocabulary}) * deviation;
      for (const Setting& s : Settings()) {
        SampleSpec spec = s.Spec();
        for (uint64_t position = 0; position < (vocabulary > 10000 ? 3 : 30); ++position) {
          spec.position = position;
          ASSERT_EQ(SampleOne(logits, spec).token, Largest(logits, spec))
              << vocabulary << " " << deviation << " " << s.top_k << " " << s.top_p;
        }
      }
    }
  }
}

// Pearson's statistic of the draws against the probabilities that are reported for them.
TEST_P(DrawTest, DrawsFollowTheDistribution) {
  at::manual_seed(3);
  constexpr int kDraws = 20000;
  const at::Tensor logits = at::randn({60});
  for (const Setting& s : Settings()) {
    SampleSpec spec = s.Spec();
    spec.seed = 77;
    spec.logprob_mode = LogprobMode::kProcessed;
    spec.top_logprobs = 60;
    const SampleResult all = SampleOne(logits, spec);
    spec.logprob_mode = LogprobMode::kNone;
    std::map<int32_t, int> counts;
    for (int i = 0; i < kDraws; ++i) {
      spec.position = static_cast<uint64_t>(i / 4);
      spec.sample_index = static_cast<uint32_t>(i % 4);
      ++counts[SampleOne(logits, spec).token];
    }
    double statistic = 0.0;
    int freedom = -1;
    int drawn = 0;
    for (size_t i = 0; i < all.top_ids.size() && all.top_ids[i] >= 0; ++i, ++freedom) {
      const double expected = kDraws * std::exp(static_cast<double>(all.top_logprobs[i]));
      const int count = counts[all.top_ids[i]];
      statistic += (count - expected) * (count - expected) / expected;
      drawn += count;
    }
    EXPECT_EQ(drawn, kDraws);
    EXPECT_LT(statistic, freedom + 4.0 * std::sqrt(2.0 * freedom)) << s.top_k << " " << s.top_p;
  }
}

// With truncation a token is the same as without, unless that one is cut off.
TEST_P(DrawTest, TruncationLeavesTheNoiseAlone) {
  at::manual_seed(4);
  const at::Tensor logits = at::randn({3000}) * 3;
  int same = 0;
  for (uint64_t position = 0; position < 300; ++position) {
    SampleSpec spec;
    spec.position = position;
    const int32_t token = SampleOne(logits, spec).token;
    for (const int32_t top_k : {2, 40, 500}) {
      SampleSpec truncated = spec;
      truncated.top_k = top_k;
      truncated.logprob_mode = LogprobMode::kProcessed;
      const std::vector<int32_t> chosen = {token};
      truncated.chosen_ids = chosen;
      const SampleResult r = SampleOne(logits, truncated);
      const bool kept = r.chosen_logprobs[0] > -INFINITY;
      if (kept) {
        EXPECT_EQ(r.token, token);
        ++same;
      } else {
        EXPECT_NE(r.token, token);
      }
    }
  }
  EXPECT_GT(same, 300);
  EXPECT_LT(same, 900);
}

// Two distributions at total variation d: with equal noise they give the same token with
// probability (1 - d) / (1 + d) or more.
TEST_P(DrawTest, NeighbouringDistributionsMostlyGiveTheSameToken) {
  at::manual_seed(5);
  constexpr int kDraws = 20000;
  for (const double step : {0.003, 0.03, 0.3}) {
    const at::Tensor logits = at::randn({500}) * 2;
    const at::Tensor moved = logits + at::randn({500}) * step;
    const at::Tensor p = at::softmax(logits.to(at::kDouble), 0);
    const at::Tensor q = at::softmax(moved.to(at::kDouble), 0);
    const double distance = 0.5 * at::abs(p - q).sum().item<double>();
    SampleSpec spec;
    int differ = 0;
    for (int i = 0; i < kDraws; ++i) {
      spec.position = static_cast<uint64_t>(i);
      differ += SampleOne(logits, spec).token != SampleOne(moved, spec).token;
    }
    const double bound = 2.0 * distance / (1.0 + distance);
    const double deviation = std::sqrt(bound / kDraws);
    EXPECT_LT(differ, kDraws * (bound + 4.0 * deviation)) << step << " " << distance;
    // No coupling does better than the total variation itself.
    EXPECT_GT(differ, kDraws * (distance - 4.0 * deviation)) << step << " " << distance;
  }
}

// Noise is of ids, not of the row.
TEST_P(DrawTest, AnswersDoNotDependOnTheVocabularysEnd) {
  at::manual_seed(6);
  const at::Tensor logits = at::randn({5000});
  const at::Tensor padded =
      at::cat({logits, at::full({2000}, -std::numeric_limits<float>::infinity())});
  for (uint64_t position = 0; position < 100; ++position) {
    SampleSpec spec;
    spec.position = position;
    EXPECT_EQ(SampleOne(logits, spec).token, SampleOne(padded, spec).token);
  }
}

DORAD_INSTANTIATE_VARIANTS(DrawTest);

}  // namespace
}  // namespace dorad::ops
