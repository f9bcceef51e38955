// Compose, Apply and ComposeBackward against the copy bandwidth of the same run: microseconds a
// call and the share of the bandwidth over the bytes they must move (two tensors read, one written;
// two with inner, and in the backward pass, which sums up d_g as well). Calls are
// replayed from a graph and walk through buffers that together exceed the L2.
//
//   kernels_compose_bench
#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include "kernels/dora/compose.h"
#include "kernels/dora/compose_backward.h"
#include "tests/bench/kernels_timing.h"

namespace {

using dorad::bench::Check;
using dorad::bench::CopyBandwidth;
using dorad::bench::MicrosecondsEach;
using dorad::kernels::ApplyParams;
using dorad::kernels::ComposeBackwardParams;
using dorad::kernels::ComposeParams;
using dorad::kernels::FloatType;

constexpr int64_t kPoolBytes = int64_t{6} << 30;
constexpr size_t kWorkspaceBytes = size_t{64} << 20;

// Random bf16 numbers in (-1, 1), which are finite fp32 numbers, too, pair by pair.
std::vector<uint16_t> RandomBits(size_t size) {
  std::vector<uint16_t> values(size);
  uint64_t state = 0x9E3779B97F4A7C15ull;
  for (uint16_t& value : values) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    const uint32_t bits = static_cast<uint32_t>(state >> 33);
    value = static_cast<uint16_t>(((bits & 1) << 15) | ((120 + (bits >> 8) % 7) << 7) |
                                  ((bits >> 16) & 0x7F));
  }
  return values;
}

struct Shape {
  int64_t rows, out;
};

const Shape kShapes[] = {{1, 4096},    {32, 4096},   {128, 4096},   {512, 2048},   {512, 4096},
                         {512, 8192},  {1024, 4096}, {2048, 2048},  {2048, 4096},  {2048, 6144},
                         {2048, 8192}, {4096, 2048}, {4096, 4096},  {4096, 8192},  {4096, 12288},
                         {8192, 4096}, {8192, 8192}, {16384, 4096}, {16384, 8192}, {8192, 28672},
                         {8192, 8191}};

}  // namespace

int main() {
  cudaStream_t stream;
  Check(cudaStreamCreate(&stream));
  char* pool;
  Check(cudaMalloc(reinterpret_cast<void**>(&pool), kPoolBytes));
  const std::vector<uint16_t> random = RandomBits(size_t{32} << 20);
  const auto block = static_cast<int64_t>(random.size() * 2);
  Check(cudaMemcpy(pool, random.data(), block, cudaMemcpyHostToDevice));
  for (int64_t at = block; at < kPoolBytes; at += block) {
    Check(cudaMemcpy(pool + at, pool, block, cudaMemcpyDeviceToDevice));
  }
  float* vectors;
  Check(cudaMalloc(reinterpret_cast<void**>(&vectors), size_t{1} << 20));
  std::vector<float> g(size_t{1} << 18);
  for (size_t i = 0; i < g.size(); ++i) g[i] = 1.0f + 0.002f * static_cast<float>(i % 17 - 8);
  Check(cudaMemcpy(vectors, g.data(), size_t{1} << 20, cudaMemcpyHostToDevice));

  float *d_g, *workspace;
  Check(cudaMalloc(reinterpret_cast<void**>(&d_g), size_t{1} << 20));
  Check(cudaMalloc(reinterpret_cast<void**>(&workspace), kWorkspaceBytes));

  const double copy = CopyBandwidth(stream, pool, pool + (size_t{2} << 30), size_t{2} << 30);
  std::printf("copy %.2f TB/s\n", copy);
  std::printf("%-14s %22s %22s %22s %22s %22s\n", "rows x out", "bf16 us (of copy)",
              "fp32 us (of copy)", "apply f32->bf16 us", "bf16 with inner us", "bf16 backward us");

  for (const Shape& shape : kShapes) {
    const int64_t elements = shape.rows * shape.out;
    std::printf("%6ld x %-6ld", shape.rows, shape.out);
    for (const FloatType type : {FloatType::kBF16, FloatType::kF32}) {
      const int64_t bytes = (elements * (type == FloatType::kF32 ? 4 : 2) + 255) / 256 * 256;
      const int sets = static_cast<int>(std::min<int64_t>(64, kPoolBytes / (3 * bytes)));
      const double us = MicrosecondsEach(stream, std::max(sets, 8), [&](int i) {
        char* const at = pool + 3 * bytes * (i % sets);
        ComposeParams p;
        p.base = at;
        p.lora = at + bytes;
        p.delta = at + 2 * bytes;
        p.g = vectors;
        p.rows = shape.rows;
        p.out = shape.out;
        p.scale = 1.5f;
        p.type = type;
        Check(dorad::kernels::Compose(p, stream));
      });
      std::printf("   %9.2f (%5.1f %%)", us, 100.0 * 3e-6 * static_cast<double>(bytes) / us / copy);
    }
    const int64_t bytes = (elements * 4 + 255) / 256 * 256;
    const int sets = static_cast<int>(std::min<int64_t>(64, kPoolBytes / (3 * bytes)));
    const double us = MicrosecondsEach(stream, std::max(sets, 8), [&](int i) {
      char* const at = pool + 3 * bytes * (i % sets);
      ApplyParams p;
      p.base = reinterpret_cast<const float*>(at);
      p.lora = reinterpret_cast<const float*>(at + bytes);
      p.y = at + 2 * bytes;
      p.g = vectors;
      p.bias = vectors;
      p.base_ld = p.lora_ld = p.y_ld = p.out = shape.out;
      p.rows = shape.rows;
      p.scale = 1.5f;
      Check(dorad::kernels::Apply(p, stream));
    });
    std::printf("   %9.2f (%5.1f %%)", us, 100.0 * 2.5e-6 * static_cast<double>(bytes) / us / copy);
    const int64_t half = (elements * 2 + 255) / 256 * 256;
    const int training_sets = static_cast<int>(std::min<int64_t>(64, kPoolBytes / (4 * half)));
    const double share = 100.0 * 4e-6 * static_cast<double>(half) / copy;
    const double forward = MicrosecondsEach(stream, std::max(training_sets, 8), [&](int i) {
      char* const at = pool + 4 * half * (i % training_sets);
      ComposeParams p;
      p.base = at;
      p.lora = at + half;
      p.delta = at + 2 * half;
      p.inner = at + 3 * half;
      p.g = vectors;
      p.rows = shape.rows;
      p.out = shape.out;
      p.scale = 1.5f;
      Check(dorad::kernels::Compose(p, stream));
    });
    std::printf("   %9.2f (%5.1f %%)", forward, share / forward);
    const double backward = MicrosecondsEach(stream, std::max(training_sets, 8), [&](int i) {
      char* const at = pool + 4 * half * (i % training_sets);
      ComposeBackwardParams p;
      p.grad = at;
      p.inner = at + half;
      p.d_base = at + 2 * half;
      p.d_lora = at + 3 * half;
      p.g = vectors;
      p.d_g = d_g;
      p.workspace = workspace;
      p.workspace_bytes = kWorkspaceBytes;
      p.rows = shape.rows;
      p.out = shape.out;
      p.scale = 1.5f;
      Check(dorad::kernels::ComposeBackward(p, stream));
    });
    std::printf("   %9.2f (%5.1f %%)\n", backward, share / backward);
  }
  return 0;
}
