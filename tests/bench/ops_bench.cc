// Times the linears of one forward pass of SmolLM2-135M (30 layers and the head, random weights)
// against what the machine can do, measured in the same run, and against ATen.
//
//   ops_bench [threads] [f32|bf16] [batch sizes, for example 1,16,256]
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <string>
#include <thread>
#include <vector>

#include "server/backends/cpu/ops/dora_linear.h"
#include "server/backends/cpu/ops/thread_team.h"
#include "server/backends/cpu/simd/kernels.h"

namespace {

using dorad::ops::AdapterFactors;
using dorad::ops::BaseLinear;
using dorad::ops::ComputeDType;
using dorad::ops::Projection;
using dorad::ops::RowSegment;

constexpr int64_t kHidden = 576, kFfn = 1536, kKv = 192, kVocabulary = 49152, kLayers = 30;

bool g_cpu_time = false;

// Wall time; with one thread its CPU time, which other work on the machine disturbs less.
double Seconds() {
  if (g_cpu_time) {
    timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// The best of several runs within about a second: other work on the machine only ever adds time.
template <typename Work>
double BestMs(Work work) {
  double best = 1e30;
  const double begin = Seconds();
  for (int i = 0; i < 3 || (i < 200 && Seconds() - begin < 1.0); ++i) {
    const double start = Seconds();
    work();
    best = std::min(best, Seconds() - start);
  }
  return best * 1e3;
}

// GB/s of reading far more than the caches hold, on all threads of the team.
double StreamBandwidth() {
  const int64_t words = 64 << 20;  // 512 MiB
  std::vector<uint64_t> data(words, 1);
  const int64_t tasks = 512;
  std::vector<uint64_t> sums(tasks);
  const double ms = BestMs([&] {
    dorad::ops::Team().Run(tasks, [&](int64_t t) {
      typedef uint64_t V __attribute__((vector_size(32)));
      V s[4] = {};
      const uint64_t* p = data.data() + t * (words / tasks);
      for (int64_t i = 0; i < words / tasks; i += 16) {
        for (int u = 0; u < 4; ++u) {
          V v;
          std::memcpy(&v, p + i + 4 * u, sizeof(v));
          s[u] += v;
        }
      }
      sums[t] = s[0][0] + s[1][1] + s[2][2] + s[3][3];
    });
  });
  if (sums[0] == 0) std::abort();
  return static_cast<double>(words) * 8 / ms / 1e6;
}

// GFLOP/s of multiply-adds whose operands stay in the first-level cache, on all threads: a product
// of six rows with weights of a few KiB, counted without its packing.
double PeakGflops(dorad::ops::cpu::Format format) {
  const dorad::ops::cpu::Kernels& kernels = dorad::ops::cpu::ActiveKernels();
  const int threads = dorad::ops::Team().threads();
  const double gflop_each = kernels.fma_peak(format, 1 << 14) * 2e-9;
  const double ms = BestMs([&] {
    dorad::ops::Team().Run(threads * 16, [&](int64_t) { kernels.fma_peak(format, 1 << 14); });
  });
  return gflop_each * 16 * threads / ms * 1e3;
}

at::Tensor Weight(int64_t rows, int64_t cols, at::ScalarType type) {
  return (at::randn({rows, cols}) * 0.05).to(type);
}

struct Linear {
  int input;  // which activation: 0 hidden, 1 ffn
  BaseLinear base;
  std::vector<AdapterFactors> adapters;
};
using Group = std::vector<Linear>;

std::vector<Group> MakeModel(at::ScalarType type) {
  std::vector<Group> model;
  auto linear = [&](int64_t out, int64_t in) {
    return Linear{in == kFfn, {Weight(out, in, type), {}}, {}};
  };
  for (int64_t i = 0; i < kLayers; ++i) {
    model.push_back({linear(kHidden, kHidden), linear(kKv, kHidden), linear(kKv, kHidden)});
    model.push_back({linear(kHidden, kHidden)});
    model.push_back({linear(kFfn, kHidden), linear(kFfn, kHidden)});
    model.push_back({linear(kHidden, kFfn)});
  }
  model.push_back({linear(kVocabulary, kHidden)});
  return model;
}

// Adapters on the layers' linears; the head has none.
void AddAdapters(std::vector<Group>& model, int count, int64_t rank, at::ScalarType type) {
  for (size_t i = 0; i < model.size(); ++i) {
    for (Linear& l : model[i]) {
      l.adapters.clear();
      for (int a = 0; a < count && i + 1 < model.size(); ++a) {
        const at::Tensor& w = l.base.weight_OI;
        l.adapters.push_back({Weight(rank, w.size(1), type), Weight(w.size(0), rank, type),
                              at::rand({w.size(0)}) + 0.5, 2.0f});
      }
    }
  }
}

double Bytes(const at::Tensor& t) {
  return t.defined() ? static_cast<double>(t.numel()) * t.element_size() : 0.0;
}

struct Step {
  std::vector<std::vector<RowSegment>> segments;
  std::vector<std::vector<Projection>> groups;
  std::vector<const at::Tensor*> inputs;
  at::Tensor hidden, ffn;
  double bytes = 0.0, flop = 0.0;

  Step(std::vector<Group>& model, int64_t rows) {
    hidden = at::randn({rows, kHidden});
    ffn = at::randn({rows, kFfn});
    for (Group& group : model) {
      for (Linear& l : group) AddSegments(l, rows);
    }
    size_t next = 0;
    for (Group& group : model) {
      groups.emplace_back();
      inputs.push_back(group[0].input == 0 ? &hidden : &ffn);
      for (Linear& l : group) {
        const at::Tensor y = at::empty({rows, l.base.weight_OI.size(0)});
        groups.back().push_back({&l.base, segments[next++], y});
        bytes += Bytes(l.base.weight_OI);
        flop += 2.0 * static_cast<double>(rows * l.base.weight_OI.numel());
      }
    }
  }

  void AddSegments(const Linear& l, int64_t rows) {
    segments.emplace_back();
    const int64_t count = std::min<int64_t>(rows, std::max<size_t>(1, l.adapters.size()));
    for (int64_t i = 0; i < count; ++i) {
      const AdapterFactors* f = l.adapters.empty() ? nullptr : &l.adapters[i];
      segments.back().push_back({f, rows * i / count, rows * (i + 1) / count});
      if (f == nullptr) continue;
      bytes += Bytes(f->a_RI) + Bytes(f->b_OR) + Bytes(f->g_O);
      const int64_t own = segments.back().back().end - segments.back().back().begin;
      flop += 2.0 * static_cast<double>(own * (f->a_RI.numel() + f->b_OR.numel()));
    }
  }

  void Run(ComputeDType compute, bool reference) const {
    for (size_t i = 0; i < groups.size(); ++i) {
      (reference ? dorad::ops::DoraLinearReference : dorad::ops::DoraLinear)(*inputs[i], groups[i],
                                                                             compute);
    }
  }
};

struct Limits {
  double bandwidth;
  double gflops;
};

double Report(const char* name, std::vector<Group>& model, int64_t rows, ComputeDType compute,
              const Limits& limits, double base_ms, bool with_aten) {
  const Step step(model, rows);
  const double ms = BestMs([&] { step.Run(compute, false); });
  const double gb = step.bytes / ms / 1e6;
  const double gflops = step.flop / ms / 1e6;
  std::printf("%5ld  %-22s %9.2f ms %7.1f GB/s (%3.0f %%) %8.1f GFLOP/s (%3.0f %%)", rows, name, ms,
              gb, 100 * gb / limits.bandwidth, gflops, 100 * gflops / limits.gflops);
  if (base_ms > 0) std::printf("  %5.2f x base", ms / base_ms);
  if (with_aten) {
    const double aten = BestMs([&] { step.Run(compute, true); });
    std::printf("  ATen %9.2f ms (%.1f x)", aten, aten / ms);
  }
  std::printf("\n");
  std::fflush(stdout);
  return ms;
}

}  // namespace

int main(int argc, char** argv) {
  const int threads =
      argc > 1 ? std::atoi(argv[1]) : static_cast<int>(std::thread::hardware_concurrency());
  const ComputeDType compute =
      argc > 2 && std::string(argv[2]) == "bf16" ? ComputeDType::kBF16 : ComputeDType::kF32;
  std::vector<int64_t> batches;
  for (const char* p = argc > 3 ? argv[3] : "1,4,16,64,256"; *p != '\0';) {
    char* end;
    batches.push_back(std::strtol(p, &end, 10));
    p = *end == ',' ? end + 1 : end;
  }
  g_cpu_time = threads == 1;
  dorad::ops::SetThreads(threads);
  at::set_num_threads(threads);
  const bool dot = compute == ComputeDType::kBF16 && dorad::ops::cpu::ActiveKernels().bf16_dot;
  const Limits limits{StreamBandwidth(), PeakGflops(dot ? dorad::ops::cpu::Format::kBf16Dot
                                                        : dorad::ops::cpu::Format::kF32)};
  std::printf("%s, %d threads: %.1f GB/s, %.0f GFLOP/s (%s)\n",
              dorad::ops::cpu::ActiveKernels().name, threads, limits.bandwidth, limits.gflops,
              dot ? "bf16 dot products" : "fp32");
  std::vector<Group> model = MakeModel(at::kBFloat16);
  for (int64_t rows : batches) {
    AddAdapters(model, 0, 0, at::kFloat);
    const double base = Report("base", model, rows, compute, limits, 0, true);
    AddAdapters(model, 1, 16, at::kFloat);
    Report("DoRA r 16", model, rows, compute, limits, base, true);
    if (rows >= 4) {
      AddAdapters(model, 4, 16, at::kFloat);
      Report("4 x DoRA r 16", model, rows, compute, limits, base, false);
    }
    AddAdapters(model, 1, 256, at::kBFloat16);
    Report("DoRA r 256 (bf16)", model, rows, compute, limits, base, false);
    if (rows >= 4) {
      AddAdapters(model, 4, 256, at::kBFloat16);
      Report("4 x DoRA r 256 (bf16)", model, rows, compute, limits, base, false);
    }
  }
  return 0;
}
