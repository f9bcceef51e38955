// Shrinks the KV cache for adapters and other processes, and grows it again. Releases only chunks
// without pages of a sequence, and keeps enough for a sequence of full length. Confined to the
// engine thread.
#pragma once

#include <cstdint>

#include "absl/time/time.h"
#include "server/engine/kv_pages.h"
#include "server/engine/model_runner.h"
#include "server/engine/request.h"

namespace dorad {
class Metrics;
}

namespace dorad::engine {

class KvBalloon {
 public:
  // All are borrowed. chunks: nullptr when the cache cannot shrink. floor: pages that are never
  // released. shrink_hold: time without growth after a shrink.
  KvBalloon(KvPages* pages, KvChunks* chunks, int64_t floor, absl::Duration shrink_hold,
            Metrics* metrics)
      : pages_(*pages),
        chunks_(chunks),
        floor_(floor),
        shrink_hold_(shrink_hold),
        metrics_(*metrics) {}

  int64_t shrinkable_bytes() const {
    return chunks_ == nullptr ? 0 : pages_.Shrinkable(floor_) * chunks_->bytes();
  }
  // Releases at least `bytes`, or as much as possible; returns the bytes released. Drops the
  // prefixes in them. REQUIRES: no step has begun.
  int64_t Shrink(int64_t bytes, Instant now);
  // Grows until `wanted_pages` are available (free or prefixes only), while there is memory; not
  // for a while after a shrink or a failure. Steps may have begun.
  void Grow(int64_t wanted_pages, Instant now);

 private:
  KvPages& pages_;
  KvChunks* const chunks_;
  const int64_t floor_;
  const absl::Duration shrink_hold_;
  Metrics& metrics_;
  Instant next_grow_ = Instant::min();
};

}  // namespace dorad::engine
