#include "server/adapter/store/store.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <limits>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "server/platform/check.h"
#include "server/platform/error.h"
#include "server/platform/files/file.h"
#include "server/platform/files/sha256.h"
#include "server/platform/instant.h"
#include "server/platform/log.h"
#include "server/platform/process/failpoint.h"

namespace dorad::adapter {
namespace {

namespace fs = std::filesystem;

constexpr char kConfigName[] = "adapter_config.json";
constexpr char kTensorsName[] = "adapter_model.safetensors";
constexpr size_t kShardDigits = 2;
constexpr uint64_t kReadBytes = 8 << 20;
// A start rewrites the journal when that halves it, and it is not tiny; during a run, where changes
// wait for it, only when less than a quarter remains.
constexpr int64_t kTinyJournalBytes = 4096;
constexpr int64_t kShortJournalBytes = 64 << 10;
constexpr int64_t kLongJournal = 4;

std::string ObjectOf(std::string_view config_json, std::string_view safetensors) {
  Sha256 hash;
  hash.UpdateFramed(config_json);
  hash.UpdateFramed(safetensors);
  return ToHex(hash.Final());
}

// As ObjectOf, for the files in a folder.
absl::StatusOr<std::string> ObjectIn(const std::string& folder) {
  constexpr uint64_t kAny = std::numeric_limits<int64_t>::max();
  DORAD_ASSIGN_OR_RETURN(const std::string config,
                         ReadFileText(absl::StrCat(folder, "/", kConfigName), kAny));
  DORAD_ASSIGN_OR_RETURN(RegularFile file,
                         RegularFile::Open(absl::StrCat(folder, "/", kTensorsName), kAny));
  Sha256 hash;
  hash.UpdateFramed(config);
  hash.UpdateU64(file.size());
  ByteBuffer block;
  for (uint64_t left = file.size(); left > 0; left -= block.size()) {
    block.clear();
    DORAD_RETURN_IF_ERROR(file.Append(std::min(left, kReadBytes), &block));
    hash.Update(block.data(), block.size());
  }
  return ToHex(hash.Final());
}

// 0 for a missing file.
int64_t BytesOf(const std::string& object_path) {
  int64_t bytes = 0;
  for (const char* name : {kConfigName, kTensorsName}) {
    std::error_code error;
    const std::uintmax_t size = fs::file_size(absl::StrCat(object_path, "/", name), error);
    if (!error) bytes += static_cast<int64_t>(size);
  }
  return bytes;
}

// The fewest records that add up to the state.
std::vector<std::string> RecordsOf(const StoredState& state) {
  std::vector<std::string> records;
  for (const Change& change : state.ToChanges()) records.push_back(ToJson(change));
  return records;
}

std::string ShardPath(const std::string& folder, const std::string& object) {
  return absl::StrCat(folder, "/objects/", object.substr(0, kShardDigits));
}

// A failed removal is repeated at the next start.
void RemoveFolder(const std::string& path) {
  std::error_code error;
  fs::remove_all(path, error);
  if (error) LogWarning("cannot remove", {{"path", path}, {"error", error.message()}});
}

// The entries of a folder; empty when it cannot be read.
std::vector<fs::path> EntriesOf(const fs::path& folder) {
  std::vector<fs::path> entries;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    entries.push_back(it->path());
  }
  return entries;
}

}  // namespace

absl::Status StoreNotConfigured() {
  return MakeError(absl::StatusCode::kFailedPrecondition, "STORE_NOT_CONFIGURED",
                   "the server keeps nothing over a restart: adapters.store_path is not set");
}

absl::StatusOr<std::unique_ptr<Store>> Store::Open(const std::string& folder,
                                                   const std::string& base_digest, Disk* disk) {
  fs::path path = fs::absolute(folder).lexically_normal();
  if (!path.has_filename()) path = path.parent_path();  // "store/"
  std::unique_ptr<Store> store(new Store(path.string(), disk));
  DORAD_RETURN_IF_ERROR(store->MakeFolders());
  DORAD_RETURN_IF_ERROR(store->Lock());
  DORAD_RETURN_IF_ERROR(store->Begin(base_digest));
  store->RemoveUnused();
  return store;
}

absl::Status Store::MakeFolders() {
  for (const char* part : {"", "/objects", "/tmp"}) {
    DORAD_RETURN_IF_ERROR(MakeFolder(folder_ + part));
  }
  DORAD_RETURN_IF_ERROR(SyncFolder(*disk_, fs::path(folder_).parent_path().string()));
  return SyncFolder(*disk_, folder_);
}

absl::Status Store::Lock() {
  const std::string path = folder_ + "/lock";
  lock_ = UniqueFd(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0640));
  if (!lock_.ok()) return DiskError("open", path, errno);
  if (flock(lock_.get(), LOCK_EX | LOCK_NB) == 0) return absl::OkStatus();
  if (errno != EWOULDBLOCK) return DiskError("lock", path, errno);
  return MakeError(absl::StatusCode::kFailedPrecondition, "STORE_LOCKED",
                   absl::StrCat("another process uses the store: it holds ", path));
}

absl::Status Store::Replay(const std::vector<std::string>& records) {
  int64_t format = 0;
  for (const std::string& record : records) {
    DORAD_ASSIGN_OR_RETURN(const Change change, ParseChange(record, &format));
    opened_.Apply(change);
  }
  return absl::OkStatus();
}

absl::Status Store::Begin(const std::string& base_digest) {
  absl::MutexLock lock(&mu_);
  std::vector<std::string> records;
  DORAD_ASSIGN_OR_RETURN(journal_, Journal::Open(folder_ + "/journal", disk_, &records));
  DORAD_RETURN_IF_ERROR(Replay(records));
  if (!records.empty() && opened_.base != base_digest) {
    return MakeError(
        absl::StatusCode::kFailedPrecondition, "STORE_OTHER_MODEL",
        absl::StrCat("the store's adapters belong to the base model with digest ", opened_.base,
                     ", not ", base_digest, ": give each base model a store of its own"));
  }
  for (const auto& [name, entry] : opened_.names) {
    if (entry.active == 0 || entry.versions.count(entry.active) != 0) continue;
    LogWarning("the active version was not durable: the adapter has none now",
               {{"adapter", name}, {"version", entry.active}});
  }
  // The restart itself is a change: ephemeral versions are gone.
  const Change started = {.generation = records.empty() ? 0 : opened_.generation + 1,
                          .base = base_digest,
                          .floor = opened_.floor};
  opened_.Apply(started);
  for (const auto& [name, entry] : opened_.names) {
    for (const auto& [version, stored] : entry.versions) ++objects_[stored.object].uses;
  }
  for (auto& [name, object] : objects_) object.bytes = BytesOf(ObjectPath(name));
  state_ = opened_;
  state_.ForgetIdleNames();
  const std::vector<std::string> fewest = RecordsOf(state_);
  const auto bytes = static_cast<int64_t>(Journal::Format(fewest).size());
  long_journal_ = std::max(kShortJournalBytes, kLongJournal * bytes);
  const bool rewrite = journal_->bytes() > kTinyJournalBytes && journal_->bytes() > 2 * bytes;
  DORAD_RETURN_IF_ERROR(rewrite ? Compact(fewest) : journal_->Append(ToJson(started)));
  CountObjects();
  absl::MutexLock stats_lock(&stats_mu_);
  stats_.journal_bytes = journal_->bytes();
  return absl::OkStatus();
}

absl::Status Store::Compact(const std::vector<std::string>& fewest) {
  const int64_t before = journal_->bytes();
  DORAD_RETURN_IF_ERROR(journal_->Rewrite(fewest));
  LogInfo("the store's journal was rewritten", {{"bytes", journal_->bytes()}, {"before", before}});
  absl::MutexLock lock(&stats_mu_);
  ++stats_.compactions;
  return absl::OkStatus();
}

void Store::CompactIfLong() {
  if (journal_->bytes() <= long_journal_) return;
  state_.ForgetIdleNames();
  const std::vector<std::string> fewest = RecordsOf(state_);
  const auto bytes = static_cast<int64_t>(Journal::Format(fewest).size());
  long_journal_ = std::max(kShortJournalBytes, kLongJournal * bytes);
  if (journal_->bytes() <= long_journal_) return;
  const absl::Status status = Noted(Compact(fewest));
  if (status.ok()) return;
  // The changes are safe in the old file. Not tried again with each of the next ones.
  long_journal_ = 2 * journal_->bytes();
  LogWarning("cannot rewrite the store's journal", {{"error", std::string(status.message())}});
}

void Store::CountObjects() {
  absl::MutexLock lock(&stats_mu_);
  stats_.objects = stats_.object_bytes = 0;
  for (const auto& [name, object] : objects_) {
    stats_.objects += object.bytes > 0;
    stats_.object_bytes += object.bytes;
  }
}

absl::Status Store::Noted(absl::Status status) {
  if (!status.ok()) {
    absl::MutexLock lock(&stats_mu_);
    ++stats_.failures[ReasonOf(status)];
  }
  return status;
}

absl::Status Store::NoteUnreadable(const std::string& object, const absl::Status& failure) {
  // Callers see the message too: it must not contain the store's path.
  const auto message = [&] {
    const std::string beginning = folder_ + "/";
    return absl::StrCat("the store's ", ObjectPath(object).substr(beginning.size()), ": ",
                        absl::StrReplaceAll(failure.message(), {{beginning, ""}}));
  };
  switch (failure.code()) {
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kDataLoss:
      return Noted(MakeError(absl::StatusCode::kDataLoss, "STORE_OBJECT_DAMAGED", message()));
    case absl::StatusCode::kUnavailable:
      if (ReasonOf(failure) != "FILE_UNREADABLE") return failure;
      return Noted(MakeError(absl::StatusCode::kUnavailable, "STORE_UNAVAILABLE", message()));
    default:
      return failure;
  }
}

Store::Stats Store::stats() const {
  absl::MutexLock lock(&stats_mu_);
  return stats_;
}

void Store::RemoveUnused() {
  for (const fs::path& path : EntriesOf(folder_ + "/tmp")) RemoveFolder(path.string());
  absl::MutexLock lock(&mu_);
  for (const fs::path& shard : EntriesOf(folder_ + "/objects")) {
    for (const fs::path& path : EntriesOf(shard)) {
      if (objects_.count(path.filename().string()) == 0) RemoveFolder(path.string());
    }
  }
}

std::string Store::ObjectPath(const std::string& object) const {
  return absl::StrCat(ShardPath(folder_, object), "/", object);
}

std::string Store::NewTmpPath() { return absl::StrCat(folder_, "/tmp/", next_tmp_++); }

absl::StatusOr<std::string> Store::Put(std::string_view config_json,
                                       absl::Span<const std::byte> safetensors) {
  const std::string_view tensors(reinterpret_cast<const char*>(safetensors.data()),
                                 safetensors.size());
  const std::string object = ObjectOf(config_json, tensors);
  {
    // From here on the object cannot be removed.
    absl::MutexLock lock(&mu_);
    ++objects_[object].uses;
  }
  const absl::Status status = Noted(PutInUse(object, config_json, tensors));
  if (!status.ok()) {
    Drop(object);
    return status;
  }
  absl::MutexLock lock(&mu_);
  objects_[object].bytes = static_cast<int64_t>(config_json.size() + tensors.size());
  CountObjects();
  return object;
}

absl::Status Store::PutInUse(const std::string& object, std::string_view config_json,
                             std::string_view safetensors) {
  if (!IsWhole(object)) {
    std::string tmp;
    {
      absl::MutexLock lock(&mu_);
      tmp = NewTmpPath();
    }
    absl::Status status = MakeFolder(tmp);
    if (status.ok()) {
      status = WriteNewFile(*disk_, absl::StrCat(tmp, "/", kConfigName), {config_json});
    }
    if (status.ok()) {
      status = WriteNewFile(*disk_, absl::StrCat(tmp, "/", kTensorsName), {safetensors});
    }
    Failpoint("store_tmp_written");
    if (status.ok()) status = SyncFolder(*disk_, tmp);
    if (status.ok()) status = Install(tmp, object);
    if (!status.ok()) {
      RemoveFolder(tmp);
      return status;
    }
  }
  // Also for an existing object: another Put may not have synced it yet.
  DORAD_RETURN_IF_ERROR(SyncFolder(*disk_, ShardPath(folder_, object)));
  return SyncFolder(*disk_, folder_ + "/objects");
}

bool Store::IsWhole(const std::string& object) const {
  const absl::StatusOr<std::string> content = ObjectIn(ObjectPath(object));
  if (content.ok() && *content == object) return true;
  if (ReasonOf(content.status()) != "FILE_NOT_FOUND") {
    LogWarning("an object of the store is damaged and is replaced", {{"object", object}});
  }
  return false;
}

absl::Status Store::Install(const std::string& tmp, const std::string& object) {
  const std::string path = ObjectPath(object);
  DORAD_RETURN_IF_ERROR(MakeFolder(ShardPath(folder_, object)));
  Failpoint("store_before_rename");
  if (disk_->Rename(tmp, path) != 0) {
    if (errno != ENOTEMPTY && errno != EEXIST) return DiskError("rename", tmp, errno);
    // The existing object was put meanwhile (others may be reading it), or is damaged.
    if (IsWhole(object)) {
      RemoveFolder(tmp);
    } else {
      DORAD_RETURN_IF_ERROR(Replace(tmp, path));
    }
  }
  Failpoint("store_after_rename");
  return absl::OkStatus();
}

absl::Status Store::Replace(const std::string& tmp, const std::string& path) {
  std::string old;
  {
    absl::MutexLock lock(&mu_);
    old = NewTmpPath();
    if (disk_->Rename(path, old) != 0) return DiskError("rename", path, errno);
    if (disk_->Rename(tmp, path) != 0) {
      const int error = errno;
      (void)disk_->Rename(old, path);
      return DiskError("rename", tmp, error);
    }
  }
  RemoveFolder(old);
  return absl::OkStatus();
}

absl::Status Store::Append(const Change& change) {
  const std::string text = ToJson(change);
  absl::MutexLock lock(&mu_);
  const Instant begin = SteadyNow();
  absl::Status status = Noted(journal_->Append(text));
  const absl::Duration time = Since(begin);
  if (status.ok()) {
    state_.Apply(change);
    CompactIfLong();
  }
  absl::MutexLock stats_lock(&stats_mu_);
  ++stats_.appends;
  stats_.append_time += time;
  stats_.journal_bytes = journal_->bytes();
  return status;
}

void Store::Drop(const std::string& object) {
  std::string removed;
  {
    absl::MutexLock lock(&mu_);
    const auto found = objects_.find(object);
    DORAD_CHECK(found != objects_.end());
    if (--found->second.uses > 0) return;
    objects_.erase(found);
    CountObjects();
    // The journal may name it although the append failed.
    if (journal_->broken()) return;
    Failpoint("store_before_removal");
    removed = NewTmpPath();
    if (disk_->Rename(ObjectPath(object), removed) != 0) return;  // was never written
  }
  RemoveFolder(removed);
}

}  // namespace dorad::adapter
