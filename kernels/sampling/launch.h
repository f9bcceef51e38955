// A call of Sample or Score for the device, and its launch with each instruction set. Internal to
// kernels/sampling.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/sampling/sampling.h"

namespace dorad::kernels {

struct Launch {
  const float* logits;
  int64_t logits_ld;
  const SampleRowSpec* samples;  // or
  const ScoreRowSpec* scores;
  const int32_t* banned;
  const ConditionalBan* conditional_bans;
  const LogitAdjustments* adjustments;
  const int32_t* allowed_ids;
  const LogitBias* biases;
  const TokenUse* uses;
  const int32_t* newest;
  const int32_t* chosen_ids;
  const int32_t* rows_in_use;
  SampleOutputs out;
  float* records;  // of plain rows
  int32_t vocabulary;
  int32_t max_top;
};

// The plain rows; lists: also those that need lists. Their records: of PlainBytes, 128-byte
// aligned, zero before the first use.
size_t PlainBytes(int rows, int vocabulary);
cudaError_t SamplePlain(const Launch& p, int rows, bool lists, cudaStream_t stream);

// The other rows, after them. adjusts: a row may have adjustments or conditional bans.
cudaError_t SampleSm90(const Launch& p, int rows, bool adjusts, cudaStream_t stream);
// workspace: of MmaBytes, any contents.
cudaError_t MmaBytes(int rows, int vocabulary, size_t* bytes);
cudaError_t SampleMma(const Launch& p, int rows, bool adjusts, void* workspace,
                      cudaStream_t stream);

}  // namespace dorad::kernels
