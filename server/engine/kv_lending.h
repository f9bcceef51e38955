// Which chunks of the KV cache's memory are lent to others (adapters, other processes), and when
// they come back. Only chunks go that hold nothing of a sequence, and never so many that a sequence
// of full length would not fit. Confined to the engine thread.
#pragma once

#include <cstdint>

#include "server/engine/kv_pages.h"
#include "server/engine/model_runner.h"
#include "server/engine/request.h"

namespace dorad {
class Metrics;
}

namespace dorad::engine {

class KvLending {
 public:
  // All are borrowed. chunks: nullptr when the memory stays. floor: pages that are always there.
  KvLending(KvPages* pages, KvChunks* chunks, int64_t floor, Metrics* metrics)
      : pages_(*pages), chunks_(chunks), floor_(floor), metrics_(*metrics) {}

  int64_t lendable_bytes() const {
    return chunks_ == nullptr ? 0 : pages_.Lendable(floor_) * chunks_->bytes();
  }
  // Lends at least so many bytes, or as many as can go; returns how many. Prefixes in them are
  // forgotten. REQUIRES: no step has begun.
  int64_t Lend(int64_t bytes);
  // Takes chunks back until so many pages are free, while there is memory; after a refusal it does
  // not ask again for a while. Steps may have begun.
  void TakeBack(int64_t wanted_free_pages, Instant now);

 private:
  KvPages& pages_;
  KvChunks* const chunks_;
  const int64_t floor_;
  Metrics& metrics_;
  Instant next_question_ = Instant::min();
};

}  // namespace dorad::engine
