// The way from whoever needs memory to the engine's KV cache, for as long as there is an engine:
// loads outlive it. Owned by App. Thread-safe; waits for the steps at hand.
#pragma once

#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/engine/engine.h"

namespace dorad {

class KvLender {
 public:
  // engine is borrowed, until Close. Before, nothing is lent.
  void Open(engine::Engine* engine);
  // Returns when nobody waits for the engine any more.
  void Close();

  // As Engine::LendKv; 0 without an engine. Not to be called on the engine's thread.
  int64_t Lend(int64_t bytes);

 private:
  absl::Mutex mu_;  // held for reading while the engine is asked
  engine::Engine* engine_ ABSL_GUARDED_BY(mu_) = nullptr;
};

}  // namespace dorad
