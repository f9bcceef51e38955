#include "server/colocation/session.h"

#include <poll.h>
#include <sys/socket.h>

namespace dorad::shared_memory {

bool Session::open() const {
  pollfd polled = {socket_.get(), POLLRDHUP, 0};
  return !closed_ && poll(&polled, 1, 0) == 0;
}

void Session::Close() {
  closed_ = true;
  (void)shutdown(socket_.get(), SHUT_RDWR);
}

uint32_t Session::Add(std::shared_ptr<const adapter::PeerMemory> memory) {
  absl::MutexLock lock(&mu_);
  memories_.push_back(std::move(memory));
  return static_cast<uint32_t>(memories_.size() - 1);
}

std::shared_ptr<const adapter::PeerMemory> Session::memory(size_t index) const {
  absl::MutexLock lock(&mu_);
  return index < memories_.size() ? memories_[index] : nullptr;
}

size_t Session::num_memories() const {
  absl::MutexLock lock(&mu_);
  return memories_.size();
}

}  // namespace dorad::shared_memory
