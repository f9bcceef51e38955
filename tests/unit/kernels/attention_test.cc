// The attention kernels against fp64 on the host, on caches whose pages are shuffled and whose
// unused places are NaN; and against themselves, to the last bit, in other company.
#include <sstream>

#include "tests/unit/kernels/attention_step.h"

namespace dorad::kernels {
namespace {

class AttentionTest : public KernelTest, public testing::WithParamInterface<Case> {
 protected:
  void SetUp() override {
    KernelTest::SetUp();
    if (!IsSkipped()) SkipWithout(GetParam().isa);
  }
};

TEST_P(AttentionTest, IsTheSoftmaxAverage) {
  const Step step(GetParam(), 1);
  const int64_t width = int64_t{GetParam().shape.heads} * GetParam().shape.head_dim;
  for (const bool simple : {true, false}) {
    if (simple && GetParam().is_fp8) continue;
    Bits out;
    step.Compute(step.All(), {.simple = simple}, &out);
    if (HasFatalFailure()) return;
    // Long runs: the rows at borders, and some others.
    for (int row = 0; row<step.rows(); row += step.rows()> 64 && row % 64 > 2 ? 5 : 1) {
      // Rounded probabilities and outputs: 2^-9 each at most, mostly far less. In eight bits heads
      // have different sizes, so that few positions make up the sum.
      ASSERT_LT(step.Error(row, out.data() + row * width), GetParam().is_fp8 ? 8e-3 : 4e-3)
          << "row " << row << (simple ? " simple" : "");
    }
  }
}

TEST_P(AttentionTest, EightBitsHaveTheBitsOfTheNumbersThatTheyStandFor) {
  if (!GetParam().is_fp8) GTEST_SKIP() << "a cache in bf16";
  const Step step(GetParam(), 3);
  for (const bool row_tiles : {true, false}) {
    Bits from_codes, from_numbers;
    step.Compute(step.All(), {.row_tiles = row_tiles}, &from_codes);
    step.Compute(step.All(), {.row_tiles = row_tiles, .as_bf16 = true}, &from_numbers);
    if (HasFatalFailure()) return;
    EXPECT_EQ(from_codes, from_numbers) << "tiles " << row_tiles;
  }
}

TEST_P(AttentionTest, RowsAreTheSameInAnyCompany) {
  const Step step(GetParam(), 2);
  const int64_t width = int64_t{GetParam().shape.heads} * GetParam().shape.head_dim;
  Bits whole;
  step.Compute(step.All(), {}, &whole);
  const Step::How hows[] = {
      {.row_tiles = false},
      {.row_tiles = false, .split = AttentionSplit::kByLoad, .shares = false},
      {.row_tiles = false, .split = AttentionSplit::kAlways, .shares = false},
      {.row_tiles = false, .split = AttentionSplit::kNever, .shares = false},
      {.row_tiles = true, .split = AttentionSplit::kByLoad, .shares = false},
      {.split = AttentionSplit::kAlways},
      {.row_tiles = false, .split = AttentionSplit::kAlways},
      {.row_tiles = false, .split = AttentionSplit::kNever},
      // Room for some parts only.
      {.row_tiles = false,
       .split = AttentionSplit::kAlways,
       .workspace = AttentionWorkspaceBytes(GetParam().shape, step.rows(), 128) + 100000},
  };
  for (size_t i = 0; i < std::size(hows); ++i) {
    Bits other;
    step.Compute(step.All(), hows[i], &other);
    if (HasFatalFailure()) return;
    int different = 0;
    std::ostringstream first;
    for (size_t at = 0; at < whole.size(); ++at) {
      if (whole[at] == other[at] || ++different > 3) continue;
      first << ", row " << at / width << " place " << at % width << ": " << whole[at] << " and "
            << other[at];
    }
    EXPECT_EQ(different, 0) << "way " << i << first.str();
  }
  // Each alone, and in reverse order.
  std::vector<int> reversed = step.All();
  std::reverse(reversed.begin(), reversed.end());
  Bits backwards;
  step.Compute(reversed, {}, &backwards);
  for (int row = 0; row < step.rows(); row += std::max(1, step.rows() / 16)) {
    Bits alone;
    step.Compute({row}, {}, &alone);
    if (HasFatalFailure()) return;
    const auto begin = whole.begin() + row * width;
    EXPECT_TRUE(std::equal(alone.begin(), alone.end(), begin)) << "row " << row;
    EXPECT_TRUE(
        std::equal(alone.begin(), alone.end(), backwards.begin() + (step.rows() - 1 - row) * width))
        << "row " << row;
  }
}

// Rows that see later ones, at the borders of pages, tiles, chunks and tiles of rows.
std::vector<Case> CasesOfBlocks() {
  std::vector<Case> cases;
  const std::vector<Run> runs = {{0, 300, {{10, 75}, {75, 77}, {100, 290}}},
                                 {655},
                                 {517, 140, {{517, 640}, {641, 657}}},
                                 {0, 64, {{0, 64}}},
                                 {60, 10, {{63, 68}}},
                                 {0, 150}};
  // Tiles of 128, 64, 42, 32 and 8 tokens.
  for (const int group : {1, 2, 3, 4, 16}) {
    cases.push_back({"blocks_group_" + std::to_string(group), {2 * group, 2, 128}, 0, runs});
  }
  for (const int dim : {16, 64, 80, 256}) {
    cases.push_back({"blocks_dim_" + std::to_string(dim), {4, 2, dim}, 0, runs});
  }
  // Shorter and longer than a block.
  for (const int window : {1, 64, 100, 200}) {
    cases.push_back({"blocks_window_" + std::to_string(window), {4, 2, 128}, window, runs});
  }
  cases.push_back({"blocks_image", {4, 2, 128}, 0, {{0, 600, {{5, 261}, {300, 556}}}, {40}}});
  return cases;
}

// Rows whose sequences have their first pages in common with the row before, some of them more than
// others; runs of a few rows of one sequence; and rows that share with none.
std::vector<Case> CasesOfCommonPages() {
  std::vector<Run> runs;
  const auto add = [&runs](int count, int common, int least) {
    for (int i = 0; i < count; ++i) {
      const int in_common = runs.empty() ? 0 : i == 0 ? std::min(common, 128) : common;
      runs.push_back({std::max(in_common, least + 37 * i % 300), 1, {}, in_common});
    }
  };
  add(9, 512, 530);
  runs.push_back({700});
  add(3, 144, 150);
  add(20, 256, 256);
  runs.push_back({300, 5});
  add(2, 1024, 1100);
  runs.push_back({0, 3});
  std::vector<Case> cases;
  for (const int group : {1, 2, 3, 4, 5, 8, 9, 16, 20}) {
    cases.push_back({"common_group_" + std::to_string(group), {2 * group, 2, 128}, 0, runs});
  }
  for (const int dim : {16, 64, 80, 96, 256}) {
    cases.push_back({"common_dim_" + std::to_string(dim), {4, 2, dim}, 0, runs});
  }
  cases.push_back({"common_window", {4, 2, 128}, 400, runs});
  // A group alone, whose parts are split.
  std::vector<Run> few;
  for (int i = 0; i < 6; ++i) few.push_back({3000 + 200 * i, 1, {}, i == 0 ? 0 : 2960});
  cases.push_back({"common_long", {8, 2, 128}, 0, few});
  cases.push_back({"common_long_dim_256", {8, 2, 256}, 0, few});
  // More rows than the plan has threads.
  std::vector<Run> many;
  for (int i = 0; i < 1100; ++i) many.push_back({128 + i % 200, 1, {}, i % 7 == 0 ? 0 : 128});
  cases.push_back({"common_many", {2, 1, 64}, 0, many});
  return cases;
}

std::vector<Case> Cases(KernelIsa isa) {
  std::vector<Case> cases;
  // Contexts at the borders of pages, tiles and chunks.
  const std::vector<Run> borders = {{0},   {1},   {15},  {16},  {63},  {64},  {65},  {127},
                                    {128}, {191}, {255}, {256}, {300}, {383}, {384}, {655}};
  cases.push_back({"qwen3", {32, 8, 128}, 0, borders});
  cases.push_back({"one_row", {32, 8, 128}, 0, {{700}}});
  cases.push_back({"first_position", {32, 8, 128}, 0, {{0}}});
  cases.push_back({"long", {8, 2, 128}, 0, {{3000}, {17}, {2047}}});
  for (const int group : {1, 2, 3, 5, 6, 7, 8, 9, 12, 16, 20}) {
    cases.push_back(
        {"group_" + std::to_string(group), {2 * group, 2, 128}, 0, {{5}, {333}, {128}}});
  }
  for (const int dim : {16, 64, 80, 96, 256}) {
    cases.push_back({"dim_" + std::to_string(dim), {6, 2, dim}, 0, borders});
    cases.push_back({"wide_dim_" + std::to_string(dim), {12, 1, dim}, 0, {{5}, {333}, {128}}});
    cases.push_back(
        {"dim_" + std::to_string(dim) + "_runs", {6, 2, dim}, 0, {{0, 150}, {77}, {130, 60}}});
  }
  for (const int window : {1, 16, 100, 128, 500}) {
    cases.push_back({"window_" + std::to_string(window), {8, 2, 128}, window, borders});
    cases.push_back({"window_" + std::to_string(window) + "_runs",
                     {8, 2, 128},
                     window,
                     {{0, 200}, {600}, {250, 70}}});
  }
  cases.push_back({"prefill", {8, 2, 128}, 0, {{0, 300}}});
  cases.push_back({"prefill_group_1", {2, 2, 128}, 0, {{0, 300}}});
  cases.push_back({"prefill_group_7", {14, 2, 128}, 0, {{0, 100}, {40, 50}}});
  cases.push_back({"prefill_group_16", {16, 1, 128}, 0, {{0, 100}, {40, 50}}});
  for (const int group : {1, 7, 16}) {
    cases.push_back({"prefill_dim_256_group_" + std::to_string(group),
                     {group, 1, 256},
                     group == 7 ? 90 : 0,
                     {{0, 100}, {40, 150}, {517, 70}}});
  }
  cases.push_back({"later_chunk", {8, 2, 128}, 0, {{517, 130}}});
  cases.push_back({"mixed",
                   {32, 8, 128},
                   0,
                   {{100}, {0, 64}, {655}, {90, 40}, {7, 5}, {256, 33}, {64, 16}, {130}}});
  for (Case& c : CasesOfBlocks()) cases.push_back(std::move(c));
  for (Case& c : CasesOfCommonPages()) cases.push_back(std::move(c));
  for (Case& c : cases) c.isa = isa;
  for (size_t i = 0, count = cases.size(); i < count; ++i) {
    if (!HasFp8Attention(cases[i].shape, cases[i].shape.head_dim)) continue;
    cases.push_back(cases[i]);
    cases.back().name = "fp8_" + cases[i].name;
    cases.back().is_fp8 = true;
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Sm90, AttentionTest, testing::ValuesIn(Cases(KernelIsa::kSm90)),
                         [](const auto& info) { return info.param.name; });
INSTANTIATE_TEST_SUITE_P(Mma, AttentionTest, testing::ValuesIn(Cases(KernelIsa::kMma)),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace dorad::kernels
