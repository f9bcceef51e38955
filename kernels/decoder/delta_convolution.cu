// Before and after a delta-net's rule: the convolution, the gated norm, and the rows that the next
// step's convolution sees.
#include "kernels/decoder/delta_device.cuh"
#include "kernels/isa/dependent_launch.cuh"

namespace dorad::kernels {
namespace {

constexpr int kWarps = 4;

__device__ inline float Silu(float x) { return x / (1.0f + expf(-x)); }

// torch.nn.functional.softplus.
__device__ inline float Softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

__device__ inline float4 LoadFour(const __nv_bfloat16* from) {
  const uint2 bits = *reinterpret_cast<const uint2*>(from);
  const float2 low = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&bits.x));
  const float2 high = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&bits.y));
  return {low.x, low.y, high.x, high.y};
}

// A head of the convolution: queries come first, then keys, then values.
struct MixedHead {
  int size;
  int first;       // channel
  int value_head;  // below 0: a query or a key
};

__device__ inline MixedHead MixedHeadAt(const DeltaShape& shape, int head) {
  const int value_head = head - 2 * shape.key_heads;
  if (value_head < 0) return {shape.key_dim, head * shape.key_dim, value_head};
  return {shape.value_dim, 2 * shape.key_size() + value_head * shape.value_dim, value_head};
}

// The weights of channels [c, c + 4) by tap; zeros before the first one.
__device__ inline void LoadTaps(const DeltaParams& p, int c, float4 (&weights)[kMostTaps]) {
  const int taps = p.shape.convolution;
  const int absent = kMostTaps - taps;
#pragma unroll
  for (int j = 0; j < kMostTaps; ++j) {
    weights[j] = {};
    if (j < absent) continue;
    const float* const at = p.convolution + int64_t{c} * taps + j - absent;
    weights[j] = {at[0], at[taps], at[2 * taps], at[3 * taps]};
  }
}

__device__ inline float4 MultiplyAdd(const float4& a, const float4& b, const float4& c) {
  return {__fmaf_rn(a.x, b.x, c.x), __fmaf_rn(a.y, b.y, c.y), __fmaf_rn(a.z, b.z, c.z),
          __fmaf_rn(a.w, b.w, c.w)};
}

// As transformers' l2norm.
__device__ inline float4 Normalised(const float4& x, float scale) {
  const float squares =
      __fmaf_rn(x.w, x.w, __fmaf_rn(x.z, x.z, __fmaf_rn(x.y, x.y, __fmul_rn(x.x, x.x))));
  const float by = rsqrtf(WarpSum(squares) + 1e-6f) * scale;
  return {x.x * by, x.y * by, x.z * by, x.w * by};
}

// One warp for a head of `count` rows in succession, four channels a lane.
__global__ void __launch_bounds__(32 * kWarps) ConvolutionKernel(const DeltaParams p, int count) {
  LaunchDependents();
  const DeltaShape& shape = p.shape;
  const int head_index = blockIdx.y * kWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (head_index >= 2 * shape.key_heads + shape.value_heads) {
    WaitForPrevious();
    return;
  }
  const MixedHead head = MixedHeadAt(shape, head_index);
  const bool is_value = head.value_head >= 0;
  const int first_row = blockIdx.x * count, end = min(first_row + count, p.rows.rows);
  const int64_t pitch = shape.qkv_size() + shape.value_size();
  const float scale = head_index < shape.key_heads ? rsqrtf(static_cast<float>(shape.key_dim)) : 1;
  // Keys take one turn, with all lanes for their norm.
  for (int i = 4 * lane; i < (head.size + 127) / 128 * 128; i += 128) {
    const int c = head.first + (i < head.size ? i : 0);
    float4 weights[kMostTaps], x[kMostTaps];
    LoadTaps(p, c, weights);
    int sequence = -1, begin = 0, from = -1;
    for (int row = first_row; row < end; ++row) {
      const bool goes_on = p.rows.sequences[row] == sequence;
      if (!goes_on) {
        sequence = p.rows.sequences[row];
        begin = p.rows.states.row_begin[sequence];
        from = p.rows.states.from[sequence];
      }
      // x[j] is of the sequence's row `first + j`; below 0: of the state, which earlier kernels of
      // the step do not write.
      const int first = row - begin + 1 - kMostTaps;
#pragma unroll
      for (int j = 0; j < kMostTaps - 1; ++j) {
        if (goes_on) {
          x[j] = x[j + 1];
        } else if (first + j < 0) {
          const int kept = first + j + shape.convolution - 1;
          x[j] = from < 0 || kept < 0 ? float4{} : LoadFour(ConvolutionAt(p, from, kept, c));
        }
      }
      WaitForPrevious();
#pragma unroll
      for (int j = 0; j < kMostTaps; ++j) {
        if (j + 1 < kMostTaps && (goes_on || first + j < 0)) continue;
        x[j] = LoadFour(p.qkvz + (begin + first + j) * pitch + c);
      }
      if (p.rows.states.to[sequence] < 0) continue;
      float4 y = {};
#pragma unroll
      for (int j = 0; j < kMostTaps; ++j) y = MultiplyAdd(weights[j], x[j], y);
      y = {Silu(y.x), Silu(y.y), Silu(y.z), Silu(y.w)};
      if (i >= head.size) y = {};
      if (!is_value) y = Normalised(y, scale);
      if (i < head.size) {
        *reinterpret_cast<float4*>(p.mixed + int64_t{row} * shape.qkv_size() + c) = y;
      }
    }
  }
  if (!is_value) return;
  for (int row = first_row + lane; row < end; row += 32) {
    float* const update = p.factors + int64_t{row} * 2 * shape.value_heads + head.value_head;
    float* const decay = update + shape.value_heads;
    const float step = Softplus(*decay + p.time_bias[head.value_head]);
    *decay = expf(-expf(p.decay_log[head.value_head]) * step);
    *update = 1.0f / (1.0f + expf(-*update));
  }
}

// Replaces the convolution's rows by the last rows of the sequence. The warps of its value heads
// share the channels.
__device__ inline void KeepLastRows(const DeltaParams& p, int sequence, int head) {
  const int begin = p.rows.states.row_begin[sequence];
  const int count = p.rows.states.row_begin[sequence + 1] - begin;
  const int from = p.rows.states.from[sequence], to = p.rows.states.to[sequence];
  WaitForPrevious();
  if (count == 0 || to < 0) return;
  const int channels = p.shape.qkv_size();
  const int kept = p.shape.convolution - 1;
  const int64_t pitch = channels + p.shape.value_size();
  const int lanes = 32 * p.shape.value_heads;
  for (int c = 4 * (32 * head + static_cast<int>(threadIdx.x) % 32); c < channels; c += 4 * lanes) {
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

// One warp for a value head of a row; behind the rows, one for a share of a sequence's last rows.
__global__ void __launch_bounds__(32 * kWarps) NormKernel(const DeltaParams p) {
  LaunchDependents();
  const DeltaShape& shape = p.shape;
  const int64_t row = blockIdx.x;
  const int head = blockIdx.y * kWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (row >= p.rows.rows && head < shape.value_heads) {
    return KeepLastRows(p, static_cast<int>(row) - p.rows.rows, head);
  }
  WaitForPrevious();
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

int HeadBlocks(int heads) { return (heads + kWarps - 1) / kWarps; }

}  // namespace

bool IsDeltaShape(const DeltaShape& shape) {
  return shape.key_heads > 0 && shape.value_heads > 0 && shape.value_heads % shape.key_heads == 0 &&
         shape.key_dim > 0 && shape.key_dim % 4 == 0 && shape.key_dim <= kMostKeys &&
         shape.value_dim > 0 && shape.value_dim % 4 == 0 && shape.convolution > 1 &&
         shape.convolution <= kMostTaps;
}

cudaError_t DeltaConvolution(const DeltaParams& params, cudaStream_t stream) {
  if (!IsValid(params)) return cudaErrorInvalidValue;
  // Many rows share the loads of the weights; few want all multiprocessors.
  const int count = params.rows.rows >= 1024 ? 16 : params.rows.rows >= 64 ? 4 : 1;
  const dim3 grid((params.rows.rows + count - 1) / count,
                  HeadBlocks(2 * params.shape.key_heads + params.shape.value_heads));
  return LaunchEarly(ConvolutionKernel, grid, 32 * kWarps, 0, stream, params, count);
}

cudaError_t DeltaNorm(const DeltaParams& params, cudaStream_t stream) {
  if (!IsValid(params)) return cudaErrorInvalidValue;
  const dim3 grid(params.rows.rows + params.rows.states.sequences,
                  HeadBlocks(params.shape.value_heads));
  return LaunchEarly(NormKernel, grid, 32 * kWarps, 0, stream, params);
}

}  // namespace dorad::kernels
