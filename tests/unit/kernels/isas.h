// The instruction sets that tests of kernels run with. For a test's thread.
#pragma once

#include <gtest/gtest.h>

#include "kernels/isa/isa.h"

namespace dorad::kernels {

// What helpers of a test launch.
inline KernelIsa tested_isa = KernelIsa::kSm90;

#define DORAD_FOR_EACH_ISA(fixture)                                                           \
  INSTANTIATE_TEST_SUITE_P(                                                                   \
      Isas, fixture,                                                                          \
      testing::Values(::dorad::kernels::KernelIsa::kSm90, ::dorad::kernels::KernelIsa::kMma), \
      [](const auto& info) {                                                                  \
        return info.param == ::dorad::kernels::KernelIsa::kSm90 ? "Sm90" : "Mma";             \
      })

}  // namespace dorad::kernels
