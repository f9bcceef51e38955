#include "kernels/decoder/delta_step_kernel.cuh"
#include "kernels/isa/mma/isa.cuh"

namespace dorad::kernels::delta {

template cudaError_t LaunchDeltaStep<MmaIsa<4>>(const DeltaParams& params, cudaStream_t stream);

}  // namespace dorad::kernels::delta
