// Computes tokens and log-probabilities from logits, on the GPU. The CPU's counterpart with the
// same semantics is server/backends/cpu/ops/sampling.h: the same order of processing (adjustments,
// bans, temperature, top-k, top-p over the top-k set, min-p relative to the largest kept
// probability), candidates of equal probability ranked by ascending id, and the same draw, by noise
// that a token id has whatever the logits (server/backends/cpu/ops/noise.h). Exponentials and their
// sums are computed in the order of the CPU's AVX-512 kernels, sums of them in double: for equal
// logits both keep the same candidates, give the same token, and the same log-probability except
// for the rounding of double sums and, at other temperatures than 1 without truncation, of the
// exponents: the GPU takes them from a logit's distance to the largest of its 1024 ids. If more
// than kMostListed candidates can survive truncation, their weights are added as integers,
// multiples of 2^-45 of the largest.
//
// Plain rows (IsPlain) are one launch: their logits are read once, by as many warps as they have
// thousands of ids. The others, and plain ones whose list would be too long, are a second launch,
// with KernelIsa::kSm90 of a cluster of blocks a row, with the row's logits in their shared memory,
// with kMma of a block a row, with a copy of the row in the workspace. All give the same results,
// to the last bit: a plain row's are those that it would have with a top list. Everything but
// sizes, pointers and SampleRows is read on the device, so that one captured graph serves greedy,
// plain and truncated rows mixed. Results of a row depend on that row only and are reproducible to
// the last bit. Functions only enqueue work, allocate nothing, are thread-safe, if concurrent calls
// have separate workspaces, and can be captured. All pointers are to device memory.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/isa/isa.h"

namespace dorad::kernels {

// kScaled: log_softmax(logits / temperature), before adjustments, bans and truncation; greedy rows
// have temperature 1 there.
enum class LogprobMode : int32_t { kNone = 0, kRaw = 1, kProcessed = 2, kScaled = 3 };

// Changes of a row's logits before sampling, in this order: allowed ids, biases, penalties (with
// each step rounded: repetition, frequency, presence). Raw log-probabilities do not change. Ranges
// of SampleParams' lists.
struct LogitAdjustments {
  bool penalised = false;
  float presence_penalty = 0.0f;
  float frequency_penalty = 0.0f;
  float repetition_penalty = 1.0f;
  int32_t allowed_begin = 0, allowed_count = 0;  // no ids: all
  int32_t bias_begin = 0, bias_count = 0;
  int32_t uses_begin = 0, uses_count = 0;  // with penalties
};
struct LogitBias {
  int32_t id = 0;
  float bias = 0.0f;
};
// A token with its occurrences.
struct TokenUse {
  static constexpr uint32_t kInPrompt = 1;
  static constexpr uint32_t kGenerated = 2;
  int32_t id = 0;
  uint32_t count = 0;  // kGenerated for each time that it was generated, kInPrompt once
};
// `token` is banned if the row's newest token (SampleSpec::newest) is `after`.
struct ConditionalBan {
  int32_t after = 0;
  int32_t token = 0;
};

// The sampling parameters of one row.
struct alignas(16) SampleRowSpec {  // read in few loads
  uint64_t seed = 0;
  uint64_t position = 0;
  uint32_t sample_index = 0;
  float temperature = 1.0f;  // 0: greedy (ties: smallest id); else positive and finite
  float top_p = 1.0f;        // 1 and more: off
  float min_p = 0.0f;        // 0 to 1
  int32_t top_k = 0;         // 0: all
  LogprobMode logprob_mode = LogprobMode::kNone;
  int32_t top_logprobs = 0;  // the k most likely tokens, up to max_top
  // Ranges of SampleParams' banned and chosen_ids. Ids outside of the vocabulary are ignored among
  // the banned and have log-probability NaN among the chosen.
  int32_t banned_begin = 0, banned_count = 0;
  int32_t conditional_begin = 0, conditional_count = 0;
  int32_t adjustments = -1;  // index; -1: none
  int32_t newest = -1;       // index of the sequence's token that `uses` lacks; -1: it has all
  int32_t chosen_begin = 0, chosen_count = 0;
};

// log_softmax(logits / temperature) at a target, the k largest and chosen ids.
struct ScoreRowSpec {
  int32_t target = -1;  // -1: none wanted (its log-probability is NaN)
  float temperature = 1.0f;
  int32_t top_logprobs = 0;
  int32_t chosen_begin = 0, chosen_count = 0;
};

// Whether fewer than all candidates can be drawn.
constexpr bool IsTruncated(const SampleRowSpec& spec, int32_t vocabulary) {
  return spec.temperature != 0.0f &&
         ((spec.top_k > 0 && spec.top_k < vocabulary) || spec.top_p < 1.0f || spec.min_p > 0.0f);
}
constexpr bool IsPlain(const SampleRowSpec& spec) {
  return spec.banned_count == 0 && spec.conditional_count == 0 && spec.adjustments < 0;
}
// Whether a list of candidates is needed, which may be too long for the first launch.
constexpr bool NeedsList(const SampleRowSpec& spec, int32_t vocabulary) {
  return IsTruncated(spec, vocabulary) ||
         (spec.top_logprobs > 0 && spec.logprob_mode != LogprobMode::kNone);
}
constexpr bool NeedsList(const ScoreRowSpec& spec) { return spec.top_logprobs > 0; }
// The rows of a call: the others are a launch less. Rows that are not as said are skipped.
enum class SampleRows {
  kMixed,
  kPlain,  // and none needs a list
  kOther,  // none is plain
};

// Top lists have the requested length: missing candidates are id -1 with -inf. Outputs that were
// not requested are not written.
struct SampleOutputs {
  int32_t* tokens = nullptr;  // [rows]; -1 where not finite. Score: the target
  float* logprobs = nullptr;  // [rows]; mode none: 0
  uint8_t* finite = nullptr;  // [rows]; 0: the row has a NaN or +inf logit, or no candidate; all of
                              // its log-probabilities are NaN
  int32_t* top_ids = nullptr;        // [rows, max_top]
  float* top_logprobs = nullptr;     // [rows, max_top]
  float* chosen_logprobs = nullptr;  // [chosen_begin + i of the row], as chosen_ids
};

constexpr int32_t kMostTopLogprobs = 1024;
constexpr int32_t kMostListed = 2048;
constexpr int32_t kMostVocabulary = 8 * 48 * 1024;

struct SampleParams {
  const float* logits = nullptr;         // [rows, vocabulary], row r at logits + r · logits_ld
  const SampleRowSpec* specs = nullptr;  // [rows]
  const int32_t* banned = nullptr;       // flat
  const ConditionalBan* conditional_bans = nullptr;  // flat
  // With both null, no row may have adjustments or conditional bans: that is faster.
  const LogitAdjustments* adjustments = nullptr;
  const int32_t* allowed_ids = nullptr;  // flat; ascending in each range
  const LogitBias* biases = nullptr;     // flat; distinct ids in each range, as in uses
  const TokenUse* uses = nullptr;        // flat
  const int32_t* newest = nullptr;       // tokens; below 0: none
  const int32_t* chosen_ids = nullptr;   // flat
  const int32_t* rows_in_use = nullptr;  // optional: rows from *rows_in_use on are skipped
  SampleOutputs out;
  int64_t logits_ld = 0;
  int32_t rows = 0;
  int32_t vocabulary = 0;
  int32_t max_top = 0;
  SampleRows rows_are = SampleRows::kMixed;
  KernelIsa isa = KernelIsa::kSm90;
  // 128-byte aligned. Zero before the first call; all calls with it have the same vocabulary.
  void* workspace = nullptr;
  size_t workspace_bytes = 0;
};

// Enough for every call of up to `rows` rows of the vocabulary on the current device.
cudaError_t SampleWorkspaceBytes(KernelIsa isa, int rows, int vocabulary, size_t* bytes);

// The fast path needs rows that are 16-byte aligned; others cost a slower copy.
// cudaErrorInvalidValue: negative sizes, vocabulary 0 or beyond kMostVocabulary, max_top beyond
// kMostTopLogprobs, a workspace too small.
cudaError_t Sample(const SampleParams& params, cudaStream_t stream);

struct ScoreParams {
  const float* logits = nullptr;
  const ScoreRowSpec* specs = nullptr;
  const int32_t* chosen_ids = nullptr;
  const int32_t* rows_in_use = nullptr;
  SampleOutputs out;
  int64_t logits_ld = 0;
  int32_t rows = 0;
  int32_t vocabulary = 0;
  int32_t max_top = 0;
  SampleRows rows_are = SampleRows::kMixed;
  KernelIsa isa = KernelIsa::kSm90;
  // 128-byte aligned. Zero before the first call; all calls with it have the same vocabulary.
  void* workspace = nullptr;
  size_t workspace_bytes = 0;
};

// Raw mode of Sample and Score at temperature 1 give bitwise equal log-probabilities for equal
// logits. Errors as Sample.
cudaError_t Score(const ScoreParams& params, cudaStream_t stream);

}  // namespace dorad::kernels
