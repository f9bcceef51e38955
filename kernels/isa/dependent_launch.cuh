// Programmatic dependent launch, as a kernel sees it: launch.h.
#pragma once

namespace dorad::kernels {

// Programmatic dependent launch: the next kernel of the stream may start in free room from now on.
__device__ inline void LaunchDependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Waits until the kernels before this one are complete and their writes are visible.
__device__ inline void WaitForPrevious() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace dorad::kernels
