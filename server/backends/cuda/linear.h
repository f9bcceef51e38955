// The adapted linear layers of a step: the fused kernel for supported shapes, library products for
// others. Confined to the engine thread.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/isa/isa.h"
#include "server/backends/cuda/batch.h"
#include "server/backends/cuda/device.h"
#include "server/backends/cuda/library_linear.h"
#include "server/backends/cuda/model.h"

namespace dorad::cuda {

class Linear {
 public:
  // groups: all groups of the model, for the size of the workspace. The stream is borrowed.
  static absl::StatusOr<Linear> Create(absl::Span<const LinearGroup* const> groups,
                                       int64_t max_rows, kernels::KernelIsa isa,
                                       MemoryLedger* ledger, const Stream* stream);

  // y = g ⊙ (W x + s·B(A x)) + bias. x: [rows, in] bf16; y: [rows, out]. Launches only. With the
  // fused kernel a row's bits do not depend on the other rows.
  absl::Status Run(const LinearGroup& group, const LinearRows& rows, const __nv_bfloat16* x,
                   float* y);
  absl::Status Run(const LinearGroup& group, const LinearRows& rows, const __nv_bfloat16* x,
                   __nv_bfloat16* y);

  // Whether the fused kernel has the group's shape.
  static bool IsFused(const LinearGroup& group);

  kernels::KernelIsa isa() const { return isa_; }

  // Whether launches may be captured and replayed for other rows: library products depend on the
  // batch's adapters at launch.
  bool is_capturable() const { return !library_.has_value(); }

 private:
  template <typename T>
  absl::Status RunAs(const LinearGroup& group, const LinearRows& rows, const __nv_bfloat16* x,
                     T* y);

  Linear(kernels::KernelIsa isa, const Stream* stream) : isa_(isa), stream_(stream) {}

  // Whether all rows can go through one launch.
  bool TakesAtOnce(const LinearGroup& group, const LinearRows& rows) const;

  std::optional<LibraryLinear> library_;  // of a model with shapes that the kernel does not support
  kernels::KernelIsa isa_;
  const Stream* stream_;
  DeviceBuffer workspace_;
};

}  // namespace dorad::cuda
