#include "server/platform/net/socket_server.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <iterator>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "server/platform/check.h"
#include "server/platform/exception.h"

namespace dorad {
namespace {

// Without descriptors accept() fails at once and for ever; try again after this.
constexpr absl::Duration kAcceptPause = absl::Milliseconds(100);
// Limit of one round, so that a flood of connections does not delay the others.
constexpr int kMaxAccepted = 64;

bool IsShortage(int error) {
  return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
}

bool AdvanceGuarded(SocketServer::Connection& connection) {
  try {
    return connection.Advance();
  } catch (...) {
    StatusOfException("a connection", "INTERNAL_ERROR").IgnoreError();  // logs it
    return false;
  }
}

}  // namespace

SocketServer::SocketServer(UniqueFd listener, Options options)
    : options_(std::move(options)),
      listener_(std::move(listener)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  DORAD_CHECK(wake_.ok() && options_.accept != nullptr && options_.max_connections > 0);
  thread_ = std::thread([this] { Run(); });
}

SocketServer::~SocketServer() {
  const uint64_t one = 1;
  DORAD_CHECK(write(wake_.get(), &one, sizeof(one)) == sizeof(one));
  thread_.join();
}

void SocketServer::Run() {
  std::vector<pollfd> polled;
  while (true) {
    polled.clear();
    polled.push_back({wake_.get(), POLLIN, 0});
    const bool accepting = SteadyNow() >= accept_after_;
    polled.push_back({accepting ? listener_.get() : -1, POLLIN, 0});
    for (const auto& connection : connections_) {
      polled.push_back({connection->socket(), connection->events(), 0});
    }
    const int ready = poll(polled.data(), polled.size(), TimeoutMillis());
    DORAD_CHECK(ready >= 0 || errno == EINTR);
    if (ready < 0) continue;
    if (polled[0].revents != 0) return connections_.clear();
    auto event = polled.begin() + 2;
    for (auto it = connections_.begin(); it != connections_.end(); ++event) {
      const bool keep = event->revents == 0 || AdvanceGuarded(**it);
      it = keep && SteadyNow() < (*it)->deadline() ? std::next(it) : connections_.erase(it);
    }
    if (polled[1].revents != 0) AcceptWaiting();
  }
}

// Until the next deadline; -1: no deadline.
int SocketServer::TimeoutMillis() const {
  const Instant now = SteadyNow();
  Instant next = Instant::max();
  if (accept_after_ > now) next = accept_after_;
  for (const auto& connection : connections_) next = std::min(next, connection->deadline());
  if (next == Instant::max()) return -1;
  const auto wait = std::chrono::ceil<std::chrono::milliseconds>(next - now).count();
  return static_cast<int>(std::max<int64_t>(0, wait));
}

void SocketServer::AcceptWaiting() {
  for (int i = 0; i < kMaxAccepted && Accept(); ++i) {
  }
}

// False when no connection is pending, or none can be accepted.
bool SocketServer::Accept() {
  const bool drops = options_.when_full == WhenFull::kDropOldest;
  UniqueFd fd(accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (!fd.ok()) {
    if (IsShortage(errno)) {
      if (drops && !connections_.empty()) connections_.pop_front();
      accept_after_ = FromNow(kAcceptPause);
    }
    return false;
  }
  const bool full = connections_.size() >= options_.max_connections;
  // The oldest one has had the most time.
  if (full && drops) connections_.pop_front();
  const bool has_room = !full || drops;
  try {
    auto connection = options_.accept(std::move(fd), has_room);
    if (has_room && connection != nullptr) connections_.push_back(std::move(connection));
  } catch (...) {
    StatusOfException("accepting a connection", "INTERNAL_ERROR").IgnoreError();  // logs it
  }
  return true;
}

}  // namespace dorad
