// Feeds tokens that one step sampled to the next one, without their crossing to the host.
// Thread-safe.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace dorad::kernels {

// Where token_ids[row] < 0 it becomes sampled[-1 - token_ids[row]], or 0 if that is negative (the
// row that it follows was not finite; nobody wants what comes of it). token_ids: device, [rows].
// sampled: device.
cudaError_t FeedTokens(int32_t* token_ids, int32_t rows, const int32_t* sampled,
                       cudaStream_t stream);

}  // namespace dorad::kernels
