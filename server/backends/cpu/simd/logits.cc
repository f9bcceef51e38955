#include "server/backends/cpu/simd/logits.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "server/backends/cpu/ops/noise.h"
#include "server/backends/cpu/simd/kernels.h"
#include "server/platform/check.h"

namespace dorad::ops::cpu {
namespace {

constexpr float kInfinity = __builtin_inff();

}  // namespace

LogitRow::LogitRow(absl::Span<const float> logits, float temperature,
                   absl::Span<const int32_t> banned)
    : logits_(logits) {
  const Kernels& kernels = ActiveKernels();
  const int64_t count = size();
  maxima_.resize((count + kLogitChunk - 1) / kLogitChunk * kChunkGroups);
  LogitStats stats = kernels.group_max(logits.data(), count, maxima_.data());
  usable_ = stats.finite && stats.maximum > -kInfinity;
  if (usable_ && (temperature != 1.0f || !banned.empty())) {
    own_.resize(count);
    if (temperature != 1.0f) {
      // Subtracts the maximum first, so that a small temperature cannot overflow.
      kernels.divide(logits.data(), count, stats.maximum, temperature, own_.data());
    } else {
      std::copy(logits.begin(), logits.end(), own_.begin());
    }
    for (int32_t id : banned) {
      DORAD_CHECK(id >= 0 && id < count);
      own_[id] = -kInfinity;
    }
    logits_ = own_;
    stats = kernels.group_max(own_.data(), count, maxima_.data());
    usable_ = stats.maximum > -kInfinity;
  }
  maximum_ = stats.maximum;
}

int32_t LogitRow::ArgMax() const {
  const auto group = std::find(maxima_.begin(), maxima_.end(), maximum_);
  DORAD_CHECK(group != maxima_.end());
  const auto begin = logits_.begin() + (group - maxima_.begin()) / kChunkGroups * kLogitChunk;
  return static_cast<int32_t>(std::find(begin, logits_.end(), maximum_) - logits_.begin());
}

void LogitRow::SumExp() {
  total_ = 0.0;
  // By chunks, each relative to its own maximum: a GPU's do not know the row's.
  auto groups = maxima_.begin();
  for (int64_t begin = 0; begin < size(); begin += kLogitChunk, groups += kChunkGroups) {
    const float chunk_max = *std::max_element(groups, groups + kChunkGroups);
    if (!(chunk_max > -kInfinity)) continue;
    const double sum = ActiveKernels().sum_exp(
        logits_.data() + begin, std::min(kLogitChunk, size() - begin), chunk_max, nullptr);
    total_ += static_cast<float>(
        sum * std::exp(static_cast<double>(chunk_max) - static_cast<double>(maximum_)));
  }
  log_total_ = std::log(total_);
}

float LogitRow::LogProb(float logit) const {
  return static_cast<float>(static_cast<double>(logit) - static_cast<double>(maximum_) -
                            log_total_);
}

std::vector<Candidate> LogitRow::AtLeast(float bound) const {
  std::vector<Candidate> found;
  for (size_t group = 0; group < maxima_.size(); ++group) {
    if (!(maxima_[group] >= bound)) continue;
    for (int64_t member = 0; member < kGroupSize; ++member) {
      const int64_t id = IdOf(static_cast<int64_t>(group), member);
      if (id >= size()) break;
      if (logits_[id] >= bound) found.push_back({logits_[id], static_cast<int32_t>(id)});
    }
  }
  return found;
}

std::vector<Candidate> LogitRow::Top(int64_t k) const {
  k = std::min(k, size());
  if (k <= 0) return {};
  // At least k logits reach the k-th largest of the groups' maxima.
  float bound = -kInfinity;
  if (k <= static_cast<int64_t>(maxima_.size())) {
    std::vector<float> maxima = maxima_;
    std::nth_element(maxima.begin(), maxima.begin() + (k - 1), maxima.end(), std::greater<>());
    bound = maxima[k - 1];
  }
  std::vector<Candidate> found = AtLeast(bound);
  std::nth_element(found.begin(), found.begin() + (k - 1), found.end(), Before);
  found.resize(k);
  std::sort(found.begin(), found.end(), Before);
  return found;
}

}  // namespace dorad::ops::cpu
