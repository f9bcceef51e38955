#include "server/backends/cuda/kv_layout.h"

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

}  // namespace
}  // namespace dorad::cuda
