// A listening socket and its connections, served by one thread over poll().
//
// Every connection has a deadline, and their number is bounded, so no client can block the thread
// or the places. The metrics listener and the shared-memory socket are built on it; each owns its
// server. Thread-safe.
#pragma once

#include <cstddef>
#include <functional>
#include <list>
#include <memory>
#include <thread>

#include "server/platform/instant.h"
#include "server/platform/net/unique_fd.h"

namespace dorad {

class SocketServer {
 public:
  // One accepted connection. Used, and destroyed, on the server's thread only.
  class Connection {
   public:
    virtual ~Connection() = default;
    virtual int socket() const = 0;
    // The awaited events of poll(): POLLIN or POLLOUT.
    virtual short events() const = 0;
    // Called on one of the events or an error. False: the connection is over. An exception is
    // logged and ends the connection.
    virtual bool Advance() = 0;
    // The time at which it is closed. Advance may move it.
    virtual Instant deadline() const = 0;
  };

  enum class WhenFull {
    kDropOldest,  // a new connection replaces the oldest one
    kRefuse,      // `accept` gets has_room = false
  };
  struct Options {
    size_t max_connections = 64;
    WhenFull when_full = WhenFull::kDropOldest;
    // Makes a connection of a non-blocking socket. nullptr: the socket is closed. has_room is
    // false, and the result is closed, when the server is full (kRefuse). Runs on the server's
    // thread and must not block.
    std::function<std::unique_ptr<Connection>(UniqueFd socket, bool has_room)> accept;
  };

  // listener: a listening, non-blocking socket.
  SocketServer(UniqueFd listener, Options options);
  // Closes every connection and joins the thread.
  ~SocketServer();
  SocketServer(const SocketServer&) = delete;
  SocketServer& operator=(const SocketServer&) = delete;

 private:
  void Run();
  int TimeoutMillis() const;
  void AcceptWaiting();
  bool Accept();

  const Options options_;
  const UniqueFd listener_;
  const UniqueFd wake_;
  // Below: only used by the thread. Oldest connection first.
  std::list<std::unique_ptr<Connection>> connections_;
  Instant accept_after_ = Instant::min();
  std::thread thread_;  // last: uses all of the above
};

}  // namespace dorad
