#include "server/rpc/upload_store.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "server/platform/error.h"
#include "server/platform/files/sha256.h"
#include "server/platform/instant.h"

namespace dorad::rpc {
namespace {

// The digest of each field that a Begin sets: a configuration may have a mebibyte.
using BeginFields = std::map<std::string, std::array<uint8_t, 32>>;

BeginFields FieldsOf(v1::PublishBegin begin) {
  BeginFields fields;
  const google::protobuf::Reflection* reflection = begin.GetReflection();
  std::vector<const google::protobuf::FieldDescriptor*> set;
  reflection->ListFields(begin, &set);
  for (const google::protobuf::FieldDescriptor* field : set) {
    v1::PublishBegin one;
    reflection->SwapFields(&begin, &one, {field});
    std::string bytes;
    {
      google::protobuf::io::StringOutputStream out(&bytes);
      google::protobuf::io::CodedOutputStream coded(&out);
      coded.SetSerializationDeterministic(true);  // maps have no order
      one.SerializeToCodedStream(&coded);
    }
    fields[field->name()] = Sha256Of(bytes);
  }
  return fields;
}

absl::Status CheckEqual(const BeginFields& kept, const BeginFields& now) {
  std::vector<Violation> violations;
  BeginFields all = kept;
  all.insert(now.begin(), now.end());
  for (const auto& [name, digest] : all) {
    const auto was = kept.find(name);
    const auto is = now.find(name);
    if (was != kept.end() && is != now.end() && was->second == is->second) continue;
    violations.push_back(
        {name, "UPLOAD_BEGIN_DIFFERS", "differs from the Begin of the upload with this upload_id"});
  }
  if (violations.empty()) return absl::OkStatus();
  return MakeInvalid("PublishBegin", std::move(violations));
}

absl::Status NotFound(const std::string& id) {
  return MakeError(
      absl::StatusCode::kNotFound, "UPLOAD_NOT_FOUND",
      absl::StrCat("there is no upload \"", id, "\": it never began, is too old or was dropped"));
}

absl::Status TakenOver(const std::string& id) {
  return MakeError(absl::StatusCode::kAborted, "UPLOAD_TAKEN_OVER",
                   absl::StrCat("a newer stream has taken over the upload \"", id, "\""));
}

// A lack of resources (memory, disk): a later try may succeed, so this refusal must not be repeated
// to it.
bool MayPass(const absl::Status& refusal) {
  return refusal.code() == absl::StatusCode::kUnavailable ||
         refusal.code() == absl::StatusCode::kResourceExhausted;
}

}  // namespace

// The store's mutex guards all members, except constants, atomics and those guarded by `feeding`.
struct UploadStore::Record {
  enum class State { kReceiving, kLoading, kEnded };

  Record(std::string whose, std::string upload_id, BeginFields fields, FileKey key_of_file,
         std::unique_ptr<Upload> u)
      : tenant(std::move(whose)),
        id(std::move(upload_id)),
        begin(std::move(fields)),
        file(std::move(key_of_file)),
        total(u->files()->size()),
        files(u->files()),
        upload(std::move(u)) {}

  bool idle() const { return state == State::kReceiving && stream == 0; }
  bool ended() const { return state == State::kEnded; }

  Key key() const { return {tenant, id}; }

  const std::string tenant;
  const std::string id;  // empty: not in the store; used by one stream only
  const BeginFields begin;
  const FileKey file;
  const uint64_t total;
  const std::weak_ptr<ArrivingFiles> files;  // gone after the load
  // Held while a part is accepted; acquired before the store's.
  absl::Mutex feeding;
  std::unique_ptr<Upload> upload ABSL_GUARDED_BY(feeding);  // until it is loaded
  std::atomic<uint64_t> received{0};

  State state = State::kReceiving;
  uint64_t stream = 0;  // the feeding stream; 0: none
  std::function<void(absl::Status)> end_stream;
  std::vector<adapter::PublishCallback> waiting;  // for the result
  std::optional<absl::StatusOr<adapter::PublishResult>> result;
  Instant expiry = Instant::max();
};

UploadStore::UploadStore(const Options& options)
    : options_(options),
      budget_(
          std::make_shared<UploadBudget>(options.max_bytes, [this] { return DropOldestIdle(); })),
      collector_([this] { Collect(); }) {}

UploadStore::~UploadStore() {
  {
    absl::MutexLock lock(&mu_);
    closing_ = true;
    changed_.Signal();
  }
  collector_.join();
}

absl::StatusOr<UploadStore::Progress> UploadStore::Find(const std::string& id,
                                                        const std::string& tenant) const {
  absl::MutexLock lock(&mu_);
  const auto found = records_.find(Key(tenant, id));
  if (found == records_.end()) return NotFound(id);
  const Record& record = *found->second;
  Progress progress;
  progress.received = record.received;
  progress.total = record.total;
  progress.committed = record.state != Record::State::kReceiving;
  progress.time_left =
      std::clamp(Between(SteadyNow(), record.expiry), absl::ZeroDuration(), options_.time_to_live);
  return progress;
}

std::shared_ptr<ArrivingFiles> UploadStore::AwaitFiles(const FileKey& key,
                                                       absl::Duration most) const {
  const absl::Time end = absl::Now() + most;
  absl::MutexLock lock(&mu_);
  while (true) {
    if (auto files = FindFiles(key)) return files;
    if (began_.WaitWithDeadline(&mu_, end)) return FindFiles(key);
  }
}

std::shared_ptr<ArrivingFiles> UploadStore::FindFiles(const FileKey& key) const {
  std::shared_ptr<ArrivingFiles> most;
  for (const auto& [id, record] : records_) {
    if (!(record->file == key)) continue;
    auto files = record->files.lock();
    if (files != nullptr && (most == nullptr || files->received() > most->received())) {
      most = std::move(files);
    }
  }
  return most;
}

UploadStore::Idle UploadStore::idle() const {
  absl::MutexLock lock(&mu_);
  Idle idle;
  for (const auto& [id, record] : records_) {
    if (!record->idle()) continue;
    ++idle.uploads;
    idle.bytes += static_cast<int64_t>(record->received);
  }
  return idle;
}

absl::StatusOr<std::shared_ptr<UploadStore::Record>> UploadStore::Open(
    std::shared_ptr<Record> fresh, uint64_t stream, std::function<void(absl::Status)> end) {
  std::shared_ptr<Record> record;
  std::function<void(absl::Status)> end_older;
  {
    absl::MutexLock lock(&mu_);
    const auto [place, is_new] = records_.try_emplace(fresh->key(), fresh);
    record = place->second;
    if (is_new) began_.SignalAll();
    DORAD_RETURN_IF_ERROR(CheckEqual(record->begin, fresh->begin));
    if (record->state != Record::State::kReceiving) return record;
    record->stream = stream;
    record->expiry = Instant::max();
    end_older = std::exchange(record->end_stream, std::move(end));
  }
  if (end_older) end_older(TakenOver(record->id));
  return record;
}

uint64_t UploadStore::NextStream() {
  absl::MutexLock lock(&mu_);
  return ++last_stream_;
}

UploadStore::Turn UploadStore::TurnOf(const Record& record, uint64_t stream) const {
  absl::MutexLock lock(&mu_);
  if (record.state != Record::State::kReceiving) return Turn::kCommitted;
  if (record.stream != stream) return Turn::kTakenOver;
  return record.id.empty() || Holds(record) ? Turn::kMine : Turn::kDropped;
}

void UploadStore::Join(Record& record, adapter::PublishCallback answer) {
  std::optional<absl::StatusOr<adapter::PublishResult>> result;
  {
    absl::MutexLock lock(&mu_);
    if (!record.ended()) {
      record.waiting.push_back(std::move(answer));
      return;
    }
    result = record.result;
  }
  answer(*std::move(result));
}

void UploadStore::Commit(Record& record, adapter::PublishCallback answer) {
  absl::MutexLock lock(&mu_);
  record.state = Record::State::kLoading;
  record.stream = 0;
  record.end_stream = nullptr;
  record.waiting.push_back(std::move(answer));
}

void UploadStore::Complete(Record& record, const absl::StatusOr<adapter::PublishResult>& result) {
  std::vector<adapter::PublishCallback> waiting;
  std::vector<std::shared_ptr<Record>> dropped;
  {
    absl::MutexLock lock(&mu_);
    if (record.ended()) return;
    record.state = Record::State::kEnded;
    record.result = result;
    record.expiry = FromNow(options_.time_to_live);
    waiting.swap(record.waiting);
    if (MayPass(result.status()) && Holds(record)) {
      dropped.push_back(std::move(records_.extract(record.key()).mapped()));
    } else {
      dropped = Thin([](const Record& r) { return r.ended() ? 1 : 0; }, kMaxResults);
    }
    changed_.Signal();
  }
  for (const adapter::PublishCallback& answer : waiting) answer(result);
}

void UploadStore::Leave(std::shared_ptr<Record> record, uint64_t stream) {
  std::vector<std::shared_ptr<Record>> dropped;  // freed without the lock
  absl::MutexLock lock(&mu_);
  if (record->state == Record::State::kReceiving && record->stream == stream) {
    record->stream = 0;
    record->end_stream = nullptr;
    record->expiry = FromNow(options_.time_to_live);
    dropped = Thin([](const Record& r) { return r.idle() ? 1 : 0; }, kMaxIdle);
    changed_.Signal();
  }
  // The store must hold the last reference: dropping a kept upload must free its memory.
  if (Holds(*record)) {
    record.reset();
  } else {
    dropped.push_back(std::move(record));
  }
}

void UploadStore::Drop(const Record& record) {
  std::shared_ptr<Record> dropped;
  absl::MutexLock lock(&mu_);
  if (Holds(record)) dropped = std::move(records_.extract(record.key()).mapped());
}

bool UploadStore::DropOldestIdle() {
  std::vector<std::shared_ptr<Record>> dropped;
  absl::MutexLock lock(&mu_);
  const auto is_idle = [](const auto& item) { return item.second->idle(); };
  const auto idle = std::count_if(records_.begin(), records_.end(), is_idle);
  if (idle == 0) return false;
  const auto bytes = [](const Record& r) -> int64_t {
    return r.idle() ? static_cast<int64_t>(r.received) + 1 : 0;
  };
  dropped = Thin(bytes, static_cast<int>(idle) - 1);
  return true;
}

bool UploadStore::Holds(const Record& record) const {
  const auto found = records_.find(record.key());
  return found != records_.end() && found->second.get() == &record;
}

std::vector<std::shared_ptr<UploadStore::Record>> UploadStore::Thin(const Weight& weight,
                                                                    int most) {
  struct Share {
    int64_t weight = 0;
    std::vector<Records::iterator> records;
  };
  std::map<std::string, Share> shares;  // by tenant
  size_t count = 0;
  for (auto it = records_.begin(); it != records_.end(); ++it) {
    const int64_t own = weight(*it->second);
    if (own == 0) continue;
    Share& share = shares[it->second->tenant];
    share.weight += own;
    share.records.push_back(it);
    ++count;
  }
  std::vector<std::shared_ptr<Record>> removed;
  for (; count > static_cast<size_t>(most); --count) {
    Share& largest =
        std::max_element(shares.begin(), shares.end(), [](const auto& a, const auto& b) {
          return a.second.weight < b.second.weight;
        })->second;
    const auto oldest = std::min_element(largest.records.begin(), largest.records.end(),
                                         [](Records::iterator a, Records::iterator b) {
                                           return a->second->expiry < b->second->expiry;
                                         });
    largest.weight -= weight(*(*oldest)->second);
    removed.push_back(std::move((*oldest)->second));
    records_.erase(*oldest);
    largest.records.erase(oldest);
  }
  return removed;
}

void UploadStore::Collect() {
  std::vector<std::shared_ptr<Record>> expired;
  absl::MutexLock lock(&mu_);
  while (!closing_) {
    const Instant now = SteadyNow();
    Instant next = Instant::max();
    for (auto it = records_.begin(); it != records_.end();) {
      if (it->second->expiry <= now) {
        expired.push_back(std::move(it->second));
        it = records_.erase(it);
      } else {
        next = std::min(next, it->second->expiry);
        ++it;
      }
    }
    if (!expired.empty()) {
      mu_.Unlock();
      expired.clear();
      mu_.Lock();
    } else {
      changed_.WaitWithTimeout(&mu_, Between(now, next));
    }
  }
}

UploadStream::UploadStream(UploadStore* store, std::function<void(absl::Status)> end,
                           adapter::PublishCallback answer, std::string tenant)
    : store_(store),
      number_(store->NextStream()),
      end_(std::move(end)),
      answer_(std::move(answer)),
      tenant_(std::move(tenant)) {}

absl::StatusOr<UploadStream::Next> UploadStream::Accept(v1::PublishRequest* part) {
  if (record_ == nullptr) return Begin(part);
  UploadStore::Record& record = *record_;
  absl::MutexLock feeding(&record.feeding);
  switch (store_->TurnOf(record, number_)) {
    case UploadStore::Turn::kMine:
      break;
    case UploadStore::Turn::kTakenOver:
      return TakenOver(record.id);
    case UploadStore::Turn::kDropped:
      return NotFound(record.id);
    case UploadStore::Turn::kCommitted:  // by the previous stream
      store_->Join(record, answer_);
      return Next::kAnswer;
  }
  const absl::Status status = record.upload->Accept(part);
  record.received = record.upload->received();
  if (!status.ok()) {
    if (part->has_commit()) store_->Drop(record);
    return status;
  }
  if (!record.upload->committed()) return Next::kRead;
  store_->Commit(record, answer_);
  return Next::kLoad;
}

absl::StatusOr<UploadStream::Next> UploadStream::Begin(v1::PublishRequest* part) {
  auto upload = std::make_unique<Upload>(store_->options_.max_image_bytes,
                                         store_->options_.has_store, store_->budget_);
  const std::string id = part->begin().upload_id();
  UploadStore::FileKey file{part->begin().name(), part->begin().version(),
                            part->begin().safetensors_sha256()};
  BeginFields fields;
  if (!id.empty()) fields = FieldsOf(part->begin());
  DORAD_RETURN_IF_ERROR(upload->Accept(part));
  record_ = std::make_shared<UploadStore::Record>(tenant_, id, std::move(fields), std::move(file),
                                                  std::move(upload));
  if (id.empty()) {
    record_->stream = number_;
    return Next::kRead;
  }
  absl::StatusOr<std::shared_ptr<UploadStore::Record>> opened =
      store_->Open(std::exchange(record_, nullptr), number_, end_);
  if (!opened.ok()) return opened.status();
  record_ = *std::move(opened);
  if (store_->TurnOf(*record_, number_) != UploadStore::Turn::kCommitted) return Next::kRead;
  store_->Join(*record_, answer_);
  return Next::kAnswer;
}

uint64_t UploadStream::received() const { return record_->received; }

std::unique_ptr<Upload> UploadStream::TakeUpload() {
  absl::MutexLock feeding(&record_->feeding);
  return std::move(record_->upload);
}

adapter::PublishCallback UploadStream::Completion() {
  return [store = store_, record = record_](const absl::StatusOr<adapter::PublishResult>& result) {
    store->Complete(*record, result);
  };
}

void UploadStream::Leave() {
  if (record_ != nullptr) store_->Leave(std::exchange(record_, nullptr), number_);
}

}  // namespace dorad::rpc
