#include "server/engine/images.h"
#include "server/platform/files/sha256.h"
#include "tests/unit/rpc/validation_fixture.h"

namespace dorad::rpc {
namespace {

constexpr int32_t kImage = 98;
constexpr int32_t kVideo = 99;

RequestLimits ImageLimits() {
  RequestLimits limits = Limits();
  limits.engine.image_token_ids = {kImage, kVideo};
  limits.engine.images = {kImage, /*patch_elements=*/3, /*merge=*/2, /*max_images=*/2,
                          /*max_tokens=*/6};
  return limits;
}

// An image of 2 x 4 patches, two tokens.
v1::Image Good(uint32_t offset) {
  v1::Image image;
  image.set_offset(offset);
  image.set_length(2);
  image.set_dtype(v1::TENSOR_DTYPE_F32);
  for (const uint32_t extent : {1, 2, 4}) image.add_grid(extent);
  image.set_data(std::string(2 * 4 * 3 * 4, 'x'));
  return image;
}

v1::GenerateRequest WithImage(const v1::Image& image) {
  v1::GenerateRequest request;
  request.set_prompt_token_ids(Pack<int32_t>({1, kImage, kImage, 2}));
  *request.add_images() = image;
  return request;
}

std::vector<std::string> RefusalOf(const v1::GenerateRequest& request,
                                   const RequestLimits& limits = ImageLimits()) {
  return FieldsAndReasons(ParseGenerate(request, limits, {}).status());
}

TEST(ImageValidation, ReadsAnImage) {
  const auto input = ParseGenerate(WithImage(Good(1)), ImageLimits(), {});
  ASSERT_TRUE(input.ok()) << input.status();
  ASSERT_EQ(input->images.size(), 1u);
  const engine::Image& image = *input->images[0].image;
  EXPECT_EQ(input->images[0].begin, 1);
  EXPECT_EQ(input->images[0].end(), 3);
  EXPECT_EQ(image.rows, 1);
  EXPECT_EQ(image.columns, 2);
  EXPECT_EQ(image.pixels.size(), 96u);
  const auto digest = Sha256Of(image.pixels);
  EXPECT_EQ(image.sha256, std::string(digest.begin(), digest.end()));
}

TEST(ImageValidation, AcceptsADigestAlone) {
  v1::Image image = Good(1);
  image.clear_data();
  image.set_sha256(std::string(32, 'd'));
  const auto input = ParseGenerate(WithImage(image), ImageLimits(), {});
  ASSERT_TRUE(input.ok()) << input.status();
  EXPECT_TRUE(input->images[0].image->pixels.empty());
}

TEST(ImageValidation, MakesThePixelsOfBytes) {
  v1::Image image = Good(1);
  image.set_dtype(v1::TENSOR_DTYPE_U8);
  std::string bytes;  // a patch has three elements: one of each channel
  for (int i = 0; i < 2 * 4 * 3; ++i) bytes.push_back(static_cast<char>(250 - 10 * i));
  image.set_data(bytes);
  RequestLimits limits = ImageLimits();
  EXPECT_THAT(RefusalOf(WithImage(image), limits),
              ElementsAre("images[0].dtype IMAGE_BYTES_UNSUPPORTED"));
  model::BytePixels known;
  for (int i = 0; i < 3 * 256; ++i) known.numbers.push_back(static_cast<float>(i) + 0.5f);
  limits.engine.images.byte_pixels = std::make_shared<const model::BytePixels>(known);
  const auto input = ParseGenerate(WithImage(image), limits, {});
  ASSERT_TRUE(input.ok()) << input.status();
  const engine::Image& read = *input->images[0].image;
  EXPECT_EQ(read.dtype, DType::kF32);
  const auto digest = Sha256Of(bytes);
  EXPECT_EQ(read.sha256, std::string(digest.begin(), digest.end()));
  ASSERT_EQ(read.pixels.size(), bytes.size() * 4);
  for (size_t i = 0; i < bytes.size(); ++i) {
    float number = 0;
    std::memcpy(&number, &read.pixels[i * 4], 4);
    EXPECT_EQ(number, static_cast<float>(i % 3 * 256 + static_cast<uint8_t>(bytes[i])) + 0.5f) << i;
  }
  engine::Image same = read;
  same.from_bytes = false;
  EXPECT_NE(same.identity(), read.identity());
  image.mutable_data()->push_back('x');
  EXPECT_THAT(RefusalOf(WithImage(image), limits), ElementsAre("images[0].data IMAGE_DATA_SIZE"));
}

TEST(ImageValidation, RoundsPixelsForABackendThatComputesWithBf16) {
  RequestLimits limits = ImageLimits();
  limits.engine.images.rounds_pixels = true;
  const v1::Image wire = Good(1);
  const auto input = ParseGenerate(WithImage(wire), limits, {});
  ASSERT_TRUE(input.ok()) << input.status();
  const engine::Image& image = *input->images[0].image;
  EXPECT_EQ(image.pixel_dtype(), DType::kBF16);
  EXPECT_EQ(image.pixels.size(), 48u);
  // What the client knows it by.
  const auto digest = Sha256Of(wire.data());
  EXPECT_EQ(image.sha256, std::string(digest.begin(), digest.end()));
  v1::Image named = wire;
  named.clear_data();
  named.set_sha256(image.sha256);
  const auto later = ParseGenerate(WithImage(named), limits, {});
  ASSERT_TRUE(later.ok()) << later.status();
  EXPECT_EQ(later->images[0].image->identity(), image.identity());
}

struct Bad {
  const char* name;
  std::function<void(v1::Image*)> change;
  const char* refusal;
};

void SetGrid(v1::Image* image, std::vector<uint32_t> grid) {
  image->clear_grid();
  for (const uint32_t extent : grid) image->add_grid(extent);
}

TEST(ImageValidation, RefusesEachFaultByName) {
  const Bad faults[] = {
      {"two extents",
       [](auto* i) {
         SetGrid(i, {2, 4});
       },
       "images[0].grid IMAGE_GRID_INVALID"},
      {"no grid", [](auto* i) { SetGrid(i, {}); }, "images[0].grid IMAGE_GRID_INVALID"},
      {"odd height",
       [](auto* i) {
         SetGrid(i, {1, 3, 4});
       },
       "images[0].grid IMAGE_GRID_INVALID"},
      {"no width",
       [](auto* i) {
         SetGrid(i, {1, 2, 0});
       },
       "images[0].grid IMAGE_GRID_INVALID"},
      {"overflow",
       [](auto* i) {
         SetGrid(i, {1, 4294967294u, 4294967294u});
       },
       "images[0].grid IMAGE_GRID_INVALID"},
      {"a video",
       [](auto* i) {
         SetGrid(i, {2, 2, 4});
       },
       "images[0].grid VIDEO_UNSUPPORTED"},
      {"too large",
       [](auto* i) {
         SetGrid(i, {1, 8, 4});
       },
       "images[0].grid IMAGE_TOO_LARGE"},
      {"length", [](auto* i) { i->set_length(1); }, "images[0].length IMAGE_LENGTH_MISMATCH"},
      {"bytes", [](auto* i) { i->set_dtype(v1::TENSOR_DTYPE_U8); },
       "images[0].dtype IMAGE_BYTES_UNSUPPORTED"},
      {"no dtype", [](auto* i) { i->clear_dtype(); }, "images[0].dtype IMAGE_DTYPE_INVALID"},
      {"short digest", [](auto* i) { i->set_sha256("abc"); },
       "images[0].sha256 IMAGE_DIGEST_INVALID"},
      {"another digest", [](auto* i) { i->set_sha256(std::string(32, 'd')); },
       "images[0].sha256 IMAGE_DIGEST_MISMATCH"},
      {"nothing", [](auto* i) { i->clear_data(); }, "images[0].data IMAGE_DATA_MISSING"},
      {"short data", [](auto* i) { i->mutable_data()->pop_back(); },
       "images[0].data IMAGE_DATA_SIZE"},
      {"data of another dtype", [](auto* i) { i->set_dtype(v1::TENSOR_DTYPE_BF16); },
       "images[0].data IMAGE_DATA_SIZE"},
      {"text in its place", [](auto* i) { i->set_offset(2); },
       "images[0].offset IMAGE_PLACE_INVALID"},
      {"beyond the prompt", [](auto* i) { i->set_offset(3); },
       "images[0].offset IMAGE_PLACE_INVALID"},
      {"far beyond", [](auto* i) { i->set_offset(4294967295u); },
       "images[0].offset IMAGE_PLACE_INVALID"},
      {"data and memory", [](auto* i) { i->mutable_memory(); },
       "images[0].memory IMAGE_MEMORY_INVALID"},
      {"memory without a digest",
       [](auto* i) {
         i->clear_data();
         i->mutable_memory();
       },
       "images[0].memory IMAGE_MEMORY_INVALID"},
      {"memory without a socket",
       [](auto* i) {
         i->clear_data();
         i->set_sha256(std::string(32, 'd'));
         i->mutable_memory()->set_session_token("s");
       },
       "images[0].memory IMAGE_MEMORY_INVALID"},
      {"a sequence", [](auto* i) { i->set_sequence(1); }, "images[0].sequence IMAGE_PLACE_INVALID"},
  };
  for (const Bad& fault : faults) {
    SCOPED_TRACE(fault.name);
    v1::Image image = Good(1);
    fault.change(&image);
    EXPECT_THAT(RefusalOf(WithImage(image)), ElementsAre(fault.refusal));
  }
}

TEST(ImageValidation, TextStandsBetweenTheRowsOfAnImage) {
  RequestLimits limits = ImageLimits();
  limits.engine.images.row_breaks = true;
  v1::Image image = Good(1);
  SetGrid(&image, {1, 4, 4});
  image.set_length(4);
  image.set_data(std::string(4 * 4 * 3 * 4, 'x'));
  v1::GenerateRequest request = WithImage(image);
  const auto prompt = [&](const std::vector<int32_t>& ids) {
    request.set_prompt_token_ids(Pack<int32_t>(ids));
  };
  prompt({1, kImage, kImage, 7, kImage, kImage, 2});
  const auto input = ParseGenerate(request, limits, {});
  ASSERT_TRUE(input.ok()) << input.status();
  EXPECT_EQ(input->images[0].end(), 6);
  for (const std::vector<int32_t>& bad :
       std::vector<std::vector<int32_t>>{{1, kImage, kImage, kImage, kImage, 2, 2},
                                         {1, kImage, kImage, kVideo, kImage, kImage, 2},
                                         {1, kImage, 7, kImage, kImage, kImage, 2},
                                         {1, kImage, kImage, 7, kImage, 7, kImage},
                                         {1, kImage, kImage, 7, kImage}}) {
    prompt(bad);
    EXPECT_THAT(RefusalOf(request, limits), ElementsAre("images[0].offset IMAGE_PLACE_INVALID"));
  }
  prompt({1, kImage, kImage, 7, kImage, kImage, kImage});
  EXPECT_THAT(RefusalOf(request, limits), ElementsAre("prompt_token_ids[6] IMAGE_UNEXPECTED"));
}

TEST(ImageValidation, RefusesImagesThatOverlapOrAreTooMany) {
  v1::GenerateRequest request = WithImage(Good(1));
  *request.add_images() = Good(1);
  EXPECT_THAT(RefusalOf(request), ElementsAre("images[1].offset IMAGE_PLACE_INVALID"));
  *request.add_images() = Good(1);
  EXPECT_THAT(RefusalOf(request), Contains("images IMAGES_TOO_MANY"));
}

TEST(ImageValidation, RefusesPlaceholdersWithoutAnImage) {
  v1::GenerateRequest request;
  request.set_prompt_token_ids(Pack<int32_t>({1, kImage}));
  EXPECT_THAT(RefusalOf(request), ElementsAre("prompt_token_ids[1] IMAGE_UNEXPECTED"));
  request.set_prompt_token_ids(Pack<int32_t>({1, kVideo}));
  EXPECT_THAT(RefusalOf(request), ElementsAre("prompt_token_ids[1] IMAGE_UNEXPECTED"));
  request = WithImage(Good(1));
  request.set_prompt_token_ids(Pack<int32_t>({1, kImage, kImage, kImage}));
  EXPECT_THAT(RefusalOf(request), ElementsAre("prompt_token_ids[3] IMAGE_UNEXPECTED"));
}

TEST(ImageValidation, RefusesImagesOfATextServerAndTruncation) {
  RequestLimits text = ImageLimits();
  text.engine.images = {};
  EXPECT_THAT(RefusalOf(WithImage(Good(1)), text),
              ElementsAre("images IMAGE_UNSUPPORTED", "prompt_token_ids[1] IMAGE_UNSUPPORTED"));
  v1::GenerateRequest request = WithImage(Good(1));
  request.set_truncate_prompt_tokens(3);
  EXPECT_THAT(RefusalOf(request),
              ElementsAre("truncate_prompt_tokens TRUNCATE_PROMPT_TOKENS_OUT_OF_RANGE"));
}

TEST(ImageValidation, ImagesOfAScoreNameTheirSequences) {
  v1::ScoreRequest request;
  request.add_sequences()->set_token_ids(Pack<int32_t>({1, 2, 3}));
  request.add_sequences()->set_token_ids(Pack<int32_t>({kImage, kImage, 3}));
  v1::Image image = Good(0);
  image.set_sequence(1);
  *request.add_images() = image;
  const auto parsed = ParseScore(request, ImageLimits(), {});
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  ASSERT_EQ(parsed->input.images.size(), 2u);
  EXPECT_TRUE(parsed->input.images[0].empty());
  EXPECT_EQ(parsed->input.images[1].size(), 1u);
  request.mutable_images(0)->set_sequence(0);
  EXPECT_THAT(FieldsAndReasons(ParseScore(request, ImageLimits(), {}).status()),
              ElementsAre("images[0].offset IMAGE_PLACE_INVALID"));
}

}  // namespace
}  // namespace dorad::rpc
