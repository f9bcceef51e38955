// What some small files say together, kept up to date with them. What is broken leaves what was in
// effect before. Owned by who asks for it. Thread-safe.
#pragma once

#include <functional>
#include <memory>
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
  // on_failure runs after each time that they could not be read or understood.
  Followed(std::vector<std::string> paths, Understand understand,
           std::function<void(const absl::Status&)> on_failure)
      : understand_(std::move(understand)),
        on_failure_(std::move(on_failure)),
        files_(std::move(paths)) {}

  // nullptr until the first Reload has succeeded; another object after each that did.
  std::shared_ptr<const T> current() const ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    return current_;
  }

  // Looks whether the files have changed, and reads them then. To be called about once a second.
  void Poll() ABSL_LOCKS_EXCLUDED(reading_) {
    absl::MutexLock reading(&reading_);
    if (auto texts = files_.Look()) Take(*std::move(texts)).IgnoreError();
  }

  // Reads the files now. As SettledFiles::Read and `understand`.
  absl::Status Reload() ABSL_LOCKS_EXCLUDED(reading_) {
    absl::MutexLock reading(&reading_);
    return Take(files_.Read());
  }

 private:
  absl::Status Take(absl::StatusOr<SettledFiles::Texts> texts)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(reading_) {
    auto next = texts.ok() ? understand_(*std::move(texts))
                           : absl::StatusOr<std::shared_ptr<const T>>(texts.status());
    if (!next.ok()) {
      on_failure_(next.status());
      return next.status();
    }
    absl::MutexLock lock(&mu_);
    current_ = *std::move(next);
    return absl::OkStatus();
  }

  const Understand understand_;
  const std::function<void(const absl::Status&)> on_failure_;
  absl::Mutex reading_;  // acquired before mu_
  SettledFiles files_ ABSL_GUARDED_BY(reading_);
  mutable absl::Mutex mu_;
  std::shared_ptr<const T> current_ ABSL_GUARDED_BY(mu_);
};

}  // namespace dorad::security
