// The gated delta rule, row by row.
#include "kernels/decoder/delta_device.cuh"

namespace dorad::kernels {
namespace {

constexpr int kThreads = 128;
constexpr int kParts = 8;  // threads of four columns
constexpr int kColumns = kThreads / kParts * 4;
constexpr int kFours = kMostKeys / kParts / 4;
constexpr int kStageRows = 16;

// What the columns of a head have in common, and their values.
struct Row {
  float4 q[kMostKeys / 4];
  float4 k[kMostKeys / 4];
  float v[kColumns];
  float update;
  float decay;
  float unused[2];
};

// Four bytes, global to shared.
__device__ inline void CopyAsync4(uint32_t destination, const void* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(destination), "l"(source)
               : "memory");
}

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

// Begins to copy rows of the step to a stage.
__device__ inline void CopyRows(const DeltaParams& p, const Columns& columns, int first, int count,
                                Row* stage) {
  constexpr int kPieces = kMostKeys / 4;  // of a query or a key, 16 bytes each
  const DeltaShape& shape = p.shape;
  const int key_head = columns.head / (shape.value_heads / shape.key_heads);
  for (int i = threadIdx.x; i < 2 * kPieces * count; i += kThreads) {
    const int row = i / (2 * kPieces), piece = i % kPieces;
    const bool is_key = i / kPieces % 2 != 0;
    const float* const head = p.mixed + int64_t{first + row} * shape.qkv_size() +
                              (is_key ? shape.key_size() : 0) + key_head * shape.key_dim;
    const bool is_in = 4 * piece < shape.key_dim;
    float4* const to = (is_key ? stage[row].k : stage[row].q) + piece;
    CopyAsync16(SharedAddress(to), head + (is_in ? 4 * piece : 0), is_in);
  }
  for (int i = threadIdx.x; i < kColumns * count; i += kThreads) {
    const int row = i / kColumns, column = i % kColumns;
    if (column >= columns.columns) continue;
    CopyAsync4(SharedAddress(stage[row].v + column),
               p.mixed + int64_t{first + row} * shape.qkv_size() + 2 * shape.key_size() +
                   columns.head * shape.value_dim + columns.column + column);
  }
  for (int i = threadIdx.x; i < 2 * count; i += kThreads) {
    Row& row = stage[i / 2];
    CopyAsync4(SharedAddress(i % 2 == 0 ? &row.update : &row.decay),
               p.factors + (int64_t{first + i / 2} * 2 + i % 2) * shape.value_heads + columns.head);
  }
}

// Replaces this block's share of the convolution's rows by the last rows of the sequence.
__device__ inline void KeepLastRows(const DeltaParams& p, int begin, int count, int from, int to) {
  const int channels = p.shape.qkv_size();
  const int kept = p.shape.convolution - 1;
  const int64_t pitch = channels + p.shape.value_size();
  const int fours = channels / 4;
  const int share = (fours + gridDim.x - 1) / gridDim.x;
  const int end = min(fours, static_cast<int>(blockIdx.x + 1) * share);
  for (int four = blockIdx.x * share + threadIdx.x; four < end; four += kThreads) {
    const int c = 4 * four;
    uint2 x[kMostTaps - 1];  // all are read before one is written: from may be to
#pragma unroll
    for (int j = 0; j < kMostTaps - 1; ++j) {
      const int of = count - kept + j;  // the row of the sequence; below 0: before these
      x[j] = make_uint2(0, 0);
      if (j >= kept) continue;
      if (of >= 0) {
        x[j] = *reinterpret_cast<const uint2*>(p.qkvz + (begin + of) * pitch + c);
      } else if (from >= 0) {
        x[j] = *reinterpret_cast<const uint2*>(ConvolutionAt(p, from, of + kept, c));
      }
    }
#pragma unroll
    for (int j = 0; j < kMostTaps - 1; ++j) {
      if (j < kept) *reinterpret_cast<uint2*>(ConvolutionAt(p, to, j, c)) = x[j];
    }
  }
}

// x · by + to.
__device__ inline float4 AddScaled(const float4& x, float by, const float4& to) {
  return {__fmaf_rn(x.x, by, to.x), __fmaf_rn(x.y, by, to.y), __fmaf_rn(x.z, by, to.z),
          __fmaf_rn(x.w, by, to.w)};
}

// Four neighbouring columns of a state's block, from `at` on. kWhole: all are there, and aligned.
template <bool kWhole>
__device__ inline float4 LoadColumns(const float* at, int columns) {
  if constexpr (kWhole) return __ldcg(reinterpret_cast<const float4*>(at));
  return {columns > 0 ? __ldcg(at) : 0.0f, columns > 1 ? __ldcg(at + 1) : 0.0f,
          columns > 2 ? __ldcg(at + 2) : 0.0f, columns > 3 ? __ldcg(at + 3) : 0.0f};
}

template <bool kWhole>
__device__ inline void StoreColumns(float* at, int columns, const float4& x) {
  if constexpr (kWhole) {
    __stcg(reinterpret_cast<float4*>(at), x);
    return;
  }
  if (columns > 0) __stcg(at, x.x);
  if (columns > 1) __stcg(at + 1, x.y);
  if (columns > 2) __stcg(at + 2, x.z);
  if (columns > 3) __stcg(at + 3, x.w);
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

__device__ inline float At(const float4& x, int i) {
  return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}

// One block for up to kColumns columns of a state's block. A thread holds every kParts-th four of
// the keys of four columns: few enough numbers of a row for each thread that shared memory does not
// bound the rule. kWhole: all kMostKeys are there, and columns come in aligned fours.
template <bool kWhole>
__global__ void __launch_bounds__(kThreads) RuleKernel(const DeltaParams p, int parts) {
  __shared__ __align__(16) Row stages[2][kStageRows];
  LaunchDependents();
  const int sequence = blockIdx.y;
  const int begin = p.rows.states.row_begin[sequence];
  const int count = p.rows.states.row_begin[sequence + 1] - begin;
  const int from = p.rows.states.from[sequence], to = p.rows.states.to[sequence];
  if (count == 0 || to < 0) {
    WaitForPrevious();
    return;
  }
  const Columns columns = ColumnsOf(p, blockIdx.x, parts);
  const int part = threadIdx.x % kParts, column = threadIdx.x / kParts * 4;
  const int present = columns.columns - column;  // of this thread's columns
  const auto place = [&](std::byte* block, int key) {
    return reinterpret_cast<float*>(block) + key * p.states.tile + columns.in_block + column;
  };
  // Key e of this thread's four i.
  const auto key_at = [&](int i, int e) { return 4 * (kParts * i + part) + e; };
  const auto has = [&](int key) { return present > 0 && (kWhole || key < p.shape.key_dim); };

  float4 s[kFours][4];
#pragma unroll
  for (int i = 0; i < kFours; ++i) {
#pragma unroll
    for (float4& four : s[i]) four = {};
  }
  if (from >= 0) {
    std::byte* const block = BlockAt(p, from, columns.block);
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int key = key_at(i, e);
        if (has(key)) s[i][e] = LoadColumns<kWhole>(place(block, key), present);
      }
    }
  }
  WaitForPrevious();
  CopyRows(p, columns, begin, min(kStageRows, count), stages[0]);
  asm volatile("cp.async.commit_group;" ::: "memory");
  KeepLastRows(p, begin, count, from, to);
  float* const out =
      p.mixed + 2 * p.shape.key_size() + columns.head * p.shape.value_dim + columns.column + column;
  const auto store = [&](int row, const float4& y) {
    // The first lanes of a column's parts store one column each.
    if (part < 4 && part < present) {
      out[int64_t{begin + row} * p.shape.qkv_size() + part] = At(y, part);
    }
  };
  float4 last = {};  // outputs of the row before, by parts: added up beside the next row's work
  for (int first = 0, stage = 0; first < count; first += kStageRows, stage ^= 1) {
    const int next = first + kStageRows;
    if (next < count) {
      CopyRows(p, columns, begin + next, min(kStageRows, count - next), stages[stage ^ 1]);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
    asm volatile("cp.async.wait_group 1;" ::: "memory");
    __syncthreads();
    const int rows = min(kStageRows, count - first);
#pragma unroll 1
    for (int r = 0; r < rows; ++r) {
      const Row& row = stages[stage][r];
      float4 k[kFours], q[kFours];
#pragma unroll
      for (int i = 0; i < kFours; ++i) {
        k[i] = row.k[kParts * i + part];
        q[i] = row.q[kParts * i + part];
      }
      float4 seen = {};
#pragma unroll
      for (int i = 0; i < kFours; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) seen = AddScaled(s[i][e], At(k[i], e), seen);
      }
      seen = SumParts(seen);
      last = SumParts(last);
      if (first + r > 0) store(first + r - 1, last);
      const float4 v = *reinterpret_cast<const float4*>(row.v + column);
      const float decay = row.decay, update = row.update;
      const auto change_of = [decay, update](float value, float is) {
        return __fmul_rn(__fmaf_rn(-decay, is, value), update);
      };
      const float4 change = {change_of(v.x, seen.x), change_of(v.y, seen.y), change_of(v.z, seen.z),
                             change_of(v.w, seen.w)};
      last = {};
#pragma unroll
      for (int i = 0; i < kFours; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float4 kept = {__fmul_rn(decay, s[i][e].x), __fmul_rn(decay, s[i][e].y),
                               __fmul_rn(decay, s[i][e].z), __fmul_rn(decay, s[i][e].w)};
          s[i][e] = AddScaled(change, At(k[i], e), kept);
          last = AddScaled(s[i][e], At(q[i], e), last);
        }
      }
    }
    __syncthreads();
  }
  store(count - 1, SumParts(last));
  std::byte* const block = BlockAt(p, to, columns.block);
#pragma unroll
  for (int i = 0; i < kFours; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int key = key_at(i, e);
      if (has(key)) StoreColumns<kWhole>(place(block, key), present, s[i][e]);
    }
  }
}

}  // namespace

cudaError_t DeltaRule(const DeltaParams& params, cudaStream_t stream) {
  if (!IsValid(params)) return cudaErrorInvalidValue;
  const int tiles = params.shape.value_heads * (params.shape.value_dim / params.states.tile);
  const int parts = (params.states.tile + kColumns - 1) / kColumns;
  const bool whole = params.shape.key_dim == kMostKeys && params.states.tile % 4 == 0;
  const auto kernel = whole ? RuleKernel<true> : RuleKernel<false>;
  const int32_t sequences = params.rows.states.sequences;
  const dim3 grid(tiles * parts, sequences);
  if (params.rows.rows < 4 * sequences) {
    return LaunchEarly(kernel, grid, kThreads, 0, stream, params, parts);
  }
  // Of long runs each block wants a multiprocessor for itself. An early launch would crowd the
  // blocks onto those that the kernel before leaves first.
  kernel<<<grid, kThreads, 0, stream>>>(params, parts);
  return cudaGetLastError();
}

}  // namespace dorad::kernels
