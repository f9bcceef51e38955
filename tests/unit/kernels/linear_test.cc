// DoraLinear against a double reference, and row by row against itself: a row's bits must not
// depend on the batch around it.
#include "kernels/dora/linear.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tests/unit/kernels/device.h"
#include "tests/unit/kernels/linear_stack.h"

namespace dorad::kernels {
namespace {

class LinearTest : public IsaTest {
 protected:
  static Stack MakeStack(const DoraLinearShape& shape,
                         const std::vector<std::vector<ModuleFactors>>& adapters, bool bias) {
    return Stack(shape, adapters, bias, kDoraLinearMaxRows, GetParam());
  }
};

DORAD_FOR_EACH_ISA(LinearTest);

TEST_P(LinearTest, OneAdapterMatchesTheReferenceAtEveryWidth) {
  Stack stack = MakeStack(Shape(576, {576, 192, 192}), {{{384}, {384}, {384}}}, true);
  for (const int rows : {1, 3, 8, 9, 16, 17, 32, 40, 64, 65, 128, 129, 256}) {
    const std::vector<RowSegment> segments = {{0, 0, rows}};
    stack.ExpectClose(stack.Run(0, rows, segments), 0, rows, segments, kFp32Tolerance,
                      "rows " + std::to_string(rows));
    if (HasFailure()) return;
  }
}

TEST_P(LinearTest, TheBaseAloneMatchesTheReference) {
  Stack stack = MakeStack(Shape(1024, {1536}), {{{16}}}, false);
  for (const int rows : {1, 8, 30, 100, 256}) {
    const std::vector<RowSegment> segments = {{-1, 0, rows}};
    stack.ExpectClose(stack.Run(0, rows, segments), 0, rows, segments, 1e-5,
                      "rows " + std::to_string(rows));
  }
}

// Launches that take adapters, and those that do not, have kernels of their own.
TEST_P(LinearTest, RowsOfTheBaseHaveTheSameBitsWhetherOrNotTheLaunchTakesAdapters) {
  for (const DoraLinearShape& shape :
       {Shape(1024, {1536}), Shape(576, {576, 192, 200}), Shape(128, {25344})}) {
    Stack stack = MakeStack(shape, ManyAdapters(shape.parts), true);
    for (const int rows : {1, 40, 65, 128, 200, 256}) {
      const std::vector<float> among = stack.Run(0, rows, {{-1, 0, rows}});
      DeviceBuffer<float> y(size_t{1} * rows * stack.out());
      DoraLinearParams params = stack.Params(0, rows, y.get(), true);
      params.max_rank = 0;
      params.maps = nullptr;
      ASSERT_EQ(DoraLinear(params, nullptr), cudaSuccess);
      ExpectSameBits(y.Read().data(), among.data(), rows * stack.out(),
                     "in " + std::to_string(shape.in) + " rows " + std::to_string(rows));
    }
  }
}

TEST_P(LinearTest, MixedBatchesMatchTheReference) {
  Stack stack = MakeStack(Shape(512, {576, 192, 208}), ManyAdapters(3), true);
  for (const int rows : {7, 16, 32, 61, 128, 256}) {
    const std::vector<RowSegment> segments = Deal(rows, {-1, 0, 1, 2, 3, 4, 5});
    const std::string what = "rows " + std::to_string(rows);
    stack.ExpectClose(stack.Run(0, rows, segments), 0, rows, segments, kFp32Tolerance, what);
    stack.ExpectClose(stack.RunBf16(rows, segments), 0, rows, segments, kBf16Tolerance, what);
  }
}

TEST_P(LinearTest, ASegmentForEveryRowMatchesTheReference) {
  Stack stack = MakeStack(Shape(512, {576, 192, 208}), ManyAdapters(3), true);
  for (const int rows : {64, 128, 256}) {
    std::vector<RowSegment> segments;
    for (int row = 0; row < rows; ++row) segments.push_back({row % 7 - 1, row, row + 1});
    stack.ExpectClose(stack.Run(0, rows, segments), 0, rows, segments, kFp32Tolerance,
                      "rows " + std::to_string(rows));
  }
}

// Shapes that a launch cuts in every way: pieces of K that meet, several tiles a block, tails.
TEST_P(LinearTest, EveryCutMatchesTheReference) {
  const DoraLinearShape shapes[] = {Shape(4096, {2048, 512, 512}), Shape(4096, {1024}),
                                    Shape(12288, {520}), Shape(64, {40000}),
                                    Shape(200, {1008, 288, 77})};
  for (const DoraLinearShape& shape : shapes) {
    Stack stack = MakeStack(shape, ManyAdapters(shape.parts), true);
    for (const int rows : {5, 24}) {
      const std::vector<RowSegment> segments = Deal(rows, {3, -1, 0, 4});
      stack.ExpectClose(stack.Run(0, rows, segments), 0, rows, segments, kFp32Tolerance,
                        "in " + std::to_string(shape.in) + " rows " + std::to_string(rows));
    }
    const std::vector<RowSegment> segments = Deal(250, {3, -1, 0, 4});
    const std::vector<float> y = stack.Run(0, 250, segments);
    const std::vector<float> last(y.end() - 6 * stack.out(), y.end());
    stack.ExpectClose(last, 244, 6, {{4, 0, 6}}, kFp32Tolerance,
                      "in " + std::to_string(shape.in) + " rows 250");
  }
}

TEST_P(LinearTest, ARowHasTheSameBitsAloneAndInEveryBatch) {
  for (const DoraLinearShape& shape :
       {Shape(4096, {2048, 512, 512}), Shape(576, {576}), Shape(64, {40000})}) {
    Stack stack = MakeStack(shape, ManyAdapters(shape.parts), false);
    const std::vector<int> slots = {-1, 0, 1, 2, 3, 4, 5};
    for (const int rows : {7, 13, 31, 64, 100, 256}) {
      const std::vector<RowSegment> segments = Deal(rows, slots);
      const std::vector<float> y = stack.Run(0, rows, segments);
      for (const RowSegment& segment : segments) {
        const int row = segment.end - 1;
        const std::vector<float> alone = stack.Run(row, 1, {{segment.slot, 0, 1}});
        ExpectSameBits(y.data() + size_t{1} * row * stack.out(), alone.data(), stack.out(),
                       "in " + std::to_string(shape.in) + " rows " + std::to_string(rows) +
                           " slot " + std::to_string(segment.slot));
      }
      if (HasFailure()) return;
    }
  }
}

// Panels of every width, and every number of rows, of which none is what rings are laid out for.
TEST_P(LinearTest, EveryNumberOfRowsGivesTheSameBits) {
  for (const DoraLinearShape& shape :
       {Shape(128, {4224}), Shape(128, {8448}), Shape(128, {12672}), Shape(128, {16896}),
        Shape(128, {25344}), Shape(1024, {1536}), Shape(1024, {6144})}) {
    Stack stack = MakeStack(shape, {{{40}}}, false);
    for (int rows = 1; rows <= kDoraLinearMaxRows; ++rows) {
      const std::vector<float> y = stack.Run(0, rows, {{0, 0, rows}});
      const std::vector<float> alone = stack.Run(rows - 1, 1, {{0, 0, 1}});
      ExpectSameBits(y.data() + size_t{1} * (rows - 1) * stack.out(), alone.data(), stack.out(),
                     "out " + std::to_string(stack.out()) + " rows " + std::to_string(rows));
      if (HasFailure()) return;
    }
  }
}

// A captured launch serves one mix after the other.
TEST_P(LinearTest, AGraphServesAnyMix) {
  Stack stack = MakeStack(Shape(1024, {1024, 256, 256}), ManyAdapters(3), true);
  constexpr int kRows = 48;
  const size_t size = size_t{1} * kRows * stack.out();
  DeviceBuffer<float> y(size);
  cudaStream_t stream;
  DORAD_ASSERT_CUDA(cudaStreamCreate(&stream));
  stack.SetSegments({{-1, 0, kRows}});
  cudaGraph_t graph;
  DORAD_ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < 3; ++i) {
    DORAD_ASSERT_CUDA(DoraLinear(stack.Params(0, kRows, y.get(), true), stream));
  }
  DORAD_ASSERT_CUDA(cudaStreamEndCapture(stream, &graph));
  cudaGraphExec_t exec;
  DORAD_ASSERT_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  for (const std::vector<int>& slots :
       {std::vector<int>{0}, {-1}, {3, 0, -1}, {-1, 0, 1, 2, 3, 4, 5}, {5}}) {
    const std::vector<RowSegment> segments = Deal(kRows, slots);
    const std::vector<float> expected = stack.Run(0, kRows, segments);
    for (int i = 0; i < 20; ++i) {
      DORAD_ASSERT_CUDA(cudaMemsetAsync(y.get(), 0xFF, size * sizeof(float), stream));
      DORAD_ASSERT_CUDA(cudaGraphLaunch(exec, stream));
    }
    DORAD_ASSERT_CUDA(cudaStreamSynchronize(stream));
    ExpectSameBits(y.Read().data(), expected.data(), static_cast<int>(size), "graph");
  }
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

// The tensor maps of a slot change in place: the copy engine must not go by what it remembers.
TEST_P(LinearTest, ASlotServesWhoeverFillsIt) {
  Stack stack = MakeStack(Shape(1024, {1024, 256}), {{{64}, {48}}, {{64}, {48}}}, false);
  constexpr int kRows = 24;
  const std::vector<float> expected[] = {stack.Run(0, kRows, {{0, 0, kRows}}),
                                         stack.Run(0, kRows, {{1, 0, kRows}})};
  DeviceBuffer<float> y(expected[0].size());
  cudaStream_t stream;
  DORAD_ASSERT_CUDA(cudaStreamCreate(&stream));
  stack.SetSegments({{0, 0, kRows}});
  cudaGraph_t graph;
  DORAD_ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  DORAD_ASSERT_CUDA(DoraLinear(stack.Params(0, kRows, y.get(), true), stream));
  DORAD_ASSERT_CUDA(cudaStreamEndCapture(stream, &graph));
  cudaGraphExec_t exec;
  DORAD_ASSERT_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  for (int i = 0; i < 50; ++i) {
    DORAD_ASSERT_CUDA(cudaGraphLaunch(exec, stream));
    DORAD_ASSERT_CUDA(cudaStreamSynchronize(stream));
    ExpectSameBits(y.Read().data(), expected[i % 2].data(), static_cast<int>(expected[0].size()),
                   "round " + std::to_string(i));
    if (HasFailure()) break;
    stack.SwapSlots(0, 1);
  }
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

TEST_P(LinearTest, RefusesWhatItCannotTake) {
  Stack stack = MakeStack(Shape(64, {32}), {{{8}}}, false);
  stack.SetSegments({{0, 0, 1}});
  DeviceBuffer<float> y(size_t{1} * 257 * 32);
  const DoraLinearParams good = stack.Params(0, 1, y.get(), true);
  DORAD_ASSERT_CUDA(DoraLinear(good, nullptr));
  const auto refused = [&](auto change) {
    DoraLinearParams params = good;
    change(params);
    return DoraLinear(params, nullptr) == cudaErrorInvalidValue;
  };
  EXPECT_TRUE(refused([](DoraLinearParams& p) { p.rows = 0; }));
  EXPECT_TRUE(refused([](DoraLinearParams& p) { p.rows = 257; }));
  EXPECT_TRUE(refused([](DoraLinearParams& p) { p.shape.in = 60; }));
  EXPECT_TRUE(refused([](DoraLinearParams& p) { p.shape.parts = 4; }));
  EXPECT_TRUE(refused([](DoraLinearParams& p) { p.x += 1; }));
  EXPECT_TRUE(refused([](DoraLinearParams& p) { p.workspace_bytes = 0; }));
  EXPECT_TRUE(refused([](DoraLinearParams& p) { p.y = nullptr; }));
  EXPECT_TRUE(refused([](DoraLinearParams& p) {
    p.shape.parts = 2;
    p.shape.out[0] = 24;
    p.shape.out[1] = 8;
  }));
  DORAD_ASSERT_CUDA(cudaDeviceSynchronize());
}

}  // namespace
}  // namespace dorad::kernels
