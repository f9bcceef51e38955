// Page-locked buffers through which host data reaches the device, so that copies run beside other
// work and the host prepares the next piece while the last one is on its way. Pinning is slow
// (0.3 s a GiB): made once, used for everything.
// Thread-compatible: one user at a time.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "server/cuda/device.h"

namespace dorad::cuda {

class StagingRing {
 public:
  // piece_bytes: of each of the two buffers.
  static absl::StatusOr<StagingRing> Create(int64_t piece_bytes);
  StagingRing(StagingRing&&) = default;
  StagingRing& operator=(StagingRing&&) = default;

  // Writes rows [first, first + count) of row_bytes each.
  using Fill = absl::FunctionRef<void(int64_t first, int64_t count, std::byte* out)>;
  // Brings `rows` rows to device memory, in pieces, in order with `stream`'s work. Returns when the
  // last piece is on its way. REQUIRES: row_bytes <= piece_bytes.
  absl::Status Upload(void* to, int64_t rows, int64_t row_bytes, Fill fill, const Stream& stream);

 private:
  struct Event {
    Event() = default;
    Event(Event&& other) noexcept : event(std::exchange(other.event, nullptr)) {}
    Event& operator=(Event&& other) noexcept {
      std::swap(event, other.event);
      return *this;
    }
    ~Event();
    cudaEvent_t event = nullptr;
  };
  struct Piece {
    PinnedBuffer buffer;
    Event copied;  // goes first, and waits for the buffer's last use
  };

  StagingRing() = default;

  std::array<Piece, 2> pieces_;
  size_t next_ = 0;
};

}  // namespace dorad::cuda
