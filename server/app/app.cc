#include "server/app/app.h"

#include <unistd.h>

#include <atomic>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/notification.h"
#include "server/adapter/peft/folder.h"
#include "server/adapter/publish/loader.h"
#include "server/adapter/registry/registry.h"
#include "server/adapter/residency/residency.h"
#include "server/adapter/store/store.h"
#include "server/app/cli.h"
#include "server/app/config_check.h"
#include "server/app/listener_health_check.h"
#include "server/app/load_report.h"
#include "server/app/options_from_config.h"
#include "server/app/scrape.h"
#include "server/app/shutdown_watchdog.h"
#include "server/app/watchdog.h"
#include "server/backends/backend.h"
#include "server/colocation/colocation.h"
#include "server/engine/engine.h"
#include "server/platform/config/config_reload.h"
#include "server/platform/error.h"
#include "server/platform/instant.h"
#include "server/platform/log.h"
#include "server/platform/metrics/metrics.h"
#include "server/platform/net/http_server.h"
#include "server/platform/net/listen_address.h"
#include "server/platform/net/listen_socket.h"
#include "server/platform/net/listener_probe.h"
#include "server/platform/process/stack_dump.h"
#include "server/platform/thread_pool.h"
#include "server/rpc/peers.h"
#include "server/rpc/server.h"
#include "server/rpc/upload_store.h"
#include "server/security/security_manager.h"

namespace dorad {
namespace {

// Loads must not slow running streams down.
constexpr int kLoaderNice = 10;
constexpr int kResponseThreads = 2;
constexpr int kRegistryWriters = 1;  // changes are serialised anyway
// Time for the last results to reach the clients; ends open Watch streams.
constexpr absl::Duration kShutdownGrace = absl::Seconds(1);
// Time for abandoned work that destructors wait for.
constexpr absl::Duration kEndGrace = absl::Seconds(2);

// The same status with the failed part named before its message and violations' fields.
absl::Status Annotate(const absl::Status& status, const std::string& part) {
  absl::Status out(status.code(), absl::StrCat(part, ": ", status.message()));
  status.ForEachPayload(
      [&out](absl::string_view url, const absl::Cord& payload) { out.SetPayload(url, payload); });
  return out;
}

// Closes the colocation at its position among the members.
struct ColocationEnd {
  ~ColocationEnd() { colocation->Close(); }
  Colocation* colocation;
};

// A port that is taken ends the start before the weights are read.
absl::Status TryListeners(const ServerConfig& server) {
  for (const auto& [what, text] : {std::pair("gRPC listener", &server.grpc_listen),
                                   {"gRPC listener", &server.admin_listen},
                                   {"metrics listener", &server.metrics_listen}}) {
    if (text->empty()) continue;
    DORAD_ASSIGN_OR_RETURN(const ListenAddress address, ParseListenAddress(*text));
    if (!address.unix_path.empty()) continue;
    const absl::StatusOr<ListenSocket> socket = ListenTcp(address);
    if (!socket.ok()) return Annotate(socket.status(), what);
  }
  return absl::OkStatus();
}

}  // namespace

// Members depend on those above them and are destroyed before them.
struct App::Impl {
  // `c` has values in place of "auto", `given` is the configuration as read. `opened` uses `d`;
  // nullptr: no store.
  Impl(const Config& c, const Config& given, std::unique_ptr<security::SecurityManager> g,
       std::unique_ptr<Backend> loaded, std::unique_ptr<engine::ModelRunner> runner,
       std::unique_ptr<adapter::Disk> d, std::unique_ptr<adapter::Store> opened)
      : config(c),
        settings(given),
        security_manager(std::move(g)),
        backend(std::move(loaded)),
        disk(std::move(d)),
        store(std::move(opened)),
        metrics(ToMetricsInfo(config, backend->info())),
        response_executor(kResponseThreads, 0),
        load_pool(ToInt32(config.adapters.loader_threads), kLoaderNice),
        residency(ResidencyOptions()),
        registry(RegistryOptions()),
        uploads(ToUploadOptions(config, store != nullptr)),
        peers(ToPeerOptions(config, security_manager->tls())),
        loader(
            LoaderOptions(), &load_pool, &backend->modules(), backend->adapter_builder(),
            &residency, &registry,
            [this](const adapter::EndedLoad& load) {
              ReportLoad(load, &metrics);
              // While the server sleeps, freed memory belongs to other processes.
              if (colocation.asleep()) backend->ReturnFreedMemory();
            },
            store.get()),
        engine(EngineOptions(), std::move(runner), &metrics) {
    colocation.Attach({backend.get(), &residency, &loader, &engine, &metrics});
    if (store != nullptr) registry_writer = std::make_unique<ThreadPool>(kRegistryWriters, 0);
    FillServices();
    activations = registry.Subscribe([this] { engine.NoteActivated(); });
  }

  ~Impl() { registry.Unsubscribe(activations); }

  engine::EngineOptions EngineOptions() {
    engine::EngineOptions options = ToEngineOptions(config, backend->info());
    // Counts tokens when they are generated: a client that disconnects before it reads them has
    // used them too.
    if (security::Quotas* const quotas = security_manager->quotas()) {
      options.on_generated = [quotas](const std::string& tenant, int64_t tokens) {
        quotas->TakeTokens(tenant, tokens);
      };
    }
    return options;
  }

  adapter::Residency::Options ResidencyOptions() {
    adapter::Residency::Options options;
    options.max_bytes = config.adapters.resident_bytes;
    options.host_copies = backend->host_copies();
    options.shrink_kv = [this](int64_t bytes) { return colocation.ShrinkKv(bytes); };
    options.executor = [this](std::function<void()> task) { load_pool.Submit(std::move(task)); };
    return options;
  }

  adapter::AdapterRegistry::Options RegistryOptions() {
    adapter::AdapterRegistry::Options options;
    options.executor = [this](std::function<void()> task) { load_pool.Submit(std::move(task)); };
    options.log = store.get();
    return options;
  }

  void FillServices() {
    services.engine = &engine;
    services.images = &images;
    services.registry = &registry;
    services.metrics = &metrics;
    services.response_executor = &response_executor;
    services.run_change = [this](std::function<void()> change) { RunChange(std::move(change)); };
    services.uploads = &uploads;
    services.peers = &peers;
    services.store = store.get();
    services.publisher = &loader;
    services.sleep = colocation.sleep();
    services.weight_layout = backend->weight_layout();
    services.authority = security_manager->authority();
    services.quotas = security_manager->quotas();
    services.memory_by_kind = [this] { return MemoryByKind(); };
    services.shared_weight_bytes = [this] { return backend->shared_weight_bytes(); };
    services.info = ToServerInfo(config, backend->info());
    services.max_message_bytes = config.server.max_message_bytes;
    services.max_adapter_bytes = config.adapters.max_bytes;
    services.message_deadlines = std::make_unique<rpc::MessageDeadlines>(
        absl::Seconds(config.server.message_timeout_seconds));
    services.default_deadline_seconds = config.server.default_deadline_seconds;
  }

  adapter::LoaderOptions LoaderOptions() {
    adapter::LoaderOptions options = ToLoaderOptions(config);
    options.run_change = [this](std::function<void()> change) { RunChange(std::move(change)); };
    return options;
  }

  // Runs a change of the registry inline, or on the thread that may wait for the store's disk.
  void RunChange(std::function<void()> change) {
    if (registry_writer == nullptr) return change();
    registry_writer->Submit(std::move(change));
  }

  std::map<std::string, int64_t> MemoryByKind() const {
    std::map<std::string, int64_t> kinds = backend->memory_by_kind();
    kinds.try_emplace("adapters", residency.stats().bytes);
    return kinds;
  }

  // Restores the versions of earlier runs.
  void Restore() {
    if (store == nullptr) return;
    std::atomic<int64_t> restored = 0, failed = 0;
    registry.Restore(store->opened(), [&](const std::string& name, int64_t version,
                                          const adapter::StoredVersion& stored) {
      auto loaded = loader.LoadStored(name, version, stored);
      ++(loaded.ok() ? restored : failed);
      if (!loaded.ok()) {
        LogError("a durable adapter version cannot be restored",
                 {{"adapter", name},
                  {"version", version},
                  {"object", stored.object},
                  {"reason", ReasonOf(loaded.status())},
                  {"error", std::string(loaded.status().message())}});
      }
      return loaded;
    });
    LogInfo("store opened", {{"path", config.adapters.store_path},
                             {"restored", restored.load()},
                             {"failed", failed.load()},
                             {"generation", registry.generation()}});
  }

  // The durable version that was active at the end of the last run, loaded or not; 0: none.
  int64_t StoredActive(const std::string& name) const {
    if (store == nullptr) return 0;
    const auto found = store->opened().names.find(name);
    return found == store->opened().names.end() ? 0 : found->second.active;
  }

  absl::Status Preload() {
    for (const auto& [name, folder] : config.adapters.preload) {
      // A preloaded adapter must not replace a newer, trained version.
      if (const int64_t active = StoredActive(name); active != 0) {
        LogWarning("an adapter is not preloaded: a version from the store is the active one",
                   {{"adapter", name}, {"version", active}, {"folder", folder}});
        continue;
      }
      adapter::PublishOptions options;
      options.name = name;
      options.activate = true;
      absl::Status result;
      absl::Notification done;
      loader.Publish(std::move(options), adapter::PathSource{folder, /*trusted=*/true},
                     [&](const absl::StatusOr<adapter::PublishResult>& published) {
                       result = published.status();
                       done.Notify();
                     });
      done.WaitForNotification();
      if (!result.ok()) return Annotate(result, absl::StrCat("adapter ", name, "=", folder));
    }
    return absl::OkStatus();
  }

  absl::Status Listen() {
    if (!config.server.shared_memory_socket.empty()) {
      const absl::Status listening = colocation.Listen(config.server.shared_memory_socket);
      if (!listening.ok()) return Annotate(listening, "shared-memory socket");
      services.shared_memory = colocation.listener();
    }
    if (!config.server.metrics_listen.empty()) {
      scrape = std::make_unique<Scrape>(
          Scrape::Sources{backend.get(), store.get(), &residency, &registry, &uploads, &colocation,
                          &engine, security_manager.get(), services.memory_by_kind},
          &metrics);
      absl::StatusOr<std::unique_ptr<MetricsHttpServer>> started = MetricsHttpServer::Start(
          config.server.metrics_listen,
          {[this] { return scrape->Render(); }, [this] { return EngineSilence() <= Patience(); },
           [this] { return ready && EngineSilence() <= Patience(); }});
      if (!started.ok()) return Annotate(started.status(), "metrics listener");
      metrics_http = *std::move(started);
    }
    rpc::Server::Options options;
    options.listen = config.server.grpc_listen;
    options.admin_listen = config.server.admin_listen;
    options.max_message_bytes = config.server.max_message_bytes;
    options.max_concurrent_streams = config.server.max_concurrent_streams;
    options.tls = security_manager->tls();
    options.asks_callers = security_manager->asks();
    absl::StatusOr<std::unique_ptr<rpc::Server>> started = rpc::Server::Start(options, &services);
    if (!started.ok()) return Annotate(started.status(), "gRPC listener");
    server = *std::move(started);
    watchdog = std::make_unique<Watchdog>(
        Patience(), [this] { return EngineSilence(); }, [this] { EndStalled(); });
    colocation.KeepBelow(config.memory);
    ready = true;
    return absl::OkStatus();
  }

  void WatchListeners(std::function<void()> on_unresponsive) {
    if (config.server.listener_check_seconds == 0) return;
    std::vector<ListenerHealthCheck::Listener> listeners = {{server->address(), Http2Greeting()}};
    if (!server->admin_address().empty()) {
      listeners.push_back({server->admin_address(), Http2Greeting()});
    }
    if (metrics_http) {
      listeners.push_back({metrics_http->address(), "GET /healthz HTTP/1.1\r\n\r\n"});
    }
    listener_health_check =
        std::make_unique<ListenerHealthCheck>(absl::Seconds(config.server.listener_check_seconds),
                                              std::move(listeners), std::move(on_unresponsive));
  }

  // All or nothing.
  absl::StatusOr<ConfigChanges> Reload(absl::StatusOr<Config> next) {
    DORAD_RETURN_IF_ERROR(next.status());
    DORAD_RETURN_IF_ERROR(CheckStart(*next));  // a restart is to find no more than this
    const ConfigChanges changes = TakeReloadable(*std::move(next), &settings);
    ApplyLogging(settings.log);
    engine.SetLimits(ToEngineOptions(Resolved(settings), backend->info()));
    engine.SetGpuShare(settings.engine.gpu_share);
    loader.SetKeepLast(settings.adapters.keep_last);
    services.default_deadline_seconds = settings.server.default_deadline_seconds;
    return changes;
  }

  absl::Duration Patience() const { return absl::Seconds(config.engine.watchdog_seconds); }

  // Zero for an idle engine, which makes no progress.
  absl::Duration EngineSilence() const {
    return engine.idle() ? absl::ZeroDuration() : engine.time_since_heartbeat();
  }

  // No orderly end: the engine's thread holds its resources.
  void EndStalled() {
    EndSoon(kExitSoftware);
    LogError("the engine makes no progress; ending the process",
             {{"seconds", absl::ToDoubleSeconds(engine.time_since_heartbeat())}});
    server->SetServing(false);
    server->SetAlive(false);
    DumpStacks();
    _exit(kExitSoftware);
  }

  ShutdownWatchdog end;
  const Config config;
  Config settings;  // with reloaded values; only for the thread that stops the app
  const std::unique_ptr<security::SecurityManager> security_manager;
  const std::unique_ptr<Backend> backend;
  const std::unique_ptr<adapter::Disk> disk;
  const std::unique_ptr<adapter::Store> store;  // nullptr: none
  Metrics metrics;
  rpc::Services services;  // points to members below; loads use it until they end
  ThreadPool response_executor;
  ThreadPool load_pool;
  Colocation colocation;  // outlives the residency and the loader, which call it
  engine::ImageStore images{config.engine.image_cache_bytes};
  adapter::Residency residency;
  adapter::AdapterRegistry registry;
  rpc::UploadStore uploads;
  rpc::Peers peers;
  adapter::AdapterLoader loader;
  const ShutdownWatchdog::Phase loader_ends{&end, ShutdownWatchdog::Part::kLoads};
  engine::Engine engine;
  const ColocationEnd colocation_ends{&colocation};
  const ShutdownWatchdog::Phase engine_ends{&end, ShutdownWatchdog::Part::kStep};
  int64_t activations = 0;  // the engine's subscription of the registry's events
  // For callers' changes of the registry, which wait for the store's disk; nullptr: no store.
  std::unique_ptr<ThreadPool> registry_writer;
  const ShutdownWatchdog::Phase changes_end{&end, ShutdownWatchdog::Part::kChanges};
  std::atomic<bool> ready{false};
  std::unique_ptr<Scrape> scrape;  // nullptr: no metrics_listen
  std::unique_ptr<MetricsHttpServer> metrics_http;
  std::unique_ptr<rpc::Server> server;
  std::unique_ptr<Watchdog> watchdog;
  std::unique_ptr<ListenerHealthCheck> listener_health_check;  // nullptr: off
};

App::App(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

App::~App() = default;

absl::StatusOr<std::unique_ptr<App>> App::Start(const Config& given,
                                                std::function<void()> on_unresponsive) {
  DORAD_RETURN_IF_ERROR(CheckStart(given));
  const Config config = Resolved(given);
  DORAD_RETURN_IF_ERROR(TryListeners(config.server));
  absl::StatusOr<std::unique_ptr<security::SecurityManager>> security_manager =
      security::SecurityManager::Open(config.server, config.security);
  if (!security_manager.ok()) return security_manager.status();
  const Instant begin = SteadyNow();
  absl::StatusOr<std::unique_ptr<Backend>> backend = Backend::Load(config);
  if (!backend.ok()) return Annotate(backend.status(), "model " + config.model.path);
  const Backend::Info& model = (*backend)->info();
  LogInfo("model loaded", {{"name", model.name},
                           {"model_type", model.model_type},
                           {"digest", model.digest},
                           {"instruction_set", model.instruction_set},
                           {"weight_bytes", model.weight_bytes},
                           {"kv_pages", model.kv_pages},
                           {"seconds", absl::ToDoubleSeconds(Since(begin))}});
  if (std::vector<LogField> chosen = ChosenValues(given, config, model); !chosen.empty()) {
    LogFields(LogLevel::kInfo, "values chosen for \"auto\"", chosen);
  }
  DORAD_ASSIGN_OR_RETURN(std::unique_ptr<engine::ModelRunner> runner, (*backend)->MakeRunner());
  auto disk = std::make_unique<adapter::Disk>();
  std::unique_ptr<adapter::Store> store;
  if (!config.adapters.store_path.empty()) {
    absl::StatusOr<std::unique_ptr<adapter::Store>> opened =
        adapter::Store::Open(config.adapters.store_path, model.digest, disk.get());
    if (!opened.ok()) {
      return Annotate(opened.status(), "adapters.store_path " + config.adapters.store_path);
    }
    store = *std::move(opened);
  }
  auto impl =
      std::make_unique<Impl>(config, given, *std::move(security_manager), *std::move(backend),
                             std::move(runner), std::move(disk), std::move(store));
  impl->Restore();
  adapter::WarnOfMissingRoots(impl->config.adapters.allowed_roots);
  DORAD_RETURN_IF_ERROR(impl->Preload());
  DORAD_RETURN_IF_ERROR(impl->Listen());
  impl->WatchListeners(std::move(on_unresponsive));
  LogInfo("serving", {{"grpc", impl->server->address()},
                      {"admin", impl->server->admin_address()},
                      {"metrics", impl->metrics_http ? impl->metrics_http->address() : ""},
                      {"seconds", absl::ToDoubleSeconds(Since(begin))}});
  return std::unique_ptr<App>(new App(std::move(impl)));
}

std::string App::ReadyLine() const {
  std::string line = absl::StrCat("dorad ready grpc=", impl_->server->address());
  if (impl_->metrics_http) {
    absl::StrAppend(&line, " metrics=http://", impl_->metrics_http->address(), "/metrics");
  }
  return line;
}

bool App::alive() const { return impl_->EngineSilence() <= impl_->Patience(); }

void App::Reload(const absl::StatusOr<Config>& config) {
  const absl::StatusOr<ConfigChanges> changes = impl_->Reload(config);
  impl_->metrics.ConfigReloaded(changes.ok() ? "applied" : "refused");
  if (!changes.ok()) {
    LogError("the new configuration is refused; the old one stays",
             {{"error", std::string(changes.status().message())}});
    for (const Violation& v : ViolationsOf(changes.status())) {
      LogError("in the refused configuration", {{"where", v.field}, {"problem", v.description}});
    }
    return;
  }
  LogInfo("configuration read again", {{"changed", absl::StrJoin(changes->applied, " ")}});
  if (!changes->waiting.empty()) {
    LogWarning("keys that need a restart differ", {{"keys", absl::StrJoin(changes->waiting, " ")}});
  }
  // Logs its own failures and keeps the old files.
  (void)impl_->security_manager->Reload();
}

void App::Stop(const absl::Notification& hurry) {
  const ServerConfig& config = impl_->settings.server;
  LogInfo("shutting down", {{"drain_delay_seconds", config.drain_delay_seconds},
                            {"drain_timeout_seconds", config.drain_timeout_seconds}});
  const absl::Duration delay = absl::Seconds(config.drain_delay_seconds);
  const absl::Duration timeout = absl::Seconds(config.drain_timeout_seconds);
  // Requests and calls have a grace period each, one after the other.
  impl_->end.Begin(delay + timeout + 2 * kShutdownGrace + kEndGrace);
  impl_->ready = false;
  if (impl_->listener_health_check) impl_->listener_health_check->Stop();
  impl_->server->Drain({delay, timeout, kShutdownGrace}, hurry);
  impl_->server->Shutdown(kShutdownGrace);
  LogInfo("shut down", {{"in_a_hurry", hurry.HasBeenNotified()}});
}

}  // namespace dorad
