// DoraLinearPrefill against a double reference, and bit for bit against DoraLinear, which takes the
// same rows 256 at a time.
#include "kernels/dora/linear_prefill.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels/dora/linear.h"
#include "tests/unit/kernels/device.h"
#include "tests/unit/kernels/linear_stack.h"

namespace dorad::kernels {
namespace {

// Both forms over the rows of a stack, the workspace shared between them.
class Forms {
 public:
  Forms(const DoraLinearShape& shape, const std::vector<std::vector<ModuleFactors>>& adapters,
        bool bias, int rows)
      : shape_(shape),
        stack_(shape, adapters, bias, rows, tested_isa),
        workspace_(std::max(DoraLinearPrefillWorkspaceBytes(shape, rows, kMaxRank),
                            DoraLinearWorkspaceBytes(shape, kDoraLinearMaxRows, kMaxRank))),
        segments_(kPrefillMaxSegments) {
    cudaMemset(workspace_.get(), 0, kDoraLinearSignalBytes);
  }

  const Stack& stack() const { return stack_; }

  DoraLinearPrefillParams Params(int rows, int segments, void* y, bool y_fp32) const {
    const DoraLinearParams common = stack_.Params(0, 1, y, y_fp32);
    DoraLinearPrefillParams params;
    params.shape = shape_;
    params.rows = rows;
    params.max_rank = common.max_rank;
    params.x = common.x;
    params.w = common.w;
    params.bias = common.bias;
    params.table = common.table;
    params.maps = common.maps;
    params.first_module = common.first_module;
    params.segments = segments_.get();
    params.num_segments = segments;
    params.y = y;
    params.y_fp32 = y_fp32;
    params.isa = common.isa;
    params.workspace = workspace_.get();
    params.workspace_bytes = workspace_.size();
    return params;
  }

  // T: float or __nv_bfloat16.
  template <typename T>
  std::vector<float> Run(int rows, const std::vector<RowSegment>& segments) {
    SetSegments(segments);
    DeviceBuffer<T> y(size_t{1} * rows * stack_.out() + kGuard);
    EXPECT_EQ(DoraLinearPrefill(Params(rows, static_cast<int>(segments.size()), y.get(), kFp32<T>),
                                nullptr),
              cudaSuccess);
    const std::vector<float> values = Read(y);
    for (size_t i = values.size() - kGuard; i < values.size(); ++i) {
      EXPECT_TRUE(std::isnan(values[i])) << "wrote beyond y";
    }
    return {values.begin(), values.end() - kGuard};
  }

  template <typename T>
  std::vector<float> RunInBlocks(int rows, const std::vector<RowSegment>& segments) {
    DeviceBuffer<T> y(size_t{1} * rows * stack_.out());
    for (int begin = 0; begin < rows; begin += kDoraLinearMaxRows) {
      const int end = std::min(rows, begin + kDoraLinearMaxRows);
      std::vector<RowSegment> block;
      for (const RowSegment& s : segments) {
        const RowSegment part = {s.slot, std::max(s.begin, begin) - begin,
                                 std::min(s.end, end) - begin};
        if (part.begin < part.end) block.push_back(part);
      }
      SetSegments(block);
      const DeviceBuffer<int32_t> count(std::vector<int32_t>{static_cast<int32_t>(block.size())});
      DoraLinearParams params =
          stack_.Params(begin, end - begin, y.get() + size_t{1} * begin * stack_.out(), kFp32<T>);
      params.segments = segments_.get();
      params.num_segments = count.get();
      params.workspace = workspace_.get();
      params.workspace_bytes = workspace_.size();
      EXPECT_EQ(DoraLinear(params, nullptr), cudaSuccess);
      EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    }
    return Read(y);
  }

  void SetSegments(const std::vector<RowSegment>& segments) {
    cudaMemcpy(segments_.get(), segments.data(), segments.size() * sizeof(RowSegment),
               cudaMemcpyHostToDevice);
  }

  // Whether waiting counters are as their owner left them.
  bool CountersAreZero() const {
    std::vector<uint8_t> counters(kDoraLinearSignalBytes);
    cudaMemcpy(counters.data(), workspace_.get(), counters.size(), cudaMemcpyDeviceToHost);
    return std::count(counters.begin(), counters.end(), 0) == static_cast<int64_t>(counters.size());
  }

 private:
  static constexpr int kMaxRank = 768;
  static constexpr size_t kGuard = 64;
  template <typename T>
  static constexpr bool kFp32 = std::is_same_v<T, float>;

  template <typename T>
  static std::vector<float> Read(const DeviceBuffer<T>& y) {
    const std::vector<T> values = y.Read();
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    return {values.begin(), values.end()};
  }

  const DoraLinearShape shape_;
  const Stack stack_;
  const DeviceBuffer<uint8_t> workspace_;
  const DeviceBuffer<RowSegment> segments_;
};

class LinearPrefillTest : public IsaTest {};

DORAD_FOR_EACH_ISA(LinearPrefillTest);

// Some rows of y: the first and last of each segment and of each tile.
void ExpectCloseAtEdges(const Stack& stack, const std::vector<float>& y, int rows,
                        const std::vector<RowSegment>& segments, double tolerance,
                        const std::string& what) {
  std::vector<int> some = {0, 127, 128, 255, 256, 383, 384, rows - 1};
  for (const RowSegment& segment : segments) {
    some.push_back(segment.begin);
    some.push_back(segment.end - 1);
  }
  for (const int row : some) {
    if (row >= rows) continue;
    const std::vector<float> one(y.begin() + int64_t{row} * stack.out(),
                                 y.begin() + int64_t{row + 1} * stack.out());
    stack.ExpectClose(one, row, 1, {{Stack::SlotOf(segments, row), 0, 1}}, tolerance,
                      what + " row " + std::to_string(row));
  }
}

TEST_P(LinearPrefillTest, MixedBatchesMatchTheReference) {
  constexpr int kRows = 700;
  Forms forms(Shape(576, {576, 192, 208}), ManyAdapters(3), true, kRows);
  for (const int rows : {257, 512, kRows}) {
    for (const std::vector<int>& slots :
         {std::vector<int>{0}, {-1}, {3, -1, 0}, {-1, 0, 1, 2, 3, 4, 5}}) {
      const std::vector<RowSegment> segments = Deal(rows, slots);
      const std::string what =
          "rows " + std::to_string(rows) + " segments " + std::to_string(segments.size());
      ExpectCloseAtEdges(forms.stack(), forms.Run<float>(rows, segments), rows, segments,
                         kFp32Tolerance, what);
      ExpectCloseAtEdges(forms.stack(), forms.Run<__nv_bfloat16>(rows, segments), rows, segments,
                         kBf16Tolerance, what);
      if (HasFailure()) return;
    }
  }
}

// Shapes that are cut in every way: pieces of K or none, tails, panels of every width and of
// several parts.
TEST_P(LinearPrefillTest, ARowHasTheBitsOfDoraLinear) {
  const DoraLinearShape shapes[] = {Shape(4096, {2048, 512, 512}), Shape(4096, {1024}),
                                    Shape(12288, {520}),           Shape(64, {20000}),
                                    Shape(200, {1024, 320, 80}),   Shape(576, {1536, 1536}),
                                    Shape(320, {4096, 4096})};
  for (const DoraLinearShape& shape : shapes) {
    constexpr int kRows = 900;
    Forms forms(shape, ManyAdapters(shape.parts), true, kRows);
    for (const int rows : {257, 640, kRows}) {
      for (const std::vector<int>& slots : {std::vector<int>{-1}, {3}, {-1, 0, 1, 2, 3, 4, 5}}) {
        const std::vector<RowSegment> segments = Deal(rows, slots);
        const std::string what =
            "in " + std::to_string(shape.in) + " rows " + std::to_string(rows) + " segments " +
            std::to_string(segments.size()) + " slot " + std::to_string(slots[0]);
        const int size = rows * forms.stack().out();
        ExpectSameBits(forms.Run<float>(rows, segments).data(),
                       forms.RunInBlocks<float>(rows, segments).data(), size, what);
        if (HasFailure()) return;
      }
    }
    const std::vector<RowSegment> segments = Deal(kRows, {4, -1, 0});
    ExpectSameBits(forms.Run<__nv_bfloat16>(kRows, segments).data(),
                   forms.RunInBlocks<__nv_bfloat16>(kRows, segments).data(),
                   kRows * forms.stack().out(), "in " + std::to_string(shape.in) + " bf16");
  }
}

// Many segments in a tile, one of a single row, and adapters that follow each other.
TEST_P(LinearPrefillTest, SegmentsMayBeSingleRows) {
  constexpr int kRows = 400;
  constexpr int kAdapters = 300;
  std::vector<std::vector<ModuleFactors>> adapters;
  for (int i = 0; i < kAdapters; ++i) adapters.push_back({{1 + i % 40, i % 3 == 0}});
  Forms forms(Shape(256, {512}), adapters, false, kRows);
  std::vector<RowSegment> segments;
  for (int i = 0; i < kAdapters; ++i) segments.push_back({i, i, i + 1});
  segments.push_back({-1, kAdapters, kRows});
  const std::vector<float> y = forms.Run<float>(kRows, segments);
  ExpectSameBits(y.data(), forms.RunInBlocks<float>(kRows, segments).data(),
                 kRows * forms.stack().out(), "single rows");
  forms.stack().ExpectClose(y, 0, kRows, segments, kFp32Tolerance, "single rows");
}

// Launches follow each other closely, with other launches between them, and leave the workspace's
// counters as they found them.
TEST_P(LinearPrefillTest, LaunchesMayOverlap) {
  constexpr int kRows = 1200;
  Forms forms(Shape(1024, {1024, 256, 256}), ManyAdapters(3), true, kRows);
  const std::vector<RowSegment> segments = Deal(kRows, {3, 0, -1, 2});
  const std::vector<float> expected = forms.Run<float>(kRows, segments);
  const size_t size = expected.size();
  DeviceBuffer<float> y(size);
  for (int i = 0; i < 50; ++i) {
    DORAD_ASSERT_CUDA(DoraLinearPrefill(
        forms.Params(kRows, static_cast<int>(segments.size()), y.get(), true), nullptr));
    if (i % 10 != 9) continue;
    ExpectSameBits(y.Read().data(), expected.data(), static_cast<int>(size),
                   "launch " + std::to_string(i));
    EXPECT_TRUE(forms.CountersAreZero());
    DORAD_ASSERT_CUDA(cudaMemset(y.get(), 0xFF, size * sizeof(float)));
  }
}

TEST_P(LinearPrefillTest, RefusesWhatItCannotTake) {
  Forms forms(Shape(64, {32}), {{{8}}}, false, 300);
  forms.SetSegments({{0, 0, 300}});
  DeviceBuffer<float> y(size_t{300} * 32);
  const DoraLinearPrefillParams good = forms.Params(300, 1, y.get(), true);
  DORAD_ASSERT_CUDA(DoraLinearPrefill(good, nullptr));
  const auto refused = [&](auto change) {
    DoraLinearPrefillParams params = good;
    change(params);
    return DoraLinearPrefill(params, nullptr) == cudaErrorInvalidValue;
  };
  EXPECT_TRUE(refused([](DoraLinearPrefillParams& p) { p.rows = 0; }));
  EXPECT_TRUE(refused([](DoraLinearPrefillParams& p) { p.num_segments = 0; }));
  EXPECT_TRUE(
      refused([](DoraLinearPrefillParams& p) { p.num_segments = kPrefillMaxSegments + 1; }));
  EXPECT_TRUE(refused([](DoraLinearPrefillParams& p) { p.shape.in = 60; }));
  EXPECT_TRUE(refused([](DoraLinearPrefillParams& p) { p.shape.out[0] = 30; }));
  EXPECT_TRUE(refused([](DoraLinearPrefillParams& p) { p.shape.parts = 4; }));
  EXPECT_TRUE(refused([](DoraLinearPrefillParams& p) {
    p.shape.parts = 2;
    p.shape.out[0] = p.shape.out[1] = 16;
  }));
  EXPECT_TRUE(refused([](DoraLinearPrefillParams& p) { p.x += 1; }));
  EXPECT_TRUE(refused([](DoraLinearPrefillParams& p) { p.workspace_bytes = 1024; }));
  EXPECT_TRUE(refused([](DoraLinearPrefillParams& p) { p.y = nullptr; }));
  DORAD_ASSERT_CUDA(cudaDeviceSynchronize());
}

}  // namespace
}  // namespace dorad::kernels
