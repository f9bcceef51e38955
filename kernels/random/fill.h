// Reproducible random numbers for benchmarks: with zeros, kernels would run faster than with real
// data. Thread-safe.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace dorad::kernels {

// Uniform in ±limit, a function of seed and index.
cudaError_t FillRandom(__nv_bfloat16* out, int64_t size, float limit, uint32_t seed,
                       cudaStream_t stream);
cudaError_t FillConstant(float* out, int64_t size, float value, cudaStream_t stream);

}  // namespace dorad::kernels
