// Reads the GPU's memory in pieces, through its own page-locked memory. Thread-safe.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "server/backends/cuda/device.h"

namespace dorad::cuda {

class DeviceReader {
 public:
  static absl::StatusOr<std::shared_ptr<const DeviceReader>> Create();

  // Waits for the bytes.
  absl::Status Read(const std::byte* from, absl::Span<std::byte> to) const ABSL_LOCKS_EXCLUDED(mu_);

  // The stream of the copies.
  const Stream& stream() const { return stream_; }

 private:
  DeviceReader(Stream stream, PinnedBuffer piece)
      : stream_(std::move(stream)), piece_(std::move(piece)) {}

  const Stream stream_;
  mutable absl::Mutex mu_;
  const PinnedBuffer piece_ ABSL_GUARDED_BY(mu_);
};

}  // namespace dorad::cuda
