// Computes norms from partial row sums: the last kernels of both forms. Internal to
// kernels/dora/norm*.cu.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/dora/norm.h"

namespace dorad::kernels::norm {

// Row sums [count, O], to be added over count.
struct PartialSums {
  const float* sums = nullptr;
  int64_t count = 0;
};

// norm = sqrt(max(Σ squares, 0)) and g, of 1 to kMostGemms modules. Sums are in double, in an order
// that depends on count alone.
cudaError_t FinishDirect(const PartialSums* squares, const DoraNormParams* modules, int count,
                         cudaStream_t stream);

// norm by the assembly of AssembleNorms, from the totals of cross and ba_sq, and g.
cudaError_t FinishFactored(PartialSums cross, PartialSums ba_sq, const DoraNormParams& params,
                           cudaStream_t stream);

// Checks of sizes, scale and workspace for both forms.
bool Valid(const DoraNormParams& params, size_t workspace_bytes);

// norm and g of a module without adaptation (s = 0 or rank 0), from base_sq.
cudaError_t BaseNorm(const DoraNormParams& params, cudaStream_t stream);

}  // namespace dorad::kernels::norm
