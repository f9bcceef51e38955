#include "server/model/byte_pixels.h"

#include "tests/unit/support/test.h"

namespace dorad::model {
namespace {

class BytePixelsTest : public ::testing::Test {
 protected:
  BytePixelsTest() { std::filesystem::create_directories(dir_); }
  ~BytePixelsTest() override { std::filesystem::remove_all(dir_); }

  void Write(const std::string& file, const std::string& text) {
    std::ofstream(std::filesystem::path(dir_) / file) << text;
  }
  BytePixels Read() { return ReadBytePixels(dir_, 3); }

  const std::string dir_ =
      (std::filesystem::path(::testing::TempDir()) / absl::StrCat("byte_pixels_", getpid()))
          .string();
};

TEST_F(BytePixelsTest, AreTheProcessorsNumbers) {
  Write("preprocessor_config.json",
        R"({"image_mean": [0.5, 0.25, 0], "image_std": [0.5, 1, 2], "rescale_factor": 0.25})");
  const BytePixels pixels = Read();
  EXPECT_EQ(pixels.problem, "");
  ASSERT_EQ(pixels.numbers.size(), 3u * 256u);
  EXPECT_EQ(pixels.numbers[0], -1.0f);
  EXPECT_EQ(pixels.numbers[10], 4.0f);
  EXPECT_EQ(pixels.numbers[256], -0.25f);
  EXPECT_EQ(pixels.numbers[256 + 4], 0.75f);
  EXPECT_EQ(pixels.numbers[512 + 255], 31.875f);
}

TEST_F(BytePixelsTest, TheFactorIsThatOfBytesAndEachStepMayBeLeftOut) {
  Write("preprocessor_config.json", R"({"do_normalize": false})");
  EXPECT_EQ(Read().numbers[255], 1.0f);
  EXPECT_EQ(Read().numbers[51], static_cast<float>(51 * (1.0 / 255.0)));
  Write("preprocessor_config.json", R"({"do_normalize": false, "do_rescale": false})");
  EXPECT_EQ(Read().numbers[512 + 7], 7.0f);
}

TEST_F(BytePixelsTest, TheFileOfTransformers5GoesFirst) {
  Write("preprocessor_config.json", R"({"do_normalize": false, "rescale_factor": 2})");
  EXPECT_EQ(Read().numbers[1], 2.0f);
  Write("processor_config.json", R"({"processor_class": "Some"})");
  EXPECT_EQ(Read().numbers[1], 2.0f);
  Write("processor_config.json",
        R"({"image_processor": {"do_normalize": false, "rescale_factor": 3}})");
  EXPECT_EQ(Read().numbers[1], 3.0f);
}

TEST_F(BytePixelsTest, WhatCannotBeReadIsNamed) {
  EXPECT_THAT(Read().problem, HasSubstr("neither preprocessor_config.json nor"));
  const std::pair<const char*, const char*> faults[] = {
      {"{", "preprocessor_config.json"},
      {"[]", "preprocessor_config.json"},
      {R"({"image_std": [1, 1, 1]})", "image_mean"},
      {R"({"image_mean": [0, 0], "image_std": [1, 1, 1]})", "image_mean"},
      {R"({"image_mean": [0, 0, "x"], "image_std": [1, 1, 1]})", "image_mean"},
      {R"({"image_mean": 0.5, "image_std": [1, 1, 1]})", "image_mean"},
      {R"({"image_mean": [0, 0, 0], "image_std": [1, 0, 1]})", "image_std"},
      {R"({"image_mean": [0, 0, 0], "image_std": [1, 1e999, 1]})", "preprocessor_config.json"},
      {R"({"do_normalize": false, "rescale_factor": "x"})", "rescale_factor"},
      {R"({"do_normalize": 1})", "do_normalize"},
  };
  for (const auto& [text, word] : faults) {
    SCOPED_TRACE(text);
    Write("preprocessor_config.json", text);
    EXPECT_THAT(Read().problem, HasSubstr(word));
    EXPECT_TRUE(Read().numbers.empty());
  }
}

}  // namespace
}  // namespace dorad::model
