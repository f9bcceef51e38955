// Which chunks of the KV cache's memory are released to others (adapters, other processes), and
// when they come back. Only chunks go that hold nothing of a sequence, and never so many that a
// sequence of full length would not fit. Confined to the engine thread.
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
  // All are borrowed. chunks: nullptr when the memory stays. floor: pages that are always there.
  // min_shrink_bytes: so long nothing comes back after chunks were released.
  KvBalloon(KvPages* pages, KvChunks* chunks, int64_t floor, absl::Duration min_shrink_bytes,
            Metrics* metrics)
      : pages_(*pages),
        chunks_(chunks),
        floor_(floor),
        min_shrink_bytes_(min_shrink_bytes),
        metrics_(*metrics) {}

  int64_t shrinkable_bytes() const {
    return chunks_ == nullptr ? 0 : pages_.Shrinkable(floor_) * chunks_->bytes();
  }
  // Lends at least so many bytes, or as many as can go; returns how many. Prefixes in them are
  // forgotten. REQUIRES: no step has begun.
  int64_t Shrink(int64_t bytes, Instant now);
  // Takes chunks back until so many pages are free or hold prefixes alone, while there is memory;
  // after a loan or a refusal not for a while. Steps may have begun.
  void TakeBack(int64_t wanted_pages, Instant now);

 private:
  KvPages& pages_;
  KvChunks* const chunks_;
  const int64_t floor_;
  const absl::Duration min_shrink_bytes_;
  Metrics& metrics_;
  Instant next_take_ = Instant::min();
};

}  // namespace dorad::engine
