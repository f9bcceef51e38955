// The tower on the GPU: an image has the same bits alone, in pieces, and in any company.
#include "server/backends/cuda/vision_encoder.h"

#include <algorithm>
#include <random>

#include "tests/unit/cuda/small_model.h"
#include "tests/unit/kernels/device.h"

namespace dorad::cuda {
namespace {

// Qwen3-VL's form, with a merger behind the first block.
model::VisionConfig Tower() {
  model::VisionConfig tower;
  tower.width = 144;
  tower.inner = 304;
  tower.heads = 2;
  tower.output = 256;
  tower.channels = 3;
  tower.patch = 4;
  tower.temporal_patch = 2;
  tower.merge = 2;
  tower.table_side = 8;
  tower.deepstack = {0};
  tower.blocks.resize(2);
  tower.deepstack_mergers.resize(1);
  return tower;
}

// Qwen2.5-VL's: with windows, and a gate.
model::VisionConfig Windowed(int64_t inner) {
  model::VisionConfig tower = Tower();
  tower.inner = inner;
  tower.window = 4;
  tower.style.rms_norms = tower.style.windows = true;
  tower.style.position_table = false;
  tower.style.mlp = model::TowerStyle::kSiluGate;
  tower.deepstack.clear();
  tower.deepstack_mergers.clear();
  tower.blocks[0].windowed = true;
  return tower;
}

class VisionEncoderTest : public kernels::IsaTest {
 protected:
  using Images = std::vector<const engine::Image*>;
  using Bits = std::vector<uint32_t>;

  void Start(model::VisionConfig tower) {
    stream_.emplace(Must(Stream::Create()));
    model::ModelConfig config = SmallModel(1);
    config.vision = std::move(tower);
    config.NumberModules();
    model_ = Must(CudaModel::Random(config, 1, &ledger_, GetParam()));
    slots_.emplace(Must(AdapterSlots::Create(4, model_->modules().size(), &ledger_)));
    encoder_ = Must(VisionEncoder::Create(model_.get(), &*slots_, &ledger_, &*stream_));
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    for (const auto& [height, width] : {std::pair(8, 6), {48, 46}, {2, 2}, {64, 64}, {20, 70}}) {
      engine::Image& image = images_.emplace_back();
      image.key = -1 - static_cast<engine::TokenId>(images_.size());
      image.height = height;
      image.width = width;
      std::vector<float> pixels(height * width * config.vision->patch_elements());
      for (float& pixel : pixels) pixel = normal(random);
      image.pixels.assign(reinterpret_cast<const char*>(pixels.data()), pixels.size() * 4);
    }
  }

  static Bits BitsOf(const CudaImageFeatures& features) {
    Bits bits(features.bytes() / 4);
    EXPECT_EQ(
        cudaMemcpy(bits.data(), features.memory.as<>(), features.bytes(), cudaMemcpyDeviceToHost),
        cudaSuccess);
    return bits;
  }

  // Of those that one call completes.
  std::vector<Bits> Encode(absl::Span<const engine::Image* const> images,
                           const CudaAdapterWeights* adapter, bool alone) {
    std::vector<Bits> bits;
    for (const auto& features : Must(encoder_->Encode(images, adapter, alone))) {
      bits.push_back(BitsOf(*features));
    }
    return bits;
  }

  void ExpectTheSameBits(const CudaAdapterWeights* adapter) {
    Images all;
    std::vector<Bits> expected;
    for (const engine::Image& image : images_) {
      all.push_back(&image);
      std::vector<Bits> bits;
      int calls = 0;
      while (bits.empty()) {
        bits = Encode({&image}, adapter, /*alone=*/false);
        ++calls;
      }
      EXPECT_GT(calls, 1);  // pixels end a piece
      ASSERT_EQ(bits.size(), 1u);
      float first = 0.0f;
      std::memcpy(&first, bits[0].data(), sizeof(first));
      ASSERT_TRUE(std::isfinite(first) && first != 0.0f);
      expected.push_back(std::move(bits[0]));
    }
    for (const bool begun : {false, true}) {
      if (begun) {
        EXPECT_TRUE(Encode(all, adapter, /*alone=*/false).empty());
      }
      EXPECT_TRUE(Encode(all, adapter, /*alone=*/true) == expected);
    }
    // In another order, so that chunks have other rows.
    const Images turned(all.rbegin(), all.rend());
    std::vector<Bits> bits = Encode(turned, adapter, /*alone=*/true);
    EXPECT_EQ(bits.size(), all.size());
    std::reverse(bits.begin(), bits.end());
    EXPECT_TRUE(bits == expected);
  }

  void ExpectTheSameBits() {
    ExpectTheSameBits(nullptr);
    const auto adapter = Must(MakeRandomAdapter(*model_, 64, 7, &ledger_));
    ExpectTheSameBits(adapter.get());
  }

  MemoryLedger ledger_;
  std::optional<Stream> stream_;
  std::unique_ptr<CudaModel> model_;
  std::optional<AdapterSlots> slots_;
  std::unique_ptr<VisionEncoder> encoder_;
  std::vector<engine::Image> images_;
};

DORAD_FOR_EACH_ISA(VisionEncoderTest);

TEST_P(VisionEncoderTest, AnImageHasTheSameBitsInAnyCompany) {
  Start(Tower());
  ExpectTheSameBits();
}

TEST_P(VisionEncoderTest, WindowsDoNotMixImages) {
  Start(Windowed(/*inner=*/304));
  ExpectTheSameBits();
}

// A library's product may have other bits in another number of rows.
TEST_P(VisionEncoderTest, ShapesOfTheLibraryAreComputedImageByImage) {
  Start(Windowed(/*inner=*/300));
  ExpectTheSameBits();
}

}  // namespace
}  // namespace dorad::cuda
