#include "server/engine/images.h"

#include <cstring>
#include <span>

#include "server/engine/image_store.h"
#include "server/platform/error.h"
#include "server/platform/files/elements.h"
#include "tests/unit/support/test.h"

namespace dorad::engine {
namespace {

std::shared_ptr<Image> Picture(char name, int64_t rows, int64_t columns, size_t bytes = 10) {
  auto image = std::make_shared<Image>();
  image->sha256 = std::string(32, name);
  image->height = 2 * rows;
  image->width = 2 * columns;
  image->rows = rows;
  image->columns = columns;
  image->pixels = std::string(bytes, name);
  image->key = Image::kNoToken - name;
  return image;
}

std::array<int64_t, 3> At(const PromptImages& images, int64_t index) {
  const PromptImages::RotaryPosition p = images.PositionOf(index);
  return {p.time, p.height, p.width};
}

using Position = std::array<int64_t, 3>;

TEST(PromptImages, TextGoesOnBehindTheLargestPositionOfAnImage) {
  // Two tokens, an image of 2 x 3, one token, an image of 3 x 1, text.
  const PromptImages images({{2, Picture('a', 2, 3)}, {9, Picture('b', 3, 1)}});
  EXPECT_EQ(images.end(), 12);
  EXPECT_EQ(At(images, 0), (Position{0, 0, 0}));
  EXPECT_EQ(At(images, 1), (Position{1, 1, 1}));
  EXPECT_EQ(At(images, 2), (Position{2, 2, 2}));
  EXPECT_EQ(At(images, 4), (Position{2, 2, 4}));
  EXPECT_EQ(At(images, 7), (Position{2, 3, 4}));
  EXPECT_EQ(At(images, 8), (Position{5, 5, 5}));
  EXPECT_EQ(At(images, 9), (Position{6, 6, 6}));
  EXPECT_EQ(At(images, 11), (Position{6, 8, 6}));
  EXPECT_EQ(At(images, 12), (Position{9, 9, 9}));
  EXPECT_EQ(At(images, 20), (Position{17, 17, 17}));
}

TEST(PromptImages, RowsOfABidirectionalImageSeeItsLast) {
  const auto first = Picture('a', 2, 3), second = Picture('b', 2, 2), third = Picture('c', 1, 3);
  first->bidirectional = third->bidirectional = true;
  const PromptImages images({{2, first}, {9, second}, {14, third}});
  std::vector<int64_t> seen;
  for (int64_t i = 0; i < 19; ++i) seen.push_back(images.LastSeenBy(i));
  EXPECT_THAT(seen, ElementsAre(0, 1, 7, 7, 7, 7, 7, 7, 8, 9, 10, 11, 12, 13, 16, 16, 16, 17, 18));
}

TEST(PromptImages, AStepEndsBeforeOrAfterABidirectionalImage) {
  const auto first = Picture('a', 2, 2), second = Picture('b', 2, 2);
  first->bidirectional = true;
  const PromptImages images({{2, first}, {7, second}});
  std::vector<int64_t> ends;
  for (int64_t end = 0; end < 10; ++end) ends.push_back(images.StepEnd(end));
  EXPECT_THAT(ends, ElementsAre(0, 1, 2, 2, 2, 2, 6, 7, 8, 9));
}

TEST(PromptImages, KeysStandForTheImagesTokens) {
  const PromptImages images({{1, Picture('a', 1, 2)}, {3, Picture('b', 1, 1)}});
  std::vector<TokenId> tokens = {5, 7, 7, 7, 5};
  images.Mark(&tokens);
  EXPECT_THAT(tokens, ElementsAre(5, -1 - 'a', -1 - 'a', -1 - 'b', 5));
}

using Place = std::array<int64_t, 4>;  // of a run: image, first, begin, count

std::vector<Place> RunsIn(const PromptImages& images, int64_t begin, int64_t end) {
  std::vector<Place> runs;
  for (const PromptImages::Run& run : images.RunsIn(begin, end)) {
    runs.push_back({static_cast<int64_t>(run.image), run.first, run.begin, run.count});
  }
  return runs;
}

TEST(PromptImages, RunsAreCutAtTheEndsOfAStep) {
  const PromptImages images({{1, Picture('a', 2, 3)}, {8, Picture('b', 1, 2)}});
  EXPECT_THAT(RunsIn(images, 0, 20), ElementsAre(Place{0, 0, 1, 6}, Place{1, 0, 8, 2}));
  EXPECT_THAT(RunsIn(images, 3, 9), ElementsAre(Place{0, 2, 3, 4}, Place{1, 0, 8, 1}));
  EXPECT_THAT(RunsIn(images, 7, 8), ElementsAre());
}

TEST(PromptImages, TheTextBetweenTheRowsOfAnImageKeepsItsTokens) {
  const auto image = Picture('a', 3, 2);
  image->row_breaks = true;
  EXPECT_EQ(image->span(), 8);
  const PromptImages images({{1, image}});
  EXPECT_EQ(images.end(), 9);
  std::vector<TokenId> tokens = {5, 7, 7, 8, 7, 7, 8, 7, 7, 9};
  images.Mark(&tokens);
  constexpr TokenId kKey = -1 - 'a';
  EXPECT_THAT(tokens, ElementsAre(5, kKey, kKey, 8, kKey, kKey, 8, kKey, kKey, 9));
  EXPECT_THAT(RunsIn(images, 0, 10),
              ElementsAre(Place{0, 0, 1, 2}, Place{0, 2, 4, 2}, Place{0, 4, 7, 2}));
  EXPECT_THAT(RunsIn(images, 2, 5), ElementsAre(Place{0, 1, 2, 1}, Place{0, 2, 4, 1}));
  EXPECT_THAT(RunsIn(images, 3, 4), ElementsAre());
}

using Prompts = std::vector<std::vector<PlacedImage>>;

std::shared_ptr<Image> Unstored(char name, size_t bytes) {
  auto image = Picture(name, 1, 1, bytes);
  image->key = 0;
  return image;
}

TEST(ImageStore, AnImageIsSentOnceAndNamedByItsDigestLater) {
  ImageStore store(100);
  Prompts first = {{{0, Unstored('a', 10)}}, {{4, Unstored('a', 0)}}};
  ASSERT_TRUE(store.Resolve("t", absl::MakeSpan(first)).ok());
  EXPECT_EQ(first[0][0].image, first[1][0].image);
  EXPECT_EQ(first[1][0].begin, 4);
  EXPECT_LT(first[0][0].image->key, Image::kNoToken);
  Prompts later = {{{0, Unstored('a', 0)}}};
  ASSERT_TRUE(store.Resolve("t", absl::MakeSpan(later)).ok());
  EXPECT_EQ(later[0][0].image, first[0][0].image);
  EXPECT_EQ(store.use().images, 1);
  EXPECT_EQ(store.use().bytes, 10);
}

TEST(ImageStore, NamesTheDigestsThatItDoesNotHave) {
  ImageStore store(100);
  Prompts prompts = {{{0, Unstored('a', 10)}, {1, Unstored('b', 0)}, {2, Unstored('c', 0)}}};
  const absl::Status status = store.Resolve("t", absl::MakeSpan(prompts));
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ReasonOf(status), "IMAGE_MISSING");
  EXPECT_THAT(std::string(status.message()), HasSubstr("6262"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("6363"));
  EXPECT_THAT(std::string(status.message()), Not(HasSubstr("6161")));
}

TEST(ImageStore, TenantsDoNotSeeEachOthersImages) {
  ImageStore store(100);
  Prompts own = {{{0, Unstored('a', 10)}}};
  ASSERT_TRUE(store.Resolve("t", absl::MakeSpan(own)).ok());
  Prompts other = {{{0, Unstored('a', 0)}}};
  EXPECT_EQ(ReasonOf(store.Resolve("u", absl::MakeSpan(other))), "IMAGE_MISSING");
}

TEST(ImageStore, DropsTheLeastRecentlyUsedAndNotThoseOfTheRequest) {
  ImageStore store(25);
  Prompts a = {{{0, Unstored('a', 10)}}};
  Prompts b = {{{0, Unstored('b', 10)}}};
  ASSERT_TRUE(store.Resolve("", absl::MakeSpan(a)).ok());
  ASSERT_TRUE(store.Resolve("", absl::MakeSpan(b)).ok());
  Prompts again = {{{0, Unstored('a', 0)}}};
  ASSERT_TRUE(store.Resolve("", absl::MakeSpan(again)).ok());
  Prompts c = {{{0, Unstored('c', 10)}, {1, Unstored('d', 10)}, {2, Unstored('e', 10)}}};
  ASSERT_TRUE(store.Resolve("", absl::MakeSpan(c)).ok());
  for (const PlacedImage& place : c[0]) EXPECT_EQ(place.image->pixels.size(), 10u);
  EXPECT_LE(store.use().bytes, 25);
  Prompts dropped = {{{0, Unstored('b', 0)}}};
  EXPECT_EQ(ReasonOf(store.Resolve("", absl::MakeSpan(dropped))), "IMAGE_MISSING");
}

TEST(Images, RoundsEveryPixelOnce) {
  Image image;
  std::vector<float> values(10000);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i) + 0.25f;
  image.pixels.assign(reinterpret_cast<const char*>(values.data()), values.size() * 4);
  std::vector<uint16_t> expected(values.size());
  ToBf16(DType::kF32, std::as_bytes(std::span(values)), expected.data());
  for (int times = 0; times < 2; ++times) {
    image.RoundPixels();
    ASSERT_EQ(image.pixels.size(), values.size() * 2);
    EXPECT_EQ(std::memcmp(image.pixels.data(), expected.data(), image.pixels.size()), 0);
  }
}

TEST(Images, RoundedPixelsLeaveTheIdentity) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    Image image;
    image.sha256 = std::string(32, 'a');
    image.dtype = dtype;
    const std::string identity = image.identity();
    image.RoundPixels();
    EXPECT_EQ(image.pixel_dtype(), dtype);  // there are none
    image.pixels = std::string(6 * SizeOf(dtype), '\x3c');
    for (int i = 0; i < 2; ++i) {
      image.RoundPixels();
      EXPECT_EQ(image.pixel_dtype(), DType::kBF16);
      EXPECT_EQ(image.pixels.size(), 12u);
    }
    EXPECT_EQ(image.identity(), identity);
  }
}

TEST(ImageStore, GivesDifferentImagesDifferentKeys) {
  ImageStore store(1000);
  auto bf16 = Unstored('a', 10);
  bf16->dtype = DType::kBF16;
  auto wider = Unstored('a', 10);
  wider->width = 6;
  Prompts prompts = {{{0, Unstored('a', 10)}, {1, bf16}, {2, wider}}};
  ASSERT_TRUE(store.Resolve("", absl::MakeSpan(prompts)).ok());
  EXPECT_NE(prompts[0][0].image->key, prompts[0][1].image->key);
  EXPECT_NE(prompts[0][0].image->key, prompts[0][2].image->key);
}

}  // namespace
}  // namespace dorad::engine
