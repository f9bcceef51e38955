// The rows of an image's products: patches or tokens in chunks, all with one adapter, or of the
// base model. Owned by the encoder and uploaded again in every call; confined to the engine thread.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "server/backends/cuda/adapter.h"
#include "server/backends/cuda/adapter_slots.h"
#include "server/backends/cuda/batch.h"
#include "server/backends/cuda/device.h"
#include "server/model/vision_config.h"

namespace dorad::cuda {

class VisionRows {
 public:
  // Patches whose pixels are copied at once.
  static constexpr int64_t kPixelRows = 1024;

  // All are borrowed.
  VisionRows(const model::VisionConfig& vision, AdapterSlots* slots, MemoryLedger* ledger,
             const Stream* stream)
      : vision_(vision), slots_(*slots), ledger_(ledger), stream_(*stream) {}

  // Of an image with `patches`, `chunk_rows` of them in a product; adapter: nullptr for the base
  // model. Ordered with the stream's work. REQUIRES: the work of the upload before has ended.
  absl::Status Upload(int64_t patches, int64_t chunk_rows, const CudaAdapterWeights* adapter);

  // `adapted`: of a module, otherwise of a product that no adapter changes. REQUIRES: a chunk's
  // patches or tokens.
  const LinearRows& Find(int64_t rows, bool adapted) const;

 private:
  const model::VisionConfig& vision_;
  AdapterSlots& slots_;
  MemoryLedger* const ledger_;
  const Stream& stream_;
  bool adapted_ = false;  // in the last upload
  PinnedBuffer host_;
  DeviceBuffer device_;
  std::vector<LinearRows> rows_;
};

}  // namespace dorad::cuda
