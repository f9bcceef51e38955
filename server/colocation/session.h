// The registered memory of one connection. It is held while the connection is open, and while a
// publish reads from it.
//
// Owned by the listener and by publishes with its session_token. Thread-safe.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/adapter/peft/peer_tensors.h"
#include "server/platform/net/unique_fd.h"

namespace dorad::shared_memory {

class Session {
 public:
  Session(UniqueFd socket, std::string session_token)
      : socket_(std::move(socket)), session_token_(std::move(session_token)) {}

  int socket() const { return socket_.get(); }
  const std::string& session_token() const { return session_token_; }

  // Whether the process still holds its end open. Asks the kernel, which knows of a killed process
  // before the listener does.
  bool open() const;
  // Ends the connection. A running publish keeps the memory, but its result is dropped.
  void Close();

  // Returns the memory's index.
  uint32_t Add(std::shared_ptr<const adapter::PeerMemory> memory) ABSL_LOCKS_EXCLUDED(mu_);
  // nullptr: no memory has that index.
  std::shared_ptr<const adapter::PeerMemory> memory(size_t index) const ABSL_LOCKS_EXCLUDED(mu_);
  size_t num_memories() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  const UniqueFd socket_;
  const std::string session_token_;
  std::atomic<bool> closed_{false};
  mutable absl::Mutex mu_;
  std::vector<std::shared_ptr<const adapter::PeerMemory>> memories_ ABSL_GUARDED_BY(mu_);
};

}  // namespace dorad::shared_memory
