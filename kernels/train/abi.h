// The kernels of training behind a C interface, for callers that load libdorad_train.so at run time
// (the Python package dorad.train). Thread-safe; functions only enqueue work on the stream.
//
// type: a dorad::kernels::FloatType (0 fp32, 1 bf16, 2 fp16). stream: a cudaStream_t. Tensors are
// [rows, out], contiguous; NULL where a comment in compose.h or compose_backward.h allows nullptr.
// Returned ints are cudaError_t, 0 for success.
#pragma once

#include <stdint.h>

#define DORAD_TRAIN_ABI 5

#if defined(__GNUC__)
#define DORAD_EXPORT __attribute__((visibility("default")))
#endif

extern "C" {

// DORAD_TRAIN_ABI of the library: rises when a function changes its meaning.
DORAD_EXPORT int dorad_train_abi(void);

// 0 if the library has code for the current device, else what a launch would return.
DORAD_EXPORT int dorad_train_check_device(void);

DORAD_EXPORT int dorad_compose_forward(const void* base, const void* lora, const float* g,
                                       void* delta, void* inner, int64_t rows, int64_t out,
                                       float scale, int32_t type, void* stream);

// One of the linears of a call: see dorad::train::Linear.
struct dorad_linear {
  const void* w;
  const void* a;
  const void* b;
  float* norm;
  float* g;
  void* inner;
  const void* m;
  const float* bias;
  void* y;
  const void* dy;
  void* d_b;
  void* d_m;
  int64_t out;
  int64_t rank;
  double scale;
};

// Forward and backward of linears that have one input (kernels/train/linear.h). gemm: the address
// of cublasGemmEx; handle: a cublasHandle_t of the same library, bound to the stream. factor_type:
// of a and b, m_type: of m and d_m, sum_type: of d_a and d_b. Bytes as in the header, -1 for
// refused sizes; of the linears they read out and rank.
DORAD_EXPORT int64_t dorad_linears_forward_bytes(const struct dorad_linear* linears, int32_t count,
                                                 int64_t rows, int64_t in, int32_t type,
                                                 int32_t factor_type, int32_t makes_norms);
DORAD_EXPORT int64_t dorad_linears_backward_bytes(const struct dorad_linear* linears, int32_t count,
                                                  int64_t rows, int64_t in, int32_t type,
                                                  int32_t factor_type);
DORAD_EXPORT int dorad_linears_forward(void* gemm, void* handle, const struct dorad_linear* linears,
                                       int32_t count, const void* x, void* h, void* workspace,
                                       int64_t workspace_bytes, int64_t rows, int64_t in, float eps,
                                       int32_t type, int32_t factor_type, int32_t m_type,
                                       void* stream);
DORAD_EXPORT int dorad_linears_backward(void* gemm, void* handle,
                                        const struct dorad_linear* linears, int32_t count,
                                        const void* x, const void* h, void* d_x, void* d_a,
                                        void* workspace, int64_t workspace_bytes, int64_t rows,
                                        int64_t in, float eps, int32_t type, int32_t factor_type,
                                        int32_t m_type, int32_t sum_type, void* stream);

// Bytes; -1 for refused sizes.
DORAD_EXPORT int64_t dorad_compose_backward_workspace(int64_t rows, int64_t out);
DORAD_EXPORT int dorad_compose_backward(const void* grad, const void* inner, const float* g,
                                        void* d_base, void* d_lora, float* d_g, void* workspace,
                                        int64_t workspace_bytes, int64_t rows, int64_t out,
                                        float scale, int32_t type, void* stream);

// Converts factors of other types than bf16 for dorad_direct_norm, with three times the rank: three
// terms of dorad::train::ConvertFactors. a [rank, in] and b [out, rank] of `type`, contiguous; to_a
// [3·rank, in] and to_b [out, 3·rank] in bf16.
DORAD_EXPORT int dorad_three_terms(const void* a, const void* b, void* to_a, void* to_b,
                                   int64_t out, int64_t in, int64_t rank, int32_t type,
                                   void* stream);

// The norm ||W + s·B·A|| of a linear module by dorad::kernels::DirectNorm, fp32 [out]. w [out, in]
// (or [in, out] with w_by_in), a [rank, in], b [out, rank] with leading dimension ldb; all bf16.
// base_sq: ||W||², fp32 [out]; read for scale 0 or rank 0 only. workspace: 256-byte aligned.
DORAD_EXPORT int64_t dorad_direct_norm_workspace(int64_t out, int64_t in, int64_t rank);
DORAD_EXPORT int dorad_direct_norm(const void* w, const void* a, const void* b,
                                   const float* base_sq, float* norm, void* workspace,
                                   int64_t workspace_bytes, int64_t out, int64_t in, int64_t rank,
                                   int64_t ldb, double scale, int32_t w_by_in, void* stream);

// "invalid argument" for 1, and so on.
DORAD_EXPORT const char* dorad_error_string(int error);

}  // extern "C"
