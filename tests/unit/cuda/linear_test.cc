#include "server/backends/cuda/linear.h"

#include "server/backends/cuda/adapter.h"
#include "server/backends/cuda/adapter_slots.h"
#include "server/backends/cuda/library_linear.h"
#include "server/engine/step_batch.h"
#include "tests/unit/cuda/small_model.h"
#include "tests/unit/kernels/device.h"

namespace dorad::cuda {
namespace {

// The fused form against the library's, on rows of the base and of adapters with different ranks.
class LinearTest : public kernels::IsaTest {
 protected:
  void SetUp() override {
    kernels::IsaTest::SetUp();
    if (IsSkipped()) return;
    model_ = Must(CudaModel::Random(SmallModel(1), 1, &ledger_, GetParam()));
    for (const int rank : {8, 64, 200}) {
      adapters_.push_back(std::make_unique<adapter::LoadedAdapter>(
          "a", rank, adapter::AdapterSummary(),
          Must(MakeRandomAdapter(*model_, rank, static_cast<uint32_t>(rank), &ledger_))));
    }
  }

  // `rows` sequences of one row, spread over the base and the adapters.
  LinearRows Rows(int64_t rows, DeviceBatch* batch, const Stream& stream) {
    sequences_.clear();
    for (int64_t i = 0; i < rows; ++i) {
      engine::StepSequence sequence;
      sequence.tokens = tokens_;
      sequence.pages = pages_;
      if (i % 4 != 3) sequence.adapter = adapters_[i % 4].get();
      sequences_.push_back(sequence);
    }
    step_ = std::make_unique<engine::StepBatch>(sequences_);
    EXPECT_TRUE(batch->Upload(*step_, sequences_, stream).ok());
    return batch->linear();
  }

  MemoryLedger ledger_;
  std::unique_ptr<CudaModel> model_;
  std::vector<std::unique_ptr<adapter::LoadedAdapter>> adapters_;
  const std::vector<engine::TokenId> tokens_ = {1};
  const std::vector<int32_t> pages_ = {0};
  std::vector<engine::StepSequence> sequences_;
  std::unique_ptr<engine::StepBatch> step_;
};

DORAD_FOR_EACH_ISA(LinearTest);

void ExpectRounded(const std::vector<float>& values, const std::vector<__nv_bfloat16>& rounded) {
  ASSERT_EQ(values.size(), rounded.size());
  for (size_t i = 0; i < values.size(); ++i) {
    ASSERT_EQ(__bfloat162float(__float2bfloat16_rn(values[i])), __bfloat162float(rounded[i])) << i;
  }
}

TEST_P(LinearTest, TheFusedFormAgreesWithTheLibrarys) {
  constexpr int64_t kMostRows = 600;
  const Stream stream = Must(Stream::Create());
  AdapterSlots slots = Must(AdapterSlots::Create(8, model_->modules().size(), &ledger_));
  DeviceBatch batch(&ledger_, &slots, 256, RowKinds(model_->config()));
  const LayerWeights& layer = model_->layers()[0];
  const std::vector<const LinearGroup*> groups = {&layer.qkv, &layer.o, &layer.gate_up,
                                                  &layer.down};
  Linear fused = Must(Linear::Create(groups, kMostRows, model_->isa(), &ledger_, &stream));
  LibraryLinear library =
      Must(LibraryLinear::Create(stream, kMostRows, layer.gate_up.out, &ledger_));
  for (const int64_t rows : {1, 5, 37, 256, 257, 600}) {
    const LinearRows linear = Rows(rows, &batch, stream);
    for (const LinearGroup* group : groups) {
      std::vector<__nv_bfloat16> x(static_cast<size_t>(rows * group->in));
      for (size_t i = 0; i < x.size(); ++i) {
        x[i] = __float2bfloat16_rn(std::sin(static_cast<float>(i % 7919)));
      }
      const kernels::DeviceBuffer<__nv_bfloat16> input(x);
      const kernels::DeviceBuffer<float> one(static_cast<size_t>(rows * group->out));
      const kernels::DeviceBuffer<float> other(static_cast<size_t>(rows * group->out));
      ASSERT_TRUE(fused.Run(*group, linear, input.get(), one.get()).ok());
      ASSERT_TRUE(library.Run(*group, linear, input.get(), other.get()).ok());
      const std::vector<float> ours = one.Read();
      const std::vector<float> theirs = other.Read();
      double difference = 0.0, size = 0.0;
      for (size_t i = 0; i < ours.size(); ++i) {
        difference += std::pow(double{ours[i]} - theirs[i], 2);
        size += std::pow(double{theirs[i]}, 2);
      }
      EXPECT_LT(std::sqrt(difference / size), 2e-3) << rows << " rows of " << group->out;
      const kernels::DeviceBuffer<__nv_bfloat16> rounded(one.size());
      ASSERT_TRUE(fused.Run(*group, linear, input.get(), rounded.get()).ok());
      ExpectRounded(ours, rounded.Read());
      ASSERT_TRUE(library.Run(*group, linear, input.get(), rounded.get()).ok());
      ExpectRounded(theirs, rounded.Read());
    }
  }
}

}  // namespace
}  // namespace dorad::cuda
