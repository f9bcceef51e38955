// The choice of the kernels' instruction set on this machine's GPU.
#include "server/backends/cuda/device.h"
#include "tests/unit/kernels/device.h"
#include "tests/unit/support/test.h"

namespace dorad::cuda {
namespace {

using kernels::KernelIsa;

class InstructionSetTest : public kernels::KernelTest {};

TEST_F(InstructionSetTest, IsTheBestUnlessNamed) {
  ASSERT_TRUE(OpenDevice().ok());
  EXPECT_EQ(ChooseIsa("auto").value(), kernels::BestIsa());
  for (const KernelIsa isa : {KernelIsa::kSm90, KernelIsa::kMma}) {
    const absl::StatusOr<KernelIsa> chosen = ChooseIsa(NameOf(isa));
    if (kernels::HasKernels(isa)) {
      EXPECT_EQ(chosen.value(), isa);
    } else {
      EXPECT_EQ(ReasonOf(chosen.status()), "INSTRUCTION_SET_UNSUPPORTED");
      EXPECT_THAT(chosen.status().message(), testing::HasSubstr("compute capability"));
    }
  }
}

}  // namespace
}  // namespace dorad::cuda
