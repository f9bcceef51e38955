#include "kernels/train/abi.h"

#include <cuda_runtime_api.h>

#include "kernels/dora/compose.h"
#include "kernels/dora/compose_backward.h"
#include "kernels/dora/norm.h"
#include "kernels/train/factors.h"
#include "kernels/train/linear.h"

using dorad::kernels::FloatType;

namespace {

// The common parameters of forward and backward.
dorad::train::LinearParams Sizes(int64_t rows, int64_t in, int64_t out, int64_t rank, int32_t type,
                                 int32_t factor_type) {
  dorad::train::LinearParams params;
  params.rows = rows;
  params.in = in;
  params.out = out;
  params.rank = rank;
  params.type = static_cast<FloatType>(type);
  params.factor_type = static_cast<FloatType>(factor_type);
  return params;
}

bool Good(int64_t in, int64_t out, int64_t rank) {
  return in >= 0 && out >= 0 && rank >= 0 && rank <= dorad::kernels::kMostRank;
}

}  // namespace

int dorad_train_abi(void) { return DORAD_TRAIN_ABI; }

int dorad_train_check_device(void) { return dorad::train::CheckDevice(); }

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

int64_t dorad_linear_factor_bytes(int64_t in, int64_t out, int64_t rank, int32_t type,
                                  int32_t factor_type, int32_t makes_norm) {
  if (!Good(in, out, rank)) return -1;
  return static_cast<int64_t>(
      dorad::train::FactorBytes(Sizes(0, in, out, rank, type, factor_type), makes_norm != 0));
}

int64_t dorad_linear_forward_bytes(int64_t rows, int64_t in, int64_t out, int64_t rank,
                                   int32_t type, int32_t factor_type, int32_t makes_norm) {
  if (rows < 0 || !Good(in, out, rank)) return -1;
  return static_cast<int64_t>(
      dorad::train::ForwardBytes(Sizes(rows, in, out, rank, type, factor_type), makes_norm != 0));
}

int dorad_linear_forward(void* gemm, void* handle, const void* x, const void* w, const void* a,
                         const void* b, const void* m, const float* bias, float* norm, float* g,
                         void* h, void* inner, void* y, void* factors, void* workspace,
                         int64_t workspace_bytes, int64_t rows, int64_t in, int64_t out,
                         int64_t rank, double scale, float eps, int32_t type, int32_t factor_type,
                         int32_t m_type, void* stream) {
  if (workspace_bytes < 0) return cudaErrorInvalidValue;
  dorad::train::LinearParams params = Sizes(rows, in, out, rank, type, factor_type);
  params.x = x;
  params.w = w;
  params.a = a;
  params.b = b;
  params.h = h;
  params.inner = inner;
  params.norm = norm;
  params.g = g;
  params.factors = factors;
  params.workspace = workspace;
  params.workspace_bytes = static_cast<size_t>(workspace_bytes);
  params.scale = scale;
  params.eps = eps;
  params.m_type = static_cast<FloatType>(m_type);
  dorad::train::LinearForward forward;
  forward.m = m;
  forward.bias = bias;
  forward.y = y;
  return dorad::train::Forward(reinterpret_cast<dorad::train::GemmFunction>(gemm),
                               static_cast<cublasHandle_t>(handle), params, forward,
                               static_cast<cudaStream_t>(stream));
}

int dorad_linear_backward(void* gemm, void* handle, const void* dy, const void* x, const void* w,
                          const void* a, const void* b, const float* norm, const float* g,
                          const void* h, const void* inner, void* d_inner, void* d_h, void* d_x,
                          void* d_a, void* d_b, void* d_m, void* factors, void* workspace,
                          int64_t workspace_bytes, int64_t rows, int64_t in, int64_t out,
                          int64_t rank, double scale, float eps, int32_t type, int32_t factor_type,
                          int32_t m_type, int32_t sum_type, void* stream) {
  if (workspace_bytes < 0) return cudaErrorInvalidValue;
  dorad::train::LinearParams params = Sizes(rows, in, out, rank, type, factor_type);
  params.x = x;
  params.w = w;
  params.a = a;
  params.b = b;
  // Backward only reads what forward wrote.
  params.norm = const_cast<float*>(norm);
  params.g = const_cast<float*>(g);
  params.h = const_cast<void*>(h);
  params.inner = const_cast<void*>(inner);
  params.factors = factors;
  params.workspace = workspace;
  params.workspace_bytes = static_cast<size_t>(workspace_bytes);
  params.scale = scale;
  params.eps = eps;
  params.m_type = static_cast<FloatType>(m_type);
  dorad::train::LinearBackward backward;
  backward.dy = dy;
  backward.d_inner = d_inner;
  backward.d_h = d_h;
  backward.d_x = d_x;
  backward.d_a = d_a;
  backward.d_b = d_b;
  backward.d_m = d_m;
  backward.sum_type = static_cast<FloatType>(sum_type);
  return dorad::train::Backward(reinterpret_cast<dorad::train::GemmFunction>(gemm),
                                static_cast<cublasHandle_t>(handle), params, backward,
                                static_cast<cudaStream_t>(stream));
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

int dorad_three_terms(const void* a, const void* b, void* to_a, void* to_b, int64_t out, int64_t in,
                      int64_t rank, int32_t type, void* stream) {
  dorad::train::FactorsParams params;
  params.a = a;
  params.b = b;
  params.to_a = to_a;
  params.to_b = to_b;
  params.rank = rank;
  params.in = in;
  params.out = out;
  params.terms = 3;
  params.from = static_cast<FloatType>(type);
  return dorad::train::ConvertFactors(params, static_cast<cudaStream_t>(stream));
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
