// One connection's memory. What has been handed over is held as long as the connection is open and,
// beyond that, as long as someone reads from it.
//
// Shared by the listener and the publishes that name its ticket. Thread-safe.
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
#include "server/adapter/peer_tensors.h"
#include "server/base/unique_fd.h"

namespace dorad::handover {

class Session {
 public:
  Session(UniqueFd socket, std::string ticket)
      : socket_(std::move(socket)), ticket_(std::move(ticket)) {}

  int socket() const { return socket_.get(); }
  const std::string& ticket() const { return ticket_; }

  // Whether the peer still holds its end open. Asks the kernel: a process that was killed is gone
  // before anyone has been told.
  bool open() const;
  // Ends the connection. What still reads from the memory keeps it, but is not wanted any more.
  void Close();

  // Returns the memory's index.
  uint32_t Add(std::shared_ptr<const adapter::PeerMemory> memory) ABSL_LOCKS_EXCLUDED(mu_);
  // nullptr: there is none with that index.
  std::shared_ptr<const adapter::PeerMemory> memory(size_t index) const ABSL_LOCKS_EXCLUDED(mu_);
  size_t num_memories() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  const UniqueFd socket_;
  const std::string ticket_;
  std::atomic<bool> closed_{false};
  mutable absl::Mutex mu_;
  std::vector<std::shared_ptr<const adapter::PeerMemory>> memories_ ABSL_GUARDED_BY(mu_);
};

}  // namespace dorad::handover
