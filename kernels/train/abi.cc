#include "kernels/train/abi.h"

#include <cuda_runtime_api.h>

#include "kernels/dora/compose.h"
#include "kernels/dora/compose_backward.h"
#include "kernels/dora/norm.h"
#include "kernels/isa/isa.h"
#include "kernels/train/factors.h"
#include "kernels/train/linear.h"

using dorad::kernels::FloatType;

namespace {

// The common parameters of forward and backward, with their linears.
struct Call {
  Call(const dorad_linear* given, int32_t count, int64_t rows, int64_t in, int32_t type,
       int32_t factor_type) {
    if (given == nullptr || count < 1 || count > dorad::train::kMostLinears) return;
    for (int i = 0; i < count; ++i) {
      const dorad_linear& from = given[i];
      dorad::train::Linear& linear = linears[i];
      linear.w = from.w;
      linear.a = from.a;
      linear.b = from.b;
      linear.norm = from.norm;
      linear.g = from.g;
      linear.inner = from.inner;
      linear.m = from.m;
      linear.bias = from.bias;
      linear.y = from.y;
      linear.dy = from.dy;
      linear.d_b = from.d_b;
      linear.d_m = from.d_m;
      linear.out = from.out;
      linear.rank = from.rank;
      linear.scale = from.scale;
    }
    params.linears = linears;
    params.count = count;  // Else 0, which is refused.
    params.rows = rows;
    params.in = in;
    params.type = static_cast<FloatType>(type);
    params.factor_type = static_cast<FloatType>(factor_type);
  }
  // params has a pointer into it.
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  bool HasSizes() const {
    for (int i = 0; i < params.count; ++i) {
      const dorad::train::Linear& linear = linears[i];
      if (linear.out < 0 || linear.rank < 0 || linear.rank > dorad::kernels::kMostRank) {
        return false;
      }
    }
    return params.count > 0 && params.rows >= 0 && params.in >= 0;
  }

  dorad::train::Linear linears[dorad::train::kMostLinears];
  dorad::train::LinearParams params;
};

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

int64_t dorad_linears_forward_bytes(const dorad_linear* linears, int32_t count, int64_t rows,
                                    int64_t in, int32_t type, int32_t factor_type,
                                    int32_t makes_norms) {
  const Call call(linears, count, rows, in, type, factor_type);
  if (!call.HasSizes()) return -1;
  return static_cast<int64_t>(dorad::train::ForwardBytes(call.params, makes_norms != 0));
}

int64_t dorad_linears_backward_bytes(const dorad_linear* linears, int32_t count, int64_t rows,
                                     int64_t in, int32_t type, int32_t factor_type) {
  const Call call(linears, count, rows, in, type, factor_type);
  if (!call.HasSizes()) return -1;
  return static_cast<int64_t>(dorad::train::BackwardBytes(call.params));
}

int dorad_linears_forward(void* gemm, void* handle, const dorad_linear* linears, int32_t count,
                          const void* x, void* h, void* workspace, int64_t workspace_bytes,
                          int64_t rows, int64_t in, float eps, int32_t type, int32_t factor_type,
                          int32_t m_type, void* stream) {
  if (workspace_bytes < 0) return cudaErrorInvalidValue;
  Call call(linears, count, rows, in, type, factor_type);
  dorad::train::LinearParams& params = call.params;
  params.x = x;
  params.h = h;
  params.workspace = workspace;
  params.workspace_bytes = static_cast<size_t>(workspace_bytes);
  params.eps = eps;
  params.m_type = static_cast<FloatType>(m_type);
  return dorad::train::Forward(reinterpret_cast<dorad::train::GemmFunction>(gemm),
                               static_cast<cublasHandle_t>(handle), params,
                               static_cast<cudaStream_t>(stream));
}

int dorad_linears_backward(void* gemm, void* handle, const dorad_linear* linears, int32_t count,
                           const void* x, const void* h, void* d_x, void* d_a, void* workspace,
                           int64_t workspace_bytes, int64_t rows, int64_t in, float eps,
                           int32_t type, int32_t factor_type, int32_t m_type, int32_t sum_type,
                           void* stream) {
  if (workspace_bytes < 0) return cudaErrorInvalidValue;
  Call call(linears, count, rows, in, type, factor_type);
  dorad::train::LinearParams& params = call.params;
  params.x = x;
  params.h = const_cast<void*>(h);  // Backward only reads it.
  params.workspace = workspace;
  params.workspace_bytes = static_cast<size_t>(workspace_bytes);
  params.eps = eps;
  params.m_type = static_cast<FloatType>(m_type);
  dorad::train::LinearGradients gradients;
  gradients.d_x = d_x;
  gradients.d_a = d_a;
  gradients.sum_type = static_cast<FloatType>(sum_type);
  return dorad::train::Backward(reinterpret_cast<dorad::train::GemmFunction>(gemm),
                                static_cast<cublasHandle_t>(handle), params, gradients,
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
  params.count = 1;
  params.in = in;
  dorad::train::LayerFactors& layer = params.layers[0];
  layer.a = a;
  layer.b = b;
  layer.to_a = to_a;
  layer.to_b = to_b;
  layer.rank = rank;
  layer.out = out;
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
  params.isa = dorad::kernels::BestIsa();
  return dorad::kernels::DirectNorm(params, static_cast<cudaStream_t>(stream));
}

const char* dorad_error_string(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}
