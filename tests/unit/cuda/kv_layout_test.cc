#include "server/backends/cuda/kv_layout.h"

#include <set>
#include <utility>

#include "tests/unit/support/test.h"

namespace dorad::cuda {
namespace {

constexpr int64_t kPiece = 2 << 20;

TEST(KvLayout, ChunksAreWholePiecesOfAtLeast64Pages) {
  const KvLayout large(72, 32 << 10, kPiece);  // Qwen3-8B
  EXPECT_EQ(large.chunk_pages(), 64);
  EXPECT_EQ(large.chunk_bytes(), int64_t{144} << 20);
  for (const int64_t planes : {2, 4, 60, 64, 72}) {
    for (const int64_t page_bytes : {512, 1024, 6144, 16384, 32768}) {
      const KvLayout layout(planes, page_bytes, kPiece);
      EXPECT_EQ(layout.chunk_bytes() % kPiece, 0);
      EXPECT_GE(layout.chunk_pages(), 64);
      EXPECT_TRUE(layout.chunk_pages() == 64 || layout.chunk_bytes() / 2 % kPiece != 0);
      EXPECT_EQ(layout.ChunksFor(layout.chunk_pages()), 1);
      EXPECT_EQ(layout.ChunksFor(layout.chunk_pages() + 1), 2);
    }
  }
}

// Every page of every plane has bytes of its own inside of its chunk, where one stride leads.
TEST(KvLayout, PlacesNeverOverlap) {
  const KvLayout layout(4, 6144, kPiece);
  const auto pages = static_cast<int32_t>(3 * layout.chunk_pages());
  std::map<int64_t, int64_t> taken;  // begin, end
  for (int32_t page = 0; page < pages; ++page) {
    EXPECT_EQ(layout.Offset(page), layout.Place(page) * layout.page_bytes());
    for (int64_t plane = 0; plane < layout.planes(); ++plane) {
      const int64_t begin = plane * layout.plane_bytes() + layout.Offset(page);
      EXPECT_EQ(begin / layout.chunk_bytes(), page / layout.chunk_pages());
      taken[begin] = begin + layout.page_bytes();
    }
  }
  EXPECT_EQ(taken.size(), static_cast<size_t>(pages * layout.planes()));
  int64_t end = 0;
  for (const auto& [begin, its_end] : taken) {
    EXPECT_EQ(begin, end) << "no gaps either";
    end = its_end;
  }
  EXPECT_EQ(end, 3 * layout.chunk_bytes());
}

model::ModelConfig Fp8Model(int64_t layers, int64_t head_dim) {
  model::ModelConfig config;
  config.num_kv_heads = 3;
  config.head_dim = head_dim;
  config.layers.resize(layers);
  config.fp8_kv = true;
  return config;
}

// In half of the memory, and a bit for factors, which have bytes of their own.
TEST(KvLayout, EightBitsHaveFactorsBehindKeysAndValues) {
  for (const int64_t head_dim : {64, 128, 256}) {
    for (const int64_t layers : {1, 16, 17, 36, 130}) {
      model::ModelConfig config = Fp8Model(layers, head_dim);
      const KvLayout layout = KvLayoutOf(config);
      const int64_t bytes = 2 * 3 * 16 * 2;  // keys' and values' factors of a page
      std::set<std::pair<int64_t, int64_t>> places;
      for (int64_t slot = 0; slot < layers; ++slot) {
        const FactorsPlace at = FactorsPlaceOf(config, slot);
        EXPECT_GE(at.plane, 2 * layers);
        EXPECT_LT(at.plane, layout.planes());
        EXPECT_EQ(at.offset % bytes, 0);
        EXPECT_LE(at.offset + bytes, layout.page_bytes());
        places.emplace(at.plane, at.offset);
      }
      EXPECT_EQ(places.size(), static_cast<size_t>(layers)) << "no two in one place";
      EXPECT_EQ(KvPageBytes(config), layout.planes() * layout.page_bytes());
      const int64_t fp8 = KvPageBytes(config);
      config.fp8_kv = false;
      EXPECT_EQ(2 * layout.page_bytes(), KvLayoutOf(config).page_bytes());
      const int64_t needed = KvPageBytes(config) / 2 + layers * bytes;
      EXPECT_LE(16 * fp8, 17 * (needed + layout.page_bytes()))
          << "of which a sixteenth may be idle";
    }
  }
}

TEST(KvLayout, TheLargestCacheHasPlacesOf32BitsForItsHeads) {
  for (const bool is_fp8 : {false, true}) {
    model::ModelConfig config = Fp8Model(30, 64);
    config.fp8_kv = is_fp8;
    const KvLayout layout = KvLayoutOf(config);
    const int64_t pages = MostKvBytes(config) / KvPageBytes(config) + kSparePages;
    const int64_t last = layout.ChunksFor(pages) * layout.chunk_pages() - 1;
    const int64_t places =
        layout.Place(static_cast<int32_t>(last)) + (layout.planes() - 1) * layout.chunk_pages();
    const int64_t last_row = (places + 1) * config.num_kv_heads * 16 - 1;
    EXPECT_LE(last_row, INT32_MAX);
    EXPECT_GT(last_row, INT32_MAX / 100 * 99);
  }
}

// SmolLM2-135M would need chunks of 1,024 pages for its 62 planes.
TEST(KvLayout, EightBitsHaveChunksAsSmallAsFewIdlePlanesMakeThem) {
  const KvLayout small = KvLayoutOf(Fp8Model(30, 64));
  EXPECT_EQ(small.planes(), 64);
  EXPECT_EQ(small.chunk_pages(), 64);
  model::ModelConfig config = Fp8Model(36, 128);  // Qwen3-8B
  config.num_kv_heads = 8;
  EXPECT_EQ(KvLayoutOf(config).planes(), 74);
  EXPECT_EQ(KvLayoutOf(config).chunk_pages(), 64);
}

}  // namespace
}  // namespace dorad::cuda
