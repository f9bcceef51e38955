#include "kernels/common/barrier.cuh"
#include "kernels/common/host.h"
#include "kernels/common/launch.h"
#include "kernels/decoder/delta.h"

namespace dorad::kernels {
namespace {

constexpr unsigned kAllLanes = 0xFFFFFFFF;
constexpr int kWarps = 4;
constexpr int kMostKeys = 128;  // of a state's column, in the registers of two threads

__device__ inline float WarpSum(float x) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(kAllLanes, x, offset);
  return x;
}

__device__ inline float Silu(float x) { return x / (1.0f + expf(-x)); }

// torch.nn.functional.softplus.
__device__ inline float Softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

__device__ inline float4 LoadFour(const __nv_bfloat16* from) {
  const uint2 bits = *reinterpret_cast<const uint2*>(from);
  const float2 low = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&bits.x));
  const float2 high = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&bits.y));
  return {low.x, low.y, high.x, high.y};
}

// Block i of a net's state, whose pages begin at pages[first].
__device__ inline std::byte* BlockAt(const DeltaParams& p, int first, int i) {
  const int index = p.states.first_block + i;
  const int64_t place = p.rows.pages[first + index / p.states.planes];
  return p.states.memory + index % p.states.planes * p.states.plane_bytes +
         place * p.states.block_bytes;
}

// Channels [c, c + 4) of the convolution's row j, 0 the oldest. c is a multiple of 4, and so is a
// block's size: one block has all four.
__device__ inline __nv_bfloat16* ConvolutionAt(const DeltaParams& p, int first, int j, int c) {
  const int in_block = p.states.block_bytes / static_cast<int>(sizeof(__nv_bfloat16));
  const int at = j * p.shape.qkv_size() + c;
  std::byte* const block = BlockAt(p, first, p.states.state_blocks + at / in_block);
  return reinterpret_cast<__nv_bfloat16*>(block) + at % in_block;
}

// One warp for a head of a row: queries, then keys, then values. Four channels a lane.
__global__ void __launch_bounds__(32 * kWarps) ConvolutionKernel(const DeltaParams p) {
  LaunchDependents();
  WaitForPrevious();
  const DeltaShape& shape = p.shape;
  const int row = blockIdx.x;
  const int head = blockIdx.y * kWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (head >= 2 * shape.key_heads + shape.value_heads) return;
  const int sequence = p.rows.sequences[row];
  if (p.rows.states.to[sequence] < 0) return;
  const int value_head = head - 2 * shape.key_heads;
  const bool is_value = value_head >= 0;
  const int size = is_value ? shape.value_dim : shape.key_dim;
  const int first =
      is_value ? 2 * shape.key_size() + value_head * shape.value_dim : head * shape.key_dim;
  const int taps = shape.convolution;
  const int begin = p.rows.states.row_begin[sequence];
  const int from = p.rows.states.from[sequence];
  const int64_t pitch = shape.qkv_size() + shape.value_size();
  float* const out = p.mixed + int64_t{row} * shape.qkv_size();
  for (int i = 4 * lane; i < (size + 127) / 128 * 128; i += 128) {
    float y[4] = {};
    const int c = first + i;
    for (int j = 0; j < taps && i < size; ++j) {
      const int of = row - begin + j + 1 - taps;  // the row of the sequence; below 0: before these
      float4 x = {};
      if (of >= 0) {
        x = LoadFour(p.qkvz + (begin + of) * pitch + c);
      } else if (from >= 0) {
        x = LoadFour(ConvolutionAt(p, from, of + taps - 1, c));
      }
      const float* const weight = p.convolution + int64_t{c} * taps + j;
      y[0] = __fmaf_rn(weight[0], x.x, y[0]);
      y[1] = __fmaf_rn(weight[taps], x.y, y[1]);
      y[2] = __fmaf_rn(weight[2 * taps], x.z, y[2]);
      y[3] = __fmaf_rn(weight[3 * taps], x.w, y[3]);
    }
    for (float& value : y) value = Silu(value);
    if (!is_value) {
      // As transformers' l2norm; only one turn of the loop, because keys are few.
      float squares = 0.0f;
      for (const float value : y) squares = __fmaf_rn(value, value, squares);
      const bool is_query = head < shape.key_heads;
      const float scale = rsqrtf(WarpSum(squares) + 1e-6f) *
                          (is_query ? rsqrtf(static_cast<float>(shape.key_dim)) : 1.0f);
      for (float& value : y) value *= scale;
    }
    if (i < size) *reinterpret_cast<float4*>(out + c) = make_float4(y[0], y[1], y[2], y[3]);
  }
  if (!is_value || lane != 0) return;
  float* const update = p.factors + int64_t{row} * 2 * shape.value_heads + value_head;
  float* const decay = update + shape.value_heads;
  const float step = Softplus(*decay + p.time_bias[value_head]);
  *decay = expf(-expf(p.decay_log[value_head]) * step);
  *update = 1.0f / (1.0f + expf(-*update));
}

namespace rule {

constexpr int kThreads = 128;
constexpr int kColumns = kThreads / 2;
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
  constexpr int kTogether = 4;  // rows whose loads are in flight together
  const int channels = p.shape.qkv_size();
  const int kept = p.shape.convolution - 1;
  const int64_t pitch = channels + p.shape.value_size();
  const int fours = channels / 4;
  const int share = (fours + gridDim.x - 1) / gridDim.x;
  const int end = min(fours, static_cast<int>(blockIdx.x + 1) * share);
  for (int four = blockIdx.x * share + threadIdx.x; four < end; four += kThreads) {
    const int c = 4 * four;
    // Ascending: with from == to, no row is read after it is written.
    for (int base = 0; base < kept; base += kTogether) {
      uint2 x[kTogether];
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        const int of = count - kept + base + j;  // the row of the sequence; below 0: before these
        x[j] = make_uint2(0, 0);
        if (base + j >= kept) continue;
        if (of >= 0) {
          x[j] = *reinterpret_cast<const uint2*>(p.qkvz + (begin + of) * pitch + c);
        } else if (from >= 0) {
          x[j] = *reinterpret_cast<const uint2*>(ConvolutionAt(p, from, of + kept, c));
        }
      }
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        if (base + j < kept) *reinterpret_cast<uint2*>(ConvolutionAt(p, to, base + j, c)) = x[j];
      }
    }
  }
}

// One block for up to kColumns columns of a state's block. Two threads a column: each holds every
// other four of its keys. kWhole: all kMostKeys are there.
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
  const int column = threadIdx.x / 2, half = threadIdx.x % 2;
  const bool is_in = column < columns.columns;
  const auto place = [&](std::byte* block, int key) {
    return reinterpret_cast<float*>(block) + key * p.states.tile + columns.in_block + column;
  };
  const auto has = [&](int key) { return is_in && (kWhole || key < p.shape.key_dim); };

  float4 s[kMostKeys / 8];
#pragma unroll
  for (float4& four : s) four = {};
  if (from >= 0) {
    std::byte* const block = BlockAt(p, from, columns.block);
#pragma unroll
    for (int i = 0; i < kMostKeys / 8; ++i) {
      const int key = 8 * i + 4 * half;
      if (!has(key)) continue;
      s[i] = {__ldcg(place(block, key)), __ldcg(place(block, key + 1)),
              __ldcg(place(block, key + 2)), __ldcg(place(block, key + 3))};
    }
  }
  WaitForPrevious();
  CopyRows(p, columns, begin, min(kStageRows, count), stages[0]);
  asm volatile("cp.async.commit_group;" ::: "memory");
  KeepLastRows(p, begin, count, from, to);
  float* const out =
      p.mixed + 2 * p.shape.key_size() + columns.head * p.shape.value_dim + columns.column + column;
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
      const float4* const k = row.k + half;
      const float4* const q = row.q + half;
      float4 sums = {};
#pragma unroll
      for (int i = 0; i < kMostKeys / 8; ++i) {
        const float4 key = k[2 * i];
        sums.x = __fmaf_rn(s[i].x, key.x, sums.x);
        sums.y = __fmaf_rn(s[i].y, key.y, sums.y);
        sums.z = __fmaf_rn(s[i].z, key.z, sums.z);
        sums.w = __fmaf_rn(s[i].w, key.w, sums.w);
      }
      float seen = (sums.x + sums.y) + (sums.z + sums.w);
      seen += __shfl_xor_sync(kAllLanes, seen, 1);
      const float decay = row.decay;
      const float change = __fmul_rn(__fmaf_rn(-decay, seen, row.v[column]), row.update);
      sums = {};
#pragma unroll
      for (int i = 0; i < kMostKeys / 8; ++i) {
        const float4 key = k[2 * i], query = q[2 * i];
        s[i].x = __fmaf_rn(key.x, change, __fmul_rn(decay, s[i].x));
        s[i].y = __fmaf_rn(key.y, change, __fmul_rn(decay, s[i].y));
        s[i].z = __fmaf_rn(key.z, change, __fmul_rn(decay, s[i].z));
        s[i].w = __fmaf_rn(key.w, change, __fmul_rn(decay, s[i].w));
        sums.x = __fmaf_rn(s[i].x, query.x, sums.x);
        sums.y = __fmaf_rn(s[i].y, query.y, sums.y);
        sums.z = __fmaf_rn(s[i].z, query.z, sums.z);
        sums.w = __fmaf_rn(s[i].w, query.w, sums.w);
      }
      float y = (sums.x + sums.y) + (sums.z + sums.w);
      y += __shfl_xor_sync(kAllLanes, y, 1);
      if (half == 0 && is_in) out[int64_t{begin + first + r} * p.shape.qkv_size()] = y;
    }
    __syncthreads();
  }
  std::byte* const block = BlockAt(p, to, columns.block);
#pragma unroll
  for (int i = 0; i < kMostKeys / 8; ++i) {
    const int key = 8 * i + 4 * half;
    if (!has(key)) continue;
    __stcg(place(block, key), s[i].x);
    __stcg(place(block, key + 1), s[i].y);
    __stcg(place(block, key + 2), s[i].z);
    __stcg(place(block, key + 3), s[i].w);
  }
}

}  // namespace rule

// One warp for a value head of a row.
__global__ void __launch_bounds__(32 * kWarps) NormKernel(const DeltaParams p) {
  LaunchDependents();
  WaitForPrevious();
  const DeltaShape& shape = p.shape;
  const int64_t row = blockIdx.x;
  const int head = blockIdx.y * kWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (head >= shape.value_heads) return;
  const int size = shape.value_dim;
  const float* const x = p.mixed + row * shape.qkv_size() + 2 * shape.key_size() + head * size;
  const __nv_bfloat16* const z =
      p.qkvz + row * (shape.qkv_size() + shape.value_size()) + shape.qkv_size() + head * size;
  __nv_bfloat16* const out = p.out + row * shape.value_size() + head * size;
  const auto four_at = [x](int i) { return *reinterpret_cast<const float4*>(x + i); };
  float squares = 0.0f;
  for (int i = 4 * lane; i < size; i += 128) {
    const float4 y = four_at(i);
    squares = __fmaf_rn(y.x, y.x, squares);
    squares = __fmaf_rn(y.y, y.y, squares);
    squares = __fmaf_rn(y.z, y.z, squares);
    squares = __fmaf_rn(y.w, y.w, squares);
  }
  const float scale = rsqrtf(WarpSum(squares) / static_cast<float>(size) + p.eps);
  for (int i = 4 * lane; i < size; i += 128) {
    const float4 y = four_at(i), gate = LoadFour(z + i);
    const float4 weight = *reinterpret_cast<const float4*>(p.norm + i);
    __nv_bfloat162 pairs[2] = {__floats2bfloat162_rn(y.x * scale * weight.x * Silu(gate.x),
                                                     y.y * scale * weight.y * Silu(gate.y)),
                               __floats2bfloat162_rn(y.z * scale * weight.z * Silu(gate.z),
                                                     y.w * scale * weight.w * Silu(gate.w))};
    *reinterpret_cast<uint2*>(out + i) = *reinterpret_cast<const uint2*>(pairs);
  }
}

bool IsValid(const DeltaParams& p) {
  const DeltaStates& states = p.states;
  return IsDeltaShape(p.shape) && p.rows.rows > 0 && p.rows.states.sequences > 0 &&
         p.rows.states.sequences <= 65535 && p.rows.states.to != nullptr && states.planes > 0 &&
         states.tile > 0 && p.shape.value_dim % states.tile == 0 &&
         int64_t{4} * p.shape.key_dim * states.tile <= states.block_bytes &&
         states.block_bytes % 16 == 0 && IsAligned(p.qkvz) && IsAligned(p.mixed);
}

dim3 HeadGrid(const DeltaParams& p, int heads) {
  return dim3(p.rows.rows, (heads + kWarps - 1) / kWarps);
}

}  // namespace

bool IsDeltaShape(const DeltaShape& shape) {
  return shape.key_heads > 0 && shape.value_heads > 0 && shape.value_heads % shape.key_heads == 0 &&
         shape.key_dim > 0 && shape.key_dim % 4 == 0 && shape.key_dim <= kMostKeys &&
         shape.value_dim > 0 && shape.value_dim % 4 == 0 && shape.convolution > 1;
}

cudaError_t DeltaConvolution(const DeltaParams& params, cudaStream_t stream) {
  if (!IsValid(params)) return cudaErrorInvalidValue;
  const dim3 grid = HeadGrid(params, 2 * params.shape.key_heads + params.shape.value_heads);
  return LaunchEarly(ConvolutionKernel, grid, 32 * kWarps, 0, stream, params);
}

cudaError_t DeltaRule(const DeltaParams& params, cudaStream_t stream) {
  if (!IsValid(params)) return cudaErrorInvalidValue;
  const int tiles = params.shape.value_heads * (params.shape.value_dim / params.states.tile);
  const int parts = (params.states.tile + rule::kColumns - 1) / rule::kColumns;
  const auto kernel =
      params.shape.key_dim == kMostKeys ? rule::RuleKernel<true> : rule::RuleKernel<false>;
  return LaunchEarly(kernel, dim3(tiles * parts, params.rows.states.sequences), rule::kThreads, 0,
                     stream, params, parts);
}

cudaError_t DeltaNorm(const DeltaParams& params, cudaStream_t stream) {
  if (!IsValid(params)) return cudaErrorInvalidValue;
  return LaunchEarly(NormKernel, HeadGrid(params, params.shape.value_heads), 32 * kWarps, 0, stream,
                     params);
}

}  // namespace dorad::kernels
