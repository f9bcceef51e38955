#include "server/adapter/loader.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "server/adapter/digest.h"
#include "server/adapter/folder.h"
#include "server/adapter/validate.h"
#include "server/base/check.h"
#include "server/base/error.h"
#include "server/base/instant.h"
#include "server/base/log.h"
#include "server/ops/torch_error.h"

namespace dorad::adapter {
namespace {

constexpr char kSubject[] = "adapter_model.safetensors";
constexpr absl::Duration kRetryAfter = absl::Seconds(1);

// What an adapter's files make.
struct Content {
  AdapterSummary summary;  // but for timing.total
  std::shared_ptr<const AdapterWeights> weights;
  std::shared_ptr<const SafetensorsFile> file;
};

// What a load makes.
struct Loaded {
  std::shared_ptr<const LoadedAdapter> adapter;
  std::string object;  // of the store, in use; empty: the version is not durable
};

// One load from its submission on; its version is reserved.
struct Job {
  PublishOptions options;
  int64_t version = 0;
  AdapterFiles files;
  std::string path;                 // not empty: `files` are read from there
  std::optional<PeerTensors> peer;  // the file of tensors is made of them
  bool trusted = false;
  absl::Duration read;  // time the caller spent receiving the bytes
  Instant submitted;
  absl::Duration queue;     // from then to its turn
  absl::Duration activate;  // of Publish
  PublishCallback done;
};

// Whoever began the publish from memory is still there, and goes on wanting it.
absl::Status CheckWanted(const Job& job) {
  if (!job.peer || job.peer->wanted()) return absl::OkStatus();
  return MakeError(absl::StatusCode::kAborted, "HANDOVER_CLOSED",
                   "the connection that handed the memory over was closed before the version was "
                   "published");
}

absl::Status CheckDigest(const Job& job, const std::string& digest) {
  if (!job.peer || job.peer->expected_digest.empty() || job.peer->expected_digest == digest) {
    return absl::OkStatus();
  }
  return MakeInvalid(kSubject, {{"expected_digest", "HANDOVER_DIGEST_MISMATCH",
                                 absl::StrCat("what was read has the digest ", digest)}});
}

void CountModule(const ModuleTensors& module, AdapterSummary& summary) {
  const int rank = module.target.rank;
  summary.min_rank = summary.num_modules == 0 ? rank : std::min(summary.min_rank, rank);
  summary.max_rank = std::max(summary.max_rank, rank);
  ++summary.num_modules;
  summary.num_parameters += module.a.num_elements() + module.b.num_elements();
  if (module.magnitude != nullptr) {
    summary.kind = AdapterKind::kDora;
    summary.num_parameters += module.magnitude->num_elements();
  }
}

// When the stages of a load ended.
struct Stages {
  Instant start, read, validated;
};

Content MakeContent(const Stages& stages, const AdapterTensors& tensors, std::string digest,
                    BuiltAdapter built) {
  Content content;
  AdapterSummary& summary = content.summary;
  for (const ModuleTensors& module : tensors.modules) CountModule(module, summary);
  summary.digest = std::move(digest);
  summary.resident_bytes = built.bytes;
  summary.timing.read = Between(stages.start, stages.read);
  summary.timing.validate = Between(stages.read, stages.validated);
  summary.timing.copy = built.copy;
  summary.timing.norms = built.norms;
  content.weights = std::move(built.weights);
  return content;
}

}  // namespace

struct AdapterLoader::Impl {
  // Shared with the tasks in the pool: a task that starts after the loader's end finds no job and
  // touches nothing else.
  struct Queue {
    absl::Mutex mu;
    std::deque<Job> jobs ABSL_GUARDED_BY(mu);
    int running ABSL_GUARDED_BY(mu) = 0;
    bool held ABSL_GUARDED_BY(mu) = false;
  };

  LoaderOptions options;
  ThreadPool* pool;
  const BaseModules* modules;
  AdapterBuilder* builder;
  Residency* residency;
  AdapterRegistry* registry;
  LoadObserver observer;
  Store* store;
  std::shared_ptr<Queue> queue = std::make_shared<Queue>();
  std::atomic<int64_t> keep_last{options.keep_last};  // the one in effect

  absl::Status Enqueue(Job& job);
  void Submit(Job job);
  void SubmitNext();
  static void RunNext(Impl* impl, Queue& jobs);
  void Run(Job& job);
  absl::StatusOr<Loaded> Load(Job& job);
  absl::StatusOr<int64_t> Publish(const Job& job, Loaded& loaded);
  absl::StatusOr<Content> Read(Job& job);
  // Of a publish whose tensors lie on the GPU.
  absl::StatusOr<Content> ReadDevice(const Job& job);
  // On a thread of the pool; catches what libtorch throws.
  absl::StatusOr<Content> ReadHere(Job& job);
  absl::StatusOr<BuiltAdapter> Build(const AdapterTensors& tensors);
  // Of a version whose content is that object; "": it cannot come back.
  absl::StatusOr<std::shared_ptr<const LoadedAdapter>> MakeAdapter(const Job& job, Content content,
                                                                   const std::string& object);
  absl::StatusOr<Content> ReadStored(const std::string& object, const std::string& digest);
  absl::StatusOr<std::shared_ptr<const LoadedAdapter>> LoadStored(const Job& job,
                                                                  const StoredVersion& stored);
  void End(Job& job, const AdapterSummary* summary, absl::StatusOr<PublishResult> result);
};

// On success the job has moved to the queue.
absl::Status AdapterLoader::Impl::Enqueue(Job& job) {
  if (job.options.durable && store == nullptr) return StoreNotConfigured();
  absl::MutexLock lock(&queue->mu);
  if (queue->jobs.size() >= static_cast<size_t>(options.max_queued_loads)) {
    return WithRetryAfter(
        MakeError(absl::StatusCode::kResourceExhausted, "LOAD_QUEUE_FULL",
                  absl::StrCat(options.max_queued_loads, " adapter loads are already waiting")),
        kRetryAfter);
  }
  DORAD_ASSIGN_OR_RETURN(
      job.version, registry->Reserve(job.options.name, job.options.version, job.options.tags));
  job.submitted = SteadyNow();
  queue->jobs.push_back(std::move(job));
  return absl::OkStatus();
}

void AdapterLoader::Impl::Submit(Job job) {
  const absl::Status status = Enqueue(job);
  if (status.ok()) {
    SubmitNext();
  } else {
    if (observer) observer({.name = job.options.name, .status = status});
    job.done(status);
  }
}

void AdapterLoader::Impl::SubmitNext() {
  pool->Submit([this, jobs = queue] { RunNext(this, *jobs); });
}

// `impl` is only alive while there is a job.
void AdapterLoader::Impl::RunNext(Impl* impl, Queue& jobs) {
  Job job;
  {
    absl::MutexLock lock(&jobs.mu);
    if (jobs.jobs.empty() || jobs.held) return;
    job = std::move(jobs.jobs.front());
    jobs.jobs.pop_front();
    ++jobs.running;
  }
  impl->Run(job);
  // What the job still holds goes before the loader may end.
  job = Job();
  absl::MutexLock lock(&jobs.mu);
  --jobs.running;
}

void AdapterLoader::Impl::Run(Job& job) {
  job.queue = Since(job.submitted);
  absl::StatusOr<Loaded> loaded = Load(job);
  job.files = AdapterFiles();
  if (job.peer) job.peer->tensors.clear();
  if (!loaded.ok()) {
    registry->Fail(job.options.name, job.version, loaded.status());
    End(job, nullptr, loaded.status());
    return;
  }
  const AdapterSummary summary = loaded->adapter->summary();
  const Instant publishing = SteadyNow();
  const absl::StatusOr<int64_t> generation = Publish(job, *loaded);
  job.activate = Since(publishing);
  if (!generation.ok()) {
    if (!loaded->object.empty()) store->Drop(loaded->object);
    End(job, nullptr, generation.status());
    return;
  }
  PublishResult result;
  result.generation = *generation;
  const absl::StatusOr<AdapterRecord> record = registry->Get({job.options.name, job.version});
  const int64_t keep = job.options.keep_last.value_or(keep_last);
  if (keep > 0) {
    const absl::Status retired = registry->RetireOlder(job.options.name, keep).status();
    // The version is published; the next publish tries again.
    if (!retired.ok()) {
      LogWarning("older versions are kept",
                 {{"adapter", job.options.name}, {"error", std::string(retired.message())}});
    }
  }
  if (record.ok()) {
    result.adapter = *record;
    End(job, &summary, std::move(result));
  } else {
    // Retired and forgotten already, by someone very quick.
    End(job, &summary, record.status());
  }
}

absl::StatusOr<int64_t> AdapterLoader::Impl::Publish(const Job& job, Loaded& loaded) {
  if (const absl::Status wanted = CheckWanted(job); !wanted.ok()) {
    registry->Fail(job.options.name, job.version, wanted);
    loaded.adapter = nullptr;
    return wanted;
  }
  return registry->Publish(std::move(loaded.adapter), job.options.activate,
                           job.options.expected_generation, loaded.object);
}

absl::StatusOr<Content> AdapterLoader::Impl::ReadHere(Job& job) {
  // Once in each thread of the pool.
  static thread_local const bool prepared = (builder->PrepareThread(), true);
  (void)prepared;
  try {
    return Read(job);
  } catch (...) {
    return ops::FromTorchException("the load of adapter " + job.options.name, "INTERNAL");
  }
}

absl::StatusOr<Content> AdapterLoader::Impl::Read(Job& job) {
  Stages stages;
  stages.start = SteadyNow();
  if (!job.path.empty()) {
    DORAD_ASSIGN_OR_RETURN(job.files,
                           ReadAdapterFolder(job.path, {options.allowed_roots, job.trusted},
                                             options.max_adapter_bytes));
  } else if (job.peer) {
    DORAD_RETURN_IF_ERROR(CheckWanted(job));
    // The store wants a file.
    if (LiesOnDevice(*job.peer) && !job.options.durable) return ReadDevice(job);
    DORAD_ASSIGN_OR_RETURN(
        job.files.safetensors,
        CopyToImage(*job.peer, static_cast<uint64_t>(options.max_adapter_bytes)));
  } else if (job.files.safetensors.size() > static_cast<uint64_t>(options.max_adapter_bytes)) {
    return MakeInvalid(
        kSubject, {{kSubject, "ADAPTER_TOO_LARGE",
                    absl::StrCat("the file has more than ", options.max_adapter_bytes, " bytes")}});
  }
  stages.read = SteadyNow();
  DORAD_ASSIGN_OR_RETURN(ValidAdapter valid,
                         ValidateAdapter(job.files.config_json, std::move(job.files.safetensors),
                                         *modules, options.max_rank));
  const AdapterTensors& tensors = valid.tensors;
  DORAD_RETURN_IF_ERROR(builder->CheckBaseCopies(tensors));
  std::string digest = ContentDigest(tensors, *modules);
  DORAD_RETURN_IF_ERROR(CheckDigest(job, digest));
  stages.validated = SteadyNow();
  DORAD_ASSIGN_OR_RETURN(BuiltAdapter built, Build(tensors));
  Content content = MakeContent(stages, tensors, std::move(digest), std::move(built));
  content.summary.timing.read += job.read;
  content.file = std::move(valid.file);
  return content;
}

absl::StatusOr<Content> AdapterLoader::Impl::ReadDevice(const Job& job) {
  Stages stages;
  stages.start = SteadyNow();
  DORAD_RETURN_IF_ERROR(CheckForm(*job.peer, static_cast<uint64_t>(options.max_adapter_bytes)));
  absl::StatusOr<std::unique_ptr<DeviceTensors>> device;
  (void)residency->WithRoom([&] {
    device = builder->CopyOnDevice(*job.peer);
    return device.status();
  });
  if (!device.ok()) return device.status();
  stages.read = SteadyNow();
  DORAD_ASSIGN_OR_RETURN(AdapterTensors tensors,
                         ValidateTensors(job.files.config_json, (*device)->tensors(),
                                         TensorPlace::kDevice, *modules, options.max_rank));
  DORAD_ASSIGN_OR_RETURN(const HostCopies host, HostCopies::Bring(**device, &tensors));
  DORAD_RETURN_IF_ERROR(builder->CheckBaseCopies(tensors));
  stages.validated = SteadyNow();
  // Beside the norms, which leave a device time for it.
  absl::StatusOr<std::string> digest;
  std::jthread hashing([&] {
    try {
      digest = DigestOnDevice(**device, *job.peer, tensors, *modules);
    } catch (...) {
      digest = ops::FromTorchException("the digest of adapter " + job.options.name, "INTERNAL");
    }
  });
  absl::StatusOr<BuiltAdapter> built = Build(tensors);
  hashing.join();
  DORAD_RETURN_IF_ERROR(digest.status());
  DORAD_RETURN_IF_ERROR(CheckDigest(job, *digest));
  if (!built.ok()) return built.status();
  return MakeContent(stages, tensors, *std::move(digest), *std::move(built));
}

// Where memory is short, idle weights of other versions make room.
absl::StatusOr<BuiltAdapter> AdapterLoader::Impl::Build(const AdapterTensors& tensors) {
  absl::StatusOr<BuiltAdapter> built;
  (void)residency->WithRoom([&] {
    built = builder->Build(tensors);
    return built.status();
  });
  return built;
}

absl::StatusOr<Loaded> AdapterLoader::Impl::Load(Job& job) {
  const Instant start = SteadyNow();
  DORAD_ASSIGN_OR_RETURN(Content content, ReadHere(job));
  Loaded loaded;
  // Last: nothing is stored of a load that fails.
  if (job.options.durable) {
    const Instant storing = SteadyNow();
    DORAD_ASSIGN_OR_RETURN(loaded.object, store->Put(job.files.config_json, content.file->image()));
    content.summary.timing.store = Since(storing);
  }
  content.summary.timing.total = job.read + Since(start);
  auto adapter = MakeAdapter(job, std::move(content), loaded.object);
  if (!adapter.ok()) {
    if (!loaded.object.empty()) store->Drop(loaded.object);
    return adapter.status();
  }
  loaded.adapter = *std::move(adapter);
  return loaded;
}

absl::StatusOr<std::shared_ptr<const LoadedAdapter>> AdapterLoader::Impl::MakeAdapter(
    const Job& job, Content content, const std::string& object) {
  Residency::Recall recall;
  if (!object.empty()) {
    recall = [this, object, digest = content.summary.digest]()
        -> absl::StatusOr<std::shared_ptr<const AdapterWeights>> {
      DORAD_ASSIGN_OR_RETURN(const Content again, ReadStored(object, digest));
      return again.weights;
    };
  }
  DORAD_ASSIGN_OR_RETURN(std::unique_ptr<Residency::Entry> entry,
                         residency->Add(std::move(content.weights), content.summary.resident_bytes,
                                        std::move(recall), job.options.pinned));
  return std::make_shared<const LoadedAdapter>(job.options.name, job.version,
                                               std::move(content.summary), std::move(entry));
}

absl::StatusOr<Content> AdapterLoader::Impl::ReadStored(const std::string& object,
                                                        const std::string& digest) {
  Job job;
  job.path = store->ObjectPath(object);
  job.trusted = true;
  const Instant start = SteadyNow();
  absl::StatusOr<Content> content = ReadHere(job);
  if (!content.ok()) return store->NoteUnreadable(object, content.status());
  const std::string& found = content->summary.digest;
  if (found != digest) {
    return store->NoteUnreadable(
        object,
        absl::DataLossError(absl::StrCat("its content has the digest ", found, ", not ", digest)));
  }
  content->summary.timing.total = Since(start);
  return content;
}

absl::StatusOr<std::shared_ptr<const LoadedAdapter>> AdapterLoader::Impl::LoadStored(
    const Job& job, const StoredVersion& stored) {
  absl::StatusOr<Content> content = ReadStored(stored.object, stored.digest);
  if (observer) {
    observer({.name = job.options.name,
              .version = job.version,
              .summary = content.ok() ? &content->summary : nullptr,
              .status = content.status()});
  }
  if (!content.ok()) return content.status();
  return MakeAdapter(job, *std::move(content), stored.object);
}

void AdapterLoader::Impl::End(Job& job, const AdapterSummary* summary,
                              absl::StatusOr<PublishResult> result) {
  if (observer) {
    observer({job.options.name, job.version, summary, result.status(), job.queue, job.activate});
  }
  job.done(std::move(result));
}

AdapterLoader::AdapterLoader(LoaderOptions options, ThreadPool* pool, const BaseModules* modules,
                             AdapterBuilder* builder, Residency* residency,
                             AdapterRegistry* registry, LoadObserver observer, Store* store)
    : impl_(new Impl{std::move(options), pool, modules, builder, residency, registry,
                     std::move(observer), store}) {}

AdapterLoader::~AdapterLoader() {
  Impl::Queue& queue = *impl_->queue;
  std::deque<Job> cancelled;
  {
    absl::MutexLock lock(&queue.mu);
    cancelled.swap(queue.jobs);
  }
  const absl::Status status =
      MakeError(absl::StatusCode::kCancelled, "LOAD_CANCELLED", "the server is stopping");
  for (Job& job : cancelled) {
    impl_->registry->Fail(job.options.name, job.version, status);
    impl_->End(job, nullptr, status);
  }
  impl_->residency->Close();  // recalls stand in the same line
  absl::MutexLock lock(&queue.mu);
  const auto idle = [&queue]()
                        ABSL_EXCLUSIVE_LOCKS_REQUIRED(queue.mu) { return queue.running == 0; };
  queue.mu.Await(absl::Condition(&idle));
}

void AdapterLoader::SetKeepLast(int64_t keep_last) { impl_->keep_last = keep_last; }

void AdapterLoader::HoldLoads() {
  Impl::Queue& queue = *impl_->queue;
  absl::MutexLock lock(&queue.mu);
  queue.held = true;
  const auto idle = [&queue]()
                        ABSL_EXCLUSIVE_LOCKS_REQUIRED(queue.mu) { return queue.running == 0; };
  queue.mu.Await(absl::Condition(&idle));
}

void AdapterLoader::ReleaseLoads() {
  Impl::Queue& queue = *impl_->queue;
  absl::MutexLock lock(&queue.mu);
  queue.held = false;
  // Their own tasks may have come in vain; one too many finds no job.
  for (size_t i = 0; i < queue.jobs.size(); ++i) impl_->SubmitNext();
}

void AdapterLoader::PublishFromBytes(PublishOptions options, std::string adapter_config_json,
                                     std::vector<std::byte> safetensors, absl::Duration read,
                                     PublishCallback done) {
  Job job;
  job.options = std::move(options);
  job.files = {std::move(adapter_config_json), std::move(safetensors)};
  job.read = read;
  job.done = std::move(done);
  impl_->Submit(std::move(job));
}

void AdapterLoader::PublishFromPath(PublishOptions options, std::string path, bool trusted,
                                    PublishCallback done) {
  Job job;
  job.options = std::move(options);
  job.path = path.empty() ? "." : std::move(path);
  job.trusted = trusted;
  job.done = std::move(done);
  impl_->Submit(std::move(job));
}

void AdapterLoader::PublishFromMemory(PublishOptions options, std::string adapter_config_json,
                                      PeerTensors peer, PublishCallback done) {
  Job job;
  job.options = std::move(options);
  job.files.config_json = std::move(adapter_config_json);
  job.peer = std::move(peer);
  job.done = std::move(done);
  impl_->Submit(std::move(job));
}

absl::StatusOr<std::shared_ptr<const LoadedAdapter>> AdapterLoader::LoadStored(
    const std::string& name, int64_t version, const StoredVersion& stored) {
  DORAD_CHECK(impl_->store != nullptr);
  absl::StatusOr<std::shared_ptr<const LoadedAdapter>> result = nullptr;
  absl::Notification done;
  impl_->pool->Submit([&] {
    Job job;
    job.options.name = name;
    job.version = version;
    job.options.pinned = stored.pinned;
    result = impl_->LoadStored(job, stored);
    done.Notify();
  });
  done.WaitForNotification();
  return result;
}

}  // namespace dorad::adapter
