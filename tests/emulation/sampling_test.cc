// Plain rows (kernels/sampling/plain.cuh) in the emulator, against the CPU's semantics.
#include "kernels/sampling/sampling.h"

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/sampling/launch.h"
#include "tests/emulation/emulator.h"
#include "tests/unit/kernels/sampling_requests.h"

namespace dorad::kernels {
namespace {

constexpr int32_t kUntouched = -7;

// Requests as one launch; logits begin `shift` floats beyond an aligned address.
class Rows {
 public:
  Rows(const std::vector<Request>& requests, int shift)
      : requests_(requests), vocabulary_(static_cast<int32_t>(requests[0].logits.size())) {
    const size_t rows = requests.size();
    logits_.assign(shift, kNan);
    for (const Request& request : requests) {
      SampleRowSpec& spec = specs_.emplace_back(request.spec);
      spec.chosen_begin = static_cast<int32_t>(chosen_.size());
      spec.chosen_count = static_cast<int32_t>(request.chosen.size());
      spec.banned_count = static_cast<int32_t>(request.banned.size());
      chosen_.insert(chosen_.end(), request.chosen.begin(), request.chosen.end());
      logits_.insert(logits_.end(), request.logits.begin(), request.logits.end());
    }
    tokens_.assign(rows, kUntouched);
    logprobs_.assign(rows, kNan);
    finite_.assign(rows, 2);
    top_ids_.assign(rows * kMaxTop, kUntouched);
    top_logprobs_.assign(rows * kMaxTop, kNan);
    chosen_logprobs_.assign(chosen_.size(), kNan);
    record_floats_ = PlainBytes(1, vocabulary_) / sizeof(float);
    records_.assign(rows * record_floats_ + 32, 0.0f);
    launch_.logits = logits_.data() + shift;
    launch_.logits_ld = launch_.vocabulary = vocabulary_;
    launch_.samples = specs_.data();
    launch_.banned = banned_;
    launch_.chosen_ids = chosen_.data();
    launch_.max_top = kMaxTop;
    launch_.out = {tokens_.data(),  logprobs_.data(),     finite_.data(),
                   top_ids_.data(), top_logprobs_.data(), chosen_logprobs_.data()};
    const auto at = reinterpret_cast<uintptr_t>(records_.data());
    launch_.records = records_.data() + (128 - at % 128) % 128 / sizeof(float);
  }

  void Run(bool lists, uint32_t seed) {
    emulation::Emulator emulator(seed);
    emulator.device.processors = 8;
    ASSERT_EQ(SamplePlain(launch_, static_cast<int>(requests_.size()), lists, nullptr),
              cudaSuccess);
    emulator.Run();
    for (size_t r = 0; r < requests_.size(); ++r) EXPECT_EQ(Word(r, 0), 0u) << "blocks that came";
  }
  bool IsHard(size_t r) const { return NeedsList(specs_[r], vocabulary_) && Word(r, 1) != 0; }
  bool IsUntouched(size_t r) const { return tokens_[r] == kUntouched && finite_[r] == 2; }
  Result At(size_t r) const {
    Result result;
    result.token = tokens_[r];
    result.logprob = logprobs_[r];
    result.finite = finite_[r] != 0;
    if (specs_[r].logprob_mode == LogprobMode::kNone) return result;
    const auto part = [](const auto& all, size_t begin, size_t count) {
      return std::vector(all.begin() + static_cast<int64_t>(begin),
                         all.begin() + static_cast<int64_t>(begin + count));
    };
    const auto top = static_cast<size_t>(specs_[r].top_logprobs);
    result.top_ids = part(top_ids_, r * kMaxTop, top);
    result.top_logprobs = part(top_logprobs_, r * kMaxTop, top);
    result.chosen_logprobs = part(chosen_logprobs_, static_cast<size_t>(specs_[r].chosen_begin),
                                  requests_[r].chosen.size());
    return result;
  }

 private:
  uint32_t Word(size_t r, int i) const {
    return __float_as_uint(launch_.records[r * record_floats_ + static_cast<size_t>(i)]);
  }

  const std::vector<Request> requests_;
  const int32_t vocabulary_;
  size_t record_floats_ = 0;
  std::vector<SampleRowSpec> specs_;
  std::vector<int32_t> chosen_, tokens_, top_ids_;
  std::vector<float> logits_, logprobs_, top_logprobs_, chosen_logprobs_, records_;
  std::vector<uint8_t> finite_;
  int32_t banned_[8] = {};
  Launch launch_ = {};
};

std::vector<Request> PlainRequests(int vocabulary, int rows, std::mt19937& random) {
  std::vector<Request> requests;
  for (int r = 0; r < rows; ++r) {
    Request request = RandomRequest(vocabulary, r, random);
    request.banned.clear();
    request.conditional.clear();
    request.adjusted = false;
    for (int32_t& id : request.chosen) id %= vocabulary;
    requests.push_back(request);
  }
  return requests;
}

TEST(PlainRowsTest, GiveTheCpusResults) {
  std::mt19937 random(1);
  int hard = 0;
  int easy = 0;
  // Less than a chunk, a chunk's edge, several warps, several blocks of a row; a row that is not
  // aligned.
  for (const int vocabulary : {5, 64, 1025, 5000, 20001}) {
    const std::vector<Request> requests = PlainRequests(vocabulary, 16, random);
    Rows rows(requests, vocabulary == 5000 ? 1 : 0);
    rows.Run(/*lists=*/true, static_cast<uint32_t>(vocabulary));
    std::vector<Request> done;
    std::vector<Result> results;
    for (size_t r = 0; r < requests.size(); ++r) {
      if (rows.IsHard(r)) {
        ++hard;
        continue;
      }
      easy += NeedsList(requests[r].spec, vocabulary);
      done.push_back(requests[r]);
      results.push_back(rows.At(r));
    }
    ExpectAsReference(done, results);
  }
  EXPECT_GT(hard, 0) << "some lists are too long";
  EXPECT_GT(easy, 20);
}

TEST(PlainRowsTest, WithoutListsOtherRowsAreSkipped) {
  std::mt19937 random(2);
  std::vector<Request> requests = PlainRequests(3000, 24, random);
  for (size_t r = 0; r < requests.size(); r += 2) {
    SampleRowSpec& spec = requests[r].spec;
    spec.top_k = spec.top_logprobs = 0;
    spec.top_p = 1.0f;
    spec.min_p = 0.0f;
  }
  requests[0].banned = {1};
  Rows rows(requests, 0);
  rows.Run(/*lists=*/false, 2);
  int done = 0;
  for (size_t r = 0; r < requests.size(); ++r) {
    const bool skipped = r == 0 || NeedsList(requests[r].spec, 3000);
    EXPECT_EQ(rows.IsUntouched(r), skipped) << r;
    if (skipped) continue;
    ++done;
    ExpectAsReference({requests[r]}, {rows.At(r)});
  }
  EXPECT_GT(done, 10);
}

TEST(PlainRowsTest, ATopListLeavesTheOtherResultsAlone) {
  std::mt19937 random(3);
  std::vector<Request> requests;
  for (Request& request : PlainRequests(2100, 24, random)) {
    request.spec.top_k = 0;
    request.spec.top_p = 1.0f;
    request.spec.min_p = 0.0f;
    if (request.spec.logprob_mode == LogprobMode::kNone) continue;
    request.spec.top_logprobs = 0;
    requests.push_back(request);
    request.spec.top_logprobs = 3;
    requests.push_back(request);
  }
  Rows rows(requests, 0);
  rows.Run(/*lists=*/true, 3);
  for (size_t r = 0; r < requests.size(); r += 2) {
    if (rows.IsHard(r + 1)) continue;
    Result listed = rows.At(r + 1);
    listed.top_ids.clear();
    listed.top_logprobs.clear();
    EXPECT_TRUE(SameBits(rows.At(r), listed)) << Describe(requests[r]);
  }
}

TEST(PlainRowsTest, RowsThatCannotBeSampledAreFlagged) {
  std::mt19937 random(4);
  std::vector<Request> requests = PlainRequests(1500, 6, random);
  for (Request& request : requests) request.spec.temperature = 1.0f;
  requests[0].logits[1499] = kNan;
  requests[1].logits[0] = kInfinity;
  std::fill(requests[2].logits.begin(), requests[2].logits.end(), -kInfinity);
  Rows rows(requests, 0);
  rows.Run(/*lists=*/true, 4);
  for (size_t r = 0; r < requests.size(); ++r) {
    if (rows.IsHard(r)) continue;
    EXPECT_EQ(rows.At(r).finite, r > 2) << r;
  }
}

}  // namespace
}  // namespace dorad::kernels
