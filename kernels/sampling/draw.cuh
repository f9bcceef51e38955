// Draws a candidate by the noise, from a row or from its sorted first candidates. Internal to
// kernels/sampling.
#pragma once

#include <cstdint>

#include "kernels/sampling/adjust.cuh"
#include "kernels/sampling/select.cuh"
#include "kernels/sampling/wanted.cuh"

namespace dorad::kernels {

static_assert(kGroupSize == kWarp && kMostChunks * kChunk < 1 << kDrawnIdBits);

// The sum over the row's chunks, the same for all lanes of a warp.
template <typename Place>
__device__ inline double Total(const Row<Place>& row, const float* sums) {
  double sum = 0.0;
  const int each = (row.chunks + kWarp - 1) / kWarp;
  for (int i = 0; i < each; ++i) {
    const int chunk = row.lane * each + i;
    if (chunk < row.chunks) sum += static_cast<double>(sums[chunk]);
  }
  return __shfl_sync(~0u, InclusiveScan(sum, row.lane), kWarp - 1);
}

// Roughly the same, and the same in all warps of all blocks.
template <typename Place>
__device__ inline float RoughTotal(const Row<Place>& row, const float* sums) {
  float sum = 0.0f;
  for (int chunk = row.lane; chunk < row.chunks; chunk += kWarp) sum += sums[chunk];
  for (int mask = kWarp / 2; mask > 0; mask /= 2) sum += __shfl_xor_sync(~0u, sum, mask);
  return sum;
}

// A draw takes the smallest E / weight. Only candidates below a limit are looked at, which are
// found by lower bounds of E: with the first limit 8 of them are expected, and one row of 3000 has
// none. Then the next limit is tried: above 47, the largest E, the likeliest candidate is found.
constexpr float kFirstLimit = 8.0f;  // over the sum of weights
constexpr float kNextLimit = 8.0f;   // times the last

// Whether all candidates that could win against this one were below the limit. The margin is for
// the rounding of bounds.
__device__ inline bool Won(Ranked drawn, float limit) {
  return drawn != 0 && DrawnValue(drawn) > static_cast<double>(0.001f - __logf(limit));
}
__device__ inline float RoughWeight(float distance) { return __expf(distance); }

// One candidate, 0 if it is above the limit.
__device__ inline Ranked DrawIfBelow(const Noise& noise, Ranked ranked, float maximum,
                                     float limit) {
  const int32_t id = IdOf(ranked);
  const int member = MemberOf(id);
  const float z = ValueOf(ranked);
  const uint32_t group_word = NoiseWord(noise, kGroups, GroupOf(id));
  const uint32_t word = NoiseWord(noise, kMembers, kGroupSize * GroupOf(id) + member);
  const float least = LeastOfGroup(group_word) + LeastOfMember(group_word, word, member);
  if (!(least < limit * RoughWeight(z - maximum))) return 0;
  const double distance = static_cast<double>(z) - static_cast<double>(maximum);
  return Drawn(noise, id, distance, group_word, word);
}

// To `hits` and num_hits: the block's groups that may have a candidate below the limit, in any
// order. For one block.
template <typename Place>
__device__ inline void FindGroups(const Row<Place>& row, const Noise& noise,
                                  const Tempered& tempered, float maximum, float limit) {
  auto* const s = Shared<Place>();
  const float4* const maxima = reinterpret_cast<const float4*>(Place::GroupMaxima(row));
  __syncthreads();  // the last limit's are in use no more
  if (threadIdx.x == 0) s->num_hits = 0;
  __syncthreads();
  const int quads = row.own * kWarp / 4;  // a call of NoiseWords has four groups
  for (int quad = threadIdx.x; quad < quads; quad += blockDim.x) {
    const uint4 words =
        NoiseWords(noise, kGroups | static_cast<uint32_t>(row.first * kWarp / 4 + quad));
    const float4 group_max = maxima[quad];
    const float largest[] = {group_max.x, group_max.y, group_max.z, group_max.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float weight = RoughWeight(tempered(largest[i]) - maximum);
      if (LeastOfGroup(WordAt(words, i)) < limit * weight) {
        s->hits[atomicAdd(&s->num_hits, 1)] = static_cast<uint16_t>(4 * quad + i);
      }
    }
  }
  __syncthreads();
}

// The best candidate below the limit among the members of these groups; each thread has its own.
// For one block.
template <typename Place>
__device__ inline Ranked DrawFromGroups(const Row<Place>& row, const Noise& noise,
                                        const Tempered& tempered, float maximum, float limit,
                                        Ranked last) {
  const auto* const s = Shared<Place>();
  Ranked best = 0;
  for (int i = threadIdx.x; i < s->num_hits * kGroupSize; i += blockDim.x) {
    const int at = IdOfMember(s->hits[i / kGroupSize], i % kGroupSize);
    const int32_t id = row.IdAt(0) + at;
    if (id >= row.vocabulary) continue;
    const float z = tempered(Share(row)[at]);
    const Ranked ranked = Rank(z, id);
    if (ranked >= last) best = max(best, DrawIfBelow(noise, ranked, maximum, limit));
  }
  return best;
}

// Draws from the candidates ranked at least `last`. tempered: how the blocks' logits become z;
// total: roughly their sum of weights, the same for all threads. For all blocks.
template <typename Place>
__device__ inline int32_t Draw(Row<Place>& row, const Noise& noise, const Tempered& tempered,
                               float maximum, float total, Ranked last) {
  for (float limit = kFirstLimit / total;; limit *= kNextLimit) {
    FindGroups(row, noise, tempered, maximum, limit);
    Ranked best = DrawFromGroups(row, noise, tempered, maximum, limit, last);
    const Ranked* const all = Exchange(row, BlockMax(row, best));
    for (int i = 0; i < Place::kBlocks; ++i) best = max(best, all[i]);
    if (Won(best, limit)) return DrawnId(best);
  }
}

// The candidates that truncation keeps are those ranked at least `last`.
struct Kept {
  Ranked last;
  double log_total;
  int32_t token;
};

// The candidates that truncation may keep. total: of all weights, for MassOfAll.
__device__ inline BinRule RuleOf(const Wanted& wanted, double total, int vocabulary) {
  BinRule rule;
  rule.last = BinOf(87.3f);  // beyond it weights are 0
  if (wanted.top_k > 0) {
    rule.count = static_cast<uint32_t>(wanted.top_k);
    return rule;
  }
  rule.count = ~0u;
  if (wanted.MassOfAll()) {
    rule.by_mass = true;
    rule.mass = static_cast<double>(wanted.top_p) * total;
    // The candidates beyond this bound weigh less than 1 - top_p together, even if they were the
    // whole vocabulary (halved against rounding).
    const double least = 0.5 * (1.0 - static_cast<double>(wanted.top_p)) * total / vocabulary;
    rule.last = min(rule.last, BinOf(static_cast<float>(fmax(-log(least), 0.0)) + 1e-3f));
  }
  if (wanted.min_p > 0.0f) rule.last = min(rule.last, BinOf(-logf(0.5f * wanted.min_p)));
  return rule;
}

// Top-k, top-p, min-p and the draw over the first `count` candidates, sorted in the list. `total`:
// of all weights of the row, for top-p without top-k. For the first block.
template <typename Place>
__device__ __noinline__ Kept DrawFromList(const Row<Place>& row, const Wanted& wanted,
                                          float maximum, int count, double total) {
  constexpr int kEach = kListed / kScanThreads;
  auto* const s = Shared<Place>();
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
  s->num_kept = last + 1;
  for (float limit = kFirstLimit / static_cast<float>(s->total);; limit *= kNextLimit) {
    Ranked best = 0;
    for (int i = threadIdx.x; i <= last; i += blockDim.x) {
      best = max(best, DrawIfBelow(wanted.noise, s->list[i], maximum, limit));
    }
    best = BlockMax(row, best);
    if (threadIdx.x == 0) s->crossed = best;
    __syncthreads();
    best = s->crossed;
    if (Won(best, limit)) return {s->list[last], log(s->total), DrawnId(best)};
  }
}

// The same when too many candidates remain for a list. For all blocks.
template <typename Place>
__device__ __noinline__ Kept DrawFromMany(Row<Place>& row, const Wanted& wanted, float maximum) {
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
  const int32_t token = Draw(row, wanted.noise, Tempered(maximum, 1.0f), maximum,
                             static_cast<float>(total / kUnits), kept.last);
  return {kept.last, log(total) - log(kUnits), token};
}

}  // namespace dorad::kernels
