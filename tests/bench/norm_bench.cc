// The factored norm against the dense one in fp64, over the paper's norm shapes: error, time with
// and without the cached ||W||², and the peak of transient memory against its budget.
//
//   norm_bench [largest weight in MiB, default 1024]
//
// Weights fp32 N(0, 0.02²), A and B of trained size (B is not zero), one thread, as a loader has
// it.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

#include "server/backends/cpu/ops/dora_norm.h"

namespace {

using dorad::ops::NormAxis;

// Counts the bytes that tensors hold, on top of the allocator it replaces.
class CountingAllocator final : public c10::Allocator {
 public:
  explicit CountingAllocator(c10::Allocator* inner) : inner_(inner) { instance_ = this; }

  c10::DataPtr allocate(size_t bytes) override {
    auto* block = new Block{inner_->allocate(bytes), bytes};
    now_ += static_cast<int64_t>(bytes);
    peak_ = std::max(peak_, now_);
    return {block->data.get(), block, &Free, block->data.device()};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    inner_->copy_data(to, from, bytes);
  }

  // Bytes above what is held now, at most, until the next call.
  void StartPeak() { peak_ = start_ = now_; }
  int64_t peak() const { return peak_ - start_; }

 private:
  struct Block {
    c10::DataPtr data;
    size_t bytes;
  };
  static void Free(void* context) {
    auto* block = static_cast<Block*>(context);
    instance_->now_ -= static_cast<int64_t>(block->bytes);
    delete block;
  }

  static inline CountingAllocator* instance_ = nullptr;
  c10::Allocator* const inner_;
  int64_t now_ = 0;
  int64_t peak_ = 0;
  int64_t start_ = 0;
};

struct Shape {
  int64_t out, in, rank;
};

const std::vector<Shape> kPaperShapes = {
    {4096, 4096, 16},   {4096, 4096, 64},    {4096, 4096, 128},  {4096, 4096, 256},
    {4096, 4096, 384},  {4096, 4096, 512},   {8192, 8192, 64},   {8192, 8192, 384},
    {8192, 8192, 512},  {8192, 8192, 768},   {4096, 11008, 384}, {8192, 28672, 384},
    {512, 512, 64},     {512, 1024, 64},     {512, 512, 384},    {1024, 1024, 128},
    {1024, 1024, 384},  {2048, 2048, 384},   {3072, 3072, 384},  {6144, 6144, 384},
    {6144, 12288, 384}, {16384, 16384, 384}, {28672, 6144, 384},
};

double Seconds(std::chrono::steady_clock::time_point since) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - since).count();
}

at::Tensor DenseNorms(const at::Tensor& w, const at::Tensor& a, const at::Tensor& b, double scale) {
  const at::Tensor a64 = a.to(at::kDouble);
  at::Tensor norms = at::randn({w.size(0)}, at::kDouble);
  constexpr int64_t kRows = 1024;
  for (int64_t row = 0; row < w.size(0); row += kRows) {
    const int64_t count = std::min(kRows, w.size(0) - row);
    const at::Tensor dense = w.narrow(0, row, count)
                                 .to(at::kDouble)
                                 .addmm(b.narrow(0, row, count).to(at::kDouble), a64, 1, scale);
    norms.narrow(0, row, count).copy_(at::linalg_vector_norm(dense, 2, {1}));
  }
  return norms;
}

void Measure(const Shape& shape, CountingAllocator* allocator) {
  const auto [out, in, rank] = shape;
  const at::Tensor w = at::randn({out, in}) * 0.02;
  const at::Tensor a = at::randn({rank, in}) * 0.02;
  const at::Tensor b = at::randn({out, rank}) * 0.02;
  const double scale = 2.0;
  const dorad::ops::NormOptions options;

  const auto begin = std::chrono::steady_clock::now();
  const at::Tensor squared = dorad::ops::BaseSquaredNorms(w, NormAxis::kRows, options);
  const double base_seconds = Seconds(begin);
  allocator->StartPeak();
  const auto cached = std::chrono::steady_clock::now();
  const at::Tensor norms =
      dorad::ops::FactoredNorms(w, squared, a, b, scale, NormAxis::kRows, options);
  const double factored_seconds = Seconds(cached);
  const int64_t peak = allocator->peak();

  const at::Tensor dense = DenseNorms(w, a, b, scale);
  const double error = ((norms.to(at::kDouble) - dense).abs() / dense).max().item<double>();
  std::printf("%6ld x %-6ld r %-4ld  %8.1e  %9.1f ms  %9.1f ms  %7.1f MiB of %ld%s\n", out, in,
              rank, error, base_seconds * 1e3, factored_seconds * 1e3,
              static_cast<double>(peak) / (1 << 20), options.chunk_budget_bytes >> 20,
              error <= 1e-6 && peak <= options.chunk_budget_bytes ? "" : "   <-- over the goal");
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t largest = (argc > 1 ? std::atoll(argv[1]) : 1024) << 20;
  at::set_num_threads(1);
  at::manual_seed(1);
  CountingAllocator allocator(c10::GetCPUAllocator());
  c10::SetCPUAllocator(&allocator, /*priority=*/100);
  std::printf("     shape             rel. error      ||W||^2      the rest   peak transient\n");
  for (const Shape& shape : kPaperShapes) {
    if (shape.out * shape.in * 4 <= largest) Measure(shape, &allocator);
  }
  // Tensors still alive refer to the allocator: leave without destructors.
  std::_Exit(0);
}
