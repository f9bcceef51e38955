// The matrix product of both forms of the norm: D = X·Y on tensor cores (bf16 operands, fp32 sums),
// reduced along its rows in registers, so that D is never stored. Internal to
// kernels/dora/norm*.cu.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/isa/isa.h"

namespace dorad::kernels::norm {

// A row-major matrix in device memory, 16-byte aligned, leading dimension a multiple of 8. Elements
// between columns and ld are not read.
struct Matrix {
  const __nv_bfloat16* data = nullptr;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t ld = 0;
};

bool FitsTensorCores(const Matrix& matrix);

// The reduction of D[m, n]. Z is [M, N].
//   kSquare  partial[p, m] = Σ_n (z + scale·d)²
//   kDot     partial[p, m] = Σ_n z·d
//   kStore   partial[p, m, n] = d, for the part p of the sum over K
enum class Reduction { kSquare, kDot, kStore };

struct RowGemm {
  Reduction reduction = Reduction::kSquare;
  Matrix x;                  // [M, K]
  Matrix y;                  // [K, N] for kSquare, [N, K] for the others
  Matrix z;                  // [M, N]; not for kStore
  bool z_by_n = false;       // z is stored as [N, M]; kSquare only
  int64_t k = 0;             // the length of the sum
  int64_t x_period = 0;      // x's columns are read modulo this multiple of 64; 0: K, no period
  int64_t splits = 1;        // parts of the sum over K, each a partial of its own
  float scale = 0.0f;        // kSquare
  float* partial = nullptr;  // [Partials(gemm), M], kStore: [splits, M, N]
  KernelIsa isa = KernelIsa::kSm90;
};

// Row sums in flight: one for each tile of columns and each split.
int64_t Partials(const RowGemm& gemm);

// The number of splits that fills the GPU, at most `most`. Depends on the shape alone.
int64_t SplitsFor(const RowGemm& gemm, int64_t most);

// Products of one launch.
constexpr int kMostGemms = 8;

// Enqueues 1 to kMostGemms products as one launch, so that none waits for the tail of another; more
// than one must all be kSquare with one layout of z and one isa. The launch lets the next kernel
// start early (programmatic dependent launch).
cudaError_t Launch(const RowGemm* gemms, int count, cudaStream_t stream);

}  // namespace dorad::kernels::norm
