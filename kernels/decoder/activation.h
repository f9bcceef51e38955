// Gated activation. Thread-safe.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace dorad::kernels {

// out[t, f] = silu(gate_up[t, f]) · gate_up[t, size + f]; gate_up is [rows, 2·size], out [rows,
// size], both 16-byte aligned. cudaErrorInvalidValue: a size out of bounds, or bad alignment.
cudaError_t SiluMul(const __nv_bfloat16* gate_up, int32_t rows, int32_t size, __nv_bfloat16* out,
                    cudaStream_t stream);
// The same with the tanh form of gelu (torch's approximate="tanh").
cudaError_t GeluTanhMul(const __nv_bfloat16* gate_up, int32_t rows, int32_t size,
                        __nv_bfloat16* out, cudaStream_t stream);
// The same with the exact form of gelu.
cudaError_t GeluMul(const __nv_bfloat16* gate_up, int32_t rows, int32_t size, __nv_bfloat16* out,
                    cudaStream_t stream);

// values[t, h, i] *= sigmoid(gate): a query's output and its gate. values: [rows, heads, head_dim];
// qkv: the projection's rows of `pitch` elements, in which each of the first heads has a query and
// then its gate.
cudaError_t GateHeads(const __nv_bfloat16* qkv, int64_t pitch, int32_t rows, int32_t heads,
                      int32_t head_dim, __nv_bfloat16* values, cudaStream_t stream);

}  // namespace dorad::kernels
