// The K-extended projection of kernels/dora/linear.h for batches with more rows than DoraLinear
// supports: W is read once for all of them. Every sum has DoraLinear's order, so a row has the same
// bits in both.
//
// The launch carries the attribute of programmatic dependent launch, with DoraLinear's conditions;
// its blocks wait for each other too. Do not capture it in graphs that outlive a batch: the number
// of segments is a host argument.
//
// By either instruction set, as DoraLinear.
//
// Thread-safe, if concurrent calls have separate workspaces.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/dora/factors.h"
#include "kernels/dora/linear.h"
#include "kernels/isa/isa.h"

namespace dorad::kernels {

inline constexpr int kPrefillMaxSegments = 512;

struct DoraLinearPrefillParams {
  DoraLinearShape shape;             // `out`: multiples of 64, the last one of 8
  int32_t rows = 0;                  // 1 or more
  int32_t max_rank = 0;              // no rank in the table is larger
  const __nv_bfloat16* x = nullptr;  // [rows, in], 16-byte aligned
  const __nv_bfloat16* w = nullptr;  // [sum(out), in], 16-byte aligned
  const float* bias = nullptr;       // [sum(out)], 8-byte aligned, or nullptr
  AdapterTable table;
  const CUtensorMap* maps = nullptr;     // as DoraLinearParams'
  int32_t first_module = 0;              // part p is module first_module + p
  const RowSegment* segments = nullptr;  // device, [num_segments]: they cover [0, rows)
  int32_t num_segments = 0;              // 1..kPrefillMaxSegments
  void* y = nullptr;                     // [rows, sum(out)], 16-byte aligned
  bool y_fp32 = false;                   // else bf16
  KernelIsa isa = KernelIsa::kSm90;
  void* workspace = nullptr;   // as DoraLinearParams'; may be the same memory
  size_t workspace_bytes = 0;  // at least DoraLinearPrefillWorkspaceBytes
};

// Enough for every batch of up to `rows` rows. 0: an unsupported shape.
size_t DoraLinearPrefillWorkspaceBytes(const DoraLinearShape& shape, int rows, int max_rank);

// cudaErrorInvalidValue: shape, rows, segments or alignment outside of the above, or a small
// workspace.
cudaError_t DoraLinearPrefill(const DoraLinearPrefillParams& params, cudaStream_t stream);

}  // namespace dorad::kernels
