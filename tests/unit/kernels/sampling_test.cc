#include "kernels/sampling/sampling.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "tests/unit/kernels/device.h"
#include "tests/unit/kernels/sampling_batch.h"
#include "tests/unit/kernels/sampling_checks.h"

namespace dorad::kernels {
namespace {

class SamplingKernelTest : public IsaTest {};
DORAD_FOR_EACH_ISA(SamplingKernelTest);

// Where a row lies is no part of its results.
TEST_P(SamplingKernelTest, EveryInstructionSetGivesTheSameBits) {
  if (GetParam() == KernelIsa::kSm90) GTEST_SKIP() << "compared with itself";
  SkipWithout(KernelIsa::kSm90);
  if (IsSkipped()) return;
  for (const auto& [vocabulary, rows] : std::initializer_list<std::pair<int, int>>{
           {7, 40}, {5000, 300}, {49152, 48}, {151936, 24}}) {
    std::mt19937 random(vocabulary);
    std::vector<Request> requests;
    for (int r = 0; r < rows; ++r) requests.push_back(RandomRequest(vocabulary, r, random));
    tested_isa = KernelIsa::kMma;
    const std::vector<Result> mma = SampleAll(requests);
    tested_isa = KernelIsa::kSm90;
    const std::vector<Result> sm90 = SampleAll(requests);
    for (size_t r = 0; r < requests.size(); ++r) {
      EXPECT_TRUE(SameBits(mma[r], sm90[r])) << "row " << r << ": " << Describe(requests[r]);
    }
  }
}

TEST_P(SamplingKernelTest, MixedRowsGiveTheCpusResults) {
  struct Size {
    int vocabulary, rows, padding;
  };
  // Less than a chunk, a chunk's edges, fewer chunks than blocks, real vocabularies, the largest;
  // rows that are aligned and rows that are not.
  for (const Size size :
       {Size{1, 40, 0}, Size{5, 80, 3}, Size{64, 80, 0}, Size{1000, 160, 0}, Size{1023, 80, 0},
        Size{1024, 80, 0}, Size{1025, 80, 3}, Size{8192, 80, 0}, Size{8193, 80, 3},
        Size{49152, 96, 4}, Size{151936, 64, 0}, Size{262144, 24, 0}, Size{151937, 16, 0},
        Size{kMostVocabulary, 8, 0}}) {
    std::mt19937 random(size.vocabulary);
    std::vector<Request> requests;
    for (int r = 0; r < size.rows; ++r) {
      requests.push_back(RandomRequest(size.vocabulary, r, random));
    }
    ExpectAsReference(requests, SampleAll(requests, 0, size.padding));
    if (HasFailure()) return;
  }
}

TEST_P(SamplingKernelTest, ARowDependsOnItselfOnly) {
  std::mt19937 random(3);
  std::vector<Request> requests;
  for (int r = 0; r < 80; ++r) requests.push_back(RandomRequest(12000, r, random));
  const std::vector<Result> together = SampleAll(requests);
  const std::vector<Result> unaligned = SampleAll(requests, 1, 1);
  std::vector<Request> reversed(requests.rbegin(), requests.rend());
  const std::vector<Result> backwards = SampleAll(reversed, 0, 8);
  for (size_t r = 0; r < requests.size(); ++r) {
    SCOPED_TRACE(testing::Message() << "row " << r << ": " << Describe(requests[r]));
    EXPECT_TRUE(SameBits(together[r], SampleOne(requests[r])));
    EXPECT_TRUE(SameBits(together[r], unaligned[r]));
    EXPECT_TRUE(SameBits(together[r], backwards[requests.size() - 1 - r]));
  }
}

TEST_P(SamplingKernelTest, ScoreGivesTheCpusResults) {
  std::mt19937 random(4);
  for (int vocabulary : {3, 1500, 151936}) {
    std::vector<Request> requests;
    std::vector<int32_t> targets;
    for (int r = 0; r < 32; ++r) {
      Request request = RandomRequest(vocabulary, r, random);
      request.banned.clear();
      request.spec.temperature = std::max(request.spec.temperature, 0.1f);
      request.spec.logprob_mode = LogprobMode::kRaw;
      targets.push_back(r % 4 == 0 ? -1 : static_cast<int32_t>(random() % vocabulary));
      requests.push_back(request);
    }
    const std::vector<Result> results = ScoreAll(requests, targets);
    for (size_t r = 0; r < requests.size(); ++r) {
      SCOPED_TRACE(testing::Message() << "row " << r << ": " << Describe(requests[r]));
      const ReferenceRow row(requests[r].logits, requests[r].spec.temperature, {});
      Result expected;
      ReferenceFull(row, targets[r], requests[r], false, &expected);
      EXPECT_EQ(results[r].token, targets[r]);
      EXPECT_TRUE(results[r].finite);
      EXPECT_TRUE(Near(results[r].logprob, expected.logprob))
          << results[r].logprob << " " << expected.logprob;
      EXPECT_EQ(results[r].top_ids, expected.top_ids);
      EXPECT_TRUE(Near(results[r].top_logprobs, expected.top_logprobs));
      EXPECT_TRUE(Near(results[r].chosen_logprobs, expected.chosen_logprobs));
    }
  }
}

TEST_P(SamplingKernelTest, RawSampleAndScoreAgreeToTheBit) {
  std::mt19937 random(5);
  std::vector<Request> requests;
  for (int r = 0; r < 64; ++r) requests.push_back(RandomRequest(30000, r, random));
  ExpectRawSampleAndScoreAgree(requests);
}

TEST_P(SamplingKernelTest, LogprobsAreTheLogSoftmaxInDouble) {
  std::mt19937 random(6);
  for (float temperature : {1.0f, 0.6f, 2.0f}) {
    Request request;
    request.logits = Normal(151936, 3.0f, random);
    request.spec.temperature = temperature;
    request.spec.logprob_mode = LogprobMode::kProcessed;
    double total = 0.0;
    for (float x : request.logits) total += std::exp(static_cast<double>(x) / temperature);
    const Result result = SampleOne(request);
    EXPECT_NEAR(result.logprob,
                static_cast<double>(request.logits[result.token]) / temperature - std::log(total),
                3e-6);
  }
}

// Pearson's statistic of draws at many positions against the probabilities in double. Among so many
// are some that the first limit of the kernel does not settle.
TEST_P(SamplingKernelTest, DrawsFollowTheDistribution) {
  std::mt19937 random(7);
  constexpr int kVocabulary = 60;
  constexpr int kDraws = 20000;
  const std::vector<float> logits = Normal(kVocabulary, 1.0f, random);
  struct Setting {
    float temperature, top_p, min_p;
    int top_k;
  };
  for (const Setting s : {Setting{1.0f, 1.0f, 0.0f, 0}, Setting{0.5f, 1.0f, 0.0f, 0},
                          Setting{1.0f, 1.0f, 0.0f, 20}, Setting{1.3f, 0.8f, 0.0f, 0},
                          Setting{1.0f, 1.0f, 0.2f, 0}, Setting{0.8f, 0.9f, 0.05f, 30}}) {
    std::vector<Request> requests(kDraws);
    for (int i = 0; i < kDraws; ++i) {
      requests[i].logits = logits;
      requests[i].spec.temperature = s.temperature;
      requests[i].spec.top_k = s.top_k;
      requests[i].spec.top_p = s.top_p;
      requests[i].spec.min_p = s.min_p;
      requests[i].spec.seed = 77;
      requests[i].spec.position = i / 4;
      requests[i].spec.sample_index = i % 4;
    }
    std::vector<int> order(kVocabulary);
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](int a, int b) { return logits[a] > logits[b]; });
    std::vector<double> p(kVocabulary, 0.0);
    double sum = 0.0;
    const int most = s.top_k > 0 ? s.top_k : kVocabulary;
    for (int i = 0; i < most; ++i) {
      p[order[i]] = std::exp(static_cast<double>(logits[order[i]]) / s.temperature);
      sum += p[order[i]];
    }
    double running = 0.0;
    double kept = 0.0;
    for (int i = 0; i < kVocabulary; ++i) {
      double& q = p[order[i]];
      if (running >= s.top_p * sum || q < s.min_p * p[order[0]]) q = 0.0;
      running += q;
      kept += q;
    }
    std::vector<int> counts(kVocabulary, 0);
    const std::vector<Result> results = SampleAll(requests);
    for (int i = 0; i < kDraws; ++i) {
      ++counts[results[i].token];
      ASSERT_EQ(results[i].token, Reference(requests[i]).token) << i;
    }
    double statistic = 0.0;
    int freedom = -1;
    for (int i = 0; i < kVocabulary; ++i) {
      if (p[i] == 0.0) {
        EXPECT_EQ(counts[i], 0) << i;
        continue;
      }
      const double expected = kDraws * p[i] / kept;
      statistic += (counts[i] - expected) * (counts[i] - expected) / expected;
      ++freedom;
    }
    EXPECT_LT(statistic, freedom + 4.0 * std::sqrt(2.0 * freedom))
        << s.temperature << " " << s.top_k;
  }
}

// The draw of a row without truncation is that of a truncated one that keeps the drawn token.
TEST_P(SamplingKernelTest, TruncationLeavesTheNoiseAlone) {
  std::mt19937 random(13);
  const std::vector<float> logits = Normal(20000, 3.0f, random);
  std::vector<Request> requests(200);
  for (size_t i = 0; i < requests.size(); ++i) {
    requests[i].logits = logits;
    requests[i].spec.position = i;
  }
  const std::vector<Result> all = SampleAll(requests);
  for (const int top_k : {40, 1000, 10000}) {  // from a list, and from many
    std::vector<Request> truncated = requests;
    for (size_t i = 0; i < truncated.size(); ++i) {
      truncated[i].spec.top_k = top_k;
      truncated[i].spec.logprob_mode = LogprobMode::kProcessed;
      truncated[i].chosen = {all[i].token};
    }
    const std::vector<Result> results = SampleAll(truncated);
    int same = 0;
    for (size_t i = 0; i < results.size(); ++i) {
      const bool kept = results[i].chosen_logprobs[0] > -kInfinity;
      EXPECT_EQ(results[i].token == all[i].token, kept) << top_k << " " << i;
      same += kept;
    }
    EXPECT_GT(same, 20);
  }
}

TEST_P(SamplingKernelTest, GreedyTakesTheSmallestIdOfTheLargest) {
  std::mt19937 random(8);
  Request request;
  request.logits = Normal(150000, 1.0f, random);
  request.spec.temperature = 0.0f;
  request.spec.logprob_mode = LogprobMode::kProcessed;
  request.spec.top_logprobs = 2;
  for (const auto& [low, high] : {std::pair{300, 700}, {3, 149999}, {40000, 40001}, {5, 5}}) {
    Request tied = request;
    tied.logits[low] = tied.logits[high] = 9.0f;
    tied.chosen = {low, high};
    const Result result = SampleOne(tied);
    EXPECT_EQ(result.token, low);
    EXPECT_EQ(result.logprob, 0.0f);
    EXPECT_EQ(result.top_ids, (std::vector<int32_t>{low, -1}));
    tied.banned = {low};
    EXPECT_EQ(SampleOne(tied).token, low == high ? Reference(tied).token : high);
  }
  // Zeros of either sign are equal.
  Request zeros;
  zeros.logits = std::vector<float>(4000, -1.0f);
  zeros.logits[1000] = -0.0f;
  zeros.logits[3000] = 0.0f;
  zeros.spec.temperature = 0.0f;
  EXPECT_EQ(SampleOne(zeros).token, 1000);
  zeros.spec.temperature = 1.0f;
  zeros.spec.top_k = 1;
  EXPECT_EQ(SampleOne(zeros).token, 1000);
}

TEST_P(SamplingKernelTest, RowsThatCannotBeSampledAreFlagged) {
  std::mt19937 random(9);
  std::vector<Request> requests;
  for (int vocabulary : {3000}) {
    for (int fault = 0; fault < 6; ++fault) {
      for (int spec = 0; spec < 6; ++spec) {
        Request request = RandomRequest(vocabulary, 0, random);
        request.spec.temperature = spec % 2 == 0 ? 1.0f : 0.5f;
        request.spec.top_logprobs = 2;
        request.banned.clear();
        request.conditional.clear();
        if (fault == 0) request.logits[vocabulary - 1] = kNan;
        if (fault == 1) request.logits[0] = kInfinity;
        if (fault == 2) std::fill(request.logits.begin(), request.logits.end(), -kInfinity);
        if (fault == 3) {
          request.banned.resize(vocabulary);
          std::iota(request.banned.begin(), request.banned.end(), 0);
        }
        if (fault == 4) {
          std::fill(request.logits.begin(), request.logits.end(), -kInfinity);
          request.logits[7] = 1.0f;
          request.banned = {7};
        }
        requests.push_back(request);
      }
    }
  }
  const std::vector<Result> results = SampleAll(requests);
  for (size_t r = 0; r < results.size(); ++r) EXPECT_EQ(results[r].finite, r / 6 == 5) << r;
  ExpectAsReference(requests, results);
}

TEST_P(SamplingKernelTest, TinyAndHugeTemperatures) {
  std::mt19937 random(10);
  std::vector<Request> requests;
  for (float temperature : {1e-38f, 1e-30f, 1e-6f, 1e6f, 1e30f}) {
    for (int kind = 0; kind < 8; ++kind) {
      Request request = RandomRequest(5000, kind, random);
      request.spec.temperature = temperature;
      requests.push_back(request);
    }
  }
  ExpectAsReference(requests, SampleAll(requests));
}

TEST_P(SamplingKernelTest, ATopListLeavesTheOtherResultsAlone) {
  std::mt19937 random(14);
  for (const int vocabulary : {100, 1025, 20000}) {
    std::vector<Request> requests;
    for (int r = 0; r < 96; ++r) {
      Request request = RandomRequest(vocabulary, r, random);
      MakeSimple(&request);
      if (request.spec.logprob_mode == LogprobMode::kNone) {
        request.spec.logprob_mode = LogprobMode::kRaw;
      }
      requests.push_back(request);
    }
    ExpectATopListLeavesTheRestAlone(requests);
  }
}

TEST_P(SamplingKernelTest, RowsOfAKindAloneGiveTheSame) {
  std::mt19937 random(15);
  std::vector<Request> requests;
  for (int r = 0; r < 32; ++r) {
    requests.push_back(RandomRequest(3000, r, random));
    MakeSimple(&requests.back());
    requests.back().spec.temperature = 0.8f;
  }
  ExpectRowsOfAKindAlone(requests);
}

// The plain rows' counters are zero between calls, of any number of rows.
TEST_P(SamplingKernelTest, CallsOfOtherNumbersOfRowsShareAWorkspace) {
  std::mt19937 random(16);
  std::vector<Request> requests;
  for (int r = 0; r < 40; ++r) requests.push_back(RandomRequest(5000, r, random));
  requests[0].banned = {1};  // for the second launch
  ExpectCallsShareAWorkspace(requests, {40, 3, 17, 1, 40});
}

TEST_P(SamplingKernelTest, RowsBeyondThoseInUseAreLeftAlone) {
  std::mt19937 random(11);
  std::vector<Request> requests;
  for (int r = 0; r < 4; ++r) requests.push_back(RandomRequest(100, 0, random));
  Batch batch(requests, 0, 0);
  const DeviceBuffer<int32_t> in_use(std::vector<int32_t>{2});
  batch.params().rows_in_use = in_use.get();
  DORAD_ASSERT_CUDA(Sample(batch.params(), nullptr));
  const std::vector<Result> results = batch.Read();
  EXPECT_GE(results[1].token, 0);
  EXPECT_EQ(results[2].token, -1);  // as the buffer was
  EXPECT_TRUE(std::isnan(results[3].logprob));
}

TEST_P(SamplingKernelTest, OneGraphServesWhateverTheSpecificationsSay) {
  std::mt19937 random(12);
  std::vector<Request> first;
  std::vector<Request> second;
  for (int r = 0; r < 16; ++r) {
    first.push_back(RandomRequest(9000, r, random));
    second.push_back(first.back());
    second.back().spec = RandomRequest(9000, r, random).spec;
  }
  Batch batch(first, 0, 0);
  Batch other(second, 0, 0);
  cudaStream_t stream;
  DORAD_ASSERT_CUDA(cudaStreamCreate(&stream));
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  DORAD_ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  DORAD_ASSERT_CUDA(Sample(batch.params(), stream));
  DORAD_ASSERT_CUDA(cudaStreamEndCapture(stream, &graph));
  DORAD_ASSERT_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  DORAD_ASSERT_CUDA(cudaGraphLaunch(executable, stream));
  ExpectAsReference(first, batch.Read());
  DORAD_ASSERT_CUDA(cudaMemcpy(batch.specs().get(), other.specs().get(),
                               sizeof(SampleRowSpec) * first.size(), cudaMemcpyDeviceToDevice));
  DORAD_ASSERT_CUDA(cudaGraphLaunch(executable, stream));
  DORAD_ASSERT_CUDA(cudaStreamSynchronize(stream));
  std::vector<int32_t> tokens(first.size());
  DORAD_ASSERT_CUDA(cudaMemcpy(tokens.data(), batch.params().out.tokens,
                               tokens.size() * sizeof(int32_t), cudaMemcpyDeviceToHost));
  for (size_t r = 0; r < second.size(); ++r) {
    const Result expected = Reference(second[r]);
    EXPECT_TRUE(expected.close || tokens[r] == expected.token) << Describe(second[r]);
  }
  DORAD_ASSERT_CUDA(cudaGraphExecDestroy(executable));
  DORAD_ASSERT_CUDA(cudaGraphDestroy(graph));
  DORAD_ASSERT_CUDA(cudaStreamDestroy(stream));
}

TEST_P(SamplingKernelTest, RefusesBadSizesAndTakesNone) {
  SampleParams params;
  params.vocabulary = 100;
  params.logits_ld = 100;
  params.isa = GetParam();
  EXPECT_EQ(Sample(params, nullptr), cudaSuccess);
  params.rows = -1;
  EXPECT_EQ(Sample(params, nullptr), cudaErrorInvalidValue);
  params.rows = 1;
  params.vocabulary = kMostVocabulary + 1;
  params.logits_ld = params.vocabulary;
  EXPECT_EQ(Sample(params, nullptr), cudaErrorInvalidValue);
  params.vocabulary = 100;
  params.logits_ld = 99;
  EXPECT_EQ(Sample(params, nullptr), cudaErrorInvalidValue);
  params.logits_ld = 100;
  params.max_top = kMostTopLogprobs + 1;
  EXPECT_EQ(Sample(params, nullptr), cudaErrorInvalidValue);
  params.max_top = 1;
  EXPECT_EQ(Sample(params, nullptr), cudaErrorInvalidValue);  // no workspace
}

}  // namespace
}  // namespace dorad::kernels
