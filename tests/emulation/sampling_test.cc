// Both launches of sampling in the emulator, against the CPU's semantics.
#include "kernels/sampling/sampling.h"

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <random>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/emulation/emulator.h"
#include "tests/unit/kernels/sampling_batch.h"

namespace dorad::kernels {
namespace {

class SamplingTest : public testing::TestWithParam<KernelIsa> {
 protected:
  SamplingTest() : emulator_(1) {
    emulator_.device.processors = 8;
    tested_isa = GetParam();
  }

 private:
  emulation::Emulator emulator_;
};
INSTANTIATE_TEST_SUITE_P(Isas, SamplingTest, testing::Values(KernelIsa::kSm90, KernelIsa::kMma),
                         [](const auto& info) {
                           return info.param == KernelIsa::kSm90 ? "Sm90" : "Mma";
                         });

void MakePlain(Request* request) {
  request->banned.clear();
  request->conditional.clear();
  request->adjusted = false;
}
// For all candidates.
void KeepAll(Request* request) {
  request->spec.top_k = 0;
  request->spec.top_p = 1.0f;
  request->spec.min_p = 0.0f;
}

TEST_P(SamplingTest, MixedRowsGiveTheCpusResults) {
  std::mt19937 random(1);
  // Less than a chunk, a chunk's edges, fewer chunks than blocks of a row, several warps and
  // blocks; rows that are aligned and rows that are not.
  for (const auto& [vocabulary, padding] : {std::pair{5, 3}, {1024, 0}, {1025, 3}, {20001, 0}}) {
    std::vector<Request> requests;
    for (int r = 0; r < 16; ++r) {
      requests.push_back(RandomRequest(vocabulary, r, random));
      if (r % 3 == 0) MakePlain(&requests.back());
    }
    ExpectAsReference(requests, SampleAll(requests, /*shift=*/padding, padding));
    if (HasFailure()) return;
  }
}

// More candidates than a list takes: the first launch leaves these rows to the second one.
TEST_P(SamplingTest, LongListsGiveTheCpusResults) {
  std::mt19937 random(2);
  std::vector<Request> requests;
  for (const int kind : {0, 2, 3, 5}) {
    Request request;
    request.logits = Logits(9000, kind, random);
    request.spec.seed = random();
    request.spec.logprob_mode = LogprobMode::kProcessed;
    request.spec.top_logprobs = 5;
    request.spec.top_k = kind == 0 ? 3000 : 0;
    request.spec.top_p = kind == 0 ? 1.0f : 0.9f;
    requests.push_back(request);
    request.spec.top_p = 1.0f;
    request.spec.min_p = 1e-6f;
    requests.push_back(request);
  }
  ExpectAsReference(requests, SampleAll(requests));
}

TEST_P(SamplingTest, RowsOfAKindAloneGiveTheSame) {
  std::mt19937 random(3);
  std::vector<Request> plain, other;
  for (int r = 0; r < 16; ++r) {
    Request request = RandomRequest(3000, r, random);
    MakePlain(&request);
    KeepAll(&request);
    request.spec.top_logprobs = 0;
    if (r % 2 != 0) request.banned = {7, 8};
    (r % 2 == 0 ? plain : other).push_back(request);
  }
  for (const auto& [requests, rows_are] :
       {std::pair{&plain, SampleRows::kPlain}, {&other, SampleRows::kOther}}) {
    Batch batch(*requests, 0, 0);
    batch.params().rows_are = rows_are;
    ASSERT_EQ(Sample(batch.params(), nullptr), cudaSuccess);
    ExpectAsReference(*requests, batch.Read());
    Batch skipped(*requests, 0, 0);
    skipped.params().rows_are =
        rows_are == SampleRows::kPlain ? SampleRows::kOther : SampleRows::kPlain;
    ASSERT_EQ(Sample(skipped.params(), nullptr), cudaSuccess);
    for (const Result& result : skipped.Read()) EXPECT_EQ(result.token, -1);
  }
}

// The plain rows' counters are zero between calls, of any number of rows.
TEST_P(SamplingTest, CallsOfOtherNumbersOfRowsShareAWorkspace) {
  std::mt19937 random(4);
  std::vector<Request> requests;
  for (int r = 0; r < 6; ++r) {
    requests.push_back(RandomRequest(9000, r, random));
    if (r % 2 == 0) continue;
    MakePlain(&requests.back());
    KeepAll(&requests.back());
    requests.back().spec.top_logprobs = 0;
  }
  requests[0].banned = {1};  // for the second launch
  const Batch all(requests, 0, 0);
  for (const int rows : {6, 3, 5, 1, 6}) {
    const std::vector<Request> some(requests.begin(), requests.begin() + rows);
    Batch batch(some, 0, 0);
    batch.params().workspace = all.params().workspace;
    batch.params().workspace_bytes = all.params().workspace_bytes;
    ASSERT_EQ(Sample(batch.params(), nullptr), cudaSuccess);
    ExpectAsReference(some, batch.Read());
  }
}

TEST_P(SamplingTest, ATopListLeavesTheOtherResultsAlone) {
  std::mt19937 random(5);
  std::vector<Request> requests;
  while (requests.size() < 12) {
    Request request = RandomRequest(2100, static_cast<int>(requests.size()), random);
    if (request.spec.logprob_mode == LogprobMode::kNone) continue;
    MakePlain(&request);
    KeepAll(&request);
    request.spec.top_logprobs = 0;
    requests.push_back(request);
    request.spec.top_logprobs = 3;
    requests.push_back(request);
  }
  std::vector<Result> results = SampleAll(requests);
  for (size_t r = 0; r < requests.size(); r += 2) {
    results[r + 1].top_ids.clear();
    results[r + 1].top_logprobs.clear();
    EXPECT_TRUE(SameBits(results[r], results[r + 1])) << Describe(requests[r]);
  }
}

TEST_P(SamplingTest, RowsThatCannotBeSampledAreFlagged) {
  std::mt19937 random(6);
  std::vector<Request> requests;
  for (int r = 0; r < 8; ++r) {
    Request request = RandomRequest(1500, r, random);
    request.spec.temperature = 1.0f;
    MakePlain(&request);
    if (r % 2 != 0) request.banned = {7};
    if (r / 2 == 0) request.logits[1499] = kNan;
    if (r / 2 == 1) request.logits[0] = kInfinity;
    if (r / 2 == 2) std::fill(request.logits.begin(), request.logits.end(), -kInfinity);
    requests.push_back(request);
  }
  const std::vector<Result> results = SampleAll(requests);
  for (size_t r = 0; r < requests.size(); ++r) EXPECT_EQ(results[r].finite, r / 2 > 2) << r;
}

// Bitwise: raw log-probabilities of a sample, and those of a score of its token.
TEST_P(SamplingTest, RawSampleAndScoreAgreeToTheBit) {
  std::mt19937 random(7);
  std::vector<Request> requests;
  for (int r = 0; r < 6; ++r) {
    Request request = RandomRequest(4000, r, random);
    request.allowed.clear();  // with bans, they may leave nothing
    request.spec.logprob_mode = LogprobMode::kRaw;
    requests.push_back(request);
  }
  const std::vector<Result> sampled = SampleAll(requests);
  std::vector<int32_t> targets;
  for (const Result& result : sampled) targets.push_back(result.token);
  for (Request& request : requests) request.spec.temperature = 1.0f;
  const std::vector<Result> scored = ScoreAll(requests, targets);
  for (size_t r = 0; r < requests.size(); ++r) {
    EXPECT_TRUE(SameBits(sampled[r], scored[r])) << Describe(requests[r]);
  }
}

}  // namespace
}  // namespace dorad::kernels
