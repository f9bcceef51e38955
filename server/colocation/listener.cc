#include "server/colocation/listener.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "server/colocation/memory_file.h"
#include "server/colocation/unix_socket.h"
#include "server/platform/check.h"
#include "server/platform/error.h"
#include "server/platform/instant.h"
#include "server/platform/log.h"
#include "server/platform/net/socket_server.h"

namespace dorad::shared_memory {
namespace {

std::string NewSessionToken() {
  std::string session_token(kSessionTokenBytes, '\0');
  DORAD_CHECK(getrandom(session_token.data(), session_token.size(), 0) ==
              static_cast<ssize_t>(kSessionTokenBytes));
  return session_token;
}

absl::Status TooMany(const std::string& what) {
  return MakeError(absl::StatusCode::kResourceExhausted, "SHARED_MEMORY_TOO_MANY", what);
}

// The connections by session_token, and counts; read by other threads.
struct Index {
  mutable absl::Mutex mu;
  absl::flat_hash_map<std::string, std::shared_ptr<Session>> by_token ABSL_GUARDED_BY(mu);
  std::atomic<int64_t> memory_bytes{0};
};

// Returns false.
bool Refuse(const Session& session, const absl::Status& why) {
  LogWarning("a process at the shared-memory socket is refused",
             {{"reason", ReasonOf(why)}, {"error", std::string(why.message())}});
  (void)SendPacket(session.socket(), FormatAnswer(0, std::string(kSessionTokenBytes, '\0'), why));
  return false;
}

class ClientConnection final : public SocketServer::Connection {
 public:
  // options and index are borrowed. allowed: the process's user may use the socket.
  ClientConnection(std::shared_ptr<Session> session, bool allowed, const Listener::Options* options,
                   Index* index)
      : options_(*options),
        index_(*index),
        session_(std::move(session)),
        allowed_(allowed),
        deadline_(FromNow(options->first_registration_time)) {}

  ~ClientConnection() override {
    {
      absl::MutexLock lock(&index_.mu);
      index_.by_token.erase(session_->session_token());
    }
    session_->Close();
    for (size_t i = 0; i < session_->num_memories(); ++i) {
      index_.memory_bytes -= static_cast<int64_t>(session_->memory(i)->size());
    }
  }

  int socket() const override { return session_->socket(); }
  short events() const override { return POLLIN; }
  Instant deadline() const override { return deadline_; }

  // Handles one packet of the process.
  bool Advance() override {
    Packet packet = ReceivePacket(session_->socket(), kRegistrationBytes);
    if (packet.state == Packet::State::kNone) return true;
    if (packet.state == Packet::State::kEnd) return false;
    if (packet.state == Packet::State::kTooLong) packet.bytes.clear();
    if (!allowed_) {
      return Refuse(*session_,
                    MakeError(absl::StatusCode::kPermissionDenied, "SHARED_MEMORY_PEER_REFUSED",
                              "this socket is for processes of the server's own user only"));
    }
    if (IsWeightsRequest(packet.bytes)) {
      const auto pieces = LeaseWeights(packet);
      if (!pieces.ok()) return Refuse(*session_, pieces.status());
      return Answer(static_cast<uint32_t>(pieces->size()), *pieces);
    }
    auto memory = Take(packet);
    if (!memory.ok()) return Refuse(*session_, memory.status());
    const auto bytes = static_cast<int64_t>((*memory)->size());
    const uint32_t place = session_->Add(*std::move(memory));
    index_.memory_bytes += bytes;
    return Answer(place, {});
  }

 private:
  // The first answer publishes the session_token and ends the deadline.
  bool Answer(uint32_t index, absl::Span<const UniqueFd> fds) {
    if (deadline_ != Instant::max()) {
      deadline_ = Instant::max();
      absl::MutexLock lock(&index_.mu);
      index_.by_token[session_->session_token()] = session_;
    }
    return SendPacket(session_->socket(),
                      FormatAnswer(index, session_->session_token(), absl::OkStatus()), fds);
  }

  absl::StatusOr<std::vector<UniqueFd>> LeaseWeights(const Packet& packet) {
    DORAD_ASSIGN_OR_RETURN(const size_t first,
                           ParseWeightsRequest(packet.bytes, packet.fds.size()));
    if (weights_ == nullptr) {
      if (!options_.lease_weights) {
        return MakeError(absl::StatusCode::kInvalidArgument, "SHARED_MEMORY_MESSAGE_INVALID",
                         "the server has no weights to lease");
      }
      DORAD_ASSIGN_OR_RETURN(weights_, options_.lease_weights());
    }
    return weights_->Share(first, kMaxPiecesAtOnce);
  }

  absl::StatusOr<std::shared_ptr<const adapter::PeerMemory>> Take(Packet& packet) {
    DORAD_ASSIGN_OR_RETURN(const MemoryRegistration registration,
                           ParseRegistration(packet.bytes, packet.fds.size()));
    if (session_->num_memories() >= options_.max_memories) {
      return TooMany(absl::StrCat(options_.max_memories, " memories are registered already"));
    }
    if (registration.kind == MemoryKind::kCudaIpc) {
      if (options_.open_device) return options_.open_device(registration);
      return MakeError(absl::StatusCode::kFailedPrecondition, "SHARED_MEMORY_DEVICE_UNSUPPORTED",
                       "this server cannot read memory of a GPU");
    }
    if (files_ >= options_.max_files) {
      return TooMany(absl::StrCat(options_.max_files, " memory files are registered already"));
    }
    ++files_;
    return OpenMemoryFile(std::move(packet.fds.front()), registration.size);
  }

  const Listener::Options& options_;
  Index& index_;
  const std::shared_ptr<Session> session_;
  const bool allowed_;
  size_t files_ = 0;                             // of its memories
  std::shared_ptr<const WeightsLease> weights_;  // nullptr: no lease
  Instant deadline_;                             // for the first registration; max: none
};

}  // namespace

struct Listener::Impl {
  Impl(Options o, UniqueFd socket)
      : options(std::move(o)),
        server(std::in_place, std::move(socket),
               SocketServer::Options{.max_connections = options.max_connections,
                                     .when_full = SocketServer::WhenFull::kRefuse,
                                     .accept = [this](UniqueFd fd, bool has_room) {
                                       return Accept(std::move(fd), has_room);
                                     }}) {}

  ~Impl() {
    server.reset();
    (void)unlink(options.path.c_str());
  }

  std::unique_ptr<SocketServer::Connection> Accept(UniqueFd fd, bool has_room) {
    const std::optional<uint32_t> user = options.peer_user(fd.get());
    const bool allowed = user && (*user == 0 || *user == geteuid());
    auto session = std::make_shared<Session>(std::move(fd), NewSessionToken());
    if (!has_room) {
      Refuse(*session,
             TooMany(absl::StrCat(options.max_connections, " connections are open already")));
      return nullptr;
    }
    return std::make_unique<ClientConnection>(std::move(session), allowed, &options, &index);
  }

  const Options options;
  Index index;
  std::optional<SocketServer> server;  // last: its thread uses the others
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

absl::StatusOr<std::shared_ptr<const Session>> Listener::Find(
    const std::string& session_token) const {
  const Index& index = impl_->index;
  absl::MutexLock lock(&index.mu);
  const auto found = index.by_token.find(session_token);
  if (found != index.by_token.end()) return found->second;
  return MakeError(absl::StatusCode::kNotFound, "SHARED_MEMORY_SESSION_UNKNOWN",
                   "no open connection of the shared-memory socket has this session_token");
}

Listener::Stats Listener::stats() const {
  const Index& index = impl_->index;
  absl::MutexLock lock(&index.mu);
  return {static_cast<int64_t>(index.by_token.size()), index.memory_bytes};
}

}  // namespace dorad::shared_memory
