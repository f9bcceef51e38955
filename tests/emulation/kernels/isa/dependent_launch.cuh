// The emulator's form of kernels/isa/dependent_launch.cuh.
#pragma once

#include "tests/emulation/emulator.h"

namespace dorad::kernels {

inline void LaunchDependents() {
  emulation::Block& block = emulation::ThisBlock();
  block.grid->LetNextStart(&block);
}
inline void WaitForPrevious() {
  while (!emulation::ThisBlock().grid->CanFollow()) emulation::Emulator::Get().SwitchAway();
}

}  // namespace dorad::kernels
