#include "kernels/dora/linear_instance.cuh"
#include "kernels/isa/sm90/isa.cuh"

namespace dorad::kernels {

template cudaError_t LaunchProject<Sm90Isa, 4, true>(const LinearLaunch<Sm90Isa>& launch);

}  // namespace dorad::kernels
