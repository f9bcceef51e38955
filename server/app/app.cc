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
#include "server/adapter/folder.h"
#include "server/adapter/loader.h"
#include "server/adapter/registry.h"
#include "server/adapter/residency.h"
#include "server/adapter/store.h"
#include "server/app/backend.h"
#include "server/app/bounded_end.h"
#include "server/app/cli.h"
#include "server/app/config_check.h"
#include "server/app/housekeeper.h"
#include "server/app/kv_lender.h"
#include "server/app/load_report.h"
#include "server/app/room_options.h"
#include "server/app/scrape.h"
#include "server/app/self_dial.h"
#include "server/app/sleeper.h"
#include "server/app/watchdog.h"
#include "server/base/config_reload.h"
#include "server/base/error.h"
#include "server/base/http_server.h"
#include "server/base/instant.h"
#include "server/base/listener_probe.h"
#include "server/base/log.h"
#include "server/base/metrics.h"
#include "server/base/stack_dump.h"
#include "server/base/thread_pool.h"
#include "server/engine/engine.h"
#include "server/handover/listener.h"
#include "server/ops/thread_team.h"
#include "server/rpc/server.h"
#include "server/rpc/upload_store.h"
#include "server/security/guard.h"

namespace dorad {
namespace {

// Loads must not slow running streams down.
constexpr int kLoaderNice = 10;
constexpr int kCouriers = 2;
constexpr int kRegistryWriters = 1;  // changes are made one after the other anyway
// What has been computed still has to reach the clients; open Watch streams end with it.
constexpr absl::Duration kShutdownGrace = absl::Seconds(1);
// For what nobody waits for any more, and the parts wait for at their end.
constexpr absl::Duration kEndGrace = absl::Seconds(2);

// The same status with the failed part named before its message and violations' fields.
absl::Status Annotate(const absl::Status& status, const std::string& part) {
  absl::Status out(status.code(), absl::StrCat(part, ": ", status.message()));
  status.ForEachPayload(
      [&out](absl::string_view url, const absl::Cord& payload) { out.SetPayload(url, payload); });
  return out;
}

}  // namespace

// Members stand on those above them and end before them.
struct App::Impl {
  // `opened` stands on `d`; nullptr: no store.
  Impl(const Config& c, std::unique_ptr<security::Guard> g, std::unique_ptr<Backend> loaded,
       std::unique_ptr<engine::ModelRunner> runner, std::unique_ptr<adapter::Disk> d,
       std::unique_ptr<adapter::Store> opened)
      : config(c),
        settings(c),
        guard(std::move(g)),
        backend(std::move(loaded)),
        disk(std::move(d)),
        store(std::move(opened)),
        metrics(ToMetricsInfo(config, backend->info())),
        couriers(kCouriers, 0),
        load_pool(ToInt32(config.adapters.loader_threads), kLoaderNice),
        residency(ResidencyOptions()),
        registry(RegistryOptions()),
        uploads(ToUploadOptions(config, store != nullptr)),
        sleeper(backend.get(), &residency, &loader, &engine),
        loader(
            ToLoaderOptions(config), &load_pool, &backend->modules(), backend->adapter_builder(),
            &residency, &registry,
            [this](const adapter::EndedLoad& load) {
              ReportLoad(load, &metrics);
              // Memory that was lent to others is theirs again.
              if (!sleeper.asleep().empty()) backend->ReturnFreedMemory();
            },
            store.get()),
        engine(ToEngineOptions(config, backend->info()), std::move(runner), &metrics) {
    kv_lender.Open(&engine);
    FillServices();
    activations = registry.Subscribe([this] { engine.NoteActivated(); });
  }

  ~Impl() {
    registry.Unsubscribe(activations);
    housekeeper.reset();
    kv_lender.Close();
  }

  adapter::Residency::Options ResidencyOptions() {
    adapter::Residency::Options options;
    options.max_bytes = config.adapters.resident_bytes;
    options.images = backend->weights_images();
    options.lender = [this](int64_t bytes) { return kv_lender.Lend(bytes); };
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
    services.registry = &registry;
    services.metrics = &metrics;
    services.couriers = &couriers;
    if (store != nullptr) {
      registry_writer = std::make_unique<ThreadPool>(kRegistryWriters, 0);
      services.run_change = [this](std::function<void()> change) {
        registry_writer->Submit(std::move(change));
      };
    }
    services.uploads = &uploads;
    services.publisher.from_bytes = [this](adapter::PublishOptions options, std::string json,
                                           std::vector<std::byte> image, absl::Duration read,
                                           adapter::PublishCallback done) {
      // A change is copyable; an image is not to be copied.
      auto held = std::make_shared<std::vector<std::byte>>(std::move(image));
      if (absl::Status asleep = RefusalOfPublish(); !asleep.ok()) return done(asleep);
      services.run_change([this, options = std::move(options), json = std::move(json), held, read,
                           done = std::move(done)] {
        loader.PublishFromBytes(options, json, std::move(*held), read, done);
      });
    };
    services.publisher.from_path = [this](adapter::PublishOptions options, std::string path,
                                          adapter::PublishCallback done) {
      if (absl::Status asleep = RefusalOfPublish(); !asleep.ok()) return done(asleep);
      services.run_change(
          [this, options = std::move(options), path = std::move(path), done = std::move(done)] {
            loader.PublishFromPath(options, path, /*trusted=*/false, done);
          });
    };
    services.sleep.sleep = [this](rpc::SleepControl::Options options,
                                  rpc::SleepControl::SleepDone done) {
      sleep_pool.Submit([this, options = std::move(options), done = std::move(done)] {
        const absl::StatusOr<Sleeper::Tags> tags = Sleeper::ParseTags(options.tags);
        done(tags.ok() ? sleeper.Sleep(*tags, {options.keep_kv, options.refuse_requests})
                       : tags.status());
      });
    };
    services.sleep.wake = [this](std::vector<std::string> tags,
                                 std::function<void(absl::Status)> done) {
      sleep_pool.Submit([this, names = std::move(tags), done = std::move(done)] {
        const absl::StatusOr<Sleeper::Tags> tags = Sleeper::ParseTags(names);
        done(tags.ok() ? sleeper.Wake(*tags) : tags.status());
      });
    };
    services.sleep.asleep = [this] {
      const Sleeper::Tags tags = sleeper.asleep();
      return std::vector<std::string>(tags.begin(), tags.end());
    };
    services.publisher.from_memory = [this](adapter::PublishOptions options, std::string json,
                                            adapter::PeerTensors peer,
                                            adapter::PublishCallback done) {
      if (absl::Status asleep = RefusalOfPublish(); !asleep.ok()) return done(asleep);
      services.run_change(
          [this, options = std::move(options), json = std::move(json), peer = std::move(peer),
           done = std::move(done)] { loader.PublishFromMemory(options, json, peer, done); });
    };
    services.weight_layout = backend->weight_layout();
    services.authority = guard->authority();
    services.quotas = guard->quotas();
    services.memory_by_kind = [this] { return MemoryByKind(); };
    services.lent_weight_bytes = [this] { return backend->lent_weight_bytes(); };
    services.info = ToServerInfo(config, backend->info());
    services.max_message_bytes = config.server.max_message_bytes;
    services.max_adapter_bytes = config.adapters.max_bytes;
    services.message_deadlines = std::make_unique<rpc::MessageDeadlines>(
        absl::Seconds(config.server.message_timeout_seconds));
    services.default_deadline_seconds = config.server.default_deadline_seconds;
  }

  // Norms need the base weights.
  absl::Status RefusalOfPublish() const {
    if (sleeper.asleep().count("weights") == 0) return absl::OkStatus();
    return WithRetryAfter(MakeError(absl::StatusCode::kUnavailable, "SERVER_SLEEPING",
                                    "the base model's weights are asleep; Wake brings them back"),
                          absl::Seconds(1));
  }

  std::map<std::string, int64_t> MemoryByKind() const {
    std::map<std::string, int64_t> kinds = backend->memory_by_kind();
    kinds.try_emplace("adapters", residency.stats().bytes);
    return kinds;
  }

  // What earlier runs left in the store.
  void Restore() {
    if (store == nullptr) return;
    int64_t restored = 0, failed = 0;
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
                             {"restored", restored},
                             {"failed", failed},
                             {"generation", registry.generation()}});
  }

  // The durable version that was active when the last run ended, loaded again or not; 0: none.
  int64_t StoredActive(const std::string& name) const {
    if (store == nullptr) return 0;
    const auto found = store->opened().names.find(name);
    return found == store->opened().names.end() ? 0 : found->second.active;
  }

  absl::Status Preload() {
    for (const auto& [name, folder] : config.adapters.preload) {
      // A trained version must not give way to what training began with.
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
      loader.PublishFromPath(std::move(options), folder, /*trusted=*/true,
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
    if (!config.server.handover_socket.empty()) {
      handover::Listener::Options memory;
      memory.path = config.server.handover_socket;
      memory.lend_weights = [this] { return LendWeights(); };
      if (auto open = backend->device_memory_opener(); open != nullptr) {
        memory.open_device = [open](const handover::Offer& offer) {
          return open(offer.ipc_handle, offer.device_uuid, offer.size);
        };
      }
      auto listening = handover::Listener::Start(std::move(memory));
      if (!listening.ok()) return Annotate(listening.status(), "handover socket");
      handover = *std::move(listening);
      services.handover = handover.get();
    }
    if (!config.server.metrics_listen.empty()) {
      scrape = std::make_unique<Scrape>(
          Scrape::Sources{backend.get(), store.get(), &residency, &registry, &uploads, &sleeper,
                          &engine, handover.get(), guard.get(), services.memory_by_kind},
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
    options.tls = guard->tls();
    options.asks_callers = guard->asks();
    absl::StatusOr<std::unique_ptr<rpc::Server>> started = rpc::Server::Start(options, &services);
    if (!started.ok()) return Annotate(started.status(), "gRPC listener");
    server = *std::move(started);
    watchdog = std::make_unique<Watchdog>(
        Patience(), [this] { return EngineSilence(); }, [this] { EndStalled(); });
    if (const std::optional<Backend::Device> device = backend->device()) {
      const MemoryConfig& memory = config.memory;
      const Governor::Marks marks{ByteLimit(memory.high_water, device->total),
                                  ByteLimit(memory.low_water, device->total)};
      housekeeper = std::make_unique<Housekeeper>(marks, backend.get(), &residency, &engine,
                                                  &kv_lender, &metrics);
    }
    ready = true;
    return absl::OkStatus();
  }

  void WatchListeners(std::function<void()> on_deaf) {
    if (config.server.self_dial_seconds == 0) return;
    std::vector<SelfDial::Listener> listeners = {{server->address(), Http2Greeting()}};
    if (!server->admin_address().empty()) {
      listeners.push_back({server->admin_address(), Http2Greeting()});
    }
    if (metrics_http) {
      listeners.push_back({metrics_http->address(), "GET /healthz HTTP/1.1\r\n\r\n"});
    }
    self_dial = std::make_unique<SelfDial>(absl::Seconds(config.server.self_dial_seconds),
                                           std::move(listeners), std::move(on_deaf));
  }

  // Refuses as a whole, or takes over as a whole.
  absl::StatusOr<ConfigChanges> Reload(absl::StatusOr<Config> next) {
    DORAD_RETURN_IF_ERROR(next.status());
    DORAD_RETURN_IF_ERROR(CheckStart(*next));  // a restart is to find no more than this
    ResolveComputeDtype(&next->model);
    const ConfigChanges changes = TakeReloadable(*std::move(next), &settings);
    ApplyLogging(settings.log);
    engine.SetLimits(ToEngineOptions(settings, backend->info()));
    engine.SetGpuShare(settings.engine.gpu_share);
    loader.SetKeepLast(settings.adapters.keep_last);
    services.default_deadline_seconds = settings.server.default_deadline_seconds;
    return changes;
  }

  // Its end may wait for whoever uses the weights, and that is not for the listener's thread.
  absl::StatusOr<std::shared_ptr<const handover::WeightsLease>> LendWeights() {
    DORAD_ASSIGN_OR_RETURN(std::unique_ptr<handover::WeightsLease> lease, backend->LendWeights());
    return std::shared_ptr<const handover::WeightsLease>(
        lease.release(), [this](const handover::WeightsLease* ended) {
          sleep_pool.Submit([ended] { delete ended; });
        });
  }

  absl::Duration Patience() const { return absl::Seconds(config.engine.watchdog_seconds); }

  // An idle engine has nothing to make progress with.
  absl::Duration EngineSilence() const {
    return engine.idle() ? absl::ZeroDuration() : engine.time_since_heartbeat();
  }

  // Nothing that the engine's thread holds can be given back in order any more.
  void EndStalled() {
    EndSoon(kExitSoftware);
    LogError("the engine makes no progress; ending the process",
             {{"seconds", absl::ToDoubleSeconds(engine.time_since_heartbeat())}});
    server->SetServing(false);
    server->SetAlive(false);
    DumpStacks();
    _exit(kExitSoftware);
  }

  BoundedEnd end;
  const Config config;
  Config settings;  // with what was reloaded since the start; of the thread that stops the app
  const std::unique_ptr<security::Guard> guard;
  const std::unique_ptr<Backend> backend;
  const std::unique_ptr<adapter::Disk> disk;
  const std::unique_ptr<adapter::Store> store;  // nullptr: none
  Metrics metrics;
  rpc::Services services;  // names what is below; loads count in it until they have ended
  ThreadPool couriers;
  ThreadPool load_pool;
  KvLender kv_lender;
  adapter::Residency residency;
  adapter::AdapterRegistry registry;
  rpc::UploadStore uploads;
  Sleeper sleeper;  // before the loader, whose last loads ask what sleeps
  adapter::AdapterLoader loader;
  const BoundedEnd::Turn loader_ends{&end, BoundedEnd::Part::kLoads};
  engine::Engine engine;
  ThreadPool sleep_pool{1, 0};  // Sleep and Wake, which need all of these, wait on it
  const BoundedEnd::Turn engine_ends{&end, BoundedEnd::Part::kStep};
  int64_t activations = 0;  // the engine's subscription of the registry's events
  // Makes the callers' changes of the registry, which wait for the store's disk; nullptr: no store.
  std::unique_ptr<ThreadPool> registry_writer;
  const BoundedEnd::Turn changes_end{&end, BoundedEnd::Part::kChanges};
  std::atomic<bool> ready{false};
  std::unique_ptr<handover::Listener> handover;  // nullptr: none
  std::unique_ptr<Scrape> scrape;                // nullptr: no metrics_listen
  std::unique_ptr<MetricsHttpServer> metrics_http;
  std::unique_ptr<rpc::Server> server;
  std::unique_ptr<Watchdog> watchdog;
  std::unique_ptr<Housekeeper> housekeeper;  // nullptr: no device that is shared
  std::unique_ptr<SelfDial> self_dial;       // nullptr: none is wanted
};

App::App(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

App::~App() = default;

absl::StatusOr<std::unique_ptr<App>> App::Start(Config config, std::function<void()> on_deaf) {
  DORAD_RETURN_IF_ERROR(CheckStart(config));
  ResolveComputeDtype(&config.model);
  absl::StatusOr<std::unique_ptr<security::Guard>> guard =
      security::Guard::Open(config.server, config.security);
  if (!guard.ok()) return guard.status();
  ops::SetThreads(Threads(config.engine));
  const Instant begin = SteadyNow();
  absl::StatusOr<std::unique_ptr<Backend>> backend = Backend::Load(config);
  if (!backend.ok()) return Annotate(backend.status(), "model " + config.model.path);
  const Backend::Info& model = (*backend)->info();
  LogInfo("model loaded", {{"name", model.name},
                           {"model_type", model.model_type},
                           {"digest", model.digest},
                           {"weight_bytes", model.weight_bytes},
                           {"kv_pages", model.kv_pages},
                           {"seconds", absl::ToDoubleSeconds(Since(begin))}});
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
  auto impl = std::make_unique<Impl>(config, *std::move(guard), *std::move(backend),
                                     std::move(runner), std::move(disk), std::move(store));
  impl->Restore();
  adapter::WarnOfMissingRoots(impl->config.adapters.allowed_roots);
  DORAD_RETURN_IF_ERROR(impl->Preload());
  DORAD_RETURN_IF_ERROR(impl->Listen());
  impl->WatchListeners(std::move(on_deaf));
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
    LogError("the configuration is refused; the old one stays",
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
  // Says itself what it refuses, and stays with what it has.
  (void)impl_->guard->Reload();
}

void App::Stop(const absl::Notification& hurry) {
  const ServerConfig& config = impl_->settings.server;
  LogInfo("shutting down", {{"drain_delay_seconds", config.drain_delay_seconds},
                            {"drain_timeout_seconds", config.drain_timeout_seconds}});
  const absl::Duration delay = absl::Seconds(config.drain_delay_seconds);
  const absl::Duration timeout = absl::Seconds(config.drain_timeout_seconds);
  // Requests and calls have a grace each, one after the other.
  impl_->end.Begin(delay + timeout + 2 * kShutdownGrace + kEndGrace);
  impl_->ready = false;
  if (impl_->self_dial) impl_->self_dial->Stop();
  impl_->server->Drain({delay, timeout, kShutdownGrace}, hurry);
  impl_->server->Shutdown(kShutdownGrace);
  LogInfo("shut down", {{"in_a_hurry", hurry.HasBeenNotified()}});
}

}  // namespace dorad
