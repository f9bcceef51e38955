// The K-extended projection: y = g ⊙ (W x + s·B(A x)) + bias for a batch whose rows belong to
// different adapters (paper: the DoRA forward, unmerged). One launch: its blocks share the shrink h
// = s·(A x), rounded to bf16, and continue from W x with h and B in the same fp32 accumulators. W
// is read once, A and B of each distinct slot once.
//
// A row's bits depend on its x, its adapter and the module's shape alone: neither on `rows` nor on
// the other rows.
//
// Capturable in CUDA graphs: rows of the batch are described by device memory read at run time. The
// launches carry the attribute of programmatic dependent launch: they start streaming weights while
// earlier kernels still run. So kernels of the same chain must not write W, the bias, the table,
// its factors and maps or the segments (writes by copies, or by launches without the attribute that
// all later launches wait for, are safe); they may write x.
//
// With adapters the blocks of a launch wait for each other, at most one on each multiprocessor;
// those of DoraLinearPrefill and of kMma also do without. Two such launches at the same time, on
// different streams or in processes that share the GPU through MPS, could each hold multiprocessors
// that the other one waits for, a deadlock: keep them in one stream. Other kernels may run beside
// them if they end by themselves.
//
// On Hopper by its own instructions, or, like every GPU from compute capability 8.0 on, by those of
// KernelIsa::kMma: with other bits, the same in every batch.
//
// Thread-safe, if concurrent calls have separate workspaces. All devices used in a process must be
// alike.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/dora/factors.h"
#include "kernels/isa/isa.h"

namespace dorad::kernels {

inline constexpr int kDoraLinearMaxRows = 256;
inline constexpr int kDoraLinearMaxParts = 3;
// The head of a workspace, zeroed by its owner once, before its first use.
inline constexpr size_t kDoraLinearSignalBytes = 4352;

// `parts` modules that share x, stacked in W: q, k, v or gate, up.
struct DoraLinearShape {
  int32_t in = 0;  // multiple of 8
  int32_t parts = 1;
  int32_t out[kDoraLinearMaxParts] = {};  // all but the last multiples of 16
};

struct DoraLinearParams {
  DoraLinearShape shape;
  int32_t rows = 0;                  // 1..kDoraLinearMaxRows
  int32_t max_rank = 0;              // no rank in the table is larger
  const __nv_bfloat16* x = nullptr;  // [rows, in], 16-byte aligned
  const __nv_bfloat16* w = nullptr;  // [sum(out), in], 16-byte aligned
  const float* bias = nullptr;       // [sum(out)] or nullptr
  AdapterTable table;
  // Device; of the table's factors, two each: EncodeDoraMaps. kMma needs none.
  const CUtensorMap* maps = nullptr;
  int32_t first_module = 0;               // part p is module first_module + p
  const RowSegment* segments = nullptr;   // [rows], the first ones in use: they cover [0, rows)
  const int32_t* num_segments = nullptr;  // [1]
  void* y = nullptr;                      // [rows, sum(out)], 16-byte aligned
  bool y_fp32 = false;                    // else bf16
  KernelIsa isa = KernelIsa::kSm90;
  void* workspace = nullptr;   // 256-byte aligned, any contents after the signals
  size_t workspace_bytes = 0;  // at least DoraLinearWorkspaceBytes
};

// The copy engine's maps of A (maps[0]) and B (maps[1]) of a module with in and out features. The
// table's owner keeps them on the device, 64-byte aligned: those of factors[i] at 2 i. Rank 0, or
// an `in` that DoraLinear does not support, gives maps that are never used.
cudaError_t EncodeDoraMaps(const DoraFactors& factors, int in, int out, CUtensorMap maps[2]);

// Enough for every batch of up to `rows` rows. Launches of one stream may share a workspace.
size_t DoraLinearWorkspaceBytes(const DoraLinearShape& shape, int rows, int max_rank);

// cudaErrorInvalidValue: shape, rows or alignment outside of the above, or a small workspace.
// cudaErrorCooperativeLaunchTooLarge: adapters need 8 multiprocessors at once, with kMma 16.
cudaError_t DoraLinear(const DoraLinearParams& params, cudaStream_t stream);

}  // namespace dorad::kernels
