// Paged attention at Qwen3-8B's shape: graphs of one plan and 36 layers, each with a cache of its
// own, pages shuffled; against the time that the caches' bytes take at the copy bandwidth of the
// same run (prefill: in TFLOP/s). Rows split by load, always and never; the norms, rotation and
// append before it, both after each other, in one launch (decodes), and that with common pages
// always and never read together. The bytes of common pages count once.
//
//   kernels_attention_bench [mma] [fp8] [filter: a part of the case's name]
//
// With `mma`, by the instructions that all GPUs have; with `fp8`, of a cache in eight bits.
#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kernels/decoder/attention.h"
#include "tests/bench/kernels_timing.h"

namespace {

using Bf16 = __nv_bfloat16;
using dorad::bench::Check;
using dorad::bench::CopyBandwidth;
using dorad::bench::Microseconds;
using dorad::kernels::AttentionShape;
using dorad::kernels::AttentionSplit;
using dorad::kernels::kKvPageTokens;

constexpr int kLayers = 36;
constexpr AttentionShape kShape{32, 8, 128};
constexpr int64_t kPageElements = int64_t{8} * 16 * 128;  // of one layer's keys or values
constexpr int64_t kPages = 15000;
constexpr int kMaxPositions = 16384;

template <typename T>
T* Allocate(int64_t elements) {
  void* data;
  Check(cudaMalloc(&data, elements * sizeof(T)));
  return static_cast<T*>(data);
}

template <typename T>
T* Upload(const std::vector<T>& values) {
  T* data = Allocate<T>(static_cast<int64_t>(values.size()));
  Check(cudaMemcpy(data, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return data;
}

// Normal numbers all over `data`, by doubling.
template <typename T>
void Fill(T* data, int64_t elements) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::vector<T> block(std::min<int64_t>(elements, (1 << 20) + 77));
  for (T& x : block) x = static_cast<T>(normal(random));
  Check(cudaMemcpy(data, block.data(), block.size() * sizeof(T), cudaMemcpyHostToDevice));
  for (auto done = static_cast<int64_t>(block.size()); done < elements; done *= 2) {
    Check(cudaMemcpy(data + done, data, std::min(done, elements - done) * sizeof(T),
                     cudaMemcpyDeviceToDevice));
  }
}

struct Run {
  int first, rows;
  int common = 0;  // positions whose pages are those of the run before
};

struct Case {
  const char* name;
  std::vector<Run> runs;
  double goal;  // ms, 0: none stated
};

std::vector<Run> Decodes(int count, int least, int most) {
  std::mt19937 random(count);
  std::uniform_int_distribution<int> context(least, most);
  std::vector<Run> runs;
  for (int i = 0; i < count; ++i) runs.push_back({context(random) - 1, 1});
  return runs;
}

// `samples` decodes of each of `prompts` prompts.
std::vector<Run> Samples(int prompts, int samples, int prompt, int least, int most) {
  std::vector<Run> runs = Decodes(prompts * samples, prompt + least, prompt + most);
  for (size_t i = 0; i < runs.size(); ++i) {
    if (i % samples != 0) runs[i].common = prompt / kKvPageTokens * kKvPageTokens;
  }
  return runs;
}

std::vector<Run> Join(std::vector<Run> runs, const std::vector<Run>& more) {
  runs.insert(runs.end(), more.begin(), more.end());
  return runs;
}

}  // namespace

int main(int argc, char** argv) {
  std::string filter;
  auto isa = dorad::kernels::KernelIsa::kSm90;
  bool is_fp8 = false;
  for (int i = 1; i < argc; ++i) {
    if (std::string(argv[i]) == "mma") {
      isa = dorad::kernels::KernelIsa::kMma;
    } else if (std::string(argv[i]) == "fp8") {
      is_fp8 = true;
    } else {
      filter = argv[i];
    }
  }
  cudaStream_t stream;
  Check(cudaStreamCreate(&stream));
  // All layers' caches, and before they are filled the copy bandwidth.
  const int64_t plane = kPages * kPageElements;
  Bf16* const cache = Allocate<Bf16>(2 * kLayers * plane);
  const size_t half = size_t{2} << 30;
  Fill(cache, 2 * kLayers * plane);
  const double copy = CopyBandwidth(stream, cache, cache + half, half);
  std::printf("copy %.2f TB/s\n", copy);
  // In eight bits: a layer's keys, values and factors, half a plane each. Factors of 2^-5 and more.
  const auto cache_of = [=](int layer) {
    Bf16* const k = cache + 2 * layer * plane;
    if (!is_fp8) return dorad::kernels::KvCache{k, k + plane};
    return dorad::kernels::KvCache{k, k + plane / 2, k + plane};
  };
  for (int layer = 0; is_fp8 && layer < kLayers; ++layer) {
    Check(cudaMemset(cache_of(layer).factors, 0x79, plane));
  }

  const int max_rows = 4096;
  const int64_t width = int64_t{kShape.heads} * kShape.head_dim;
  const int64_t all = int64_t{kShape.heads + 2 * kShape.kv_heads} * kShape.head_dim;
  Bf16* const q = Allocate<Bf16>(max_rows * width);
  Bf16* const out = Allocate<Bf16>(max_rows * width);
  Bf16* const qkv = Allocate<Bf16>(max_rows * all);
  float* const angles = Allocate<float>(kMaxPositions * 64);
  Fill(q, max_rows * width);
  Fill(qkv, max_rows * all);
  Fill(angles, kMaxPositions * 64);
  std::vector<int32_t> shuffled(kPages);
  std::iota(shuffled.begin(), shuffled.end(), 0);
  std::shuffle(shuffled.begin(), shuffled.end(), std::mt19937(3));
  const size_t workspace_bytes =
      dorad::kernels::AttentionWorkspaceBytes(kShape, max_rows, kMaxPositions);
  std::printf("workspace %.1f MB\n", 1e-6 * static_cast<double>(workspace_bytes));
  char* const workspace = Allocate<char>(static_cast<int64_t>(workspace_bytes));

  Check(cudaMemset(workspace, 0xFF, workspace_bytes));

  const Case cases[] = {
      {"decode 1", Decodes(1, 656, 656), 0.3},
      {"decode 8", Decodes(8, 400, 912), 0.0},
      {"decode 32", Decodes(32, 400, 912), 0.95},
      {"decode 32 equal", Decodes(32, 656, 656), 0.95},
      {"decode 128", Decodes(128, 400, 912), 3.3},
      {"decode 256", Decodes(256, 400, 912), 6.4},
      {"decode 256 equal", Decodes(256, 656, 656), 6.4},
      {"decode 4 of 8000", Decodes(4, 8000, 8000), 1.4},
      {"decode 1 of 16000", Decodes(1, 16000, 16000), 0.0},
      {"decode 64 skewed", Join(Decodes(60, 100, 400), Decodes(4, 8000, 8000)), 0.0},
      {"samples 128 of 8", Samples(128, 8, 576, 1, 256), 0.0},
      {"samples 64 of 8", Samples(64, 8, 576, 100, 600), 0.0},
      {"samples 32 of 8", Samples(32, 8, 576, 100, 600), 0.0},
      {"samples 128 of 2", Samples(128, 2, 576, 100, 600), 0.0},
      {"samples 4 of 8", Samples(4, 8, 576, 100, 600), 0.0},
      {"samples 1 of 16", Samples(1, 16, 8000, 100, 600), 0.0},
      {"prefill 1 of 512", {{0, 512}}, 0.0},
      {"prefill 1 of 4096", {{0, 4096}}, 18.0},
      {"prefill 512 at 3584", {{3584, 512}}, 0.0},
      {"mixed 64 and 448", Join(Decodes(64, 400, 912), {{0, 448}}), 0.0},
  };
  std::printf("%-20s %6s %9s %9s %9s %7s %9s %9s %9s %9s %9s\n", "36 layers, ms", "goal",
              "attention", "split", "whole", "floor", "share", "append", "both", "in one", "apart");
  for (const Case& c : cases) {
    if (std::string(c.name).find(filter) == std::string::npos) continue;
    std::vector<int32_t> positions, sequences, page_begin, pages;
    int64_t next_page = 0, bytes = 0;
    double flop = 0.0;
    bool has_runs = false;
    for (size_t s = 0; s < c.runs.size(); ++s) {
      const int length = c.runs[s].first + c.runs[s].rows;
      const int common = c.runs[s].common;
      page_begin.push_back(static_cast<int32_t>(pages.size()));
      for (int at = 0; at < length; at += kKvPageTokens) {
        pages.push_back(at < common ? pages[page_begin[s - 1] + at / kKvPageTokens]
                                    : shuffled[next_page++ % kPages]);
      }
      bytes += int64_t{2} * (length - common) * kShape.kv_heads *
               (is_fp8 ? kShape.head_dim + 2 : 2 * kShape.head_dim);
      has_runs = has_runs || c.runs[s].rows > 1;
      for (int r = 0; r < c.runs[s].rows; ++r) {
        positions.push_back(c.runs[s].first + r);
        sequences.push_back(static_cast<int32_t>(s));
        flop += 4.0 * static_cast<double>(width) * (c.runs[s].first + r + 1);
      }
    }
    if (next_page > kPages) {
      std::fprintf(stderr, "%s: too many pages\n", c.name);
      return 1;
    }
    const auto rows_count = static_cast<int32_t>(positions.size());
    int32_t* const d_positions = Upload(positions);
    int32_t* const d_sequences = Upload(sequences);
    int32_t* const d_page_begin = Upload(page_begin);
    int32_t* const d_pages = Upload(pages);
    const dorad::kernels::StepRows rows{rows_count,  nullptr,      d_positions,
                                        d_sequences, d_page_begin, d_pages};
    const auto plan = [&](AttentionSplit split, bool shares) {
      dorad::kernels::AttentionPlanParams params;
      params.rows = rows;
      params.shape = kShape;
      params.row_tiles = has_runs;
      params.split = split;
      params.shares = shares;
      params.isa = isa;
      params.is_fp8 = is_fp8;
      params.workspace = {workspace, workspace_bytes, max_rows};
      Check(PlanAttention(params, stream));
    };
    const auto attention_of = [&](int layer, bool shares = true) {
      dorad::kernels::PagedAttentionParams params;
      params.rows = rows;
      params.shape = kShape;
      params.q = q;
      params.cache = cache_of(layer);
      params.softmax_scale = 1.0f / std::sqrt(128.0f);
      params.row_tiles = has_runs;
      params.isa = isa;
      params.workspace = {workspace, workspace_bytes, max_rows};
      params.shares = shares;
      params.out = out;
      return params;
    };
    const auto append_of = [&](int layer) {
      dorad::kernels::RopeAppendParams params;
      params.rows = rows;
      params.shape = kShape;
      params.qkv = qkv;
      params.q_norm = params.k_norm = angles;
      params.eps = 1e-6f;
      params.cos = params.sin = angles;
      params.q = q;
      params.cache = cache_of(layer);
      return params;
    };
    const int replays = has_runs ? 3 : 9;
    double ms[3];
    const AttentionSplit splits[] = {AttentionSplit::kByLoad, AttentionSplit::kAlways,
                                     AttentionSplit::kNever};
    for (int i = 0; i < 3; ++i) {
      ms[i] = 1e-3 * Microseconds(stream, replays, true, [&] {
                plan(splits[i], /*shares=*/true);
                for (int layer = 0; layer < kLayers; ++layer) {
                  Check(PagedAttention(attention_of(layer), stream));
                }
              });
    }
    const double append_ms = 1e-3 * Microseconds(stream, replays, true, [&] {
                               for (int layer = 0; layer < kLayers; ++layer) {
                                 Check(RopeAppend(append_of(layer), stream));
                               }
                             });
    const auto in_one_ms = [&](bool shares) {
      return 1e-3 * Microseconds(stream, replays, true, [&] {
               plan(AttentionSplit::kByLoad, shares);
               for (int layer = 0; layer < kLayers; ++layer) {
                 Check(AppendAttention(append_of(layer), attention_of(layer, shares), stream));
               }
             });
    };
    const double both_ms = 1e-3 * Microseconds(stream, replays, true, [&] {
                             plan(AttentionSplit::kByLoad, /*shares=*/true);
                             for (int layer = 0; layer < kLayers; ++layer) {
                               Check(RopeAppend(append_of(layer), stream));
                               Check(PagedAttention(attention_of(layer), stream));
                             }
                           });
    const double floor = 1e-9 * static_cast<double>(bytes) * kLayers / copy;
    std::printf("%-20s %6.2f %9.3f %9.3f %9.3f %7.3f", c.name, c.goal, ms[0], ms[1], ms[2], floor);
    if (has_runs) {
      std::printf(" %4.0f TF/s", 1e-9 * flop * kLayers / ms[0]);
    } else {
      std::printf("   %5.1f %%", 100.0 * floor / ms[0]);
    }
    std::printf(" %9.3f %9.3f", append_ms, both_ms);
    for (const bool shares : {true, false}) {
      if (!has_runs) std::printf(" %9.3f", in_one_ms(shares));
    }
    std::printf("\n");
    std::fflush(stdout);
    Check(cudaFree(d_positions));
    Check(cudaFree(d_sequences));
    Check(cudaFree(d_page_begin));
    Check(cudaFree(d_pages));
  }
  return 0;
}
