#include "kernels/isa/launch.h"

namespace dorad::kernels {
namespace {

// Compiled as all other kernels are.
__global__ void Probe() {}

}  // namespace

bool KnowDependentLaunch() {
  static const bool know = [] {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, Probe) == cudaSuccess && attributes.ptxVersion >= 90;
  }();
  return know;
}

}  // namespace dorad::kernels
