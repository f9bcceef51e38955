
#include "server/backends/cuda/adapter.h"
#include "server/backends/cuda/host_copies.h"
#include "server/backends/cuda/pinned_pages.h"
#include "tests/unit/cuda/small_model.h"
#include "tests/unit/kernels/device.h"

namespace dorad::cuda {
namespace {

using kernels::DoraFactors;

class AdapterImagesTest : public kernels::KernelTest {
 protected:
  std::shared_ptr<const CudaAdapterWeights> Adapter(int rank, uint32_t seed) {
    return Must(MakeRandomAdapter(*model_, rank, seed, &ledger_));
  }

  // All tensors of an adapter, one behind the other.
  std::vector<std::byte> Content(const CudaAdapterWeights& weights) const {
    std::vector<std::byte> content;
    const auto append = [&](const void* from, int64_t bytes) {
      const size_t at = content.size();
      content.resize(at + static_cast<size_t>(bytes));
      EXPECT_EQ(cudaMemcpy(content.data() + at, from, bytes, cudaMemcpyDeviceToHost), cudaSuccess);
    };
    for (size_t id = 0; id < weights.modules().size(); ++id) {
      const DoraFactors& factors = weights.modules()[id];
      if (factors.rank == 0) continue;
      const adapter::BaseModule& module = model_->modules().all()[id];
      append(factors.a, factors.rank * module.cols * 2);
      append(factors.b, module.rows * factors.ldb * 2);
      append(factors.g, module.rows * 4);
    }
    return content;
  }

  void SetUp() override {
    KernelTest::SetUp();
    if (!IsSkipped()) model_ = Must(CudaModel::Random(SmallModel(2), 1, &ledger_));
  }

  MemoryLedger ledger_;
  std::unique_ptr<CudaModel> model_;
};

TEST_F(AdapterImagesTest, WhatComesBackIsTheSameAtAnotherPlace) {
  const auto images = Must(MakeCudaHostCopies(model_.get(), 64 << 20, &ledger_));
  auto weights = Adapter(64, 7);
  const std::vector<std::byte> content = Content(*weights);
  const auto image = Must(images->Save(weights));
  // While the old ones are there, the new ones cannot lie at their place.
  const auto again = Must(images->Restore(*image));
  const auto& restored = static_cast<const CudaAdapterWeights&>(*again);
  EXPECT_NE(restored.memory(), weights->memory());
  EXPECT_NE(restored.id(), weights->id()) << "slots must be filled anew";
  EXPECT_EQ(restored.bytes(), weights->bytes());
  weights = nullptr;
  EXPECT_TRUE(Content(restored) == content);
  // What the slots of a step are filled with points to the new place.
  std::vector<DoraFactors> image_of(restored.modules().size());
  ASSERT_EQ(cudaMemcpy(image_of.data(), restored.image(), image_of.size() * sizeof(DoraFactors),
                       cudaMemcpyDeviceToHost),
            cudaSuccess);
  for (size_t id = 0; id < image_of.size(); ++id) {
    EXPECT_EQ(image_of[id].a, restored.modules()[id].a);
    EXPECT_EQ(image_of[id].rank, restored.modules()[id].rank);
    if (image_of[id].a == nullptr) continue;
    const auto* a = reinterpret_cast<const std::byte*>(image_of[id].a);
    EXPECT_TRUE(a >= restored.memory() && a < restored.memory() + restored.bytes());
  }
}

TEST_F(AdapterImagesTest, ImagesTakeWholePagesAndGiveThemBack) {
  constexpr int64_t kPage = PinnedPages::kPageBytes;
  const auto weights = Adapter(160, 7);
  const auto images = Must(MakeCudaHostCopies(model_.get(), 2 * kPage + 5, &ledger_));
  EXPECT_EQ(images->capacity_bytes(), 2 * kPage);
  EXPECT_EQ(images->BytesFor(kPage + 1), 2 * kPage);
  ASSERT_EQ(images->BytesFor(weights->bytes()), 2 * kPage);
  for (int i = 0; i < 3; ++i) {
    const auto image = Must(images->Save(weights));
    EXPECT_EQ(ReasonOf(images->Save(weights).status()), "OUT_OF_MEMORY");
  }
}

TEST_F(AdapterImagesTest, WithoutDeviceMemoryNothingComesBackAndTheImageStays) {
  const auto images = Must(MakeCudaHostCopies(model_.get(), 64 << 20, &ledger_));
  const auto weights = Adapter(64, 7);
  const auto image = Must(images->Save(weights));
  ledger_.set_limit(ledger_.total());
  EXPECT_EQ(ReasonOf(images->Restore(*image).status()), "OUT_OF_MEMORY");
  ledger_.set_limit(MemoryLedger::kNoLimit);
  const auto again = Must(images->Restore(*image));
  EXPECT_TRUE(Content(static_cast<const CudaAdapterWeights&>(*again)) == Content(*weights));
}

using PinnedPagesTest = kernels::KernelTest;

TEST_F(PinnedPagesTest, GivesEachPageToOneHolder) {
  const auto pages = Must(PinnedPages::Create(8 * PinnedPages::kPageBytes));
  const auto first = Must(pages->Take(5));
  EXPECT_EQ(ReasonOf(pages->Take(4).status()), "OUT_OF_MEMORY");
  const auto second = Must(pages->Take(3));
  std::set<std::byte*> distinct(first.begin(), first.end());
  distinct.insert(second.begin(), second.end());
  EXPECT_EQ(distinct.size(), 8u);
  pages->Return(first);
  EXPECT_EQ(Must(pages->Take(5)).size(), 5u);
}

}  // namespace
}  // namespace dorad::cuda
