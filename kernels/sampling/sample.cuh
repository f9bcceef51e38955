// Samples or scores one row that is not plain, or that plain.cuh found hard. Internal to
// kernels/sampling.
#pragma once

#include "kernels/sampling/adjust.cuh"
#include "kernels/sampling/draw.cuh"
#include "kernels/sampling/record.cuh"
#include "kernels/sampling/results.cuh"
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

// The same for chunk_max and GroupMax.
template <typename Place>
__device__ inline void TemperMaxima(const Row<Place>& row, const Tempered& tempered) {
  for (int chunk = row.warp; chunk < row.own; chunk += row.warps) {
    GroupMax(row, chunk) = tempered(GroupMax(row, chunk));
    if (row.lane == 0) {
      float& chunk_max = Shared<Place>()->chunk_max[chunk];
      chunk_max = tempered(chunk_max);
    }
  }
}

// Replaces banned logits by -inf.
template <typename Place, typename A>
__device__ void Ban(const Row<Place>& row, const Wanted& wanted, const A& adjuster) {
  __syncthreads();
  for (int i = threadIdx.x; i < adjuster.NumBanned(wanted); i += blockDim.x) {
    const int32_t id = adjuster.Ban(wanted, i);
    const int at = id - row.IdAt(0);
    if (id < row.vocabulary && at >= 0 && at < row.own * kChunk) Share(row)[at] = -Infinity();
  }
  __syncthreads();
}

// A row from its largest logit on. For all blocks.
template <typename Place, typename A>
__device__ __noinline__ void RunFrom(Row<Place>& row, const Wanted& wanted, const A& adjuster,
                                     float row_maximum, const Target& to) {
  RowShared<Place>* const s = Shared<Place>();
  Tempered tempered(row_maximum, wanted.temperature);
  const Tempered raw(row_maximum, wanted.raw_temperature);
  if (wanted.raw) {
    SumExp(row, raw, raw.Maximum(), s->raw_sums);
    if (wanted.top_logprobs > 0) {
      if (!raw.identity) {
        Temper(row, raw);
        TemperMaxima(row, raw);
      }
      __syncthreads();
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
    if (!raw.identity && wanted.top_logprobs > 0) {
      for (int chunk = row.warp; chunk < row.own; chunk += row.warps) LoadChunk(row, chunk);
      __syncthreads();
      RowMax(row, false);
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
  if (adjuster.NumBanned(wanted) > 0) {
    Ban(row, wanted, adjuster);
    const float left = RowMax(row, false);
    if (!(left > -Infinity())) {
      if (row.rank == 0) WriteUnusable(wanted, to);
      return;
    }
    maximum = tempered(left);
  }
  // Before x is replaced, as a plain row's.
  if (!wanted.greedy && (!wanted.truncated || wanted.MassOfAll())) {
    SumExp(row, tempered, maximum, s->sums);
  }
  if (!tempered.identity) {
    Temper(row, tempered);
    TemperMaxima(row, tempered);
  }
  __syncthreads();

  if (!wanted.truncated) {
    if (wanted.greedy) FindFirst(row, maximum);
    const bool list = wanted.ListsProcessed();
    if (list) ListFirst(row, maximum, wanted.top_logprobs);
    Place::Sync();
    if (list && row.rank == 0) {
      if (row.warp == 0) {
        const double total = Total(row, s->sums);
        if (row.lane == 0) s->log_total = log(total);
      }
      __syncthreads();
      WriteTop(row, wanted, to, row.vocabulary, maximum, s->log_total, wanted.score);
    }
    int32_t token = -1;
    if (wanted.Draws()) {
      token =
          Draw(row, wanted.noise, Tempered(maximum, 1.0f), maximum, RoughTotal(row, s->sums), 0);
    }
    if (row.rank != 0) return;
    FinishFull(row, wanted, adjuster, tempered, maximum, raw, token, to);
    WriteChosen(row, wanted, adjuster, tempered, maximum, raw, nullptr);
    if (wanted.greedy && wanted.processed) WritePoint(row, wanted, to);
    return;
  }

  Place::Sync();
  BinRule rule;
  if (row.rank == 0) {
    if (wanted.MassOfAll()) {
      if (row.warp == 0) {
        const double total = Total(row, s->sums);
        if (row.lane == 0) s->total = total;
      }
      __syncthreads();
    }
    rule = RuleOf(wanted, s->total, row.vocabulary);
  }
  const int count = ListByRule(row, maximum, rule);
  const bool list = count <= kListed;
  Kept kept;
  if (list) {
    if (row.rank != 0) return;
    kept = DrawFromList(row, wanted, maximum, count, s->total);
  } else {
    kept = DrawFromMany(row, wanted, maximum);
    if (wanted.processed && wanted.top_logprobs > 0) {
      ListFirst(row, maximum, wanted.top_logprobs);
    }
    if (row.rank != 0) return;
  }
  FinishKept(row, wanted, adjuster, tempered, maximum, raw, kept, list, to);
}

// The whole of it, unless the row is finished. For all blocks of the row; `memory`: of this one.
template <typename Place, typename A>
__device__ __forceinline__ void SampleRow(const Launch& p, int index,
                                          const typename Place::Memory& memory) {
  const Wanted wanted(p, index);
  if (wanted.plain && !(wanted.needs_list && *PlainRecord(p, index).hard != 0)) return;
  Row<Place> row;
  static_cast<typename Place::Memory&>(row) = memory;
  row.x = p.logits + index * p.logits_ld;
  row.vocabulary = p.vocabulary;
  row.rank = Place::Rank();
  row.chunks = ChunksOf(p.vocabulary);
  row.share = (row.chunks + Place::kBlocks - 1) / Place::kBlocks;
  row.first = row.rank * row.share;
  row.own = max(min(row.share, row.chunks - row.first), 0);
  row.lane = threadIdx.x % kWarp;
  row.warp = threadIdx.x / kWarp;
  row.warps = blockDim.x / kWarp;
  Place::StartLoad(row);

  RowShared<Place>* const s = Shared<Place>();
  if (threadIdx.x == 0) s->first_id = ~0u;
  for (int i = threadIdx.x; i < kBins; i += blockDim.x) s->counts[i] = 0;
  // All blocks have started, and the first one may be written to.
  Place::Sync();

  const float maximum = RowMax(row, true);
  const Target to(p.out, index, p.max_top);
  if (!(maximum > -Infinity() && maximum < Infinity())) {
    if (row.rank == 0) WriteUnusable(wanted, to);
    return;
  }
  RunFrom(row, wanted, A(p, index), maximum, to);
}

}  // namespace dorad::kernels
