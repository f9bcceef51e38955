// A kernel that is compiled as all kernels of kSm90 are. Internal to kernels/isa.
#pragma once

namespace dorad::kernels {

const void* Sm90Probe();

}  // namespace dorad::kernels
