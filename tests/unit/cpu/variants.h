// Runs a test suite once for each SIMD variant that this processor supports.
#pragma once

#include "server/backends/cpu/simd/kernels.h"
#include "tests/unit/support/test.h"

namespace dorad::ops {

class VariantTest : public ::testing::TestWithParam<const cpu::Kernels*> {
 protected:
  void SetUp() override { cpu::SetActiveKernels(*GetParam()); }
  void TearDown() override { cpu::SetActiveKernels(**cpu::SupportedKernels().begin()); }
};

#define DORAD_INSTANTIATE_VARIANTS(suite)                                                  \
  INSTANTIATE_TEST_SUITE_P(                                                                \
      Variants, suite,                                                                     \
      ::testing::ValuesIn(cpu::SupportedKernels().begin(), cpu::SupportedKernels().end()), \
      [](const auto& info) { return std::string(info.param->name); })

}  // namespace dorad::ops
