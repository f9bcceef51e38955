#include "server/handover/listener.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <list>
#include <thread>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "server/base/check.h"
#include "server/base/error.h"
#include "server/base/log.h"
#include "server/handover/memory_file.h"
#include "server/handover/unix_socket.h"

namespace dorad::handover {
namespace {

using Clock = std::chrono::steady_clock;

// Without descriptors accept() fails at once and for ever; look again after this.
constexpr std::chrono::milliseconds kAcceptPause(100);

std::string NewTicket() {
  std::string ticket(kTicketBytes, '\0');
  DORAD_CHECK(getrandom(ticket.data(), ticket.size(), 0) == static_cast<ssize_t>(kTicketBytes));
  return ticket;
}

absl::Status TooMany(const std::string& what) {
  return MakeError(absl::StatusCode::kResourceExhausted, "HANDOVER_TOO_MANY", what);
}

struct Connection {
  std::shared_ptr<Session> session;
  bool allowed = false;                         // by its user
  size_t files = 0;                             // of its memories
  std::shared_ptr<const WeightsLease> weights;  // nullptr: not lent to it
  Clock::time_point deadline;                   // of its first offer; max: it has come
};

}  // namespace

struct Listener::Impl {
  Impl(Options o, UniqueFd socket)
      : options(std::move(o)),
        listener(std::move(socket)),
        wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    DORAD_CHECK(wake.ok());
    thread = std::thread([this] { Run(); });
  }

  ~Impl() {
    const uint64_t one = 1;
    DORAD_CHECK(write(wake.get(), &one, sizeof(one)) == sizeof(one));
    thread.join();
    while (!connections.empty()) Drop(connections.begin());
    (void)unlink(options.path.c_str());
  }

  void Run() {
    std::vector<pollfd> polled;
    while (true) {
      polled.clear();
      polled.push_back({wake.get(), POLLIN, 0});
      const bool accepting = Clock::now() >= accept_after;
      polled.push_back({accepting ? listener.get() : -1, POLLIN, 0});
      for (const Connection& connection : connections) {
        polled.push_back({connection.session->socket(), POLLIN, 0});
      }
      const int ready = poll(polled.data(), polled.size(), TimeoutMillis());
      DORAD_CHECK(ready >= 0 || errno == EINTR);
      if (ready < 0) continue;
      if (polled[0].revents != 0) return;
      auto event = polled.begin() + 2;
      for (auto it = connections.begin(); it != connections.end(); ++event) {
        const bool keep = event->revents == 0 || Advance(*it);
        it = keep && Clock::now() < it->deadline ? std::next(it) : Drop(it);
      }
      if (polled[1].revents != 0) Accept();
    }
  }

  // Until the next deadline; -1 is for ever.
  int TimeoutMillis() const {
    const Clock::time_point now = Clock::now();
    Clock::time_point next = Clock::time_point::max();
    if (accept_after > now) next = accept_after;
    for (const Connection& connection : connections) next = std::min(next, connection.deadline);
    if (next == Clock::time_point::max()) return -1;
    const auto wait = std::chrono::ceil<std::chrono::milliseconds>(next - now).count();
    return static_cast<int>(std::max<int64_t>(0, wait));
  }

  void Accept() {
    UniqueFd fd(accept4(listener.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!fd.ok()) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
        accept_after = Clock::now() + kAcceptPause;
      }
      return;
    }
    const std::optional<uint32_t> user = options.peer_user(fd.get());
    Connection connection;
    connection.allowed = user && (*user == 0 || *user == geteuid());
    connection.session = std::make_shared<Session>(std::move(fd), NewTicket());
    if (connections.size() >= options.max_connections) {
      (void)Refuse(connection,
                   TooMany(absl::StrCat(options.max_connections, " connections are open already")));
      return;
    }
    connection.deadline = Clock::now() + absl::ToChronoNanoseconds(options.first_offer_time);
    connections.push_back(std::move(connection));
  }

  // Takes what the peer has sent; false when the connection is over.
  bool Advance(Connection& connection) {
    Packet packet = ReceivePacket(connection.session->socket(), kOfferBytes);
    if (packet.state == Packet::State::kNone) return true;
    if (packet.state == Packet::State::kEnd) return false;
    if (packet.state == Packet::State::kTooLong) packet.bytes.clear();
    if (!connection.allowed) {
      return Refuse(connection,
                    MakeError(absl::StatusCode::kPermissionDenied, "HANDOVER_PEER_REFUSED",
                              "this socket is for processes of the server's own user only"));
    }
    if (IsWeightsRequest(packet.bytes)) {
      const auto pieces = Lend(connection, packet);
      if (!pieces.ok()) return Refuse(connection, pieces.status());
      return Answer(connection, static_cast<uint32_t>(pieces->size()), *pieces);
    }
    auto memory = Take(connection, packet);
    if (!memory.ok()) return Refuse(connection, memory.status());
    memory_bytes += static_cast<int64_t>((*memory)->size());
    return Answer(connection, connection.session->Add(*std::move(memory)), {});
  }

  // From its first answer on a connection has a ticket, and no deadline.
  bool Answer(Connection& connection, uint32_t index, absl::Span<const UniqueFd> fds) {
    const Session& session = *connection.session;
    if (connection.deadline != Clock::time_point::max()) {
      connection.deadline = Clock::time_point::max();
      absl::MutexLock lock(&mu);
      by_ticket[session.ticket()] = connection.session;
    }
    return SendPacket(session.socket(), FormatAnswer(index, session.ticket(), absl::OkStatus()),
                      fds);
  }

  absl::StatusOr<std::vector<UniqueFd>> Lend(Connection& connection, const Packet& packet) const {
    DORAD_ASSIGN_OR_RETURN(const size_t first,
                           ParseWeightsRequest(packet.bytes, packet.fds.size()));
    if (connection.weights == nullptr) {
      if (!options.lend_weights) {
        return MakeError(absl::StatusCode::kInvalidArgument, "HANDOVER_MESSAGE_INVALID",
                         "there are no weights to be lent");
      }
      DORAD_ASSIGN_OR_RETURN(connection.weights, options.lend_weights());
    }
    return connection.weights->Share(first, kMaxPiecesAtOnce);
  }

  absl::StatusOr<std::shared_ptr<const adapter::PeerMemory>> Take(Connection& connection,
                                                                  Packet& packet) const {
    DORAD_ASSIGN_OR_RETURN(const Offer offer, ParseOffer(packet.bytes, packet.fds.size()));
    if (connection.session->num_memories() >= options.max_memories) {
      return TooMany(absl::StrCat(options.max_memories, " memories are held already"));
    }
    if (offer.kind == MemoryKind::kCudaIpc) {
      if (options.open_device) return options.open_device(offer);
      return MakeError(absl::StatusCode::kFailedPrecondition, "HANDOVER_DEVICE_UNSUPPORTED",
                       "this server cannot read memory of a GPU");
    }
    if (connection.files >= options.max_files) {
      return TooMany(absl::StrCat(options.max_files, " memory files are held already"));
    }
    ++connection.files;
    return OpenMemoryFile(std::move(packet.fds.front()), offer.size);
  }

  // Returns false.
  bool Refuse(const Connection& connection, const absl::Status& why) const {
    LogWarning("a process at the handover socket is refused",
               {{"reason", ReasonOf(why)}, {"error", std::string(why.message())}});
    (void)SendPacket(connection.session->socket(),
                     FormatAnswer(0, std::string(kTicketBytes, '\0'), why));
    return false;
  }

  std::list<Connection>::iterator Drop(std::list<Connection>::iterator it) {
    Session& session = *it->session;
    {
      absl::MutexLock lock(&mu);
      by_ticket.erase(session.ticket());
    }
    session.Close();
    for (size_t i = 0; i < session.num_memories(); ++i) {
      memory_bytes -= static_cast<int64_t>(session.memory(i)->size());
    }
    return connections.erase(it);
  }

  const Options options;
  const UniqueFd listener;
  const UniqueFd wake;
  mutable absl::Mutex mu;
  absl::flat_hash_map<std::string, std::shared_ptr<Session>> by_ticket ABSL_GUARDED_BY(mu);
  std::atomic<int64_t> memory_bytes{0};
  // Below: only used by the thread.
  std::list<Connection> connections;
  Clock::time_point accept_after = Clock::time_point::min();
  std::thread thread;
};

std::optional<uint32_t> Listener::PeerUser(int socket) {
  ucred peer = {};
  socklen_t size = sizeof(peer);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return std::nullopt;
  return peer.uid;
}

absl::StatusOr<std::unique_ptr<Listener>> Listener::Start(Options options) {
  DORAD_ASSIGN_OR_RETURN(UniqueFd socket, ListenUnix(options.path));
  return std::unique_ptr<Listener>(
      new Listener(std::make_unique<Impl>(std::move(options), std::move(socket))));
}

Listener::Listener(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Listener::~Listener() = default;

absl::StatusOr<std::shared_ptr<const Session>> Listener::Find(const std::string& ticket) const {
  absl::MutexLock lock(&impl_->mu);
  const auto found = impl_->by_ticket.find(ticket);
  if (found != impl_->by_ticket.end()) return found->second;
  return MakeError(absl::StatusCode::kNotFound, "HANDOVER_TICKET_UNKNOWN",
                   "no open connection of the handover socket has this ticket");
}

Listener::Stats Listener::stats() const {
  absl::MutexLock lock(&impl_->mu);
  return {static_cast<int64_t>(impl_->by_ticket.size()), impl_->memory_bytes};
}

}  // namespace dorad::handover
