// The table of SIMD kernels behind the CPU ops. The same source (variant.h) is compiled once for
// each instruction set; the best one that the processor has is chosen at run time.
// Plain pointers and sizes only: callers have checked shapes, dtypes and contiguity.
// Every kernel is a pure function of its arguments and thread-safe for distinct outputs.
#pragma once

#include <cstdint>

namespace dorad::ops::cpu {

// How the operands of a dot product along K are stored. A *chunk* is 2 * lanes consecutive k.
//   kF32      weights fp32; inputs fp32 in natural order.
//   kBf16     weights bf16; inputs fp32, in each chunk first the even k, then the odd k: a vector
//   of
//             32-bit words of weights then becomes two fp32 vectors with one shift and one mask.
//   kBf16Dot  weights bf16; inputs bf16 in natural order, for the bf16 dot-product instruction.
enum class Format : uint8_t { kF32, kBf16, kBf16Dot };

inline constexpr int kMaxTileRows = 8;

// Weight rows of length `k`, row n at data + n * k elements.
struct WeightRows {
  const void* data = nullptr;
  int64_t k = 0;
  Format format = Format::kF32;
};

// Up to tile_rows rows of inputs. Row m of chunk c lies at x + c * x_step + m * (bytes of a chunk).
struct GemmTile {
  int rows = 0;
  const char* x = nullptr;
  int64_t x_step = 0;
  // The low-rank extension: after the base weight the sums go on over B's columns with the row's
  // packed h (chunks without gaps). b[m].data nullptr: none. shared: all rows have the same b.
  bool extended = false;
  bool shared = false;
  WeightRows b[kMaxTileRows];
  const char* h = nullptr;  // row m at h + m * h_step
  int64_t h_step = 0;
  // Epilogue: y = sum * g + bias, each where present. y row m at y + m * y_step.
  const float* g[kMaxTileRows] = {};
  float* y = nullptr;
  int64_t y_step = 0;
};

inline constexpr int kMaxQueries = 6;
inline constexpr int64_t kPageSize = 16;
// The softmax is rescaled at multiples of this many positions, for any range.
inline constexpr int64_t kAttentionBlock = 64;

// Query vectors of one kv head.
struct AttentionQueries {
  int count = 0;
  int64_t head_dim = 0;
  float scale = 0.0f;
  const float* q[kMaxQueries] = {};
  int64_t low[kMaxQueries] = {};  // first and last position that a query sees
  int64_t high[kMaxQueries] = {};
};

// Pages of one kv head: page p's keys at k + p * page_stride elements, [head_dim, 16], values at
// v + p * page_stride, [16, head_dim]. bf16: both are bf16, else fp32.
struct AttentionPages {
  const void* k = nullptr;
  const void* v = nullptr;
  int64_t page_stride = 0;
  const int32_t* pages = nullptr;  // by position / 16
  bool bf16 = false;
};

// Softmax state of one query over a set of positions: running maximum, sum of exp(score - maximum),
// and the sum of exp(score - maximum) * v.
struct AttentionState {
  float maximum = 0.0f;
  float sum = 0.0f;
  float* out = nullptr;  // [head_dim]
};

// Maxima of logits are of groups as in ops/noise.h: 32 pairs of columns of each 1024 in rows of 64.
inline constexpr int64_t kLogitChunk = 1024;
inline constexpr int64_t kLogitColumns = 64;
inline constexpr int64_t kChunkGroups = kLogitColumns / 2;

struct LogitStats {
  float maximum = 0.0f;
  bool finite = true;  // no NaN and no +inf (-inf is a logit like any other)
};

struct Kernels {
  const char* name;
  int lanes;      // fp32 lanes of a vector
  bool bf16_dot;  // kBf16Dot is available
  int tile_rows;  // most rows of a tile, <= kMaxTileRows
  int queries;    // most queries of one attend call, <= kMaxQueries

  // dst <- scale * src[0, count), rounded to bf16 (nearest even) if asked, in `format`; the last
  // chunk is filled with zeros. Chunk c goes to dst + c * step.
  void (*pack)(const float* src, int64_t count, float scale, bool round_bf16, Format format,
               char* dst, int64_t step);
  // y[m, n - begin] for n in [begin, end): dot products of the tile's rows with weight rows.
  void (*gemm)(const WeightRows& weight, int64_t begin, int64_t end, const float* bias,
               const GemmTile& tile);

  // For benches: runs `steps` rounds of independent multiply-adds in registers, as `format` has
  // them, and returns how many scalar multiply-adds that was.
  double (*fma_peak)(Format format, int64_t steps);

  void (*rms_norm)(const float* x, const float* weight, int64_t dim, float eps, float* y);
  void (*add)(float* x, const float* y, int64_t count);  // x += y
  void (*silu_mul)(float* gate, const float* up, int64_t count);
  void (*gelu_tanh_mul)(float* gate, const float* up, int64_t count);
  // x <- (w[i] + x[i]) * g[i] with g optional. w: fp32 or bf16.
  void (*embed_row)(const void* weight, bool bf16, const float* g, int64_t dim, float* x);
  // Rotates pairs (i, i + half) of one head.
  void (*rotate)(float* x, const float* cos, const float* sin, int64_t half);
  void (*to_bf16)(const float* src, int64_t count, uint16_t* dst);

  // New states over the positions [begin, end) that each query sees; begin is a multiple of
  // kAttentionBlock. A query that sees none gets maximum -inf and sum 0.
  void (*attend)(const AttentionQueries& queries, const AttentionPages& pages, int64_t begin,
                 int64_t end, AttentionState* states);
  // a <- a combined with b, b being the later positions.
  void (*merge)(AttentionState* a, const AttentionState& b, int64_t head_dim);
  void (*scale)(const float* x, int64_t count, float by, float* y);  // y = x * by

  // z = (x - minus) / by.
  void (*divide)(const float* x, int64_t count, float minus, float by, float* z);
  // The maximum of all and, in maxima[kChunkGroups * ceil(count / kLogitChunk)], of each group
  // (-inf: it has no logit).
  LogitStats (*group_max)(const float* x, int64_t count, float* maxima);
  // Sum of exp(x - maximum); the terms go to e[count] unless e is nullptr.
  double (*sum_exp)(const float* x, int64_t count, float maximum, float* e);

  // words[4 calls] of Philox4x32-10 with the last word of the counter at counter[3] + 0, 1, ...;
  // calls is a multiple of 8.
  void (*philox)(const uint32_t* counter, const uint32_t* key, int64_t calls, uint32_t* words);
  // Group words and maxima of `groups`, a multiple of kChunkGroups, to lower bounds of the smallest
  // E / weight in each (ops/noise.h), up to rounding.
  void (*group_bounds)(const uint32_t* words, const float* maxima, int64_t groups, float maximum,
                       float* bounds);
};

// Variants this processor can run, best first. Never empty.
struct KernelList {
  const Kernels* const* begin_;
  int size;
  const Kernels* const* begin() const { return begin_; }
  const Kernels* const* end() const { return begin_ + size; }
};
KernelList SupportedKernels();

// The variant in use: the best supported one, unless a test or bench chose another.
const Kernels& ActiveKernels();
void SetActiveKernels(const Kernels& kernels);

}  // namespace dorad::ops::cpu
