// Attention over the paged cache in its simple form: one block for each query head of each row, one
// warp for each fourth position, fp32 throughout. Supports every shape; the reference for the fast
// kernels' tests, and the path for other shapes. A row's result depends on its own query and its
// own cache positions only, to the last bit.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/decoder/attention.h"

namespace dorad::kernels {

// Ignores params.workspace. head_dim: even, at most 256.
cudaError_t SimplePagedAttention(const PagedAttentionParams& params, cudaStream_t stream);

}  // namespace dorad::kernels
