// What some small files say together, kept up to date with them. What is broken leaves what was in
// effect before. Owned by who asks for it. Thread-safe.
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
#include "server/security/settled_files.h"

namespace dorad::security {

template <typename T>
class Followed {
 public:
  // What one text for each path means.
  using Understand = std::function<absl::StatusOr<std::shared_ptr<const T>>(SettledFiles::Texts)>;
  // on_failure runs after each time that they could not be read or understood, on_change after each
  // time that there is another current(). Neither may call Poll or Reload.
  Followed(
      std::vector<std::string> paths, Understand understand,
      std::function<void(const absl::Status&)> on_failure, std::function<void()> on_change = [] {})
      : understand_(std::move(understand)),
        on_failure_(std::move(on_failure)),
        on_change_(std::move(on_change)),
        files_(std::move(paths)) {}

  // nullptr until the first Reload has succeeded; another object after each that did.
  std::shared_ptr<const T> current() const ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    return current_;
  }

  // Looks whether the files have changed, and reads them then. What was refused is tried again: a
  // certificate may have become valid. To be called about once a second.
  void Poll() ABSL_LOCKS_EXCLUDED(reading_) {
    absl::MutexLock reading(&reading_);
    if (auto texts = files_.Look()) {
      Take(*std::move(texts)).IgnoreError();
    } else if (refused_) {
      if (auto next = understand_(*refused_); next.ok()) Install(*std::move(next));
    }
  }

  // Reads the files now. As SettledFiles::Read and `understand`.
  absl::Status Reload() ABSL_LOCKS_EXCLUDED(reading_) {
    absl::MutexLock reading(&reading_);
    return Take(files_.Read());
  }

 private:
  absl::Status Take(absl::StatusOr<SettledFiles::Texts> texts)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(reading_) {
    refused_.reset();
    auto next =
        texts.ok() ? understand_(*texts) : absl::StatusOr<std::shared_ptr<const T>>(texts.status());
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

  const Understand understand_;
  const std::function<void(const absl::Status&)> on_failure_;
  const std::function<void()> on_change_;
  absl::Mutex reading_;  // acquired before mu_
  SettledFiles files_ ABSL_GUARDED_BY(reading_);
  std::optional<SettledFiles::Texts> refused_ ABSL_GUARDED_BY(reading_);  // what was read last
  mutable absl::Mutex mu_;
  std::shared_ptr<const T> current_ ABSL_GUARDED_BY(mu_);
};

}  // namespace dorad::security
