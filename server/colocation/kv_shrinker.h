// KV ballooning: loads that need device memory ask the engine to shrink its KV cache; loads may
// outlive the engine. The engine grows the cache again by itself. Owned by App. Thread-safe; Shrink
// waits for the steps in flight.
#pragma once

#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/engine/engine.h"

namespace dorad {

class KvShrinker {
 public:
  // engine is borrowed until Close. Before Open, Shrink has no effect.
  void Open(engine::Engine* engine);
  // Waits for running calls of Shrink.
  void Close();

  // Shrinks the KV cache by up to `bytes` and returns the released bytes; 0 without an engine. Not
  // to be called on the engine's thread.
  int64_t Shrink(int64_t bytes);

 private:
  absl::Mutex mu_;  // held for reading during Shrink
  engine::Engine* engine_ ABSL_GUARDED_BY(mu_) = nullptr;
};

}  // namespace dorad
