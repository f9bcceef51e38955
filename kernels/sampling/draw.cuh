// Draws a candidate from a row's weights or its sorted first candidates. Internal to
// kernels/sampling.
#pragma once

#include <cstdint>

#include "kernels/sampling/adjust.cuh"
#include "kernels/sampling/select.cuh"
#include "kernels/sampling/wanted.cuh"

namespace dorad::kernels {

// The sum of the row's chunk sums, the same for all lanes. *before is that of the chunks before the
// lane's own ones, of which there are `each`. For a warp of the first block.
__device__ inline double Total(const Row& row, const float* sums, double* before, int* each) {
  *each = (row.chunks + kWarp - 1) / kWarp;
  double sum = 0.0;
  for (int i = 0; i < *each; ++i) {
    const int chunk = row.lane * *each + i;
    if (chunk < row.chunks) sum += static_cast<double>(sums[chunk]);
  }
  const double inclusive = InclusiveScan(sum, row.lane);
  const double previous = __shfl_up_sync(~0u, inclusive, 1);
  *before = row.lane == 0 ? 0.0 : previous;
  return __shfl_sync(~0u, inclusive, kWarp - 1);
}
__device__ inline double Total(const Row& row, const float* sums) {
  double before;
  int each;
  return Total(row, sums, &before, &each);
}

// The first id at which the running sum of weights exceeds uniform · total. For a warp of the first
// block.
template <typename A>
__device__ inline int32_t DrawById(const Row& row, const Wanted& wanted, const A& adjuster,
                                   const Tempered& tempered, float maximum, double uniform,
                                   double* total) {
  RowShared* const s = Shared();
  double before;
  int each;
  *total = Total(row, s->sums, &before, &each);
  const double target = uniform * *total;
  int found = -1;
  int last = -1;  // with any weight
  for (int i = 0; i < each && found < 0; ++i) {
    const int chunk = row.lane * each + i;
    if (chunk >= row.chunks) break;
    const double sum = static_cast<double>(s->sums[chunk]);
    if (sum > 0.0) last = chunk;
    if (before + sum > target) {
      found = chunk;
    } else {
      before += sum;
    }
  }
  const uint32_t lanes = __ballot_sync(~0u, found >= 0);
  if (lanes != 0) {
    found = __shfl_sync(~0u, found, __ffs(lanes) - 1);
    before = __shfl_sync(~0u, before, __ffs(lanes) - 1);
  } else {
    // Rounding: the last possible id.
    found = __reduce_max_sync(~0u, last);
    before = *total;
  }
  // The chunk's weights again, from global memory: the others' shared memory is gone.
  const int begin = found * kChunk;
#pragma unroll 8
  for (int i = 0; i < kWarp; ++i) {
    const int id = begin + i * kWarp + row.lane;
    const float x = id < row.vocabulary ? row.x[id] : -Infinity();
    s->terms[i * (kWarp + 1) + row.lane] = adjuster.on ? x : Exp(tempered(x) - maximum);
  }
  __syncwarp();
  if constexpr (A::kPossible) {
    if (adjuster.on) {
      AdjustRange(
          adjuster, begin, min(begin + kChunk, row.vocabulary),
          [s](int i) -> float& { return s->terms[i + i / kWarp]; }, row.lane, kWarp,
          s->newest_count, [] { __syncwarp(); });
      for (int i = 0; i < kWarp; ++i) {
        float* const term = s->terms + i * (kWarp + 1) + row.lane;
        *term = Exp(tempered(*term) - maximum);
      }
      __syncwarp();
    }
  }
  for (int i = row.lane; i < adjuster.NumBanned(wanted); i += kWarp) {
    const int at = adjuster.Ban(wanted, i) - begin;
    if (at >= 0 && at < kChunk) s->terms[at + at / kWarp] = 0.0f;
  }
  __syncwarp();
  const float* const own = s->terms + row.lane * (kWarp + 1);
  double sum = 0.0;
  for (int i = 0; i < kWarp; ++i) sum += static_cast<double>(own[i]);
  const double inclusive = InclusiveScan(sum, row.lane);
  const double previous = __shfl_up_sync(~0u, inclusive, 1);
  double running = row.lane == 0 ? before : before + previous;
  uint32_t id = ~0u;
  uint32_t last_id = 0;
  for (int i = 0; i < kWarp; ++i) {
    running += static_cast<double>(own[i]);
    const uint32_t at = static_cast<uint32_t>(begin + row.lane * kWarp + i);
    if (id == ~0u && running > target) id = at;
    if (own[i] > 0.0f) last_id = at;
  }
  id = __reduce_min_sync(~0u, id);
  last_id = __reduce_max_sync(~0u, last_id);
  return static_cast<int32_t>(id != ~0u ? id : last_id);
}

// The candidates that truncation keeps are those ranked at least `last`.
struct Kept {
  Ranked last;
  double log_total;
  int32_t token;
};

// Top-k, top-p, min-p and the draw over the first `count` candidates, sorted in the list. `total`:
// of all weights of the row, for top-p without top-k. For the first block.
__device__ __noinline__ Kept DrawFromList(const Row& row, const Wanted& wanted, float maximum,
                                          double uniform, int count, double total) {
  constexpr int kEach = kListed / kScanThreads;
  RowShared* const s = Shared();
  SortList(row, count);
  if (wanted.top_k > 0) count = min(count, wanted.top_k);
  const int begin = static_cast<int>(threadIdx.x) * kEach;
  const int end = min(begin + kEach, count);  // may lie before begin
  double sum = 0.0;
  float weights[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    weights[i] = begin + i < end ? Exp(ValueOf(s->list[begin + i]) - maximum) : 0.0f;
    sum += static_cast<double>(weights[i]);
  }
  if (threadIdx.x == 0) {
    s->num_before = 0;
    s->num_kept = 0;
    s->last_kept = 0;
  }
  double all;
  const double before = ExclusiveScan<double>(row, sum, s->scan_double, &all);

  int kept = count;
  if (wanted.top_p < 1.0f) {
    // All candidates before the first at which the running sum reaches the mass, and that one.
    const double mass = static_cast<double>(wanted.top_p) * (wanted.top_k > 0 ? all : total);
    double running = before;
    int less = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      running += static_cast<double>(weights[i]);
      less += begin + i < end && running < mass;
    }
    if (less > 0) atomicAdd(&s->num_kept, less);
    __syncthreads();
    kept = min(s->num_kept + 1, count);
  }
  // Drops candidates below min_p or without weight from the end; the first one stays.
  int last = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (begin + i < kept && weights[i] > 0.0f && !(weights[i] < wanted.min_p)) last = begin + i;
  }
  if (last > 0) atomicMax(&s->last_kept, last);
  __syncthreads();
  last = s->last_kept;
  double running = before;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    running += static_cast<double>(weights[i]);
    if (begin + i == last) s->total = running;
  }
  __syncthreads();
  const double target = uniform * s->total;
  running = before;
  int not_over = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    running += static_cast<double>(weights[i]);
    not_over += begin + i < last && running <= target;
  }
  if (not_over > 0) atomicAdd(&s->num_before, not_over);
  __syncthreads();
  s->num_kept = last + 1;
  return {s->list[last], log(s->total), IdOf(s->list[s->num_before])};
}

// The same when too many candidates remain for a list. For all blocks.
__device__ __noinline__ Kept DrawFromMany(Row& row, const Wanted& wanted, float maximum,
                                          double uniform) {
  Ranked bound = 0;
  if (wanted.top_k > 0) bound = SelectByMeasure(row, maximum, false, wanted.top_k);
  if (wanted.top_p < 1.0f) {
    const Ranked units = SumSurvivors(row, maximum, bound, 0.0f).units;
    const double mass = ceil(static_cast<double>(wanted.top_p) * static_cast<double>(units));
    const Ranked need = mass < 1.0 ? 1 : min(static_cast<Ranked>(mass), units);
    bound = SelectByMeasure(row, maximum, true, need);
  }
  const Survivors kept = SumSurvivors(row, maximum, bound, wanted.min_p);
  const double total = static_cast<double>(kept.units);
  const Ranked need = min(static_cast<Ranked>(uniform * total) + 1, kept.units);
  const Ranked drawn = SelectByMeasure(row, maximum, true, need);
  return {kept.last, log(total) - log(kUnits), IdOf(drawn)};
}

}  // namespace dorad::kernels
