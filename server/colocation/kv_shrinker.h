// KV ballooning: whoever needs device memory asks the engine to shrink its KV cache, for as long as
// there is an engine: loads outlive it. The engine grows the cache again by itself. Owned by App.
// Thread-safe; Shrink waits for the steps at hand.
#pragma once

#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/engine/engine.h"

namespace dorad {

class KvShrinker {
 public:
  // engine is borrowed, until Close. Before, nothing shrinks.
  void Open(engine::Engine* engine);
  // Returns when nobody waits for the engine any more.
  void Close();

  // Takes up to so many bytes from the KV cache and returns how many; 0 without an engine. Not to
  // be called on the engine's thread.
  int64_t Shrink(int64_t bytes);

 private:
  absl::Mutex mu_;  // held for reading while the engine is asked
  engine::Engine* engine_ ABSL_GUARDED_BY(mu_) = nullptr;
};

}  // namespace dorad
