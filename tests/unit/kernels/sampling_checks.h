// What holds of sampling on every device, checked with given requests.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "tests/unit/kernels/sampling_batch.h"

namespace dorad::kernels {

// simple: plain requests that need no list, of more than 8 tokens.
inline void ExpectRowsOfAKindAlone(const std::vector<Request>& simple) {
  std::vector<Request> other = simple;
  for (Request& request : other) request.banned = {7, 8};
  std::vector<Request> listed = simple;
  for (Request& request : listed) {
    request.spec.temperature = 0.8f;
    request.spec.top_k = 5;
  }
  struct Call {
    SampleRows rows_are;
    const std::vector<Request>& requests;
    bool is_done;  // rows that are not as said are skipped
  };
  for (const Call& call : {Call{SampleRows::kPlain, simple, true},
                           {SampleRows::kPlain, listed, false},
                           {SampleRows::kPlain, other, false},
                           {SampleRows::kOther, simple, false},
                           {SampleRows::kOther, listed, false},
                           {SampleRows::kOther, other, true}}) {
    Batch batch(call.requests, 0, 0);
    batch.params().rows_are = call.rows_are;
    EXPECT_EQ(Sample(batch.params(), nullptr), cudaSuccess);
    const std::vector<Result> results = batch.Read();
    if (call.is_done) {
      ExpectAsReference(call.requests, results);
    } else {
      for (const Result& result : results) EXPECT_EQ(result.token, -1);  // as the buffer was
    }
  }
}

// Calls one after the other, of so many of the first requests.
inline void ExpectCallsShareAWorkspace(const std::vector<Request>& requests,
                                       std::initializer_list<int> calls) {
  Batch all(requests, 0, 0);
  for (const int rows : calls) {
    const std::vector<Request> some(requests.begin(), requests.begin() + rows);
    Batch batch(some, 0, 0);
    batch.params().workspace = all.params().workspace;
    batch.params().workspace_bytes = all.params().workspace_bytes;
    EXPECT_EQ(Sample(batch.params(), nullptr), cudaSuccess);
    ExpectAsReference(some, batch.Read());
  }
}

// simple: plain requests that need no list, with log-probabilities.
inline void ExpectATopListLeavesTheRestAlone(const std::vector<Request>& simple) {
  std::vector<Request> listed = simple;
  for (Request& request : listed) {
    ASSERT_FALSE(NeedsList(request.spec, static_cast<int32_t>(request.logits.size())));
    request.spec.top_logprobs = 3;
  }
  const std::vector<Result> without = SampleAll(simple);
  std::vector<Result> with = SampleAll(listed);
  for (size_t r = 0; r < simple.size(); ++r) {
    with[r].top_ids.clear();
    with[r].top_logprobs.clear();
    EXPECT_TRUE(SameBits(without[r], with[r])) << Describe(simple[r]);
  }
}

// Bitwise: raw log-probabilities of samples, and those of scores of their tokens.
inline void ExpectRawSampleAndScoreAgree(std::vector<Request> requests) {
  for (Request& request : requests) {
    request.allowed.clear();  // with bans, they may leave nothing
    request.spec.logprob_mode = LogprobMode::kRaw;
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

}  // namespace dorad::kernels
