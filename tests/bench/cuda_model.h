// What the benches of whole models share, beside their shapes: a batch that decodes, quantiles.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "server/engine/kv_needs.h"
#include "server/engine/model_runner.h"
#include "server/model/kv_groups.h"

namespace dorad::bench {

// Ends the program unless all is well.
template <typename T>
T Must(absl::StatusOr<T> value) {
  if (!value.ok()) {
    std::fprintf(stderr, "%s\n", value.status().ToString().c_str());
    std::exit(1);
  }
  return *std::move(value);
}

inline void Must(const absl::Status& status) {
  Must(status.ok() ? absl::StatusOr<int>(0) : absl::StatusOr<int>(status));
}

// values: not empty. share: 0.5 for the median.
inline double Quantile(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  return values[std::lround(share * static_cast<double>(values.size() - 1))];
}

// Pages of a sequence of so many tokens, all kept.
inline int64_t PagesOf(const model::ModelConfig& model, int64_t tokens) {
  return engine::BlocksOf(tokens) * static_cast<int64_t>(model::KvGroups(model).windows.size());
}

// A step in which every sequence of a batch decodes one token behind a context.
class DecodeStep {
 public:
  // adapter: of all sequences, borrowed; nullptr: base.
  DecodeStep(int64_t batch, int64_t context, const engine::ModelRunner& runner,
             const adapter::LoadedAdapter* adapter) {
    const auto groups = static_cast<int64_t>(runner.windows().size());
    rows_.resize(static_cast<size_t>(batch));
    int32_t page = 0;
    for (int64_t i = 0; i < batch; ++i) {
      Row& row = rows_[i];
      row.tokens = {static_cast<engine::TokenId>(i * 7919 % 151936)};
      const int64_t pages = engine::BlocksOf(context + 1) * groups;
      for (int64_t p = 0; p < pages; ++p) row.pages.push_back(page++);
      for (int64_t p = 0; p < runner.state_pages(); ++p) row.state.push_back(page++);
      row.want.sampling.temperature = 0.0f;
      row.want.position = context + 1;
      engine::StepSequence sequence;
      sequence.tokens = row.tokens;
      sequence.position = context;
      sequence.pages = row.pages;
      sequence.state = row.state;
      sequence.samples = {&row.want, 1};
      sequence.adapter = adapter;
      sequences_.push_back(sequence);
    }
  }
  DecodeStep(const DecodeStep&) = delete;
  DecodeStep& operator=(const DecodeStep&) = delete;

  // Of a step behind one that has not finished, whose tokens it takes; else one of its own.
  absl::Span<const engine::StepSequence> sequences(bool behind) {
    for (size_t i = 0; i < sequences_.size(); ++i) {
      sequences_[i].follows = behind ? static_cast<int32_t>(i) : -1;
    }
    return sequences_;
  }

 private:
  struct Row {
    std::vector<engine::TokenId> tokens;
    std::vector<int32_t> pages, state;
    engine::SampleWant want;
  };
  std::vector<Row> rows_;
  std::vector<engine::StepSequence> sequences_;
};

}  // namespace dorad::bench
