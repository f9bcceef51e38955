// A value parsed from some small files and kept up to date with them. A broken new file leaves the
// old value in effect. Owned by TlsFiles and Authority. Thread-safe.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/security/file_watcher.h"

namespace dorad::security {

template <typename T>
class ReloadableFiles {
 public:
  // Makes the value from the files' texts, one for each path.
  using Parse = std::function<absl::StatusOr<std::shared_ptr<const T>>(FileWatcher::Texts)>;
  // on_failure runs after each failed read or parse, on_change after each change of current().
  // Neither may call Poll or Reload.
  ReloadableFiles(
      std::vector<std::string> paths, Parse parse,
      std::function<void(const absl::Status&)> on_failure, std::function<void()> on_change = [] {})
      : parse_(std::move(parse)),
        on_failure_(std::move(on_failure)),
        on_change_(std::move(on_change)),
        files_(std::move(paths)) {}

  // nullptr until the first successful Reload; a new object after each success.
  std::shared_ptr<const T> current() const ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    return current_;
  }

  // Reads changed files. Parses refused texts again: a certificate may have become valid. Call
  // about once a second.
  void Poll() ABSL_LOCKS_EXCLUDED(reading_) {
    absl::MutexLock reading(&reading_);
    if (auto texts = files_.Look()) {
      Take(*std::move(texts)).IgnoreError();
    } else if (refused_) {
      if (auto next = parse_(*refused_); next.ok()) Install(*std::move(next));
    }
  }

  // Reads the files now. Statuses of FileWatcher::Read and of `parse`.
  absl::Status Reload() ABSL_LOCKS_EXCLUDED(reading_) {
    absl::MutexLock reading(&reading_);
    return Take(files_.Read());
  }

 private:
  absl::Status Take(absl::StatusOr<FileWatcher::Texts> texts)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(reading_) {
    refused_.reset();
    auto next =
        texts.ok() ? parse_(*texts) : absl::StatusOr<std::shared_ptr<const T>>(texts.status());
    if (!next.ok()) {
      if (texts.ok()) refused_ = *std::move(texts);
      on_failure_(next.status());
      return next.status();
    }
    Install(*std::move(next));
    return absl::OkStatus();
  }

  void Install(std::shared_ptr<const T> next) ABSL_EXCLUSIVE_LOCKS_REQUIRED(reading_) {
    refused_.reset();
    {
      absl::MutexLock lock(&mu_);
      current_ = std::move(next);
    }
    on_change_();
  }

  const Parse parse_;
  const std::function<void(const absl::Status&)> on_failure_;
  const std::function<void()> on_change_;
  absl::Mutex reading_;  // acquired before mu_
  FileWatcher files_ ABSL_GUARDED_BY(reading_);
  std::optional<FileWatcher::Texts> refused_ ABSL_GUARDED_BY(reading_);  // the texts read last
  mutable absl::Mutex mu_;
  std::shared_ptr<const T> current_ ABSL_GUARDED_BY(mu_);
};

}  // namespace dorad::security
