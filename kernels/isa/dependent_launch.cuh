// Programmatic dependent launch, as a kernel sees it: launch.h. Nothing before sm_90, where
// launches wait for each other.
#pragma once

namespace dorad::kernels {

// Programmatic dependent launch: the next kernel of the stream may start in free room from now on.
__device__ inline void LaunchDependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the kernels before this one are complete and their writes are visible.
__device__ inline void WaitForPrevious() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace dorad::kernels
