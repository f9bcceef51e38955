#include "server/rpc/incoming_bytes.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "server/platform/net/tcp_peers.h"
#include "server/rpc/request_reading.h"

namespace dorad::rpc {
namespace {

constexpr absl::Duration kLook = absl::Milliseconds(10);
// Connection::fd when the process has no such connection: it has closed.
constexpr int kGone = -2;
// Of a call; hardly any has more.
constexpr int64_t kHeaderBytes = 1024;
// What a client sends before it hears of a refusal: the window of a stream.
constexpr int64_t kWindowBytes = 64 << 10;

// What a client sends ahead of the message that is awaited: gRPC widens the windows of a connection
// with its bandwidth. Small messages have none ahead.
constexpr int64_t kAheadBytes = 64 << 20;

// With frames and encryption.
int64_t OnTheWire(int64_t bytes) { return bytes + bytes / 16; }

}  // namespace

IncomingBytes::IncomingBytes() : thread_([this] { Run(); }) {}

IncomingBytes::~IncomingBytes() {
  {
    absl::MutexLock lock(&mu_);
    closing_ = true;
    changed_.Signal();
  }
  thread_.join();
}

void IncomingBytes::Run() {
  absl::MutexLock lock(&mu_);
  while (!closing_) {
    if (connections_.empty()) {
      asleep_ = true;
      changed_.Wait(&mu_);
      asleep_ = false;
    }
    if (!closing_) changed_.WaitWithTimeout(&mu_, kLook);
    const std::vector<std::function<void()>> told = Look();
    mu_.Unlock();
    for (const std::function<void()>& too_large : told) too_large();
    mu_.Lock();
  }
}

std::vector<std::function<void()>> IncomingBytes::Look() {
  std::optional<std::map<std::string, int>> peers;
  std::vector<std::function<void()>> told;
  for (auto& [peer, connection] : connections_) {
    std::optional<int64_t> received = BytesReadFromPeer(connection.fd, peer);
    if (!received && connection.fd != kGone) {
      if (!peers) peers = TcpPeers();
      const auto found = peers->find(peer);
      connection.fd = found == peers->end() ? kGone : found->second;
      received = BytesReadFromPeer(connection.fd, peer);
    }
    if (!received) continue;
    Count(*received, &connection);
    Judge(&connection, &told);
  }
  return told;
}

void IncomingBytes::Count(int64_t received, Connection* connection) {
  Connection& c = *connection;
  if (c.received >= 0) {
    // Bytes from before the first look may belong to a message that was handed over since.
    c.held = std::max<int64_t>(0, c.held + received - c.received - (c.handed_over - c.known));
  }
  c.received = received;
  c.known = c.handed_over;
}

void IncomingBytes::Judge(Connection* connection, std::vector<std::function<void()>>* told) {
  int64_t most = kOtherBytes;
  bool any_small = false;
  for (const Read& read : connection->reads) {
    most += OnTheWire(read.most) + (read.most > kSmallRequestBytes ? kAheadBytes : 0);
    any_small = any_small || (read.too_large && read.most <= kSmallRequestBytes);
  }
  const bool too_many = connection->held > most;
  bool any_told = false;
  for (Read& read : connection->reads) {
    // The bytes do not tell their call. A large message is likely to be an allowed one.
    const bool suspect =
        too_many && read.too_large && !(any_small && read.most > kSmallRequestBytes);
    // At one look, the bytes may belong to calls that are about to start on a busy machine.
    if (!std::exchange(read.suspected, suspect) || !suspect) continue;
    told->push_back(std::exchange(read.too_large, nullptr));
    any_told = true;
  }
  if (any_told) connection->held = 0;
}

void IncomingMessage::Start(std::function<void()> too_large) {
  if (!absl::StartsWith(peer_, "ip")) return;  // a socket file
  absl::MutexLock lock(&bytes_->mu_);
  taken_ = false;
  if (std::exchange(started_, true)) {
    place_->too_large = std::move(too_large);
    return;
  }
  connection_ = bytes_->connections_.try_emplace(peer_).first;
  std::list<IncomingBytes::Read>& reads = connection_->second.reads;
  place_ = reads.insert(reads.end(), {most_, std::move(too_large)});
  connection_->second.handed_over += kHeaderBytes;
  if (bytes_->asleep_) bytes_->changed_.Signal();
}

void IncomingMessage::Take(int64_t bytes) {
  if (!started_) return;
  std::function<void()> too_large;  // freed without the lock
  absl::MutexLock lock(&bytes_->mu_);
  too_large = std::exchange(place_->too_large, nullptr);
  connection_->second.handed_over += OnTheWire(bytes);
  taken_ = true;
}

void IncomingMessage::Stop() {
  if (!std::exchange(started_, false)) return;
  std::function<void()> too_large;  // freed without the lock
  absl::MutexLock lock(&bytes_->mu_);
  IncomingBytes::Connection& connection = connection_->second;
  too_large = std::move(place_->too_large);
  connection.reads.erase(place_);
  // Bytes of a message that never became complete are freed with the call.
  if (!taken_) connection.handed_over += most_;
  if (connection.reads.empty()) bytes_->connections_.erase(connection_);
}

void IncomingMessage::Refuse() {
  absl::MutexLock lock(&bytes_->mu_);
  const auto found = bytes_->connections_.find(peer_);
  if (found != bytes_->connections_.end()) {
    found->second.handed_over += kHeaderBytes + std::min(most_, kWindowBytes);
  }
}

}  // namespace dorad::rpc
