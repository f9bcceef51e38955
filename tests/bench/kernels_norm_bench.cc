// The norms on the GPU: both forms of a module's norm against each other, against the time of their
// products and bytes, and in error against fp64; the whole of Qwen3-8B's 252 modules; ||W||²
// against the copy bandwidth of the same run. Weights and factors of different modules lie in
// different memory, together beyond the L2.
//
//   kernels_norm_bench [rank, default 384] [sm90 | mma]
#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include "kernels/dora/norm.h"
#include "tests/bench/kernels_timing.h"

namespace {

using Bf16 = __nv_bfloat16;
using dorad::bench::Check;
using dorad::bench::CopyBandwidth;
using dorad::bench::Microseconds;
using dorad::kernels::DoraNormParams;

constexpr double kScale = 1.5;
constexpr int kLayers = 36;

// Device memory in one piece, filled with bf16 numbers of about N(0, 0.02²).
class Pool {
 public:
  explicit Pool(size_t bytes) : bytes_(bytes) {
    Check(cudaMalloc(reinterpret_cast<void**>(&data_), bytes));
    std::vector<Bf16> random(size_t{16} << 20);
    uint64_t state = 0x9E3779B97F4A7C15ull;
    for (Bf16& value : random) {
      state = state * 6364136223846793005ull + 1442695040888963407ull;
      // Four uniform bytes make a bell of standard deviation 147.8.
      const auto bits = static_cast<uint32_t>(state >> 32);
      const int sum = (bits & 255) + (bits >> 8 & 255) + (bits >> 16 & 255) + (bits >> 24);
      value = __float2bfloat16_rn(static_cast<float>(sum - 510) * (0.02f / 147.8f));
    }
    const size_t block = random.size() * sizeof(Bf16);
    for (size_t at = 0; at < bytes; at += block) {
      Check(cudaMemcpy(data_ + at, random.data(), std::min(block, bytes - at),
                       cudaMemcpyHostToDevice));
    }
  }
  void Reset() { used_ = 0; }
  // Pieces are not multiples of the random block, so no two have the same content.
  const Bf16* Take(int64_t elements) {
    const size_t bytes = (static_cast<size_t>(elements) * 2 + 4096 + 255) / 256 * 256;
    if (used_ + bytes > bytes_) {
      std::fprintf(stderr, "pool too small\n");
      std::exit(1);
    }
    char* const at = data_ + used_;
    used_ += bytes;
    return reinterpret_cast<const Bf16*>(at);
  }
  size_t left() const { return bytes_ - used_; }
  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  char* data_ = nullptr;
  const size_t bytes_;
  size_t used_ = 0;
};

struct Shape {
  int64_t out, in;
};

struct Form {
  const char* name;
  cudaError_t (*run)(const DoraNormParams&, cudaStream_t);
  size_t (*workspace)(int64_t, int64_t, int64_t);
};
const Form kForms[] = {
    {"direct", dorad::kernels::DirectNorm, dorad::kernels::DirectNormWorkspace},
    {"factored", dorad::kernels::FactoredNorm, dorad::kernels::FactoredNormWorkspace}};

dorad::kernels::KernelIsa isa;

DoraNormParams Module(Pool& pool, Shape shape, int64_t rank, float* vectors, void* workspace,
                      size_t workspace_bytes) {
  DoraNormParams p;
  p.w = pool.Take(shape.out * shape.in);
  p.a = pool.Take(rank * shape.in);
  p.b = pool.Take(shape.out * rank);
  p.base_sq = vectors;
  p.norm = vectors + (1 << 16);
  p.magnitude = vectors;
  p.g = vectors + (2 << 16);
  p.workspace = workspace;
  p.workspace_bytes = workspace_bytes;
  p.out = shape.out;
  p.in = shape.in;
  p.rank = p.ldb = rank;
  p.scale = kScale;
  p.isa = isa;
  return p;
}

// The largest relative error of a sample of rows against fp64.
double Error(const DoraNormParams& p) {
  const auto read = [](const auto* from, int64_t count) {
    std::vector<std::remove_cv_t<std::remove_pointer_t<decltype(from)>>> values(count);
    Check(cudaMemcpy(values.data(), from, count * sizeof(values[0]), cudaMemcpyDeviceToHost));
    return values;
  };
  const auto a = read(p.a, p.rank * p.in);
  std::vector<float> a_float(a.size());
  for (size_t i = 0; i < a.size(); ++i) a_float[i] = __bfloat162float(a[i]);
  const auto norms = read(p.norm, p.out);
  double worst = 0.0;
  for (int64_t sample = 0; sample < 16; ++sample) {
    const int64_t row = sample * 9973 % p.out;
    const auto w = read(p.w + row * p.in, p.in);
    const auto b = read(p.b + row * p.ldb, p.rank);
    std::vector<double> t(p.in);
    for (int64_t i = 0; i < p.in; ++i) t[i] = __bfloat162float(w[i]);
    for (int64_t r = 0; r < p.rank; ++r) {
      const double x = p.scale * __bfloat162float(b[r]);
      for (int64_t i = 0; i < p.in; ++i) t[i] += x * a_float[r * p.in + i];
    }
    double sum = 0.0;
    for (const double x : t) sum += x * x;
    worst = std::max(worst, std::abs(norms[row] / std::sqrt(sum) - 1.0));
  }
  return worst;
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t rank = argc > 1 ? std::atoll(argv[1]) : 384;
  isa = dorad::bench::IsaOf(argc > 2 ? argv[2] : "");
  cudaStream_t stream;
  Check(cudaStreamCreate(&stream));
  Pool pool(size_t{17} << 30);
  float* vectors;
  Check(cudaMalloc(reinterpret_cast<void**>(&vectors), 4 << 20));
  Check(cudaMemcpy(vectors, pool.data(), 4 << 20, cudaMemcpyDeviceToDevice));
  const size_t workspace_bytes = size_t{64} << 20;
  void* workspace;
  Check(cudaMalloc(&workspace, workspace_bytes));

  const size_t half = size_t{2} << 30;
  const double copy = CopyBandwidth(stream, pool.data(), pool.data() + half, half);
  std::printf("copy %.2f TB/s; rank %ld\n", copy, rank);

  std::printf("squared row norms: us (share of the copy bandwidth)\n");
  for (const Shape shape : {Shape{1024, 4096}, Shape{4096, 4096}, Shape{12288, 4096},
                            Shape{4096, 12288}, Shape{8192, 28672}, Shape{151936, 4096}}) {
    std::printf("%7ld x %-6ld", shape.out, shape.in);
    const int64_t elements = shape.out * shape.in;
    pool.Reset();
    std::vector<const Bf16*> weights;
    while (weights.size() < 16 && pool.left() > static_cast<size_t>(elements) * 4 + 8192) {
      weights.push_back(pool.Take(2 * elements));
    }
    for (const bool wide : {false, true}) {
      const double us = Microseconds(stream, 9, true, [&] {
        for (const Bf16* w : weights) {
          Check(wide ? dorad::kernels::SquaredRowNorms(reinterpret_cast<const float*>(w), shape.out,
                                                       shape.in, vectors + (3 << 16), stream)
                     : dorad::kernels::SquaredRowNorms(w, shape.out, shape.in, vectors + (3 << 16),
                                                       stream));
        }
      });
      const double each = us / static_cast<double>(weights.size());
      const double bytes = static_cast<double>(elements) * (wide ? 4 : 2);
      std::printf("   %s %8.1f (%5.1f %%)", wide ? "fp32" : "bf16", each,
                  100e-6 * bytes / each / copy);
    }
    std::printf("\n");
  }

  std::printf("norm of a module: us (TFLOP/s of 2·O·I·R), error against fp64, workspace\n");
  for (const Shape shape : {Shape{1024, 4096}, Shape{4096, 4096}, Shape{12288, 4096},
                            Shape{4096, 12288}, Shape{8192, 8192}, Shape{8192, 28672}}) {
    std::printf("%6ld x %-6ld", shape.out, shape.in);
    pool.Reset();
    std::vector<DoraNormParams> modules;
    const int64_t elements = shape.out * shape.in + rank * (shape.out + shape.in);
    while (modules.size() < 12 && pool.left() > static_cast<size_t>(elements) * 2 + 65536) {
      modules.push_back(Module(pool, shape, rank, vectors, workspace, workspace_bytes));
    }
    for (const Form& form : kForms) {
      Check(dorad::kernels::SquaredRowNorms(modules[0].w, shape.out, shape.in, vectors, stream));
      Check(cudaMemsetAsync(vectors + (1 << 16), 0xFF, shape.out * sizeof(float), stream));
      Check(form.run(modules[0], stream));
      Check(cudaStreamSynchronize(stream));
      const double error = Error(modules[0]);
      const double us = Microseconds(stream, 9, true,
                                     [&] {
                                       for (const DoraNormParams& p : modules)
                                         Check(form.run(p, stream));
                                     }) /
                        static_cast<double>(modules.size());
      const double flop = 2.0 * static_cast<double>(shape.out * shape.in * rank);
      std::printf("   %s %8.1f (%3.0f) %.1e %4.1f MB", form.name, us, 1e-6 * flop / us, error,
                  1e-6 * static_cast<double>(form.workspace(shape.out, shape.in, rank)));
    }
    std::printf("\n");
  }

  {
    pool.Reset();
    DoraNormParams p = Module(pool, {4096, 151936}, rank, vectors, workspace, workspace_bytes);
    p.w_by_in = true;
    const double us =
        Microseconds(stream, 5, true, [&] { Check(dorad::kernels::DirectNorm(p, stream)); });
    std::printf("embedding 151936 x 4096: %.0f us (%.0f TFLOP/s)\n", us,
                2e-6 * 4096 * 151936 * static_cast<double>(rank) / us);
  }

  pool.Reset();
  std::vector<DoraNormParams> modules;
  double elements = 0.0;
  for (int layer = 0; layer < kLayers; ++layer) {
    for (const Shape shape :
         {Shape{4096, 4096}, Shape{1024, 4096}, Shape{1024, 4096}, Shape{4096, 4096},
          Shape{12288, 4096}, Shape{12288, 4096}, Shape{4096, 12288}}) {
      modules.push_back(Module(pool, shape, rank, vectors, workspace, workspace_bytes));
      elements += static_cast<double>(shape.out * shape.in);
    }
  }
  std::printf("Qwen3-8B, %zu modules; the weights' bytes alone take %.2f ms\n", modules.size(),
              2e-9 * elements / copy);
  const auto print = [&](const char* name, const std::function<void()>& work) {
    for (const bool as_graph : {false, true}) {
      const double us = Microseconds(stream, 5, as_graph, work);
      std::printf("  %-15s %-6s %7.2f ms, %4.0f TFLOP/s\n", name, as_graph ? "graph" : "stream",
                  1e-3 * us, 2e-6 * elements * static_cast<double>(rank) / us);
    }
  };
  for (const Form& form : kForms) {
    print(form.name, [&] {
      for (const DoraNormParams& p : modules) Check(form.run(p, stream));
    });
  }
  // A layer's modules side by side, with parts of the workspace of their own.
  constexpr int kOfLayer = 7;
  for (int i = 0; i < static_cast<int>(modules.size()); ++i) {
    modules[i].workspace_bytes = workspace_bytes / kOfLayer / 256 * 256;
    modules[i].workspace =
        static_cast<char*>(workspace) + modules[i].workspace_bytes * (i % kOfLayer);
  }
  print("direct by layer", [&] {
    for (int layer = 0; layer < kLayers; ++layer) {
      Check(dorad::kernels::DirectNorms(modules.data() + layer * kOfLayer, kOfLayer, stream));
    }
  });
  return 0;
}
