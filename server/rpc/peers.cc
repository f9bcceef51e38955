#include "server/rpc/peers.h"

#include <arpa/inet.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/channel_arguments.h>
#include <netdb.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/platform/check.h"
#include "server/platform/error.h"
#include "server/security/file_watcher.h"

namespace dorad::rpc {
namespace {

constexpr absl::Duration kRetryBusy = absl::Seconds(1);
constexpr int kNice = 10;
// A chunk or a configuration, and its frame.
constexpr int kMaxReceivedBytes = 4 << 20;

bool IsLoopback(const sockaddr& address) {
  static const auto* const loopback =
      new std::vector<Network>{*Network::Parse("127.0.0.0/8"), *Network::Parse("::1")};
  return std::any_of(loopback->begin(), loopback->end(),
                     [&](const Network& network) { return network.Contains(address); });
}

// "ipv4:10.0.0.1:50051".
std::string GrpcTarget(const sockaddr& address, socklen_t size, int port) {
  char host[NI_MAXHOST] = {};
  DORAD_CHECK(getnameinfo(&address, size, host, sizeof(host), nullptr, 0, NI_NUMERICHOST) == 0);
  return absl::StrCat(address.sa_family == AF_INET ? "ipv4:" : "ipv6:", JoinHostPort(host, port));
}

struct Addresses {
  explicit Addresses(addrinfo* first) : first(first) {}
  ~Addresses() { freeaddrinfo(first); }
  Addresses(const Addresses&) = delete;
  Addresses& operator=(const Addresses&) = delete;
  addrinfo* const first;
};

absl::StatusOr<std::string> ReadSecret(const std::string& path) {
  DORAD_ASSIGN_OR_RETURN(const security::FileWatcher::Texts texts,
                         security::FileWatcher({path}).Read());
  return std::string(absl::StripAsciiWhitespace(texts.front()));
}

}  // namespace

absl::Status PeerUnavailable(const std::string& message) {
  return MakeError(absl::StatusCode::kUnavailable, "PEER_UNAVAILABLE", message);
}

Peers::Peers(const Options& options)
    : options_(options), threads_(2 * options.max_transfers, kNice) {
  for (const std::string& text : options_.allowed) {
    const std::optional<Network> network = Network::Parse(text);
    DORAD_CHECK(network.has_value());  // the configuration's reader has checked it
    allowed_.push_back(*network);
  }
}

absl::Status Peers::Start(Direction direction, std::function<void()> transfer) {
  int& running = running_[static_cast<int>(direction)];
  {
    absl::MutexLock lock(&mu_);
    if (running >= options_.max_transfers) {
      return WithRetryAfter(
          MakeError(absl::StatusCode::kResourceExhausted, "PEER_BUSY",
                    absl::StrCat(running, " adapters are already on their way in this direction")),
          kRetryBusy);
    }
    ++running;
  }
  threads_.Submit([this, &running, transfer = std::move(transfer)] {
    transfer();
    absl::MutexLock lock(&mu_);
    --running;
  });
  return absl::OkStatus();
}

void Peers::Pace(int64_t bytes) {
  if (options_.bytes_per_second == 0) return;
  absl::Duration wait;
  {
    absl::MutexLock lock(&mu_);
    const Instant now = SteadyNow();
    next_send_ = std::max(next_send_, now);
    wait = Between(now, next_send_);
    const double seconds =
        static_cast<double>(bytes) / static_cast<double>(options_.bytes_per_second);
    next_send_ += absl::ToChronoNanoseconds(absl::Seconds(seconds));
  }
  absl::SleepFor(wait);
}

absl::StatusOr<std::shared_ptr<grpc::Channel>> Peers::Connect(const ListenAddress& peer,
                                                              grpc::ClientContext* context) const {
  const std::string address = JoinHostPort(peer.host, peer.port);
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(peer.host.c_str(), nullptr, &hints, &found); error != 0) {
    return PeerUnavailable(absl::StrCat(address, ": ", gai_strerror(error)));
  }
  const Addresses addresses(found);
  const addrinfo* chosen = nullptr;
  for (const addrinfo* each = found; each != nullptr && chosen == nullptr; each = each->ai_next) {
    const auto holds = [&](const Network& network) { return network.Contains(*each->ai_addr); };
    if (std::any_of(allowed_.begin(), allowed_.end(), holds)) chosen = each;
  }
  if (chosen == nullptr) {
    return MakeError(absl::StatusCode::kPermissionDenied, "PEER_NOT_ALLOWED",
                     absl::StrCat(address, " is not in peers.allowed"));
  }
  grpc::ChannelArguments arguments;
  arguments.SetInt("grpc.enable_http_proxy", 0);
  arguments.SetMaxReceiveMessageSize(kMaxReceivedBytes);
  // A new connection: a shared one would keep waiting after a peer's restart.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  std::shared_ptr<grpc::ChannelCredentials> credentials = grpc::InsecureChannelCredentials();
  if (!options_.ca_file.empty()) {
    grpc::SslCredentialsOptions tls;
    DORAD_ASSIGN_OR_RETURN(tls.pem_root_certs, ReadSecret(options_.ca_file));
    if (options_.own != nullptr) {
      const auto own = options_.own->identity();
      tls.pem_private_key = own->key;
      tls.pem_cert_chain = own->certificates;
    }
    credentials = grpc::SslCredentials(tls);
    // The certificate names the host, the connection goes to the checked address.
    arguments.SetSslTargetNameOverride(peer.host);
  }
  if (!options_.token_file.empty()) {
    if (options_.ca_file.empty() && !IsLoopback(*chosen->ai_addr) && !options_.allow_insecure) {
      return MakeError(absl::StatusCode::kPermissionDenied, "PEER_NOT_ALLOWED",
                       "the token would go to another host in plain text: set peers.ca_file");
    }
    DORAD_ASSIGN_OR_RETURN(const std::string token, ReadSecret(options_.token_file));
    context->AddMetadata("authorization", absl::StrCat("Bearer ", token));
  }
  return grpc::CreateCustomChannel(GrpcTarget(*chosen->ai_addr, chosen->ai_addrlen, peer.port),
                                   credentials, arguments);
}

}  // namespace dorad::rpc
