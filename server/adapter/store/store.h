// The folder of durable versions: they survive a restart and any crash.
//
//   lock              held by the one process that uses the folder
//   journal           the registry's changes, in order (change_log.h)
//   objects/ab/abc…/  adapter_config.json and adapter_model.safetensors of one or more versions,
//                     named by the SHA-256 of both; never changed, only added and removed whole
//   tmp/              objects being added or removed; emptied at start
//
// The journal is rewritten when it is several times larger than its state needs. An object is on
// the disk before the journal names it, and is removed only after the journal no longer names it:
// after a crash at any moment each version is there wholly or not at all.
// Owned by App. Thread-safe; calls may wait for the disk.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "server/adapter/registry/change_log.h"
#include "server/adapter/store/disk.h"
#include "server/adapter/store/journal.h"
#include "server/platform/net/unique_fd.h"

namespace dorad::adapter {

// FAILED_PRECONDITION (STORE_NOT_CONFIGURED): something is to be durable, but there is no store.
absl::Status StoreNotConfigured();

class Store : public ChangeLog {
 public:
  // Opens the folder or creates it (its parent must exist), and begins a new run: the state's
  // generation is above all earlier ones. Removes unreferenced files. `base_digest` is the base
  // model's; `disk` is borrowed. FAILED_PRECONDITION (STORE_LOCKED: another process uses it;
  // STORE_OTHER_MODEL: its adapters were published over another base model), DATA_LOSS
  // (STORE_DAMAGED), otherwise as DiskError.
  static absl::StatusOr<std::unique_ptr<Store>> Open(const std::string& folder,
                                                     const std::string& base_digest, Disk* disk);

  // The state at Open, for AdapterRegistry::Restore.
  const StoredState& opened() const { return opened_; }

  struct Stats {
    int64_t journal_bytes = 0;
    int64_t objects = 0;
    int64_t object_bytes = 0;
    // Since the store was opened.
    int64_t appends = 0;
    absl::Duration append_time;  // waited for the disk in all appends
    int64_t compactions = 0;
    std::map<std::string, int64_t> failures;  // by reason
  };
  // As of the end of the last call. Does not wait for the disk.
  Stats stats() const ABSL_LOCKS_EXCLUDED(stats_mu_);

  // Writes an adapter's two files and returns their object. An existing object is read and compared
  // instead, and replaced when it is damaged. Every call counts as one use of the object, and so
  // does every version of opened(); Drop ends a use. RESOURCE_EXHAUSTED (STORE_FULL), UNAVAILABLE
  // (STORE_UNAVAILABLE): nothing is left behind.
  absl::StatusOr<std::string> Put(std::string_view config_json,
                                  absl::Span<const std::byte> safetensors);

  // A PEFT folder.
  std::string ObjectPath(const std::string& object) const;
  // Translates and counts a failure to read an object of the journal: DATA_LOSS
  // (STORE_OBJECT_DAMAGED) or UNAVAILABLE (STORE_UNAVAILABLE), with the object's folder in the
  // store. Other causes, such as lack of memory, stay as they are.
  absl::Status NoteUnreadable(const std::string& object, const absl::Status& failure)
      ABSL_LOCKS_EXCLUDED(stats_mu_);

  absl::Status Append(const Change& change) override;
  // Ends one use of the object and removes it after the last one.
  void Drop(const std::string& object) override;

 private:
  struct Object {
    int64_t uses = 0;
    int64_t bytes = 0;  // 0 before it is there
  };

  Store(std::string folder, Disk* disk) : folder_(std::move(folder)), disk_(disk) {}
  absl::Status MakeFolders();
  absl::Status Lock();
  absl::Status Begin(const std::string& base_digest);
  absl::Status Replay(const std::vector<std::string>& records);
  void CountObjects() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Rewrites the journal if that shrinks it enough.
  void CompactIfLong() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status Compact(const std::vector<std::string>& fewest) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Counts a failure and returns it.
  absl::Status Noted(absl::Status status) ABSL_LOCKS_EXCLUDED(stats_mu_);
  void RemoveUnused();
  std::string NewTmpPath() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status PutInUse(const std::string& object, std::string_view config_json,
                        std::string_view safetensors) ABSL_LOCKS_EXCLUDED(mu_);
  // Whether the object's files match its name.
  bool IsWhole(const std::string& object) const;
  // Moves the folder tmp to the object's place, or removes it if the object exists.
  absl::Status Install(const std::string& tmp, const std::string& object) ABSL_LOCKS_EXCLUDED(mu_);
  // Replaces a damaged object.
  absl::Status Replace(const std::string& tmp, const std::string& path) ABSL_LOCKS_EXCLUDED(mu_);

  const std::string folder_;
  Disk* const disk_;
  UniqueFd lock_;
  StoredState opened_;
  absl::Mutex mu_;
  std::unique_ptr<Journal> journal_ ABSL_GUARDED_BY(mu_);
  // As in the journal, perhaps without droppable names.
  StoredState state_ ABSL_GUARDED_BY(mu_);
  // Above this size the journal is compared with its state.
  int64_t long_journal_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<std::string, Object> objects_ ABSL_GUARDED_BY(mu_);
  int64_t next_tmp_ ABSL_GUARDED_BY(mu_) = 1;
  // Separate from mu_, so that stats do not wait for a disk; taken after mu_.
  mutable absl::Mutex stats_mu_;
  Stats stats_ ABSL_GUARDED_BY(stats_mu_);
};

}  // namespace dorad::adapter
