// Both launches of sampling in the emulator, against the CPU's semantics.
#include "kernels/sampling/sampling.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <random>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/sampling/launch.h"
#include "tests/emulation/emulator.h"
#include "tests/unit/kernels/sampling_batch.h"
#include "tests/unit/kernels/sampling_checks.h"

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
DORAD_FOR_EACH_ISA(SamplingTest);

// After a call: whether the first launch left this row to the second one.
bool IsHard(Batch* batch, size_t row) {
  const SampleParams& p = batch->params();
  const auto* const record = static_cast<const unsigned char*>(p.workspace);
  uint32_t words[2];  // of PlainRecord
  std::memcpy(words, record + row * PlainBytes(1, p.vocabulary), sizeof(words));
  return words[1] != 0;
}

TEST_P(SamplingTest, MixedRowsGiveTheCpusResults) {
  std::mt19937 random(1);
  int listed_at_once = 0;
  // Less than a chunk, a chunk's edges, fewer chunks than blocks of a row, several warps and
  // blocks; rows that are aligned and rows that are not.
  for (const auto& [vocabulary, padding] : {std::pair{5, 3}, {1024, 0}, {1025, 3}, {20001, 0}}) {
    std::vector<Request> requests;
    for (int r = 0; r < 16; ++r) {
      requests.push_back(RandomRequest(vocabulary, r, random));
      if (r % 3 == 0) MakePlain(&requests.back());
    }
    Batch batch(requests, /*shift=*/padding, padding);
    ASSERT_EQ(Sample(batch.params(), nullptr), cudaSuccess);
    ExpectAsReference(requests, batch.Read());
    if (HasFailure()) return;
    for (size_t r = 0; r < requests.size(); r += 3) {
      listed_at_once += NeedsList(requests[r].spec, vocabulary) && !IsHard(&batch, r);
    }
  }
  EXPECT_GT(listed_at_once, 10) << "by the first launch";
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
  Batch batch(requests, 0, 0);
  ASSERT_EQ(Sample(batch.params(), nullptr), cudaSuccess);
  ExpectAsReference(requests, batch.Read());
  for (size_t r = 0; r < requests.size(); ++r) EXPECT_TRUE(IsHard(&batch, r)) << r;
}

TEST_P(SamplingTest, RowsOfAKindAloneGiveTheSame) {
  std::mt19937 random(3);
  std::vector<Request> requests;
  for (int r = 0; r < 8; ++r) {
    requests.push_back(RandomRequest(3000, r, random));
    MakeSimple(&requests.back());
  }
  ExpectRowsOfAKindAlone(requests);
}

// The plain rows' counters are zero between calls, of any number of rows.
TEST_P(SamplingTest, CallsOfOtherNumbersOfRowsShareAWorkspace) {
  std::mt19937 random(4);
  std::vector<Request> requests;
  for (int r = 0; r < 6; ++r) {
    requests.push_back(RandomRequest(9000, r, random));
    if (r % 2 != 0) MakeSimple(&requests.back());
  }
  requests[0].banned = {1};  // for the second launch
  ExpectCallsShareAWorkspace(requests, {6, 3, 5, 1, 6});
}

TEST_P(SamplingTest, ATopListLeavesTheOtherResultsAlone) {
  std::mt19937 random(5);
  std::vector<Request> requests;
  while (requests.size() < 6) {
    Request request = RandomRequest(2100, static_cast<int>(requests.size()), random);
    if (request.spec.logprob_mode == LogprobMode::kNone) continue;
    MakeSimple(&request);
    requests.push_back(request);
  }
  ExpectATopListLeavesTheRestAlone(requests);
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

TEST_P(SamplingTest, RawSampleAndScoreAgreeToTheBit) {
  std::mt19937 random(7);
  std::vector<Request> requests;
  for (int r = 0; r < 6; ++r) requests.push_back(RandomRequest(4000, r, random));
  ExpectRawSampleAndScoreAgree(requests);
}

}  // namespace
}  // namespace dorad::kernels
