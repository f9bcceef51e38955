// Requests as one batch on the device.
#pragma once

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

#include "kernels/sampling/sampling.h"
#include "tests/unit/kernels/device.h"
#include "tests/unit/kernels/sampling_requests.h"

namespace dorad::kernels {

// All requests as one batch; logits begin `shift` floats beyond an aligned address, and rows are
// `padding` floats longer than the vocabulary.
class Batch {
 public:
  Batch(const std::vector<Request>& requests, int shift, int padding)
      : vocabulary_(static_cast<int>(requests[0].logits.size())), requests_(requests) {
    const int64_t ld = vocabulary_ + padding;
    std::vector<float> logits(shift + requests.size() * ld, kNan);
    std::vector<int32_t> banned;
    std::vector<int32_t> chosen;
    std::vector<ConditionalBan> conditional;
    std::vector<LogitAdjustments> adjustments;
    std::vector<int32_t> allowed, newest;
    std::vector<LogitBias> biases;
    std::vector<TokenUse> uses;
    std::vector<SampleRowSpec> specs;
    // Appends to a list for the device; sets the range.
    const auto append = [](const auto& from, auto* to, int32_t* begin, int32_t* count) {
      *begin = static_cast<int32_t>(to->size());
      *count = static_cast<int32_t>(from.size());
      to->insert(to->end(), from.begin(), from.end());
    };
    for (size_t r = 0; r < requests.size(); ++r) {
      const Request& request = requests[r];
      std::copy(request.logits.begin(), request.logits.end(), logits.begin() + shift + r * ld);
      SampleRowSpec spec = request.spec;
      append(request.banned, &banned, &spec.banned_begin, &spec.banned_count);
      append(request.chosen, &chosen, &spec.chosen_begin, &spec.chosen_count);
      append(request.conditional, &conditional, &spec.conditional_begin, &spec.conditional_count);
      if (request.newest >= 0) {
        spec.newest = static_cast<int32_t>(newest.size());
        newest.push_back(request.newest);
      }
      if (request.adjusted) {
        spec.adjustments = static_cast<int32_t>(adjustments.size());
        LogitAdjustments how = request.how;
        append(request.allowed, &allowed, &how.allowed_begin, &how.allowed_count);
        append(request.biases, &biases, &how.bias_begin, &how.bias_count);
        append(request.uses, &uses, &how.uses_begin, &how.uses_count);
        adjustments.push_back(how);
      }
      specs.push_back(spec);
      begins_.push_back(spec.chosen_begin);
    }
    const size_t rows = requests.size();
    logits_ = std::make_unique<DeviceBuffer<float>>(logits);
    specs_ = std::make_unique<DeviceBuffer<SampleRowSpec>>(specs);
    banned_ = std::make_unique<DeviceBuffer<int32_t>>(banned);
    chosen_ = std::make_unique<DeviceBuffer<int32_t>>(chosen);
    conditional_ = std::make_unique<DeviceBuffer<ConditionalBan>>(conditional);
    adjustments_ = std::make_unique<DeviceBuffer<LogitAdjustments>>(adjustments);
    allowed_ = std::make_unique<DeviceBuffer<int32_t>>(allowed);
    newest_ = std::make_unique<DeviceBuffer<int32_t>>(newest);
    biases_ = std::make_unique<DeviceBuffer<LogitBias>>(biases);
    uses_ = std::make_unique<DeviceBuffer<TokenUse>>(uses);
    tokens_ = std::make_unique<DeviceBuffer<int32_t>>(rows);
    logprobs_ = std::make_unique<DeviceBuffer<float>>(rows);
    finite_ = std::make_unique<DeviceBuffer<uint8_t>>(rows);
    top_ids_ = std::make_unique<DeviceBuffer<int32_t>>(rows * kMaxTop);
    top_logprobs_ = std::make_unique<DeviceBuffer<float>>(rows * kMaxTop);
    chosen_logprobs_ = std::make_unique<DeviceBuffer<float>>(chosen.size());
    params_.logits = logits_->get() + shift;
    params_.specs = specs_->get();
    params_.banned = banned_->get();
    params_.conditional_bans = conditional_->get();
    params_.adjustments = adjustments_->get();
    params_.allowed_ids = allowed_->get();
    params_.newest = newest_->get();
    params_.biases = biases_->get();
    params_.uses = uses_->get();
    params_.chosen_ids = chosen_->get();
    params_.out = {tokens_->get(),  logprobs_->get(),     finite_->get(),
                   top_ids_->get(), top_logprobs_->get(), chosen_logprobs_->get()};
    params_.logits_ld = ld;
    params_.rows = static_cast<int32_t>(rows);
    params_.vocabulary = vocabulary_;
    params_.max_top = kMaxTop;
    params_.isa = tested_isa;
    size_t bytes = 0;
    EXPECT_EQ(SampleWorkspaceBytes(tested_isa, params_.rows, vocabulary_, &bytes), cudaSuccess);
    workspace_ = std::make_unique<DeviceBuffer<uint8_t>>(std::vector<uint8_t>(bytes));
    params_.workspace = workspace_->get();
    params_.workspace_bytes = bytes;
  }

  SampleParams& params() { return params_; }
  const DeviceBuffer<SampleRowSpec>& specs() const { return *specs_; }

  // After a run. Lists as long as wanted.
  std::vector<Result> Read(bool score = false) const {
    const auto tokens = tokens_->Read();
    const auto logprobs = logprobs_->Read();
    const auto finite = finite_->Read();
    const auto top_ids = top_ids_->Read();
    const auto top_logprobs = top_logprobs_->Read();
    const auto chosen = chosen_logprobs_->Read();
    std::vector<Result> results(tokens.size());
    for (size_t r = 0; r < results.size(); ++r) {
      Result& result = results[r];
      result.token = tokens[r];
      result.logprob = logprobs[r];
      result.finite = finite[r] != 0;
      if (!score && requests_[r].spec.logprob_mode == LogprobMode::kNone) continue;
      const size_t top = requests_[r].spec.top_logprobs;
      result.top_ids.assign(top_ids.begin() + r * kMaxTop, top_ids.begin() + r * kMaxTop + top);
      result.top_logprobs.assign(top_logprobs.begin() + r * kMaxTop,
                                 top_logprobs.begin() + r * kMaxTop + top);
      result.chosen_logprobs.assign(chosen.begin() + begins_[r],
                                    chosen.begin() + begins_[r] + requests_[r].chosen.size());
    }
    return results;
  }

 private:
  const int vocabulary_;
  const std::vector<Request> requests_;
  std::vector<int32_t> begins_;
  SampleParams params_;
  std::unique_ptr<DeviceBuffer<float>> logits_, logprobs_, top_logprobs_, chosen_logprobs_;
  std::unique_ptr<DeviceBuffer<SampleRowSpec>> specs_;
  std::unique_ptr<DeviceBuffer<int32_t>> banned_, chosen_, tokens_, top_ids_, allowed_, newest_;
  std::unique_ptr<DeviceBuffer<ConditionalBan>> conditional_;
  std::unique_ptr<DeviceBuffer<LogitAdjustments>> adjustments_;
  std::unique_ptr<DeviceBuffer<LogitBias>> biases_;
  std::unique_ptr<DeviceBuffer<TokenUse>> uses_;
  std::unique_ptr<DeviceBuffer<uint8_t>> finite_, workspace_;
};

inline std::vector<Result> SampleAll(const std::vector<Request>& requests, int shift = 0,
                                     int padding = 0) {
  Batch batch(requests, shift, padding);
  EXPECT_EQ(Sample(batch.params(), nullptr), cudaSuccess);
  return batch.Read();
}
inline Result SampleOne(const Request& request) { return SampleAll({request})[0]; }

inline std::vector<Result> ScoreAll(const std::vector<Request>& requests,
                                    const std::vector<int32_t>& targets) {
  Batch batch(requests, 0, 0);
  const std::vector<SampleRowSpec> specs = batch.specs().Read();
  std::vector<ScoreRowSpec> scores;
  for (size_t r = 0; r < requests.size(); ++r) {
    scores.push_back({targets[r], specs[r].temperature, specs[r].top_logprobs,
                      specs[r].chosen_begin, specs[r].chosen_count});
  }
  const DeviceBuffer<ScoreRowSpec> device_scores(scores);
  const SampleParams& p = batch.params();
  ScoreParams params;
  params.logits = p.logits;
  params.specs = device_scores.get();
  params.chosen_ids = p.chosen_ids;
  params.out = p.out;
  params.logits_ld = p.logits_ld;
  params.rows = p.rows;
  params.vocabulary = p.vocabulary;
  params.max_top = p.max_top;
  params.isa = p.isa;
  params.workspace = p.workspace;
  params.workspace_bytes = p.workspace_bytes;
  EXPECT_EQ(Score(params, nullptr), cudaSuccess);
  return batch.Read(true);
}

}  // namespace dorad::kernels
