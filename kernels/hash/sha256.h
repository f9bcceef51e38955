// SHA-256 of the pieces of many tensors: the leaves of a tensor's digest
// (server/platform/files/tree_sha256.h has the rest). Pieces are hashed in parallel; SHA-256 of a
// whole tensor would be sequential.
//
// Only enqueues work on the stream; thread-safe, and can be captured in graphs.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace dorad::kernels {

// Bytes of a piece; a tensor's last piece may be shorter.
constexpr int64_t kHashPieceBytes = 16 << 10;
constexpr int64_t kHashBytes = 32;

struct HashedTensor {
  const void* data = nullptr;  // device memory, 16-byte aligned
  int64_t bytes = 0;
  int64_t first_piece = 0;  // the number of pieces of all tensors before this one
};

// digests [pieces, kHashBytes]. tensors: [count] in device memory, in order of first_piece, without
// empty tensors; digests is 16-byte aligned. Uses a few threads of each multiprocessor, so that
// other kernels can run beside it. cudaErrorInvalidValue: a negative count.
cudaError_t PieceHashes(const HashedTensor* tensors, int count, int64_t pieces, void* digests,
                        cudaStream_t stream);

}  // namespace dorad::kernels
