// A row's logits after allowed tokens, biases and penalties. Internal to kernels/sampling. The
// CPU's counterpart with the same results is server/backends/cpu/logit_adjustments.cc.
#pragma once

#include <cstdint>

#include "kernels/sampling/row.cuh"
#include "kernels/sampling/wanted.cuh"

namespace dorad::kernels {

// A call in which no row has adjustments or conditional bans: code for them is left out.
struct Unadjusted {
  static constexpr bool kPossible = false;
  static constexpr bool on = false;

  __device__ Unadjusted() {}
  __device__ Unadjusted(const Launch&, int) {}
  __device__ static int NumBanned(const Wanted& wanted) { return wanted.num_banned; }
  __device__ static int32_t Ban(const Wanted& wanted, int i) { return wanted.banned[i]; }
};

struct Adjuster {
  static constexpr bool kPossible = true;
  bool on = false;
  LogitAdjustments how;
  const int32_t* allowed = nullptr;  // ascending
  const LogitBias* biases = nullptr;
  const TokenUse* uses = nullptr;
  const ConditionalBan* conditional = nullptr;
  int32_t num_conditional = 0;
  int32_t newest = -1;  // the token that `uses` lacks; -1: none

  __device__ Adjuster(const Launch& p, int index) {
    const SampleRowSpec& spec = p.samples[index];
    conditional = p.conditional_bans + spec.conditional_begin;
    num_conditional = spec.conditional_count;
    if (spec.newest >= 0) newest = p.newest[spec.newest];
    if (spec.adjustments < 0) return;
    on = true;
    how = p.adjustments[spec.adjustments];
    allowed = p.allowed_ids + how.allowed_begin;
    biases = p.biases + how.bias_begin;
    uses = p.uses + how.uses_begin;
  }

  __device__ int NumBanned(const Wanted& wanted) const {
    return wanted.num_banned + num_conditional;
  }
  // The i-th of these; -1: its condition is not met.
  __device__ int32_t Ban(const Wanted& wanted, int i) const {
    if (i < wanted.num_banned) return wanted.banned[i];
    const ConditionalBan ban = conditional[i - wanted.num_banned];
    return ban.after == newest ? ban.token : -1;
  }

  __device__ bool Allows(int32_t id) const {
    int low = 0;
    int high = how.allowed_count;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (allowed[middle] < id) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low < how.allowed_count && allowed[low] == id;
  }

  // Each step is rounded: no fused multiply-add.
  __device__ float Penalised(float x, uint32_t count) const {
    if (how.repetition_penalty != 1.0f) {
      x = x > 0.0f ? __fdiv_rn(x, how.repetition_penalty) : __fmul_rn(x, how.repetition_penalty);
    }
    const uint32_t generated = count / TokenUse::kGenerated;
    if (generated > 0) {
      x = __fsub_rn(x, __fmul_rn(how.frequency_penalty, static_cast<float>(generated)));
      x = __fsub_rn(x, how.presence_penalty);
    }
    return x;
  }
};

// Calls visit(use) for each of the row's uses, by `threads` threads. Some loads are in flight at a
// time: a row may have thousands of uses, and a load takes most of a microsecond.
template <typename Visit>
__device__ inline void ForEachUse(const Adjuster& a, int thread, int threads, const Visit& visit) {
  constexpr int kInFlight = 8;
  for (int first = thread; first < a.how.uses_count; first += kInFlight * threads) {
    TokenUse uses[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int at = first + i * threads;
      uses[i] = at < a.how.uses_count ? a.uses[at] : TokenUse{-1, 0};
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) visit(uses[i]);
  }
}

// Replaces the block's logits.
template <typename Place>
__device__ __noinline__ void AdjustShare(const Row<Place>& row, const Adjuster& a) {
  RowShared<Place>* const s = Shared<Place>();
  const int threads = static_cast<int>(blockDim.x);
  const int thread = static_cast<int>(threadIdx.x);
  __syncthreads();
  if (thread == 0) s->newest_count = 0;
  const int begin = row.IdAt(0);
  const int end = min(begin + row.own * kChunk, row.vocabulary);
  const auto at = [begin, &row](int32_t id) -> float& { return Share(row)[id - begin]; };
  if (a.how.allowed_count > 0) {
    for (int id = begin + thread; id < end; id += threads) {
      if (!a.Allows(id)) at(id) = -Infinity();
    }
    __syncthreads();
  }
  for (int i = thread; i < a.how.bias_count; i += threads) {
    const LogitBias bias = a.biases[i];
    if (bias.id >= begin && bias.id < end) at(bias.id) = __fadd_rn(at(bias.id), bias.bias);
  }
  __syncthreads();
  ForEachUse(a, thread, threads, [&](const TokenUse& use) {
    if (use.id < begin || use.id >= end) return;
    if (use.id == a.newest) {
      s->newest_count = use.count;
    } else {
      at(use.id) = a.Penalised(at(use.id), use.count);
    }
  });
  __syncthreads();
  if (thread == 0 && a.how.penalised && a.newest >= begin && a.newest < end) {
    at(a.newest) = a.Penalised(at(a.newest), s->newest_count + TokenUse::kGenerated);
  }
  __syncthreads();
}

// The logit of one id, the same for all lanes, from the row's x. For a warp, after AdjustShare.
template <typename Place>
__device__ inline float AdjustedByWarp(const Row<Place>& row, const Adjuster& a, float x,
                                       int32_t id) {
  if (!a.on) return x;
  if (a.how.allowed_count > 0 && !a.Allows(id)) x = -Infinity();
  uint32_t bias = 0;  // bits
  for (int i = row.lane; i < a.how.bias_count; i += kWarp) {
    if (a.biases[i].id == id) bias = __float_as_uint(a.biases[i].bias);
  }
  bias = __reduce_or_sync(~0u, bias);
  if (bias != 0) x = __fadd_rn(x, __uint_as_float(bias));
  uint32_t count = 0;
  ForEachUse(a, row.lane, kWarp, [&](const TokenUse& use) {
    if (use.id == id) count = use.count;
  });
  count = __reduce_or_sync(~0u, count);
  if (a.how.penalised && id == a.newest) count += TokenUse::kGenerated;
  return count > 0 ? a.Penalised(x, count) : x;
}

template <typename A>
__device__ inline bool Banned(const Wanted& wanted, const A& adjuster, int32_t id) {
  for (int i = 0; i < adjuster.NumBanned(wanted); ++i) {
    if (adjuster.Ban(wanted, i) == id) return true;
  }
  return false;
}

}  // namespace dorad::kernels
