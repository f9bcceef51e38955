
#include "kernels/random/fill.h"
#include "server/backends/cuda/model_runner.h"
#include "tests/unit/cuda/small_model.h"
#include "tests/unit/kernels/device.h"

namespace dorad::cuda {
namespace {

class LostGpuTest : public kernels::KernelTest {};

// Runs in a process of its own: afterwards the GPU is lost to it.
void StepAfterAnIllegalAccess() {
  MemoryLedger ledger;
  if (!OpenDevice().ok()) return;
  const auto model = CudaModel::Random(SmallModel(1), 1, &ledger);
  const auto runner = MakeCudaModelRunner(model->get(), {8, 128, 16, 4}, &ledger);
  if (!runner.ok()) return;
  const std::vector<engine::TokenId> tokens = {1, 2, 3};
  const std::vector<int32_t> pages = {0};
  engine::StepSequence sequence;
  sequence.tokens = tokens;
  sequence.pages = pages;
  // All is well so far.
  if (!(*runner)->Begin({sequence}).ok() || !(*runner)->Finish().ok()) return;
  (void)kernels::FillConstant(reinterpret_cast<float*>(16), 4, 1.0f, nullptr);
  (void)cudaDeviceSynchronize();
  if ((*runner)->Begin({sequence}).ok()) (void)(*runner)->Finish();
}

TEST_F(LostGpuTest, AnIllegalAccessEndsTheProcessAndSaysWhy) {
  // The child starts anew: CUDA does not survive a fork.
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(StepAfterAnIllegalAccess(),
               "the GPU cannot be used any more: ending.*illegal memory access");
}

}  // namespace
}  // namespace dorad::cuda
