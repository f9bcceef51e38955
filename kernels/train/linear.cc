#include "kernels/train/linear.h"

#include <algorithm>
#include <limits>

#include "kernels/common/status.h"
#include "kernels/dora/compose_backward.h"
#include "kernels/dora/norm.h"
#include "kernels/isa/isa.h"
#include "kernels/train/factors.h"

namespace dorad::train {
namespace {

using kernels::FloatType;

static_assert(kMostLinears <= kMostLayers);

// An operand of a product: [rows, columns] row-major, or the transpose of a matrix stored so.
struct Matrix {
  const void* data;
  int64_t ld;
  bool transposed = false;
};

Matrix Transposed(Matrix matrix) { return {matrix.data, matrix.ld, !matrix.transposed}; }

// A product's output, row-major.
struct Output {
  void* data;
  int64_t ld;
  FloatType type;
};

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

  // to [m, n] = alpha·left [m, k] @ right [k, n] + beta·to, of `to_type`.
  cudaError_t Run(int64_t m, int64_t n, int64_t k, float alpha, Matrix left, Matrix right,
                  float beta, Output to) const {
    // cuBLAS's matrices are column-major: it computes toᵀ = rightᵀ @ leftᵀ.
    const cublasStatus_t status =
        gemm_(handle_, right.transposed ? CUBLAS_OP_T : CUBLAS_OP_N,
              left.transposed ? CUBLAS_OP_T : CUBLAS_OP_N, static_cast<int>(n), static_cast<int>(m),
              static_cast<int>(k), &alpha, right.data, type_, static_cast<int>(right.ld), left.data,
              type_, static_cast<int>(left.ld), &beta, to.data, DataType(to.type),
              static_cast<int>(to.ld), CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    return status == CUBLAS_STATUS_SUCCESS ? cudaSuccess : cudaErrorUnknown;
  }

 private:
  GemmFunction gemm_;
  cublasHandle_t handle_;
  cudaDataType_t type_;
};

bool Good(const LinearParams& p) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  if (p.count < 1 || p.count > kMostLinears) return false;
  int64_t ranks = 0;
  for (int i = 0; i < p.count; ++i) {
    const Linear& linear = p.linears[i];
    if (std::min(linear.out, linear.rank) < 1 || std::max(linear.out, linear.rank) > kMost) {
      return false;
    }
    ranks += linear.rank;
  }
  return std::min(p.rows, p.in) >= 1 && std::max({p.rows, p.in, ranks}) <= kMost;
}

size_t SizeOf(FloatType type) { return type == FloatType::kF32 ? sizeof(float) : sizeof(uint16_t); }

void* At(void* matrix, int64_t element, FloatType type) {
  return static_cast<char*>(matrix) + static_cast<size_t>(element) * SizeOf(type);
}

const void* At(const void* matrix, int64_t element, FloatType type) {
  return static_cast<const char*>(matrix) + static_cast<size_t>(element) * SizeOf(type);
}

// The part of inner that is kept: see linear.h.
float InnerScale(FloatType type) { return type == FloatType::kF16 ? 0.0625f : 1.0f; }

// Divides a workspace; without one it only counts.
class Pieces {
 public:
  explicit Pieces(void* workspace) : workspace_(workspace) {}

  void* Take(int64_t elements, size_t size) {
    void* const piece = workspace_ == nullptr ? nullptr : static_cast<char*>(workspace_) + bytes_;
    bytes_ += (static_cast<size_t>(elements) * size + 255) / 256 * 256;
    return elements == 0 ? nullptr : piece;
  }
  size_t bytes() const { return bytes_; }

 private:
  void* workspace_;
  size_t bytes_ = 0;
};

int64_t RanksOf(const LinearParams& p) {
  int64_t ranks = 0;
  for (int i = 0; i < p.count; ++i) ranks += p.linears[i].rank;
  return ranks;
}

int64_t MostOut(const LinearParams& p) {
  int64_t out = 0;
  for (int i = 0; i < p.count; ++i) out = std::max(out, p.linears[i].out);
  return out;
}

// A and B for the products, and for the norms.
struct Factors {
  Matrix a;  // [ranks, in]: of all linears, one after the other
  Matrix b[kMostLinears];
  const void* norm_a[kMostLinears];
  const void* norm_b[kMostLinears];
  int64_t norm_rank[kMostLinears];
  FactorsParams convert;  // count 0: nothing to convert
};

// Factors of another type than the norm's are converted to three terms each.
Factors FactorsOf(const LinearParams& p, bool makes_norms, Pieces* pieces) {
  Factors factors = {};
  FactorsParams& convert = factors.convert;
  const bool converts = p.factor_type != p.type;
  const bool in_terms = converts && makes_norms && p.factor_type != FloatType::kBF16;
  convert.in = p.in;
  convert.terms = in_terms ? 3 : 1;
  convert.from = p.factor_type;
  convert.to = p.type;
  convert.count = converts || p.count > 1 ? p.count : 0;
  factors.a = {p.linears[0].a, p.in};
  const size_t size = SizeOf(p.type);
  const int64_t terms = convert.terms;
  void* const all_a = convert.count == 0 ? nullptr : pieces->Take(RanksOf(p) * p.in, size);
  if (convert.count > 0) factors.a.data = all_a;
  int64_t rank = 0;
  for (int i = 0; i < p.count; ++i) {
    const Linear& linear = p.linears[i];
    LayerFactors& layer = convert.layers[i];
    layer.a = linear.a;
    layer.b = linear.b;
    layer.rank = linear.rank;
    layer.out = linear.out;
    if (all_a != nullptr) layer.rounded_a = At(all_a, rank * p.in, p.type);
    if (in_terms) layer.to_a = pieces->Take(terms * linear.rank * p.in, size);
    if (converts) layer.to_b = pieces->Take(terms * linear.rank * linear.out, size);
    rank += linear.rank;
    factors.b[i] = {converts ? layer.to_b : linear.b, terms * linear.rank};
    factors.norm_a[i] = in_terms ? layer.to_a : linear.a;
    factors.norm_b[i] = factors.b[i].data;
    factors.norm_rank[i] = terms * linear.rank;
    // The second of three terms of b is the rounded one.
    if (in_terms && layer.to_b != nullptr) {
      factors.b[i].data = At(layer.to_b, linear.rank, p.type);
    }
  }
  return factors;
}

// Rows of the output at a time, in half types. It bounds the memory of their fp32 sums; parts that
// stay in L2 between the products are no faster, and are more launches.
int64_t RowsAtOnce(int64_t rows, int64_t out) {
  constexpr int64_t kSumBytes = 128 << 20;
  constexpr int64_t kTile = 128;
  const int64_t tiles = kSumBytes / (std::max<int64_t>(1, out) * sizeof(float)) / kTile;
  const int64_t most = std::max<int64_t>(2, tiles) * kTile;
  // Equal parts, in whole tiles.
  const int64_t parts = std::max<int64_t>(1, (rows + most - 1) / most);
  return ((rows + parts - 1) / parts + kTile - 1) / kTile * kTile;
}

struct ForwardPieces {
  Factors factors;
  float* sums = nullptr;  // in half types
  void* norms[kMostLinears] = {};
  size_t norm_bytes[kMostLinears] = {};
};

ForwardPieces PiecesOf(const LinearParams& p, bool makes_norms, Pieces* all) {
  ForwardPieces pieces;
  pieces.factors = FactorsOf(p, makes_norms, all);
  if (p.type != FloatType::kF32) {
    int64_t sums = 0;
    for (int i = 0; i < p.count; ++i) {
      const int64_t out = p.linears[i].out;
      sums = std::max(sums, std::min(p.rows, RowsAtOnce(p.rows, out)) * out);
    }
    pieces.sums = static_cast<float*>(all->Take(sums, sizeof(float)));
  }
  for (int i = 0; makes_norms && i < p.count; ++i) {
    pieces.norm_bytes[i] =
        kernels::DirectNormWorkspace(p.linears[i].out, p.in, pieces.factors.norm_rank[i]);
    pieces.norms[i] = all->Take(static_cast<int64_t>(pieces.norm_bytes[i]), 1);
  }
  return pieces;
}

// inner and y of a linear from h, g and the products. cuBLAS rounds a product to 16 bits before it
// adds the existing output, and would lose an update of less than half the last place of x Wᵀ each
// time: the sums are made in fp32, and rounded once. h: its columns, of `ranks` in all.
cudaError_t JoinHalf(const Products& products, const LinearParams& p, const Linear& linear,
                     Matrix h, Matrix b, float* sums, cudaStream_t stream) {
  const int64_t most = RowsAtOnce(p.rows, linear.out);
  const float scale = InnerScale(p.type);
  const Output to = {sums, linear.out, FloatType::kF32};
  for (int64_t row = 0; row < p.rows; row += most) {
    const int64_t rows = std::min(most, p.rows - row);
    DORAD_CUDA_RETURN_IF_ERROR(products.Run(rows, linear.out, p.in, scale,
                                            {At(p.x, row * p.in, p.type), p.in},
                                            Transposed({linear.w, p.in}), 0.0f, to));
    DORAD_CUDA_RETURN_IF_ERROR(
        products.Run(rows, linear.out, linear.rank, scale * static_cast<float>(linear.scale),
                     {At(h.data, row * h.ld, p.type), h.ld}, Transposed(b), 1.0f, to));
    kernels::ApplyParams apply;
    apply.base = sums;
    apply.g = linear.g;
    apply.bias = linear.bias;
    apply.y = At(linear.y, row * linear.out, p.type);
    if (linear.inner != linear.y) apply.inner = At(linear.inner, row * linear.out, p.type);
    apply.base_ld = apply.y_ld = apply.out = linear.out;
    apply.rows = rows;
    apply.y_type = p.type;
    DORAD_CUDA_RETURN_IF_ERROR(kernels::Apply(apply, stream));
  }
  return cudaSuccess;
}

cudaError_t JoinF32(const Products& products, const LinearParams& p, const Linear& linear, Matrix h,
                    Matrix b, cudaStream_t stream) {
  const Output to = {linear.inner, linear.out, p.type};
  DORAD_CUDA_RETURN_IF_ERROR(products.Run(p.rows, linear.out, p.in, 1.0f, {p.x, p.in},
                                          Transposed({linear.w, p.in}), 0.0f, to));
  DORAD_CUDA_RETURN_IF_ERROR(products.Run(p.rows, linear.out, linear.rank,
                                          static_cast<float>(linear.scale), h, Transposed(b), 1.0f,
                                          to));
  kernels::ApplyParams apply;
  apply.base = linear.inner;
  apply.g = linear.g;
  apply.bias = linear.bias;
  apply.y = linear.y;
  apply.base_ld = apply.y_ld = apply.out = linear.out;
  apply.rows = p.rows;
  apply.y_type = p.type;
  return kernels::Apply(apply, stream);
}

cudaError_t MakeNorms(const LinearParams& p, const ForwardPieces& pieces, cudaStream_t stream) {
  kernels::DoraNormParams norms[kMostLinears];
  int count = 0;
  for (int i = 0; i < p.count; ++i) {
    const Linear& linear = p.linears[i];
    if (linear.m == nullptr) continue;
    kernels::DoraNormParams& norm = norms[count++];
    norm.w = static_cast<const __nv_bfloat16*>(linear.w);
    norm.a = static_cast<const __nv_bfloat16*>(pieces.factors.norm_a[i]);
    norm.b = static_cast<const __nv_bfloat16*>(pieces.factors.norm_b[i]);
    norm.rank = norm.ldb = pieces.factors.norm_rank[i];
    norm.norm = linear.norm;
    norm.g = linear.g;
    norm.workspace = pieces.norms[i];
    norm.workspace_bytes = pieces.norm_bytes[i];
    norm.out = linear.out;
    norm.in = p.in;
    norm.scale = linear.scale;
    norm.eps = p.eps;
    norm.isa = kernels::BestIsa();
    if (p.m_type == FloatType::kBF16) {
      norm.magnitude = static_cast<const __nv_bfloat16*>(linear.m);
    } else {
      norm.magnitude = static_cast<const float*>(linear.m);
    }
  }
  return kernels::DirectNorms(norms, count, stream);
}

bool MakesNorms(const LinearParams& p) {
  return std::any_of(p.linears, p.linears + p.count,
                     [](const Linear& linear) { return linear.m != nullptr; });
}

struct BackwardPieces {
  Factors factors;
  void* d_inner = nullptr;  // [rows, the largest out]
  void* d_h = nullptr;      // [rows, ranks]
  void* sums = nullptr;
  size_t sum_bytes = 0;
};

BackwardPieces PiecesOf(const LinearParams& p, Pieces* all) {
  BackwardPieces pieces;
  pieces.factors = FactorsOf(p, /*makes_norms=*/false, all);
  pieces.d_inner = all->Take(p.rows * MostOut(p), SizeOf(p.type));
  pieces.d_h = all->Take(p.rows * RanksOf(p), SizeOf(p.type));
  for (int i = 0; i < p.count; ++i) {
    pieces.sum_bytes =
        std::max(pieces.sum_bytes, kernels::ComposeBackwardWorkspace(p.rows, p.linears[i].out));
  }
  pieces.sums = all->Take(static_cast<int64_t>(pieces.sum_bytes), 1);
  return pieces;
}

// d_inner, and d_m where it is wanted.
cudaError_t Scale(const LinearParams& p, const Linear& linear, const BackwardPieces& pieces,
                  bool wants_inner, cudaStream_t stream) {
  if (!wants_inner && linear.d_m == nullptr) return cudaSuccess;
  kernels::ComposeBackwardParams scaled;
  scaled.grad = linear.dy;
  scaled.inner = linear.inner;
  scaled.g = linear.g;
  scaled.d_lora = wants_inner ? pieces.d_inner : nullptr;
  scaled.d_g = linear.d_m;
  scaled.d_g_type = p.m_type;
  scaled.norm = linear.norm;
  scaled.eps = p.eps;
  scaled.workspace = pieces.sums;
  scaled.workspace_bytes = pieces.sum_bytes;
  scaled.rows = p.rows;
  scaled.out = linear.out;
  scaled.scale = 1.0f;
  scaled.type = p.type;
  return kernels::ComposeBackward(scaled, stream);
}

}  // namespace

size_t ForwardBytes(const LinearParams& p, bool makes_norms) {
  Pieces all(nullptr);
  PiecesOf(p, makes_norms, &all);
  return all.bytes();
}

size_t BackwardBytes(const LinearParams& p) {
  Pieces all(nullptr);
  PiecesOf(p, &all);
  return all.bytes();
}

cudaError_t Forward(GemmFunction gemm, cublasHandle_t handle, const LinearParams& p,
                    cudaStream_t stream) {
  if (!Good(p)) return cudaErrorInvalidValue;
  const bool makes_norms = MakesNorms(p);
  if (makes_norms && (p.type != FloatType::kBF16 || p.m_type == FloatType::kF16)) {
    return cudaErrorInvalidValue;
  }
  Pieces all(p.workspace);
  const ForwardPieces pieces = PiecesOf(p, makes_norms, &all);
  if (p.workspace_bytes < all.bytes()) return cudaErrorInvalidValue;
  const Factors& factors = pieces.factors;
  if (factors.convert.count > 0) {
    DORAD_CUDA_RETURN_IF_ERROR(ConvertFactors(factors.convert, stream));
  }
  if (makes_norms) DORAD_CUDA_RETURN_IF_ERROR(MakeNorms(p, pieces, stream));
  const Products products(gemm, handle, p.type);
  const int64_t ranks = RanksOf(p);
  DORAD_CUDA_RETURN_IF_ERROR(products.Run(p.rows, ranks, p.in, 1.0f, {p.x, p.in},
                                          Transposed(factors.a), 0.0f, {p.h, ranks, p.type}));
  int64_t rank = 0;
  for (int i = 0; i < p.count; ++i) {
    const Linear& linear = p.linears[i];
    const Matrix h = {At(p.h, rank, p.type), ranks};
    rank += linear.rank;
    DORAD_CUDA_RETURN_IF_ERROR(
        p.type == FloatType::kF32
            ? JoinF32(products, p, linear, h, factors.b[i], stream)
            : JoinHalf(products, p, linear, h, factors.b[i], pieces.sums, stream));
  }
  return cudaSuccess;
}

cudaError_t Backward(GemmFunction gemm, cublasHandle_t handle, const LinearParams& p,
                     const LinearGradients& gradients, cudaStream_t stream) {
  if (!Good(p)) return cudaErrorInvalidValue;
  Pieces all(p.workspace);
  const BackwardPieces pieces = PiecesOf(p, &all);
  if (p.workspace_bytes < all.bytes()) return cudaErrorInvalidValue;
  const Factors& factors = pieces.factors;
  const bool wants_h = gradients.d_x != nullptr || gradients.d_a != nullptr;
  if (wants_h && factors.convert.count > 0) {
    DORAD_CUDA_RETURN_IF_ERROR(ConvertFactors(factors.convert, stream));
  }
  const Products products(gemm, handle, p.type);
  const int64_t ranks = RanksOf(p);
  int64_t rank = 0;
  for (int i = 0; i < p.count; ++i) {
    const Linear& linear = p.linears[i];
    const auto scale = static_cast<float>(linear.scale);
    const bool wants_inner = wants_h || linear.d_b != nullptr;
    DORAD_CUDA_RETURN_IF_ERROR(Scale(p, linear, pieces, wants_inner, stream));
    const Matrix d_inner = {pieces.d_inner, linear.out};
    if (wants_h) {
      DORAD_CUDA_RETURN_IF_ERROR(products.Run(p.rows, linear.rank, linear.out, scale, d_inner,
                                              factors.b[i], 0.0f,
                                              {At(pieces.d_h, rank, p.type), ranks, p.type}));
    }
    if (gradients.d_x != nullptr) {
      DORAD_CUDA_RETURN_IF_ERROR(products.Run(p.rows, p.in, linear.out, 1.0f, d_inner,
                                              {linear.w, p.in}, i == 0 ? 0.0f : 1.0f,
                                              {gradients.d_x, p.in, p.type}));
    }
    if (linear.d_b != nullptr) {
      DORAD_CUDA_RETURN_IF_ERROR(products.Run(linear.out, linear.rank, p.rows, scale,
                                              Transposed(d_inner), {At(p.h, rank, p.type), ranks},
                                              0.0f, {linear.d_b, linear.rank, gradients.sum_type}));
    }
    rank += linear.rank;
  }
  const Matrix d_h = {pieces.d_h, ranks};
  if (gradients.d_x != nullptr) {
    DORAD_CUDA_RETURN_IF_ERROR(products.Run(p.rows, p.in, ranks, 1.0f, d_h, factors.a, 1.0f,
                                            {gradients.d_x, p.in, p.type}));
  }
  if (gradients.d_a != nullptr) {
    DORAD_CUDA_RETURN_IF_ERROR(products.Run(ranks, p.in, p.rows, 1.0f, Transposed(d_h), {p.x, p.in},
                                            0.0f, {gradients.d_a, p.in, gradients.sum_type}));
  }
  return cudaSuccess;
}

}  // namespace dorad::train
