// Samples or scores one row. Internal to kernels/sampling.
#pragma once

#include "kernels/sampling/adjust.cuh"
#include "kernels/sampling/draw.cuh"
#include "kernels/sampling/select.cuh"
#include "kernels/sampling/wanted.cuh"

namespace dorad::kernels {

static_assert(kMostListed == kListed && kMostVocabulary == kMostChunks * kChunk);

// Replaces x by z.
template <typename Place>
__device__ inline void Temper(const Row<Place>& row, const Tempered& tempered) {
  for (int chunk = row.warp; chunk < row.own; chunk += row.warps) {
    float2* at = reinterpret_cast<float2*>(Share(row) + chunk * kChunk) + row.lane;
#pragma unroll 2
    for (int i = 0; i < kPairs; ++i) {
      const float2 v = at[i * kWarp];
      at[i * kWarp] = {tempered.Divide(v.x - tempered.maximum),
                       tempered.Divide(v.y - tempered.maximum)};
    }
  }
}

// Replaces x by z, also in GroupMax, and banned logits by -inf.
template <typename Place, typename A>
__device__ void Process(const Row<Place>& row, const Wanted& wanted, const A& adjuster,
                        const Tempered& tempered) {
  if (!tempered.identity) {
    Temper(row, tempered);
    for (int chunk = row.warp; chunk < row.own; chunk += row.warps) {
      GroupMax(row, chunk) = tempered(GroupMax(row, chunk));
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < adjuster.NumBanned(wanted); i += blockDim.x) {
    const int32_t id = adjuster.Ban(wanted, i);
    const int at = id - row.IdAt(0);
    if (id < row.vocabulary && at >= 0 && at < row.own * kChunk) Share(row)[at] = -Infinity();
  }
  __syncthreads();
}

// The first block's final outputs for rows without truncation: token, log-probabilities of token
// and chosen. token: the drawn one, else of no meaning. `maximum` is of z, `raw`: the temperature
// of raw ones.
template <typename Place, typename A>
__device__ void FinishFull(const Row<Place>& row, const Wanted& wanted, const A& adjuster,
                           const Tempered& tempered, float maximum, const Tempered& raw,
                           int32_t token, const Target& to) {
  RowShared<Place>* const s = Shared<Place>();
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
  RowShared<Place>* const s = Shared<Place>();
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

// Rows with adjustments, banned ids, top lists or truncation. For all blocks.
template <typename Place, typename A>
__device__ __noinline__ void RunGeneral(Row<Place>& row, const Wanted& wanted, const A& adjuster,
                                        Tempered& tempered, const Tempered& raw, const Target& to) {
  RowShared<Place>* const s = Shared<Place>();
  if (wanted.raw) {
    if (!raw.identity) {
      Temper(row, raw);
      __syncthreads();
    }
    SumExp(row, raw.Maximum(), s->raw_sums);
    if (wanted.top_logprobs > 0) {
      ListFirst(row, raw.Maximum(), wanted.top_logprobs);
      if (row.rank == 0) {
        if (row.warp == 0) {
          const double total = Total(row, s->raw_sums);
          if (row.lane == 0) s->raw_log_total = log(total);
        }
        __syncthreads();
        WriteTop(row, wanted, to, row.vocabulary, raw.Maximum(), s->raw_log_total, true);
      }
    }
    __syncthreads();
    if (!raw.identity) {
      for (int chunk = row.warp; chunk < row.own; chunk += row.warps) LoadChunk(row, chunk);
      __syncthreads();
    }
  }
  float maximum = tempered.Maximum();
  if constexpr (A::kPossible) {
    if (adjuster.on) {
      AdjustShare(row, adjuster);
      const float adjusted_maximum = RowMax(row, false);
      if (!(adjusted_maximum > -Infinity() && adjusted_maximum < Infinity())) {
        if (row.rank == 0) WriteUnusable(wanted, to);
        return;
      }
      tempered = Tempered(adjusted_maximum, wanted.temperature);
      maximum = tempered.Maximum();
    }
  }
  const bool has_bans = adjuster.NumBanned(wanted) > 0;
  if (!tempered.identity || has_bans) Process(row, wanted, adjuster, tempered);
  if (has_bans) {
    maximum = RowMax(row, false);
    if (!(maximum > -Infinity())) {
      if (row.rank == 0) WriteUnusable(wanted, to);
      return;
    }
  }

  if (!wanted.truncated) {
    if (wanted.greedy) {
      FindFirst(row, maximum);
    } else {
      SumExp(row, maximum, s->sums);
    }
    const bool list = wanted.top_logprobs > 0 && !wanted.greedy && !wanted.raw;
    if (list) ListFirst(row, maximum, wanted.top_logprobs);
    Place::Sync();
    if (list && row.rank == 0) {
      if (row.warp == 0) {
        const double total = Total(row, s->sums);
        if (row.lane == 0) s->log_total = log(total);
      }
      __syncthreads();
      WriteTop(row, wanted, to, row.vocabulary, maximum, s->log_total, wanted.score);
      __syncthreads();  // the noise overwrites the list
    }
    int32_t token = -1;
    if (wanted.Draws()) {
      FillNoise(row, wanted.noise);
      __syncthreads();
      token =
          Draw(row, wanted.noise, Tempered(maximum, 1.0f), maximum, RoughTotal(row, s->sums), 0);
    }
    if (row.rank != 0) return;
    FinishFull(row, wanted, adjuster, tempered, maximum, raw, token, to);
    WriteChosen(row, wanted, adjuster, tempered, maximum, raw, nullptr);
    if (wanted.greedy && wanted.processed) {
      for (int i = threadIdx.x; i < wanted.top_logprobs; i += blockDim.x) {
        to.top_ids[i] = i == 0 ? s->token : -1;
        to.top_logprobs[i] = i == 0 ? 0.0f : -Infinity();
      }
    }
    return;
  }

  const bool mass_of_all = wanted.top_p < 1.0f && wanted.top_k == 0;
  if (mass_of_all) SumExp(row, maximum, s->sums);
  CountByDistance(row, maximum);
  if (row.rank == 0) {
    BinRule rule;
    rule.last = BinOf(87.3f);  // beyond it weights are 0
    if (wanted.top_k > 0) {
      rule.count = static_cast<uint32_t>(wanted.top_k);
    } else {
      rule.count = ~0u;
      if (mass_of_all) {
        if (row.warp == 0) {
          const double total = Total(row, s->sums);
          if (row.lane == 0) s->total = total;
        }
        __syncthreads();
        rule.by_mass = true;
        rule.mass = static_cast<double>(wanted.top_p) * s->total;
        // The candidates beyond this bound weigh less than 1 - top_p together, even if they were
        // the whole vocabulary (halved against rounding).
        const double least = 0.5 * (1.0 - static_cast<double>(wanted.top_p)) * s->total /
                             static_cast<double>(row.vocabulary);
        rule.last = min(rule.last, BinOf(static_cast<float>(fmax(-log(least), 0.0)) + 1e-3f));
      }
      if (wanted.min_p > 0.0f) rule.last = min(rule.last, BinOf(-logf(0.5f * wanted.min_p)));
    }
    PickBin(row, rule);
  }
  Place::Sync();
  const int count = s->picked_count;
  const bool list = count <= kListed;
  Kept kept;
  if (list) {
    const int bin = s->picked_bin;
    Gather(row, [&](float z, int) { return BinOf(maximum - z) <= bin; });
    Place::Sync();
    if (row.rank != 0) return;
    kept = DrawFromList(row, wanted, maximum, count, s->total);
  } else {
    kept = DrawFromMany(row, wanted, maximum);
    if (wanted.processed && wanted.top_logprobs > 0) {
      ListFirst(row, maximum, wanted.top_logprobs);
    }
    if (row.rank != 0) return;
  }
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
    int present = list ? s->num_kept : 0;
    if (!list) {
      while (present < min(wanted.top_logprobs, row.vocabulary) && s->list[present] >= kept.last) {
        ++present;
      }
    }
    WriteTop(row, wanted, to, present, maximum, kept.log_total, true);
  }
  WriteChosen(row, wanted, adjuster, tempered, maximum, raw, &kept);
}

// The whole of it. For all blocks of the row; `memory`: of this one.
template <typename Place, typename A>
__device__ __forceinline__ void SampleRow(const Launch& p, int index,
                                          const typename Place::Memory& memory) {
  Row<Place> row;
  static_cast<typename Place::Memory&>(row) = memory;
  row.x = p.logits + index * p.logits_ld;
  row.vocabulary = p.vocabulary;
  row.rank = Place::Rank();
  row.chunks = (p.vocabulary + kChunk - 1) / kChunk;
  row.share = (row.chunks + Place::kBlocks - 1) / Place::kBlocks;
  row.first = row.rank * row.share;
  row.own = max(min(row.share, row.chunks - row.first), 0);
  row.lane = threadIdx.x % kWarp;
  row.warp = threadIdx.x / kWarp;
  row.warps = blockDim.x / kWarp;
  Place::StartLoad(row);

  Wanted wanted(p, index);
  const bool simple = wanted.num_banned == 0 && wanted.top_logprobs == 0 && !wanted.truncated &&
                      !A::Concerns(p, index);
  RowShared<Place>* const s = Shared<Place>();
  if (threadIdx.x == 0) s->first_id = ~0u;
  if (!simple) {
    for (int i = threadIdx.x; i < kBins; i += blockDim.x) s->counts[i] = 0;
  } else if (wanted.Draws()) {
    FillNoise(row, wanted.noise);
  }
  // All blocks have started, and the first one may be written to.
  Place::Sync();

  const float maximum = RowMax(row, true);
  const Target to(p.out, index, p.max_top);
  if (!(maximum > -Infinity() && maximum < Infinity())) {
    if (row.rank == 0) WriteUnusable(wanted, to);
    return;
  }
  const Tempered tempered(maximum, wanted.temperature);
  if (!simple) {
    // Copies, so that the other rows' values can stay in registers.
    Row<Place> general = row;
    const Wanted all = wanted;
    const A adjuster(p, index);
    Tempered copy = tempered;
    RunGeneral(general, all, adjuster, copy, Tempered(maximum, wanted.raw_temperature), to);
    return;
  }
  if (wanted.raw_temperature != 1.0f) {  // what is sampled from
    wanted.raw = false;
    wanted.processed = true;
  }
  if (wanted.greedy) FindFirst(row, maximum);
  if (tempered.identity) {
    if (wanted.raw) SumExp(row, maximum, s->raw_sums);
    if (!wanted.greedy && !wanted.raw) SumExp(row, maximum, s->sums);
  } else if (wanted.raw) {
    SumExpTempered<true>(row, tempered);
  } else {
    SumExpTempered<false>(row, tempered);
  }
  Place::Sync();
  int32_t token = -1;
  if (wanted.Draws()) {
    // At temperature 1 the raw sums are the sums.
    const float* const sums = tempered.identity && wanted.raw ? s->raw_sums : s->sums;
    token = Draw(row, wanted.noise, tempered, tempered.Maximum(), RoughTotal(row, sums), 0);
  }
  if (row.rank != 0) return;
  const Tempered raw(maximum, 1.0f);
  FinishFull(row, wanted, Unadjusted(), tempered, tempered.Maximum(), raw, token, to);
  if (wanted.num_chosen > 0) {
    WriteChosen(row, wanted, Unadjusted(), tempered, tempered.Maximum(), raw, nullptr);
  }
}

}  // namespace dorad::kernels
