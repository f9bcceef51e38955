#include "kernels/decoder/delta_step_kernel.cuh"
#include "kernels/isa/sm90/isa.cuh"

namespace dorad::kernels::delta {

template cudaError_t LaunchDeltaStep<Sm90Isa>(const DeltaParams& params, cudaStream_t stream);

}  // namespace dorad::kernels::delta
