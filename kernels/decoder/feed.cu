#include "kernels/decoder/feed.h"

namespace dorad::kernels {
namespace {

constexpr int kThreads = 256;

__global__ void FeedKernel(int32_t* token_ids, int rows, const int32_t* sampled) {
  const int row = blockIdx.x * kThreads + threadIdx.x;
  if (row >= rows || token_ids[row] >= 0) return;
  token_ids[row] = max(sampled[-1 - token_ids[row]], 0);
}

}  // namespace

cudaError_t FeedTokens(int32_t* token_ids, int32_t rows, const int32_t* sampled,
                       cudaStream_t stream) {
  if (rows <= 0) return cudaErrorInvalidValue;
  FeedKernel<<<(rows + kThreads - 1) / kThreads, kThreads, 0, stream>>>(token_ids, rows, sampled);
  return cudaGetLastError();
}

}  // namespace dorad::kernels
