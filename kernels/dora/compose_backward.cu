#include <algorithm>

#include "kernels/common/status.h"
#include "kernels/dora/compose_backward.h"
#include "kernels/dora/elementwise.cuh"
#include "kernels/isa/dependent_launch.cuh"
#include "kernels/isa/launch.h"

namespace dorad::kernels {
namespace {

// A block of the first stage makes one row of partial sums from its rows: the rows are divided into
// this many blocks, and few enough that the sums cost little compared with the data.
constexpr int64_t kWantedBlocks = 1056;
constexpr int64_t kMostBlockRows = 128;
// Rows whose loads a thread begins before it uses the first.
constexpr int kRowsAtOnce = 4;
// The second stage: columns and shares of the partial sums of a block.
constexpr int kFinishColumns = 32;
constexpr int kFinishShares = 16;

// The division of the rows. By the shape alone: the order of the sums depends on it.
struct Cut {
  dim3 block;
  int64_t block_rows = 0;
  int64_t blocks_of_rows = 0;
  int64_t blocks_of_columns = 0;
};

Cut CutFor(int64_t rows, int64_t out, int size) {
  const int64_t vectors = (out + size - 1) / size;
  Cut cut;
  cut.block = BlockFor(vectors, 128);
  cut.blocks_of_columns = (vectors + cut.block.x - 1) / cut.block.x;
  // Whole rounds of loads of all of a block's threads.
  const int64_t round = int64_t{cut.block.y} * kRowsAtOnce;
  const int64_t wanted = rows * cut.blocks_of_columns / kWantedBlocks;
  cut.block_rows =
      std::clamp((wanted + round - 1) / round * round, round, std::max(round, kMostBlockRows));
  cut.blocks_of_rows = (rows + cut.block_rows - 1) / cut.block_rows;
  return cut;
}

// The sums of a block's threads of one column, in the order of their rows. sums: [y][x] of shared
// memory.
template <int size>
__device__ void AddUp(Vector<float, size>* sums, Vector<float, size>* mine) {
  sums[threadIdx.y * blockDim.x + threadIdx.x] = *mine;
  __syncthreads();
  if (threadIdx.y != 0) return;
  for (unsigned y = 1; y < blockDim.y; ++y) {
    const Vector<float, size>& next = sums[y * blockDim.x + threadIdx.x];
#pragma unroll
    for (int j = 0; j < size; ++j) mine->values[j] = __fadd_rn(mine->values[j], next.values[j]);
  }
}

// A block has the rows [block_rows · y, block_rows · (y + 1)) of its columns. Pointers are not
// __restrict__: outputs may be inputs; a thread reads an element before it overwrites it.
template <typename T, int size, bool wants_g>
__global__ void __launch_bounds__(kThreads)
    BackwardKernel(ComposeBackwardParams p, float* partials, int64_t block_rows,
                   int64_t blocks_of_rows) {
  using V = Vector<T, size>;
  __shared__ Vector<float, size> sums[wants_g ? kThreads : 1];
  LaunchDependents();
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * size;
  const bool has_column = column < p.out;
  WaitForPrevious();
  Vector<float, size> gs;
#pragma unroll
  for (int j = 0; j < size; ++j) gs.values[j] = 1.0f;
  if (has_column) gs = *reinterpret_cast<const Vector<float, size>*>(p.g + column);
  const T* const grads = static_cast<const T*>(p.grad) + column;
  const T* const inners = static_cast<const T*>(p.inner) + column;
  T* const d_bases = static_cast<T*>(p.d_base) + column;
  T* const d_loras = static_cast<T*>(p.d_lora) + column;
  for (int64_t block = blockIdx.y; block < blocks_of_rows; block += gridDim.y) {
    Vector<float, size> sum;
#pragma unroll
    for (int j = 0; j < size; ++j) sum.values[j] = 0.0f;
    const int64_t begin = block * block_rows + threadIdx.y;
    const int64_t end = has_column ? min(p.rows, (block + 1) * block_rows) : 0;
    const int64_t step = blockDim.y;
    for (int64_t first = begin; first < end; first += kRowsAtOnce * step) {
      V grad[kRowsAtOnce];
      V inner[kRowsAtOnce];
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        const int64_t row = first + i * step;
        if (row >= end) continue;
        grad[i] = *reinterpret_cast<const V*>(grads + row * p.out);
        if constexpr (wants_g) inner[i] = *reinterpret_cast<const V*>(inners + row * p.out);
      }
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        const int64_t row = first + i * step;
        if (row >= end) continue;
        V d_base;
        V d_lora;
#pragma unroll
        for (int j = 0; j < size; ++j) {
          const float g = gs.values[j];
          const float x = ToFloat(grad[i].values[j]);
          d_base.values[j] = FromFloat<T>(__fmul_rn(__fsub_rn(g, 1.0f), x));
          d_lora.values[j] = FromFloat<T>(__fmul_rn(__fmul_rn(p.scale, g), x));
          if constexpr (wants_g) {
            const float product = __fmul_rn(x, ToFloat(inner[i].values[j]));
            sum.values[j] = __fadd_rn(sum.values[j], product);
          }
        }
        if (p.d_base != nullptr) *reinterpret_cast<V*>(d_bases + row * p.out) = d_base;
        if (p.d_lora != nullptr) *reinterpret_cast<V*>(d_loras + row * p.out) = d_lora;
      }
    }
    if constexpr (wants_g) {
      AddUp(sums, &sum);
      if (threadIdx.y == 0 && has_column) {
        *reinterpret_cast<Vector<float, size>*>(partials + block * p.out + column) = sum;
      }
      __syncthreads();
    }
  }
}

// A norm of NaN stays one.
__device__ void Store(const ComposeBackwardParams& p, int64_t column, float sum) {
  if (p.norm != nullptr) sum = __fdiv_rn(sum, p.norm[column] < p.eps ? p.eps : p.norm[column]);
  switch (p.d_g_type) {
    case FloatType::kF32:
      static_cast<float*>(p.d_g)[column] = sum;
      return;
    case FloatType::kBF16:
      static_cast<__nv_bfloat16*>(p.d_g)[column] = FromFloat<__nv_bfloat16>(sum);
      return;
    case FloatType::kF16:
      static_cast<__half*>(p.d_g)[column] = FromFloat<__half>(sum);
      return;
  }
}

// d_g[column] of the sum of partials [blocks_of_rows, out]: each share every kFinishShares-th of
// them, then the shares.
__global__ void __launch_bounds__(kFinishColumns* kFinishShares)
    FinishKernel(const float* partials, int64_t blocks_of_rows, ComposeBackwardParams p) {
  __shared__ Vector<float, 1> sums[kFinishColumns * kFinishShares];
  LaunchDependents();
  WaitForPrevious();
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kFinishColumns + threadIdx.x;
  Vector<float, 1> sum = {{0.0f}};
  if (column < p.out) {
#pragma unroll 8
    for (int64_t block = threadIdx.y; block < blocks_of_rows; block += kFinishShares) {
      sum.values[0] = __fadd_rn(sum.values[0], partials[block * p.out + column]);
    }
  }
  AddUp(sums, &sum);
  if (threadIdx.y == 0 && column < p.out) Store(p, column, sum.values[0]);
}

template <typename T, int size>
cudaError_t Launch(const ComposeBackwardParams& p, cudaStream_t stream) {
  const Cut cut = CutFor(p.rows, p.out, size);
  const dim3 grid(static_cast<unsigned>(cut.blocks_of_columns),
                  static_cast<unsigned>(std::min<int64_t>(65535, cut.blocks_of_rows)));
  if (p.d_g == nullptr) {
    return LaunchEarly(BackwardKernel<T, size, false>, grid, cut.block, 0, stream, p,
                       static_cast<float*>(nullptr), cut.block_rows, cut.blocks_of_rows);
  }
  // A single row of partial sums, in fp32 and without norms, is the result.
  const bool is_whole =
      cut.blocks_of_rows == 1 && p.norm == nullptr && p.d_g_type == FloatType::kF32;
  float* const partials = static_cast<float*>(is_whole ? p.d_g : p.workspace);
  DORAD_CUDA_RETURN_IF_ERROR(LaunchEarly(BackwardKernel<T, size, true>, grid, cut.block, 0, stream,
                                         p, partials, cut.block_rows, cut.blocks_of_rows));
  if (is_whole) return cudaSuccess;
  const dim3 finish_grid(static_cast<unsigned>((p.out + kFinishColumns - 1) / kFinishColumns));
  return LaunchEarly(FinishKernel, finish_grid, dim3(kFinishColumns, kFinishShares), 0, stream,
                     static_cast<const float*>(partials), cut.blocks_of_rows, p);
}

template <typename T>
cudaError_t LaunchAs(const ComposeBackwardParams& p, cudaStream_t stream) {
  constexpr int kSize = 16 / sizeof(T);
  const bool vectors = p.out % kSize == 0 && Aligned(p.grad) && Aligned(p.inner) &&
                       Aligned(p.d_base) && Aligned(p.d_lora) && Aligned(p.g) && Aligned(p.d_g);
  return vectors ? Launch<T, kSize>(p, stream) : Launch<T, 1>(p, stream);
}

}  // namespace

size_t ComposeBackwardWorkspace(int64_t rows, int64_t out) {
  if (!GoodSizes(rows, out)) return 0;
  // The largest need over types and alignments.
  int64_t partials = 0;
  for (const int size : {1, 4, 8}) {
    partials = std::max(partials, CutFor(rows, out, size).blocks_of_rows);
  }
  return static_cast<size_t>(partials * out) * sizeof(float);
}

cudaError_t ComposeBackward(const ComposeBackwardParams& params, cudaStream_t stream) {
  if (!GoodSizes(params.rows, params.out)) return cudaErrorInvalidValue;
  if (params.out == 0) return cudaSuccess;
  if (params.rows == 0) {
    if (params.d_g == nullptr) return cudaSuccess;
    const size_t size = params.d_g_type == FloatType::kF32 ? sizeof(float) : sizeof(__half);
    return cudaMemsetAsync(params.d_g, 0, static_cast<size_t>(params.out) * size, stream);
  }
  if (params.d_g != nullptr &&
      (params.inner == nullptr ||
       params.workspace_bytes < ComposeBackwardWorkspace(params.rows, params.out))) {
    return cudaErrorInvalidValue;
  }
  switch (params.type) {
    case FloatType::kF32:
      return LaunchAs<float>(params, stream);
    case FloatType::kBF16:
      return LaunchAs<__nv_bfloat16>(params, stream);
    case FloatType::kF16:
      return LaunchAs<__half>(params, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace dorad::kernels
