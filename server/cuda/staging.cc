#include "server/cuda/staging.h"

#include <algorithm>

#include "server/base/check.h"
#include "server/base/error.h"

namespace dorad::cuda {
namespace {

constexpr char kCopy[] = "copying to the GPU";

}  // namespace

StagingRing::Event::~Event() {
  if (event == nullptr) return;
  // The buffer goes next, and a copy may still read it.
  (void)cudaEventSynchronize(event);
  cudaEventDestroy(event);
}

absl::StatusOr<StagingRing> StagingRing::Create(int64_t piece_bytes) {
  StagingRing ring;
  for (Piece& piece : ring.pieces_) {
    DORAD_ASSIGN_OR_RETURN(piece.buffer, PinnedBuffer::Allocate(piece_bytes));
    DORAD_RETURN_IF_CUDA_ERROR(
        cudaEventCreateWithFlags(&piece.copied.event, cudaEventDisableTiming), kCopy);
  }
  return ring;
}

absl::Status StagingRing::Upload(void* to, int64_t rows, int64_t row_bytes, Fill fill,
                                 const Stream& stream) {
  const int64_t most = pieces_[0].buffer.bytes() / row_bytes;
  DORAD_CHECK(most > 0);
  for (int64_t first = 0; first < rows; first += most) {
    const int64_t count = std::min(most, rows - first);
    Piece& piece = pieces_[next_];
    next_ = 1 - next_;
    DORAD_RETURN_IF_CUDA_ERROR(cudaEventSynchronize(piece.copied.event), kCopy);
    fill(first, count, piece.buffer.as<>());
    DORAD_RETURN_IF_CUDA_ERROR(
        cudaMemcpyAsync(static_cast<char*>(to) + first * row_bytes, piece.buffer.as<>(),
                        count * row_bytes, cudaMemcpyHostToDevice, stream.get()),
        kCopy);
    DORAD_RETURN_IF_CUDA_ERROR(cudaEventRecord(piece.copied.event, stream.get()), kCopy);
  }
  return absl::OkStatus();
}

}  // namespace dorad::cuda
