// The adapted linear layer on the GPU in its simple form: library products, one after another for
// each adapter, and one kernel at the end. The reference for the fused form.
// Confined to the engine thread.
#pragma once

#include <cublas_v2.h>
#include <cuda_bf16.h>

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/cuda/batch.h"
#include "server/cuda/device.h"
#include "server/cuda/model.h"

namespace dorad::cuda {

class LibraryLinear {
 public:
  // Products run on the stream, which is borrowed.
  static absl::StatusOr<LibraryLinear> Create(const Stream& stream);
  LibraryLinear(LibraryLinear&& other) noexcept
      : handle_(std::exchange(other.handle_, nullptr)), stream_(other.stream_) {}
  ~LibraryLinear();

  // y = g ⊙ (W x + s·B(A x)) + bias. x: [rows, in] bf16; y: [rows, out] fp32; h: scratch of
  // rows · 1024 bf16. A x is rounded to bf16, sums are fp32.
  absl::Status Run(const LinearGroup& group, int64_t rows, absl::Span<const AdapterRange> ranges,
                   const __nv_bfloat16* x, __nv_bfloat16* h, float* y);

 private:
  LibraryLinear(cublasHandle_t handle, const Stream* stream) : handle_(handle), stream_(stream) {}

  cublasHandle_t handle_;
  const Stream* stream_;
};

}  // namespace dorad::cuda
