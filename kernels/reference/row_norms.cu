#include "kernels/reference/row_norms.h"

namespace dorad::kernels {
namespace {

constexpr int kThreads = 256;

// One block a row.
__global__ void RowNormsKernel(const RowNormsParams p) {
  const int64_t row = blockIdx.x;
  const float* b = p.b + row * p.rank;
  double squares = 0.0;
  for (int64_t col = threadIdx.x; col < p.cols; col += kThreads) {
    float lora = 0.0f;
    for (int r = 0; r < p.rank; ++r) lora += b[r] * p.a[int64_t{r} * p.cols + col];
    const float w =
        __bfloat162float(p.weight[row * p.row_stride + col * p.col_stride]) + p.scale * lora;
    squares += static_cast<double>(w) * w;
  }
  __shared__ double sums[kThreads];
  sums[threadIdx.x] = squares;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) p.norms[row] = static_cast<float>(sqrt(sums[0]));
}

}  // namespace

cudaError_t RowNorms(const RowNormsParams& params, cudaStream_t stream) {
  if (params.rows <= 0 || params.cols <= 0 || params.rank < 0) return cudaErrorInvalidValue;
  RowNormsKernel<<<static_cast<unsigned>(params.rows), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace dorad::kernels
