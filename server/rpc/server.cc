#include "server/rpc/server.h"

#include <google/protobuf/stubs/logging.h>
#include <grpc/grpc.h>
#include <grpc/support/log.h>
#include <grpcpp/ext/channelz_service_plugin.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/server_builder_option.h>
#include <grpcpp/impl/server_builder_plugin.h>
#include <grpcpp/resource_quota.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/platform/error.h"
#include "server/platform/instant.h"
#include "server/platform/log.h"
#include "server/platform/net/listen_address.h"
#include "server/platform/net/listen_socket.h"
#include "server/platform/net/unique_fd.h"
#include "server/rpc/adapter_service.h"
#include "server/rpc/control_service.h"
#include "server/rpc/health_service.h"
#include "server/rpc/inference_service.h"
#include "server/rpc/message_deadlines.h"
#include "server/rpc/raw_service.h"
#include "server/rpc/tls_credentials.h"

namespace dorad::rpc {
namespace {

constexpr char kReadiness[] = "readiness";
constexpr char kLiveness[] = "liveness";
// The number of messages of the largest size that a listener may be reading at a time; beyond that
// gRPC ends calls of any caller (RESOURCE_EXHAUSTED).
constexpr int64_t kReadingMessages = 8;
// Memory for connections and calls besides.
constexpr int64_t kMinReadingBytes = 64 << 20;

// gRPC logs to stderr in its own format, including errors that the server reports itself.
void ForwardGrpcLog(gpr_log_func_args* args) {
  Log(LogLevel::kDebug, "grpc",
      {{"text", std::string(args->message)}, {"at", absl::StrCat(args->file, ":", args->line)}});
}

// protobuf logs to stderr too, with callers' invalid UTF-8.
void ForwardProtobufLog(google::protobuf::LogLevel /*level*/, const char* file, int line,
                        const std::string& message) {
  Log(LogLevel::kDebug, "protobuf", {{"text", message}, {"at", absl::StrCat(file, ":", line)}});
}

int ClampToInt(int64_t value) {
  return static_cast<int>(std::min<int64_t>(value, std::numeric_limits<int>::max()));
}

void AddLimits(const Server::Options& options, grpc::ServerBuilder* builder) {
  grpc::ResourceQuota quota("dorad");
  quota.Resize(static_cast<size_t>(
      std::max(kReadingMessages * options.max_message_bytes, kMinReadingBytes)));
  builder->SetResourceQuota(quota);
  // gRPC checks a message's size only after reading all of it, and its error says less than
  // ParseRequest's.
  builder->SetMaxReceiveMessageSize(-1);
  // No decompression: three mebibytes would become as many gibibytes, outside the quota.
  for (const grpc_compression_algorithm algorithm : {GRPC_COMPRESS_DEFLATE, GRPC_COMPRESS_GZIP}) {
    builder->SetCompressionAlgorithmSupportStatus(algorithm, false);
  }
  builder->AddChannelArgument(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
  builder->AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS,
                              ClampToInt(options.max_concurrent_streams));
  // A second server on the same port must fail, not share it.
  builder->AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  // The default keeps connections without HTTP/2 for 120 s.
  builder->AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, 5000);
  builder->AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, 16 << 10);
  // Dead connections are found within 80 s; clients may ping every 10 s.
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 60'000);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 20'000);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 10'000);
}

// gRPC unlinks any socket at the path: without this check a second server would replace the first
// one's socket.
absl::Status CheckSocketFree(const std::string& path) {
  sockaddr_un address{};
  if (path.size() >= sizeof(address.sun_path)) {
    return MakeError(absl::StatusCode::kInvalidArgument, "LISTEN_ADDRESS",
                     absl::StrCat("the path of a socket has fewer than ", sizeof(address.sun_path),
                                  " bytes: ", path));
  }
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.c_str(), path.size());
  const UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int error =
      connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 ? 0
                                                                                           : errno;
  // No socket, or one of a dead process.
  if (error == ENOENT || error == ECONNREFUSED) return absl::OkStatus();
  // EPROTOTYPE: the socket has another type, such as a shared-memory socket.
  if (error == 0 || error == EPROTOTYPE) {
    return MakeError(absl::StatusCode::kUnavailable, "PORT_IN_USE",
                     absl::StrCat("cannot listen on unix:", path, ": another server does"));
  }
  return MakeError(absl::StatusCode::kUnavailable, "LISTEN_FAILED",
                   absl::StrCat("cannot listen on unix:", path, ": ", std::strerror(error)));
}

absl::Status WhyListenFailed(const ListenAddress& address, const std::string& text) {
  if (address.unix_path.empty()) {
    const absl::StatusOr<ListenSocket> probe = ListenTcp(address);
    if (!probe.ok()) return probe.status();
  }
  return MakeError(absl::StatusCode::kUnavailable, "LISTEN_FAILED",
                   absl::StrCat("cannot listen on ", text));
}

// gRPC's own services on a listener. Linking or requesting one would add it to every server of the
// process.
struct BuiltinServices {
  bool reflection = false;
  bool channelz = false;
};

class OnlySome final : public grpc::ServerBuilderOption {
 public:
  explicit OnlySome(BuiltinServices own) : own_(own) {}

  void UpdateArguments(grpc::ChannelArguments* /*args*/) override {}
  void UpdatePlugins(std::vector<std::unique_ptr<grpc::ServerBuilderPlugin>>* plugins) override {
    const auto last = std::remove_if(plugins->begin(), plugins->end(), [this](const auto& plugin) {
      return plugin->name() == "channelz_service" ? !own_.channelz : !own_.reflection;
    });
    plugins->erase(last, plugins->end());
  }

 private:
  const BuiltinServices own_;
};

struct Listener {
  std::shared_ptr<grpc::ServerCredentials> credentials;  // used by every handshake
  std::unique_ptr<grpc::Server> server;
  std::string address;
  std::vector<RawService*> parts;
  HealthService* health = nullptr;
};

// Sets a restrictive umask while it lives: gRPC creates the socket file and listens on it in one
// call. The process has one umask: it also applies to files of other threads meanwhile.
class RestrictedUmask {
 public:
  RestrictedUmask() : before_(umask(S_IRWXG | S_IRWXO)) { umask(before_ | S_IRWXO); }
  ~RestrictedUmask() { umask(before_); }
  RestrictedUmask(const RestrictedUmask&) = delete;
  RestrictedUmask& operator=(const RestrictedUmask&) = delete;

 private:
  const mode_t before_;
};

absl::StatusOr<Listener> Listen(const std::string& text, const Server::Options& options,
                                BuiltinServices own, HealthService* health,
                                std::vector<RawService*> parts) {
  DORAD_ASSIGN_OR_RETURN(const ListenAddress address, ParseListenAddress(text));
  const bool is_unix = !address.unix_path.empty();
  if (is_unix) DORAD_RETURN_IF_ERROR(CheckSocketFree(address.unix_path));
  grpc::ServerBuilder builder;
  AddLimits(options, &builder);
  builder.SetOption(std::make_unique<OnlySome>(own));
  int port = 0;
  Listener listener;
  // A socket file needs no encryption.
  listener.credentials = !is_unix && options.tls != nullptr ? MakeTlsCredentials(options.tls)
                                                            : grpc::InsecureServerCredentials();
  builder.AddListeningPort(
      is_unix ? absl::StrCat("unix:", address.unix_path) : JoinHostPort(address.host, address.port),
      listener.credentials, &port);
  for (RawService* part : parts) builder.RegisterService(part);
  builder.RegisterService(health);
  listener.parts = std::move(parts);
  listener.health = health;
  {
    // The socket file is never open to others, not even for a moment.
    std::optional<RestrictedUmask> restricted_umask;
    if (is_unix) restricted_umask.emplace();
    listener.server = builder.BuildAndStart();
  }
  if (listener.server == nullptr || port == 0) return WhyListenFailed(address, text);
  if (is_unix && chmod(address.unix_path.c_str(), 0660) != 0) {
    return MakeError(
        absl::StatusCode::kUnavailable, "LISTEN_FAILED",
        absl::StrCat("cannot set the mode of ", address.unix_path, ": ", std::strerror(errno)));
  }
  listener.address = is_unix ? text : JoinHostPort(address.host, port);
  return listener;
}

}  // namespace

struct Server::Impl {
  explicit Impl(Services* s)
      : services(s),
        inference(s),
        adapters(s),
        control(s),
        main_health(s, &health_deadlines),
        admin_health(s, &health_deadlines) {}

  // Calls each(health, parts) for each active listener.
  template <typename Each>
  void ForEachHealth(Each each) {
    for (Listener* listener : {&main, &admin}) {
      if (listener->server) each(listener->health, listener->parts);
    }
  }

  // Generate calls end with their tokens so far.
  void Abort(engine::AbortTarget target) {
    services->engine->Abort(std::move(target), "the server is shutting down", [](int) {});
  }

  bool RequestsRun() const { return !services->engine->idle() || services->open_requests > 0; }

  // Whether loads can run: they need the base weights, and would wait as long as these sleep.
  bool LoadsRun() const {
    if (services->open_loads == 0) return false;
    const std::vector<std::string> asleep = services->sleep->asleep();
    return std::find(asleep.begin(), asleep.end(), "weights") == asleep.end();
  }

  // Frozen and sleeping requests would never finish.
  void AbortFrozen(const engine::EngineStats& stats) {
    if (!RequestsRun()) return;
    if (stats.paused || stats.asleep) Abort({.all = true});
    for (const adapter::AdapterRef& ref : stats.paused_adapters) Abort({.adapter = ref});
  }

  // Waits while busy() and at most `timeout`, or until `hurry`.
  template <typename Busy>
  static void AwaitQuiet(absl::Duration timeout, const absl::Notification& hurry, Busy busy) {
    constexpr absl::Duration kPoll = absl::Milliseconds(20);
    const Instant end = FromNow(timeout);
    while (busy() && SteadyNow() < end) {
      if (hurry.WaitForNotificationWithTimeout(kPoll)) return;
    }
  }

  Services* const services;
  InferenceService inference;
  AdapterService adapters;
  ControlService control;
  MessageDeadlines health_deadlines{kHealthRequestTime};
  HealthService main_health;
  HealthService admin_health;
  // After the services: the servers end first.
  Listener main;
  Listener admin;
  bool shut_down = false;
};

Server::Server(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Server::~Server() { Shutdown(absl::ZeroDuration()); }

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const Options& options, Services* services) {
  gpr_set_log_function(ForwardGrpcLog);
  google::protobuf::SetLogHandler(ForwardProtobufLog);
  // Never shut down: the last shutdown waits for gRPC's threads, and these may wait for clients
  // that are slow to read their cancellations.
  grpc_init();
  auto impl = std::make_unique<Impl>(services);
  RawService* const inference = &impl->inference;
  RawService* const adapters = &impl->adapters;
  RawService* const control = &impl->control;
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::channelz::experimental::InitChannelzService();
  if (options.admin_listen.empty()) {
    const BuiltinServices own{.reflection = !options.asks_callers,
                              .channelz = !options.asks_callers};
    DORAD_ASSIGN_OR_RETURN(impl->main, Listen(options.listen, options, own, &impl->main_health,
                                              {inference, adapters, control}));
  } else {
    const BuiltinServices own{.reflection = !options.asks_callers, .channelz = false};
    DORAD_ASSIGN_OR_RETURN(impl->main,
                           Listen(options.listen, options, own, &impl->main_health, {inference}));
    const BuiltinServices all{.reflection = true, .channelz = true};
    DORAD_ASSIGN_OR_RETURN(impl->admin, Listen(options.admin_listen, options, all,
                                               &impl->admin_health, {adapters, control}));
  }
  std::unique_ptr<Server> server(new Server(std::move(impl)));
  server->SetAlive(true);
  server->SetServing(true);
  return server;
}

const std::string& Server::address() const { return impl_->main.address; }
const std::string& Server::admin_address() const { return impl_->admin.address; }

void Server::SetServing(bool serving) {
  impl_->ForEachHealth([serving](HealthService* health, const auto& parts) {
    for (const char* name : {"", kReadiness}) health->Set(name, serving);
    for (const RawService* part : parts) health->Set(part->name(), serving);
  });
}

void Server::SetAlive(bool alive) {
  impl_->ForEachHealth(
      [alive](HealthService* health, const auto&) { health->Set(kLiveness, alive); });
}

void Server::Drain(const DrainTimes& times, const absl::Notification& hurry) {
  SetServing(false);
  hurry.WaitForNotificationWithTimeout(times.delay);
  impl_->services->draining = true;
  engine::Engine* const engine = impl_->services->engine;
  engine->StopAdmission();
  Impl::AwaitQuiet(times.timeout, hurry, [this, engine] {
    // Pauses and sleep may begin at any time.
    impl_->AbortFrozen(engine->stats());
    return impl_->RequestsRun() || impl_->LoadsRun() || impl_->services->open_changes > 0;
  });
  if (!impl_->RequestsRun()) return;
  impl_->Abort({.all = true});
  const absl::Notification never;
  Impl::AwaitQuiet(times.grace, never, [this] { return impl_->RequestsRun(); });
}

void Server::Shutdown(absl::Duration grace) {
  if (std::exchange(impl_->shut_down, true)) return;
  impl_->ForEachHealth([](HealthService* health, const auto&) { health->Shutdown(); });
  const auto deadline = std::chrono::system_clock::now() + absl::ToChronoNanoseconds(grace);
  for (Listener* listener : {&impl_->main, &impl_->admin}) {
    if (listener->server) listener->server->Shutdown(deadline);
  }
}

}  // namespace dorad::rpc
