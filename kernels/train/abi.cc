#include "kernels/train/abi.h"

#include <cuda_runtime_api.h>

#include "kernels/dora/compose.h"
#include "kernels/dora/compose_backward.h"
#include "kernels/dora/norm.h"

using dorad::kernels::FloatType;

int dorad_train_abi(void) { return DORAD_TRAIN_ABI; }

int dorad_compose_forward(const void* base, const void* lora, const float* g, void* delta,
                          void* inner, int64_t rows, int64_t out, float scale, int32_t type,
                          void* stream) {
  dorad::kernels::ComposeParams params;
  params.base = base;
  params.lora = lora;
  params.g = g;
  params.delta = delta;
  params.inner = inner;
  params.rows = rows;
  params.out = out;
  params.scale = scale;
  params.type = static_cast<FloatType>(type);
  return dorad::kernels::Compose(params, static_cast<cudaStream_t>(stream));
}

int64_t dorad_compose_backward_workspace(int64_t rows, int64_t out) {
  if (rows < 0 || out < 0) return -1;
  return static_cast<int64_t>(dorad::kernels::ComposeBackwardWorkspace(rows, out));
}

int dorad_compose_backward(const void* grad, const void* inner, const float* g, void* d_base,
                           void* d_lora, float* d_g, void* workspace, int64_t workspace_bytes,
                           int64_t rows, int64_t out, float scale, int32_t type, void* stream) {
  if (workspace_bytes < 0) return cudaErrorInvalidValue;
  dorad::kernels::ComposeBackwardParams params;
  params.grad = grad;
  params.inner = inner;
  params.g = g;
  params.d_base = d_base;
  params.d_lora = d_lora;
  params.d_g = d_g;
  params.workspace = workspace;
  params.workspace_bytes = static_cast<size_t>(workspace_bytes);
  params.rows = rows;
  params.out = out;
  params.scale = scale;
  params.type = static_cast<FloatType>(type);
  return dorad::kernels::ComposeBackward(params, static_cast<cudaStream_t>(stream));
}

int64_t dorad_direct_norm_workspace(int64_t out, int64_t in, int64_t rank) {
  if (out < 0 || in < 0 || rank < 0 || rank > dorad::kernels::kMostRank) return -1;
  return static_cast<int64_t>(dorad::kernels::DirectNormWorkspace(out, in, rank));
}

int dorad_direct_norm(const void* w, const void* a, const void* b, const float* base_sq,
                      float* norm, void* workspace, int64_t workspace_bytes, int64_t out,
                      int64_t in, int64_t rank, int64_t ldb, double scale, int32_t w_by_in,
                      void* stream) {
  if (workspace_bytes < 0) return cudaErrorInvalidValue;
  dorad::kernels::DoraNormParams params;
  params.w = static_cast<const __nv_bfloat16*>(w);
  params.a = static_cast<const __nv_bfloat16*>(a);
  params.b = static_cast<const __nv_bfloat16*>(b);
  params.base_sq = base_sq;
  params.norm = norm;
  params.workspace = workspace;
  params.workspace_bytes = static_cast<size_t>(workspace_bytes);
  params.out = out;
  params.in = in;
  params.rank = rank;
  params.ldb = ldb;
  params.scale = scale;
  params.w_by_in = w_by_in != 0;
  return dorad::kernels::DirectNorm(params, static_cast<cudaStream_t>(stream));
}

const char* dorad_error_string(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}
