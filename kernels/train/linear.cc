#include "kernels/train/linear.h"

#include <algorithm>
#include <limits>

#include "kernels/common/status.h"
#include "kernels/dora/compose_backward.h"
#include "kernels/dora/norm.h"
#include "kernels/train/factors.h"

namespace dorad::train {
namespace {

using kernels::FloatType;

// An operand of a product: [rows, columns] row-major, or the transpose of a matrix stored so.
struct Matrix {
  const void* data;
  int64_t ld;
  bool transposed = false;
};

Matrix Transposed(Matrix matrix) { return {matrix.data, matrix.ld, !matrix.transposed}; }

cudaDataType_t DataType(FloatType type) {
  switch (type) {
    case FloatType::kF32:
      return CUDA_R_32F;
    case FloatType::kBF16:
      return CUDA_R_16BF;
    case FloatType::kF16:
      return CUDA_R_16F;
  }
  return CUDA_R_32F;
}

class Products {
 public:
  Products(GemmFunction gemm, cublasHandle_t handle, FloatType type)
      : gemm_(gemm), handle_(handle), type_(DataType(type)) {}

  // to [m, n] = alpha·left [m, k] @ right [k, n] + beta·to, contiguous, of `to_type`.
  cudaError_t Run(int64_t m, int64_t n, int64_t k, float alpha, Matrix left, Matrix right,
                  float beta, void* to, FloatType to_type) const {
    // cuBLAS's matrices are column-major: it computes toᵀ = rightᵀ @ leftᵀ.
    const cublasStatus_t status =
        gemm_(handle_, right.transposed ? CUBLAS_OP_T : CUBLAS_OP_N,
              left.transposed ? CUBLAS_OP_T : CUBLAS_OP_N, static_cast<int>(n), static_cast<int>(m),
              static_cast<int>(k), &alpha, right.data, type_, static_cast<int>(right.ld), left.data,
              type_, static_cast<int>(left.ld), &beta, to, DataType(to_type), static_cast<int>(n),
              CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    return status == CUBLAS_STATUS_SUCCESS ? cudaSuccess : cudaErrorUnknown;
  }

 private:
  GemmFunction gemm_;
  cublasHandle_t handle_;
  cudaDataType_t type_;
};

bool Good(const LinearParams& p) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  return std::min({p.rows, p.in, p.out, p.rank}) >= 1 &&
         std::max({p.rows, p.in, p.out, p.rank}) <= kMost;
}

size_t SizeOf(FloatType type) { return type == FloatType::kF32 ? sizeof(float) : sizeof(uint16_t); }

// The part of inner that is kept: see linear.h.
float InnerScale(FloatType type) { return type == FloatType::kF16 ? 0.0625f : 1.0f; }

size_t RoundedUp(size_t bytes) { return (bytes + 255) / 256 * 256; }

// Factors of another type than the norm's are converted to three terms each.
int Terms(const LinearParams& p, bool makes_norm) {
  return makes_norm && p.factor_type != FloatType::kBF16 ? 3 : 1;
}

// A and B for the products, and for the norm.
struct Factors {
  Matrix a;
  Matrix b;
  const void* norm_a;
  const void* norm_b;
  int64_t norm_rank;
};

cudaError_t MakeFactors(const LinearParams& p, bool makes_norm, Factors* factors,
                        cudaStream_t stream) {
  if (p.factor_type == p.type) {
    *factors = {{p.a, p.in}, {p.b, p.rank}, p.a, p.b, p.rank};
    return cudaSuccess;
  }
  if (p.factors == nullptr) return cudaErrorInvalidValue;
  const int terms = Terms(p, makes_norm);
  FactorsParams convert;
  convert.a = p.a;
  convert.b = p.b;
  convert.to_a = p.factors;
  convert.to_b = static_cast<char*>(p.factors) +
                 RoundedUp(static_cast<size_t>(terms * p.rank * p.in) * SizeOf(p.type));
  convert.rank = p.rank;
  convert.in = p.in;
  convert.out = p.out;
  convert.terms = terms;
  convert.from = p.factor_type;
  convert.to = p.type;
  DORAD_CUDA_RETURN_IF_ERROR(ConvertFactors(convert, stream));
  const char* const rounded_b = static_cast<const char*>(convert.to_b) +
                                (terms == 3 ? static_cast<size_t>(p.rank) * SizeOf(p.type) : 0);
  *factors = {{convert.to_a, p.in},
              {rounded_b, terms * p.rank},
              convert.to_a,
              convert.to_b,
              terms * p.rank};
  return cudaSuccess;
}

// Rows of the output at a time, in half types: their fp32 sums stay in L2 between the products.
int64_t RowsAtOnce(int64_t out) {
  constexpr int64_t kSumBytes = 32 << 20;
  constexpr int64_t kTile = 128;
  const int64_t tiles = kSumBytes / (std::max<int64_t>(1, out) * sizeof(float)) / kTile;
  return std::max<int64_t>(2, tiles) * kTile;
}

// inner and y from h, g and the products. cuBLAS rounds a product to 16 bits before it adds the
// existing output, and would lose an update of less than half the last place of x Wᵀ each time: the
// sums are made in fp32, and rounded once.
cudaError_t JoinHalf(const Products& products, const LinearParams& p, const LinearForward& forward,
                     Matrix b, cudaStream_t stream) {
  const int64_t most = RowsAtOnce(p.out);
  const float scale = InnerScale(p.type);
  if (p.workspace_bytes < ForwardBytes(p, false)) return cudaErrorInvalidValue;
  const auto row_of = [&p](const void* matrix, int64_t row, int64_t columns) {
    return static_cast<const char*>(matrix) + static_cast<size_t>(row * columns) * SizeOf(p.type);
  };
  for (int64_t row = 0; row < p.rows; row += most) {
    const int64_t rows = std::min(most, p.rows - row);
    DORAD_CUDA_RETURN_IF_ERROR(products.Run(rows, p.out, p.in, scale,
                                            {row_of(p.x, row, p.in), p.in}, Transposed({p.w, p.in}),
                                            0.0f, p.workspace, FloatType::kF32));
    DORAD_CUDA_RETURN_IF_ERROR(products.Run(
        rows, p.out, p.rank, scale * static_cast<float>(p.scale),
        {row_of(p.h, row, p.rank), p.rank}, Transposed(b), 1.0f, p.workspace, FloatType::kF32));
    kernels::ApplyParams apply;
    apply.base = p.workspace;
    apply.g = p.g;
    apply.bias = forward.bias;
    apply.y = const_cast<char*>(row_of(forward.y, row, p.out));
    if (p.inner != forward.y) apply.inner = const_cast<char*>(row_of(p.inner, row, p.out));
    apply.base_ld = apply.y_ld = apply.out = p.out;
    apply.rows = rows;
    apply.y_type = p.type;
    DORAD_CUDA_RETURN_IF_ERROR(kernels::Apply(apply, stream));
  }
  return cudaSuccess;
}

cudaError_t JoinF32(const Products& products, const LinearParams& p, const LinearForward& forward,
                    Matrix b, cudaStream_t stream) {
  DORAD_CUDA_RETURN_IF_ERROR(products.Run(p.rows, p.out, p.in, 1.0f, {p.x, p.in},
                                          Transposed({p.w, p.in}), 0.0f, p.inner, p.type));
  DORAD_CUDA_RETURN_IF_ERROR(products.Run(p.rows, p.out, p.rank, static_cast<float>(p.scale),
                                          {p.h, p.rank}, Transposed(b), 1.0f, p.inner, p.type));
  kernels::ApplyParams apply;
  apply.base = p.inner;
  apply.g = p.g;
  apply.bias = forward.bias;
  apply.y = forward.y;
  apply.base_ld = apply.y_ld = apply.out = p.out;
  apply.rows = p.rows;
  apply.y_type = p.type;
  return kernels::Apply(apply, stream);
}

kernels::DoraNormParams NormOf(const LinearParams& p) {
  kernels::DoraNormParams norm;
  norm.w = static_cast<const __nv_bfloat16*>(p.w);
  norm.norm = p.norm;
  norm.g = p.g;
  norm.workspace = p.workspace;
  norm.workspace_bytes = p.workspace_bytes;
  norm.out = p.out;
  norm.in = p.in;
  norm.scale = p.scale;
  norm.eps = p.eps;
  return norm;
}

}  // namespace

size_t FactorBytes(const LinearParams& p, bool makes_norm) {
  if (p.factor_type == p.type) return 0;
  const size_t terms = static_cast<size_t>(Terms(p, makes_norm));
  return RoundedUp(terms * static_cast<size_t>(p.rank * p.in) * SizeOf(p.type)) +
         terms * static_cast<size_t>(p.out * p.rank) * SizeOf(p.type);
}

size_t ForwardBytes(const LinearParams& p, bool makes_norm) {
  const size_t norm =
      makes_norm ? kernels::DirectNormWorkspace(p.out, p.in, Terms(p, true) * p.rank) : 0;
  if (p.type == FloatType::kF32) return norm;
  const int64_t rows = std::min(p.rows, RowsAtOnce(p.out));
  return std::max(norm, static_cast<size_t>(rows * p.out) * sizeof(float));
}

size_t SumBytes(int64_t rows, int64_t out) { return kernels::ComposeBackwardWorkspace(rows, out); }

cudaError_t Forward(GemmFunction gemm, cublasHandle_t handle, const LinearParams& p,
                    const LinearForward& forward, cudaStream_t stream) {
  const bool makes_norm = forward.m != nullptr;
  if (!Good(p) || (makes_norm && (p.type != FloatType::kBF16 || p.m_type == FloatType::kF16))) {
    return cudaErrorInvalidValue;
  }
  Factors factors;
  DORAD_CUDA_RETURN_IF_ERROR(MakeFactors(p, makes_norm, &factors, stream));
  if (makes_norm) {
    kernels::DoraNormParams norm = NormOf(p);
    norm.a = static_cast<const __nv_bfloat16*>(factors.norm_a);
    norm.b = static_cast<const __nv_bfloat16*>(factors.norm_b);
    norm.rank = norm.ldb = factors.norm_rank;
    if (p.m_type == FloatType::kBF16) {
      norm.magnitude = static_cast<const __nv_bfloat16*>(forward.m);
    } else {
      norm.magnitude = static_cast<const float*>(forward.m);
    }
    DORAD_CUDA_RETURN_IF_ERROR(kernels::DirectNorm(norm, stream));
  }
  const Products products(gemm, handle, p.type);
  DORAD_CUDA_RETURN_IF_ERROR(products.Run(p.rows, p.rank, p.in, 1.0f, {p.x, p.in},
                                          Transposed(factors.a), 0.0f, p.h, p.type));
  const auto join = p.type == FloatType::kF32 ? JoinF32 : JoinHalf;
  return join(products, p, forward, factors.b, stream);
}

cudaError_t Backward(GemmFunction gemm, cublasHandle_t handle, const LinearParams& p,
                     const LinearBackward& backward, cudaStream_t stream) {
  const bool wants_h = backward.d_x != nullptr || backward.d_a != nullptr;
  if (!Good(p) || (wants_h && backward.d_h == nullptr) ||
      ((wants_h || backward.d_b != nullptr) && backward.d_inner == nullptr)) {
    return cudaErrorInvalidValue;
  }
  kernels::ComposeBackwardParams scaled;
  scaled.grad = backward.dy;
  scaled.inner = p.inner;
  scaled.g = p.g;
  scaled.d_lora = backward.d_inner;
  scaled.d_g = backward.d_m;
  scaled.d_g_type = p.m_type;
  scaled.norm = p.norm;
  scaled.eps = p.eps;
  scaled.workspace = p.workspace;
  scaled.workspace_bytes = p.workspace_bytes;
  scaled.rows = p.rows;
  scaled.out = p.out;
  scaled.scale = 1.0f;
  scaled.type = p.type;
  DORAD_CUDA_RETURN_IF_ERROR(kernels::ComposeBackward(scaled, stream));
  const Products products(gemm, handle, p.type);
  const Matrix d_inner = {backward.d_inner, p.out}, d_h = {backward.d_h, p.rank};
  if (wants_h) {
    Factors factors;
    DORAD_CUDA_RETURN_IF_ERROR(MakeFactors(p, false, &factors, stream));
    DORAD_CUDA_RETURN_IF_ERROR(products.Run(p.rows, p.rank, p.out, static_cast<float>(p.scale),
                                            d_inner, factors.b, 0.0f, backward.d_h, p.type));
    if (backward.d_x != nullptr) {
      DORAD_CUDA_RETURN_IF_ERROR(products.Run(p.rows, p.in, p.out, 1.0f, d_inner, {p.w, p.in}, 0.0f,
                                              backward.d_x, p.type));
      DORAD_CUDA_RETURN_IF_ERROR(
          products.Run(p.rows, p.in, p.rank, 1.0f, d_h, factors.a, 1.0f, backward.d_x, p.type));
    }
  }
  if (backward.d_a != nullptr) {
    DORAD_CUDA_RETURN_IF_ERROR(products.Run(p.rank, p.in, p.rows, 1.0f, Transposed(d_h),
                                            {p.x, p.in}, 0.0f, backward.d_a, backward.sum_type));
  }
  if (backward.d_b != nullptr) {
    DORAD_CUDA_RETURN_IF_ERROR(products.Run(p.out, p.rank, p.rows, static_cast<float>(p.scale),
                                            Transposed(d_inner), {p.h, p.rank}, 0.0f, backward.d_b,
                                            backward.sum_type));
  }
  return cudaSuccess;
}

}  // namespace dorad::train
