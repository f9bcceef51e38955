// The adapted linear layers of a step: the fused kernel where it takes the shape, library products
// where it does not. Confined to the engine thread.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/cuda/batch.h"
#include "server/cuda/device.h"
#include "server/cuda/library_linear.h"
#include "server/cuda/model.h"

namespace dorad::cuda {

// How a product learns that x is there while the kernel that makes it still ends: its blocks count
// themselves. No count: by that kernel's end.
struct BlockCount {
  uint32_t* count = nullptr;  // device; zero before, and again after the product
  uint32_t blocks = 0;
};

class Linear {
 public:
  // groups: all that will be run, for the size of the workspace. The stream is borrowed.
  static absl::StatusOr<Linear> Create(absl::Span<const LinearGroup* const> groups,
                                       int64_t max_rows, MemoryLedger* ledger,
                                       const Stream* stream);

  // y = g ⊙ (W x + s·B(A x)) + bias. x: [rows, in] bf16; y: [rows, out]. Launches only. With the
  // fused kernel a row's bits do not depend on the other rows. next: the product that will be run
  // after this one, so that its first weights come early.
  absl::Status Run(const LinearGroup& group, const LinearRows& rows, const __nv_bfloat16* x,
                   float* y, const BlockCount& x_ready = {}, const LinearGroup* next = nullptr);
  absl::Status Run(const LinearGroup& group, const LinearRows& rows, const __nv_bfloat16* x,
                   __nv_bfloat16* y, const BlockCount& x_ready = {},
                   const LinearGroup* next = nullptr);
  // Whether a product uses x_ready; otherwise nobody clears the count.
  static bool Counts(const LinearGroup& group, const LinearRows& rows);

  // Whether launches may be captured and replayed for other rows: library products look at the
  // adapters of a batch when they are launched.
  bool is_capturable() const { return is_capturable_; }

 private:
  template <typename T>
  absl::Status RunAs(const LinearGroup& group, const LinearRows& rows, const __nv_bfloat16* x, T* y,
                     const BlockCount& x_ready, const LinearGroup* next);

  Linear(LibraryLinear library, const Stream* stream)
      : library_(std::move(library)), stream_(stream) {}

  LibraryLinear library_;
  const Stream* stream_;
  DeviceBuffer workspace_;
  bool is_capturable_ = true;
};

}  // namespace dorad::cuda
