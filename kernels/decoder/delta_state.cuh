// One row of the gated delta rule by the threads of a block: the arithmetic of both kernels.
#pragma once

#include "kernels/decoder/delta_device.cuh"
#include "kernels/isa/mma/isa.cuh"

namespace dorad::kernels {

struct Sm90Isa;

}  // namespace dorad::kernels

namespace dorad::kernels::delta {

inline constexpr int kThreads = 128;
inline constexpr int kParts = 8;  // threads of four columns
inline constexpr int kColumns = kThreads / kParts * 4;
inline constexpr int kFours = kMostKeys / kParts / 4;

// What the columns of a head have in common, and their values.
struct Row {
  float4 q[kMostKeys / 4];
  float4 k[kMostKeys / 4];
  float v[kColumns];
  float update;
  float decay;
  float unused[2];
};

// The columns of a block: [column, column + columns) of a head, `in_block` of them behind the first
// of its state's block.
struct Columns {
  int head;
  int column;
  int columns;
  int block;
  int in_block;
};

__device__ inline Columns ColumnsOf(const DeltaParams& p, int index, int parts) {
  const int tiles = p.shape.value_dim / p.states.tile;
  const int block = index / parts;
  const int in_block = index % parts * kColumns;
  const int tile = block % tiles;
  return {block / tiles, tile * p.states.tile + in_block, min(kColumns, p.states.tile - in_block),
          block, in_block};
}

// x · by + to.
__device__ inline float4 AddScaled(const float4& x, float by, const float4& to) {
  return {__fmaf_rn(x.x, by, to.x), __fmaf_rn(x.y, by, to.y), __fmaf_rn(x.z, by, to.z),
          __fmaf_rn(x.w, by, to.w)};
}

// The sums over the parts of a column, in all of their lanes; their order is fixed.
__device__ inline float4 SumParts(float4 x) {
#pragma unroll
  for (int offset = kParts / 2; offset > 0; offset /= 2) {
    x.x = __fadd_rn(x.x, __shfl_xor_sync(kAllLanes, x.x, offset));
    x.y = __fadd_rn(x.y, __shfl_xor_sync(kAllLanes, x.y, offset));
    x.z = __fadd_rn(x.z, __shfl_xor_sync(kAllLanes, x.z, offset));
    x.w = __fadd_rn(x.w, __shfl_xor_sync(kAllLanes, x.w, offset));
  }
  return x;
}

// The same sum for one of the columns, that of ColumnOfSum: half the work.
__device__ inline float SumPartsOfOne(const float4& x, int part) {
  const bool high = part & 1, odd = part & 2;
  float a = __fadd_rn(high ? x.z : x.x, __shfl_xor_sync(kAllLanes, high ? x.x : x.z, 1));
  const float b = __fadd_rn(high ? x.w : x.y, __shfl_xor_sync(kAllLanes, high ? x.y : x.w, 1));
  a = __fadd_rn(odd ? b : a, __shfl_xor_sync(kAllLanes, odd ? a : b, 2));
#pragma unroll
  for (int offset = 4; offset < kParts; offset *= 2) {
    a = __fadd_rn(a, __shfl_xor_sync(kAllLanes, a, offset));
  }
  return a;
}

__device__ inline int ColumnOfSum(int part) { return (part & 1) * 2 + (part & 2) / 2; }

__device__ inline float At(const float4& x, int i) {
  return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}

// A thread's numbers of a state: four columns, of every kParts-th four keys. So few numbers of a
// row come to each thread that shared memory does not bound the rule.
struct State {
  float4 at[kFours][4];

  // Key e of four i.
  static __device__ int KeyAt(int i, int e, int part) { return 4 * (kParts * i + part) + e; }

  // f(key, its four columns)
  template <typename F>
  __device__ void ForEach(int part, F f) {
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) f(KeyAt(i, e, part), at[i][e]);
    }
  }
};

// A thread's numbers of a row.
struct RowPart {
  float4 q[kFours], k[kFours], v;
  float update, decay;

  __device__ RowPart(const Row& row, int part, int column)
      : v(*reinterpret_cast<const float4*>(row.v + column)), update(row.update), decay(row.decay) {
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      q[i] = row.q[kParts * i + part];
      k[i] = row.k[kParts * i + part];
    }
  }
};

// What a key sees in the state.
__device__ inline float4 Seen(const State& s, const RowPart& row) {
  float4 sums = {};
#pragma unroll
  for (int i = 0; i < kFours; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sums = AddScaled(s.at[i][e], At(row.k[i], e), sums);
  }
  return SumParts(sums);
}

// Moves the state on and returns this part of the outputs.
__device__ inline float4 Update(State& s, const RowPart& row, const float4& seen) {
  const auto change_of = [&row](float value, float is) {
    return __fmul_rn(__fmaf_rn(-row.decay, is, value), row.update);
  };
  const float4 change = {change_of(row.v.x, seen.x), change_of(row.v.y, seen.y),
                         change_of(row.v.z, seen.z), change_of(row.v.w, seen.w)};
  float4 outputs = {};
#pragma unroll
  for (int i = 0; i < kFours; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float4& at = s.at[i][e];
      const float4 kept = {__fmul_rn(row.decay, at.x), __fmul_rn(row.decay, at.y),
                           __fmul_rn(row.decay, at.z), __fmul_rn(row.decay, at.w)};
      at = AddScaled(change, At(row.k[i], e), kept);
      outputs = AddScaled(at, At(row.q[i], e), outputs);
    }
  }
  return outputs;
}

// DeltaRule where no sequence has more than one row, and every block of a state is [kMostKeys,
// tile] with a tile of fours up to kColumns. With the same results for all instruction sets.
template <typename Isa>
cudaError_t LaunchDeltaStep(const DeltaParams& params, cudaStream_t stream);

}  // namespace dorad::kernels::delta
