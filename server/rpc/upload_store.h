// Uploads with an upload_id, which outlive their streams.
//
// A stream that breaks before Commit leaves its upload here. A newer stream with an equal Begin
// continues it, even if the older stream still looks alive: only the client knows which of its
// connections works, so the newest one wins. After Commit the result is kept, so that a client that
// has lost the answer cannot publish twice; but after a failure for lack of resources the id is
// free. Uploads and results are dropped after their time to live, and idle uploads make room for
// new bytes.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "dorad/v1/adapters.pb.h"
#include "server/adapter/publish/publisher.h"
#include "server/rpc/upload.h"

namespace dorad::rpc {

// Owned by App; outlives streams and loads. Thread-safe.
class UploadStore {
 public:
  // Limit on idle uploads and on results; beyond it the oldest one of the tenant with the most is
  // dropped.
  static constexpr int kMaxIdle = 64;
  static constexpr int kMaxResults = 1024;

  struct Options {
    int64_t max_image_bytes = 0;                      // of one upload
    int64_t max_bytes = 0;                            // of all uploads together
    absl::Duration time_to_live = absl::Minutes(10);  // without a stream; of a result
    bool has_store = false;                           // versions can be durable
  };
  explicit UploadStore(const Options& options);
  // Drops everything. No stream may be left.
  ~UploadStore();
  UploadStore(const UploadStore&) = delete;
  UploadStore& operator=(const UploadStore&) = delete;

  struct Progress {
    uint64_t received = 0;  // bytes
    uint64_t total = 0;     // bytes
    bool committed = false;
    absl::Duration time_left;
  };
  // NOT_FOUND (UPLOAD_NOT_FOUND). tenant: the owner of the id; two tenants may choose the same.
  absl::StatusOr<Progress> Find(const std::string& id, const std::string& tenant = "") const
      ABSL_LOCKS_EXCLUDED(mu_);

  // Names a version's file, of any uploader.
  struct FileKey {
    std::string name;
    int64_t version = 0;
    std::string sha256;  // 32 bytes, of the safetensors file

    bool operator==(const FileKey&) const = default;
  };
  // The files of an upload that has an id and has begun; waits for its begin, at most for so long.
  // nullptr: there is none, or its load has ended.
  std::shared_ptr<ArrivingFiles> AwaitFiles(const FileKey& key, absl::Duration most) const
      ABSL_LOCKS_EXCLUDED(mu_);

  struct Idle {
    int uploads = 0;
    int64_t bytes = 0;
  };
  // Uploads without a stream.
  Idle idle() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  friend class UploadStream;
  struct Record;
  using Key = std::pair<std::string, std::string>;  // tenant, id
  using Records = std::map<Key, std::shared_ptr<Record>>;

  // The state of an upload as seen by one stream.
  enum class Turn { kMine, kTakenOver, kCommitted, kDropped };

  // The record of the id, made from `fresh` if new. Makes `stream` its feeding stream; the previous
  // one ends. INVALID_ARGUMENT (UPLOAD_BEGIN_DIFFERS).
  absl::StatusOr<std::shared_ptr<Record>> Open(std::shared_ptr<Record> fresh, uint64_t stream,
                                               std::function<void(absl::Status)> end)
      ABSL_LOCKS_EXCLUDED(mu_);
  uint64_t NextStream() ABSL_LOCKS_EXCLUDED(mu_);
  Turn TurnOf(const Record& record, uint64_t stream) const ABSL_LOCKS_EXCLUDED(mu_);
  // Passes the result of a committed upload to `answer`, now or later.
  void Join(Record& record, adapter::PublishCallback answer) ABSL_LOCKS_EXCLUDED(mu_);
  void Commit(Record& record, adapter::PublishCallback answer) ABSL_LOCKS_EXCLUDED(mu_);
  void Complete(Record& record, const absl::StatusOr<adapter::PublishResult>& result)
      ABSL_LOCKS_EXCLUDED(mu_);
  // The stream has ended before Commit.
  void Leave(std::shared_ptr<Record> record, uint64_t stream) ABSL_LOCKS_EXCLUDED(mu_);
  void Drop(const Record& record) ABSL_LOCKS_EXCLUDED(mu_);
  bool DropOldestIdle() ABSL_LOCKS_EXCLUDED(mu_);

  std::shared_ptr<ArrivingFiles> FindFiles(const FileKey& key) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool Holds(const Record& record) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // A record's weight among those of its tenant; 0: never removed.
  using Weight = std::function<int64_t(const Record&)>;
  // Removes records while more than `most` have a weight: each time the oldest one of the tenant
  // with the largest total, so that no tenant displaces the records of a smaller one.
  std::vector<std::shared_ptr<Record>> Thin(const Weight& weight, int most)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Collect() ABSL_LOCKS_EXCLUDED(mu_);

  const Options options_;
  const std::shared_ptr<UploadBudget> budget_;
  mutable absl::Mutex mu_;
  Records records_ ABSL_GUARDED_BY(mu_);
  uint64_t last_stream_ ABSL_GUARDED_BY(mu_) = 0;
  bool closing_ ABSL_GUARDED_BY(mu_) = false;
  absl::CondVar changed_;        // an expiry was set, or closing_
  mutable absl::CondVar began_;  // an upload with an id
  std::thread collector_;
};

// One Publish call's part in an upload: with an id, several calls may continue one upload. Confined
// to one call.
class UploadStream {
 public:
  enum class Next {
    kRead,    // the next part
    kLoad,    // TakeUpload, and its result to Completion()
    kAnswer,  // nothing: `answer` gets the result of an earlier Commit
  };

  // end: runs on another thread, at most once, when a newer stream has taken the upload over
  // (ABORTED, UPLOAD_TAKEN_OVER). answer: runs once, on any thread, after kLoad or kAnswer. tenant:
  // the owner of the upload id.
  UploadStream(UploadStore* store, std::function<void(absl::Status)> end,
               adapter::PublishCallback answer, std::string tenant = "");
  // Leaves the upload to its store.
  ~UploadStream() { Leave(); }
  UploadStream(const UploadStream&) = delete;
  UploadStream& operator=(const UploadStream&) = delete;

  // As Upload::Accept, and INVALID_ARGUMENT (UPLOAD_BEGIN_DIFFERS), ABORTED (UPLOAD_TAKEN_OVER),
  // NOT_FOUND (UPLOAD_NOT_FOUND: dropped meanwhile). After a failure no part may follow. A failed
  // Commit drops the upload, any other failure leaves it unchanged.
  absl::StatusOr<Next> Accept(v1::PublishRequest* part);

  // Bytes of the upload that have arrived, from any stream. After Begin.
  uint64_t received() const;

  // After kLoad.
  std::unique_ptr<Upload> TakeUpload();
  adapter::PublishCallback Completion();

  // The stream has ended. Idempotent.
  void Leave();

 private:
  absl::StatusOr<Next> Begin(v1::PublishRequest* part);

  UploadStore* const store_;
  const uint64_t number_;
  const std::function<void(absl::Status)> end_;
  const adapter::PublishCallback answer_;
  const std::string tenant_;
  std::shared_ptr<UploadStore::Record> record_;  // from Begin to the end
};

}  // namespace dorad::rpc
