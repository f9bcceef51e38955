// Feeds a step's sampled tokens to the next step without a copy to the host. Thread-safe.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace dorad::kernels {

// Replaces token_ids[row] < 0 by sampled[-1 - token_ids[row]], or by 0 if that is negative (its
// logits were not finite; the result is not used). token_ids: device, [rows]. sampled: device.
cudaError_t FeedTokens(int32_t* token_ids, int32_t rows, const int32_t* sampled,
                       cudaStream_t stream);

}  // namespace dorad::kernels
