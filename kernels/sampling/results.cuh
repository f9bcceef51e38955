// The results of a row beside top lists. Internal to kernels/sampling.
#pragma once

#include <cstdint>

#include "kernels/sampling/adjust.cuh"
#include "kernels/sampling/draw.cuh"
#include "kernels/sampling/wanted.cuh"

namespace dorad::kernels {

// The first block's final outputs for rows without truncation: token, log-probabilities of token
// and chosen. token: the drawn one, else of no meaning. `maximum` is of z, `raw`: the temperature
// of raw ones.
template <typename Place, typename A>
__device__ void FinishFull(const Row<Place>& row, const Wanted& wanted, const A& adjuster,
                           const Tempered& tempered, float maximum, const Tempered& raw,
                           int32_t token, const Target& to) {
  auto* const s = Shared<Place>();
  if (row.warp == 0) {
    if (wanted.score) token = wanted.target;
    if (wanted.greedy) token = static_cast<int32_t>(s->first_id);
    if (row.lane == 0) s->token = token;
    if (wanted.score || (wanted.processed && !wanted.greedy)) {
      const double total = Total(row, s->sums);
      if (row.lane == 0) s->log_total = log(total);
    }
    if (wanted.raw) {
      const double raw_total = Total(row, s->raw_sums);
      if (row.lane == 0) s->raw_log_total = log(raw_total);
    }
    __syncwarp();
    [[maybe_unused]] float adjusted = 0.0f;
    if constexpr (A::kPossible) {
      if (wanted.processed) adjusted = AdjustedByWarp(row, adjuster, row.x[token], token);
    }
    if (row.lane == 0) {
      float logprob = 0.0f;
      if (wanted.raw) {
        logprob = LogProb(raw(row.x[token]), raw.Maximum(), s->raw_log_total);
      } else if (wanted.score || (wanted.processed && !wanted.greedy)) {
        const float x = token < 0 ? NotANumber() : A::kPossible ? adjusted : row.x[token];
        logprob = token < 0 ? NotANumber() : LogProb(tempered(x), maximum, s->log_total);
      }
      *to.token = token;
      *to.logprob = logprob;
      *to.finite = 1;
    }
  }
}

// Chosen ids; kept: the truncated distribution, or nullptr. For the first block.
template <typename Place, typename A>
__device__ void WriteChosen(const Row<Place>& row, const Wanted& wanted, const A& adjuster,
                            const Tempered& tempered, float maximum, const Tempered& raw,
                            const Kept* kept) {
  auto* const s = Shared<Place>();
  __syncthreads();
  for (int base = row.warp * kWarp; base < wanted.num_chosen; base += blockDim.x) {
    const int i = base + row.lane;
    const int32_t id = i < wanted.num_chosen ? wanted.chosen[i] : -1;
    const bool valid = id >= 0 && id < row.vocabulary;
    float x = valid ? row.x[id] : NotANumber();
    if constexpr (A::kPossible) {
      for (int lane = 0; lane < kWarp && adjuster.on && wanted.processed; ++lane) {
        const float adjusted =
            AdjustedByWarp(row, adjuster, __shfl_sync(~0u, x, lane), __shfl_sync(~0u, id, lane));
        if (row.lane == lane) x = adjusted;
      }
    }
    if (i >= wanted.num_chosen) continue;
    float logprob;
    if (!valid) {
      logprob = NotANumber();
    } else if (wanted.raw) {
      logprob = LogProb(raw(x), raw.Maximum(), s->raw_log_total);
    } else if (wanted.greedy) {
      logprob = id == s->token ? 0.0f : -Infinity();
    } else {
      const float z = Banned(wanted, adjuster, id) ? -Infinity() : tempered(x);
      const bool possible = kept == nullptr || Rank(z, id) >= kept->last;
      logprob = possible ? LogProb(z, maximum, s->log_total) : -Infinity();
    }
    wanted.chosen_logprobs[i] = logprob;
  }
}

// The top list of a greedy row: all probability on its token. For the first block.
template <typename Place>
__device__ inline void WritePoint(const Row<Place>&, const Wanted& wanted, const Target& to) {
  const int32_t token = Shared<Place>()->token;
  for (int i = threadIdx.x; i < wanted.top_logprobs; i += blockDim.x) {
    to.top_ids[i] = i == 0 ? token : -1;
    to.top_logprobs[i] = i == 0 ? 0.0f : -Infinity();
  }
}

// The first block's final outputs for truncated rows. listed: the list has all kept candidates;
// else only the first ones.
template <typename Place, typename A>
__device__ void FinishKept(const Row<Place>& row, const Wanted& wanted, const A& adjuster,
                           const Tempered& tempered, float maximum, const Tempered& raw,
                           const Kept& kept, bool listed, const Target& to) {
  auto* const s = Shared<Place>();
  if (threadIdx.x == 0) {
    s->log_total = kept.log_total;
    s->token = kept.token;
  }
  if (wanted.raw && row.warp == 0) {
    const double total = Total(row, s->raw_sums);
    if (row.lane == 0) s->raw_log_total = log(total);
  }
  __syncthreads();
  if (threadIdx.x < kWarp) {
    float x = row.x[kept.token];
    if constexpr (A::kPossible) {
      if (wanted.processed) x = AdjustedByWarp(row, adjuster, x, kept.token);
    }
    if (threadIdx.x == 0) {
      *to.token = kept.token;
      *to.logprob = wanted.raw         ? LogProb(raw(x), raw.Maximum(), s->raw_log_total)
                    : wanted.processed ? LogProb(tempered(x), maximum, kept.log_total)
                                       : 0.0f;
      *to.finite = 1;
    }
  }
  if (wanted.processed && wanted.top_logprobs > 0) {
    int present = listed ? s->num_kept : 0;
    if (!listed) {
      while (present < min(wanted.top_logprobs, row.vocabulary) && s->list[present] >= kept.last) {
        ++present;
      }
    }
    WriteTop(row, wanted, to, present, maximum, kept.log_total, true);
  }
  WriteChosen(row, wanted, adjuster, tempered, maximum, raw, &kept);
}

}  // namespace dorad::kernels
