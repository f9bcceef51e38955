// The adapted linear layer on the GPU in its simple form: library products, one after another for
// each adapter, and one kernel at the end. The reference for the fused form.
// Confined to the engine thread.
#pragma once

#include <cublas_v2.h>
#include <cuda_bf16.h>

#include <cstdint>
#include <utility>

#include "absl/status/statusor.h"
#include "server/backends/cuda/batch.h"
#include "server/backends/cuda/device.h"
#include "server/backends/cuda/model.h"

namespace dorad::cuda {

// The largest rank that an adapter may have.
inline constexpr int64_t kMaxRank = 1024;

class LibraryLinear {
 public:
  // Products run on the stream, which is borrowed. max_out: of groups whose output is bf16.
  // DEVICE_UNAVAILABLE where cuBLAS is not found.
  static absl::StatusOr<LibraryLinear> Create(const Stream& stream, int64_t max_rows,
                                              int64_t max_out, MemoryLedger* ledger);
  LibraryLinear(LibraryLinear&& other) noexcept
      : handle_(std::exchange(other.handle_, nullptr)),
        stream_(other.stream_),
        scratch_(std::move(other.scratch_)),
        sums_(std::move(other.sums_)) {}
  ~LibraryLinear();

  // y = g ⊙ (W x + s·B(A x)) + bias. x: [rows, in] bf16; y: [rows, out]. A x is rounded to bf16,
  // sums are fp32. A row's last bits may depend on the number of rows.
  absl::Status Run(const LinearGroup& group, const LinearRows& rows, const __nv_bfloat16* x,
                   float* y);
  absl::Status Run(const LinearGroup& group, const LinearRows& rows, const __nv_bfloat16* x,
                   __nv_bfloat16* y);

 private:
  LibraryLinear(cublasHandle_t handle, const Stream* stream) : handle_(handle), stream_(stream) {}

  cublasHandle_t handle_;
  const Stream* stream_;
  DeviceBuffer scratch_;  // A x of one range
  DeviceBuffer sums_;     // [rows, out] fp32, of an output that is bf16
};

}  // namespace dorad::cuda
