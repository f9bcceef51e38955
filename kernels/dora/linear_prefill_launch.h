// The launches behind DoraLinearPrefill, one for each instruction set.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "kernels/dora/linear_prefill_problem.cuh"

namespace dorad::kernels {

// The shrink in slices of K, for batches of few tiles: the most rows, and the room for their sums.
inline constexpr int kPrefillMostSlicedRows = 2048;
inline constexpr size_t kPrefillSharesBytes = size_t{24} * 1024 * 1024;

// The most tiles that two clusters divide, and the room for what these tell each other.
inline constexpr int kPrefillMostDivided = 36;
inline constexpr size_t kPrefillGivenBytes = size_t{9} * 1024 * 1024;

// Of MmaIsa, where sums have two pieces: the room for those of the first one, of all blocks.
inline constexpr size_t kPrefillMmaKeptBytes = size_t{24} * 1024 * 1024;

struct PrefillLaunch {
  PrefillProblem problem;  // without its tiles
  float* shares;           // kPrefillSharesBytes; nullptr: no slices
  // kPrefillGivenBytes; of MmaIsa kPrefillMmaKeptBytes, if the plan has splits.
  float* given;
  int processors;
  cudaStream_t stream;
};

// The parts of params.workspace. Sets all but processors and stream.
PrefillLaunch LayOutPrefill(const DoraLinearPrefillParams& params, const LinearPlan& plan);

cudaError_t LaunchPrefillSm90(const PrefillLaunch& launch);
cudaError_t LaunchPrefillMma(const PrefillLaunch& launch);

}  // namespace dorad::kernels
