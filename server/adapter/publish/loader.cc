#include "server/adapter/publish/loader.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "server/platform/check.h"
#include "server/platform/error.h"
#include "server/platform/exception.h"
#include "server/platform/instant.h"
#include "server/platform/log.h"

namespace dorad::adapter {
namespace {

constexpr absl::Duration kRetryAfter = absl::Seconds(1);

absl::Status WeightsAsleep() {
  return WithRetryAfter(MakeError(absl::StatusCode::kUnavailable, "SERVER_SLEEPING",
                                  "the base model's weights are asleep; Wake brings them back"),
                        kRetryAfter);
}

// The result of a load.
struct Loaded {
  std::shared_ptr<const LoadedAdapter> adapter;
  std::string object;  // of the store, in use; empty: the version is not durable
};

// One load, from its submission on.
struct Job {
  PublishOptions options;
  AdapterSource source;
  PublishCallback done;
  std::function<bool()> wanted;  // of a MemorySource
  int64_t version = 0;           // reserved when the job is queued
  Instant submitted;
  absl::Duration queue;     // from `submitted` to the start
  absl::Duration activate;  // of Publish
};

}  // namespace

struct AdapterLoader::Impl {
  // Shared with the tasks in the pool: a task that starts after the loader's end finds no job.
  struct Queue {
    absl::Mutex mu;
    std::deque<Job> jobs ABSL_GUARDED_BY(mu);
    int running ABSL_GUARDED_BY(mu) = 0;
    std::atomic<bool> suspended{false};  // written under mu; read without: mu may wait for a disk

    void AwaitNoneRunning() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
      const auto idle = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) { return running == 0; };
      mu.Await(absl::Condition(&idle));
    }
  };

  LoaderOptions options;
  ThreadPool* pool;
  Residency* residency;
  AdapterRegistry* registry;
  LoadObserver observer;
  Store* store;
  AdapterReader reader;
  std::shared_ptr<Queue> queue = std::make_shared<Queue>();
  std::atomic<int64_t> keep_last{options.keep_last};  // current value

  absl::Status Enqueue(Job& job);
  void Submit(Job job);
  void SubmitNext();
  static void RunNext(Impl* impl, Queue& jobs);
  void Run(Job& job);
  absl::StatusOr<Loaded> Load(Job& job);
  absl::StatusOr<int64_t> Publish(const Job& job, Loaded& loaded);
  // object: of the store; "": the version cannot be reloaded.
  absl::StatusOr<std::shared_ptr<const LoadedAdapter>> MakeAdapter(const std::string& name,
                                                                   int64_t version, bool pinned,
                                                                   Content content,
                                                                   const std::string& object);
  absl::StatusOr<Content> ReadStored(const std::string& object, const std::string& digest);
  absl::StatusOr<std::shared_ptr<const LoadedAdapter>> LoadStored(const std::string& name,
                                                                  int64_t version,
                                                                  const StoredVersion& stored);
  void End(Job& job, const AdapterSummary* summary, absl::StatusOr<PublishResult> result);
};

// On success moves the job to the queue.
absl::Status AdapterLoader::Impl::Enqueue(Job& job) {
  if (job.options.durable && store == nullptr) return StoreNotConfigured();
  absl::MutexLock lock(&queue->mu);
  if (queue->jobs.size() >= static_cast<size_t>(options.max_queued_loads)) {
    return WithRetryAfter(
        MakeError(absl::StatusCode::kResourceExhausted, "LOAD_QUEUE_FULL",
                  absl::StrCat(options.max_queued_loads, " adapter loads are already waiting")),
        kRetryAfter);
  }
  // Allocates the place first: running out of memory must not cost a version number.
  queue->jobs.emplace_back();
  const absl::StatusOr<int64_t> version = registry->Reserve(job.options.name, job.options.version,
                                                            job.options.tags, job.options.of_peer);
  if (!version.ok()) {
    queue->jobs.pop_back();
    return version.status();
  }
  job.version = *version;
  job.submitted = SteadyNow();
  queue->jobs.back() = std::move(job);
  return absl::OkStatus();
}

void AdapterLoader::Impl::Submit(Job job) {
  absl::Status status;
  try {
    status = Enqueue(job);
  } catch (...) {
    status = StatusOfException("the publish of adapter " + job.options.name, "INTERNAL");
  }
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

// `impl` is only valid while there is a job.
void AdapterLoader::Impl::RunNext(Impl* impl, Queue& jobs) {
  Job job;
  {
    absl::MutexLock lock(&jobs.mu);
    if (jobs.jobs.empty() || jobs.suspended) return;
    job = std::move(jobs.jobs.front());
    jobs.jobs.pop_front();
    ++jobs.running;
  }
  impl->Run(job);
  // Releases the job's objects before the loader may end.
  job = Job();
  absl::MutexLock lock(&jobs.mu);
  --jobs.running;
}

void AdapterLoader::Impl::Run(Job& job) {
  job.queue = Since(job.submitted);
  absl::StatusOr<Loaded> loaded;
  try {
    loaded = Load(job);
  } catch (...) {
    loaded = StatusOfException("the load of adapter " + job.options.name, "INTERNAL");
  }
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
    // Another caller has already retired it, and its record is gone.
    End(job, &summary, record.status());
  }
}

absl::StatusOr<int64_t> AdapterLoader::Impl::Publish(const Job& job, Loaded& loaded) {
  if (const absl::Status wanted = CheckWanted(job.wanted); !wanted.ok()) {
    registry->Fail(job.options.name, job.version, wanted);
    loaded.adapter = nullptr;
    return wanted;
  }
  return registry->Publish(std::move(loaded.adapter), job.options.activate,
                           job.options.expected_generation, loaded.object);
}

absl::StatusOr<Loaded> AdapterLoader::Impl::Load(Job& job) {
  const Instant start = SteadyNow();
  const auto* const bytes = std::get_if<BytesSource>(&job.source);
  const absl::Duration received = bytes == nullptr ? absl::ZeroDuration() : bytes->read;
  DORAD_ASSIGN_OR_RETURN(Content content,
                         reader.Read(std::move(job.source), job.options.durable, job.options.name));
  Loaded loaded;
  // Last: a failed load stores nothing.
  if (job.options.durable) {
    const Instant storing = SteadyNow();
    DORAD_ASSIGN_OR_RETURN(loaded.object, store->Put(content.config_json, content.file->image()));
    content.summary.timing.store = Since(storing);
  }
  content.summary.timing.total = received + Since(start);
  auto adapter = MakeAdapter(job.options.name, job.version, job.options.pinned, std::move(content),
                             loaded.object);
  if (!adapter.ok()) {
    if (!loaded.object.empty()) store->Drop(loaded.object);
    return adapter.status();
  }
  loaded.adapter = *std::move(adapter);
  return loaded;
}

absl::StatusOr<std::shared_ptr<const LoadedAdapter>> AdapterLoader::Impl::MakeAdapter(
    const std::string& name, int64_t version, bool pinned, Content content,
    const std::string& object) {
  Residency::Reload reload;
  if (!object.empty()) {
    reload = [this, object, digest = content.summary.digest]()
        -> absl::StatusOr<std::shared_ptr<const AdapterWeights>> {
      DORAD_ASSIGN_OR_RETURN(const Content again, ReadStored(object, digest));
      return again.weights;
    };
  }
  DORAD_ASSIGN_OR_RETURN(std::unique_ptr<Residency::Entry> entry,
                         residency->Add(std::move(content.weights), content.summary.resident_bytes,
                                        std::move(reload), pinned));
  return std::make_shared<const LoadedAdapter>(name, version, std::move(content.summary),
                                               std::move(entry));
}

absl::StatusOr<Content> AdapterLoader::Impl::ReadStored(const std::string& object,
                                                        const std::string& digest) {
  const Instant start = SteadyNow();
  absl::StatusOr<Content> content = reader.Read(
      PathSource{store->ObjectPath(object), /*trusted=*/true}, /*needs_file=*/false, object);
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
    const std::string& name, int64_t version, const StoredVersion& stored) {
  absl::StatusOr<Content> content = ReadStored(stored.object, stored.digest);
  if (observer) {
    observer({.name = name,
              .version = version,
              .summary = content.ok() ? &content->summary : nullptr,
              .status = content.status()});
  }
  if (!content.ok()) return content.status();
  return MakeAdapter(name, version, stored.pinned, *std::move(content), stored.object);
}

void AdapterLoader::Impl::End(Job& job, const AdapterSummary* summary,
                              absl::StatusOr<PublishResult> result) {
  if (observer) {
    observer({job.options.name, job.version, summary, result.status(), job.queue, job.activate});
  }
  job.done(std::move(result));
}

AdapterLoader::AdapterLoader(const LoaderOptions& options, ThreadPool* pool,
                             const BaseModules* modules, AdapterBuilder* builder,
                             Residency* residency, AdapterRegistry* registry, LoadObserver observer,
                             Store* store)
    : impl_(new Impl{options, pool, residency, registry, std::move(observer), store,
                     AdapterReader(options.read, modules, builder, residency)}) {}

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
  impl_->residency->Close();  // reloads use the same pool
  absl::MutexLock lock(&queue.mu);
  queue.AwaitNoneRunning();
}

void AdapterLoader::SetKeepLast(int64_t keep_last) { impl_->keep_last = keep_last; }

void AdapterLoader::Suspend() {
  Impl::Queue& queue = *impl_->queue;
  {
    absl::MutexLock lock(&queue.mu);
    queue.suspended = true;
    queue.AwaitNoneRunning();
  }
  impl_->residency->Suspend();
}

void AdapterLoader::Resume() {
  impl_->residency->Resume();
  Impl::Queue& queue = *impl_->queue;
  absl::MutexLock lock(&queue.mu);
  queue.suspended = false;
  // Earlier tasks of these jobs may have returned during the suspension. Surplus tasks find no job.
  for (size_t i = 0; i < queue.jobs.size(); ++i) impl_->SubmitNext();
}

void AdapterLoader::Publish(PublishOptions options, AdapterSource source, PublishCallback done) {
  auto job = std::make_shared<Job>();
  job->options = std::move(options);
  if (const auto* memory = std::get_if<MemorySource>(&source)) job->wanted = memory->tensors.wanted;
  job->source = std::move(source);
  job->done = std::move(done);
  if (impl_->queue->suspended) return job->done(WeightsAsleep());
  if (impl_->options.run_change == nullptr) return impl_->Submit(std::move(*job));
  impl_->options.run_change([impl = impl_.get(), job] { impl->Submit(std::move(*job)); });
}

absl::StatusOr<std::shared_ptr<const LoadedAdapter>> AdapterLoader::LoadStored(
    const std::string& name, int64_t version, const StoredVersion& stored) {
  DORAD_CHECK(impl_->store != nullptr);
  return impl_->LoadStored(name, version, stored);
}

}  // namespace dorad::adapter
