#include "kernels/common/host.h"
#include "kernels/common/status.h"
#include "kernels/sampling/launch.h"
#include "kernels/sampling/sampling.h"

namespace dorad::kernels {
namespace {

// What Sample and Score have in common; params: of either.
template <typename Params>
cudaError_t Run(const Params& params, bool adjusts, Launch* p, cudaStream_t stream) {
  // `rows <` first would begin a template for g++.
  if (params.rows > (1 << 25) || params.rows < 0 || params.vocabulary <= 0 ||
      params.vocabulary > kMostVocabulary || params.logits_ld < params.vocabulary ||
      params.max_top < 0 || params.max_top > kMostTopLogprobs) {
    return cudaErrorInvalidValue;
  }
  if (params.rows == 0) return cudaSuccess;
  size_t bytes = 0;
  DORAD_CUDA_RETURN_IF_ERROR(
      SampleWorkspaceBytes(params.isa, params.rows, params.vocabulary, &bytes));
  if (params.workspace_bytes < bytes || !IsThere(params.workspace, 128)) {
    return cudaErrorInvalidValue;
  }
  p->logits = params.logits;
  p->logits_ld = params.logits_ld;
  p->chosen_ids = params.chosen_ids;
  p->rows_in_use = params.rows_in_use;
  p->out = params.out;
  p->records = static_cast<float*>(params.workspace);
  p->vocabulary = params.vocabulary;
  p->max_top = params.max_top;
  if (params.rows_are == SampleRows::kPlain) {
    return SamplePlain(*p, params.rows, /*lists=*/false, stream);
  }
  if (params.rows_are == SampleRows::kMixed) {
    DORAD_CUDA_RETURN_IF_ERROR(SamplePlain(*p, params.rows, /*lists=*/true, stream));
  }
  if (params.isa == KernelIsa::kSm90) return SampleSm90(*p, params.rows, adjusts, stream);
  // At the end: the plain rows' counters stay where they are for any number of rows.
  size_t end = 0;
  DORAD_CUDA_RETURN_IF_ERROR(MmaBytes(params.rows, params.vocabulary, &end));
  auto* const begin = static_cast<unsigned char*>(params.workspace);
  return SampleMma(*p, params.rows, adjusts, begin + (params.workspace_bytes - end) / 16 * 16,
                   stream);
}

}  // namespace

cudaError_t SampleWorkspaceBytes(KernelIsa isa, int rows, int vocabulary, size_t* bytes) {
  *bytes = 0;
  if (rows < 1 || vocabulary < 1) return cudaSuccess;
  if (isa != KernelIsa::kSm90) DORAD_CUDA_RETURN_IF_ERROR(MmaBytes(rows, vocabulary, bytes));
  *bytes += PlainBytes(rows, vocabulary);
  return cudaSuccess;
}

cudaError_t Sample(const SampleParams& params, cudaStream_t stream) {
  Launch p = {};
  p.samples = params.specs;
  p.banned = params.banned;
  p.conditional_bans = params.conditional_bans;
  p.adjustments = params.adjustments;
  p.allowed_ids = params.allowed_ids;
  p.biases = params.biases;
  p.uses = params.uses;
  p.newest = params.newest;
  return Run(params, p.adjustments != nullptr || p.conditional_bans != nullptr, &p, stream);
}

cudaError_t Score(const ScoreParams& params, cudaStream_t stream) {
  Launch p = {};
  p.scores = params.specs;
  return Run(params, /*adjusts=*/false, &p, stream);
}

}  // namespace dorad::kernels
