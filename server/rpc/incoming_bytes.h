// Ends reads of calls whose connection brings more bytes than the calls may need.
//
// gRPC hands a message over when it is complete; until then it holds all that arrives, whatever the
// method. But the kernel counts the bytes of a connection, so one thread compares them with the
// messages that were handed over and with the bounds of those that are awaited. What a connection
// brings between three looks is not bounded here; gRPC's quota bounds it. Socket files are not
// watched: they are for the host's own users. Owned by Services. Thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace dorad::rpc {

class IncomingBytes {
 public:
  // What a connection may hold besides the messages that are awaited.
  static constexpr int64_t kOtherBytes = 256 << 10;

  IncomingBytes();
  ~IncomingBytes();
  IncomingBytes(const IncomingBytes&) = delete;
  IncomingBytes& operator=(const IncomingBytes&) = delete;

 private:
  friend class IncomingMessage;

  struct Read {
    int64_t most = 0;
    std::function<void()> too_large;  // null: told, or the message was handed over
    bool suspected = false;           // at the last look
  };
  struct Connection {
    std::list<Read> reads;
    // Since the first of these reads began: bytes of messages, of what comes with them, and of
    // messages that no call awaits any more.
    int64_t handed_over = 0;
    int fd = -1;
    // At the last look; -1: there was none.
    int64_t received = -1;
    int64_t known = 0;
    // Bytes that arrived and were not handed over.
    int64_t held = 0;
  };
  using Connections = std::map<std::string, Connection>;

  void Run() ABSL_LOCKS_EXCLUDED(mu_);
  // Returns what to call for the reads that are to end.
  std::vector<std::function<void()>> Look() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  static void Count(int64_t received, Connection* connection);
  static void Judge(Connection* connection, std::vector<std::function<void()>>* told);

  absl::Mutex mu_;
  absl::CondVar changed_;
  Connections connections_ ABSL_GUARDED_BY(mu_);  // with reads, by peer
  bool asleep_ ABSL_GUARDED_BY(mu_) = false;
  bool closing_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;  // last: Run needs the others
};

// The messages of one call, one at a time. Only the reader calls the functions. The bytes outlive
// it.
class IncomingMessage {
 public:
  // peer: the connection, as gRPC names it. most: the bound of the method's messages.
  IncomingMessage(IncomingBytes* bytes, std::string peer, int64_t most)
      : bytes_(bytes), peer_(std::move(peer)), most_(most) {}
  ~IncomingMessage() { Stop(); }
  IncomingMessage(const IncomingMessage&) = delete;
  IncomingMessage& operator=(const IncomingMessage&) = delete;

  int64_t most() const { return most_; }
  // Awaits a message. Calls `too_large` at most once, on another thread; the other functions may
  // return while it runs.
  void Start(std::function<void()> too_large);
  // A message of so many bytes was handed over. The bytes of the next one may arrive already.
  void Take(int64_t bytes);
  // No further message is awaited.
  void Stop();
  // The call is refused and does not await its message: some of it arrives nevertheless.
  void Refuse();

 private:
  IncomingBytes* const bytes_;
  const std::string peer_;
  const int64_t most_;
  bool started_ = false;
  bool taken_ = false;
  IncomingBytes::Connections::iterator connection_;
  std::list<IncomingBytes::Read>::iterator place_;
};

}  // namespace dorad::rpc
