// Watches small related files (a key and its certificate) for changes, debounced: a change counts
// when two polls in a row read the same contents, because a writer may have replaced only one of
// the files at the first poll. Contents are compared, not times: a file may change twice in one
// tick of a clock. Owned by ReloadableFiles. Confined to one thread at a time.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace dorad::security {

class FileWatcher {
 public:
  using Texts = std::vector<std::string>;

  // An empty path stands for an empty text.
  explicit FileWatcher(std::vector<std::string> paths) : paths_(std::move(paths)) {}

  // The files' current texts, one for each path. Statuses of ReadFileText, and FAILED_PRECONDITION
  // (FILE_WRITABLE_BY_OTHERS): any user of the host could grant rights.
  absl::StatusOr<Texts> Read();

  // As Read, once for each change since the last Read or Look with a result; else nullopt.
  std::optional<absl::StatusOr<Texts>> Look();

 private:
  absl::StatusOr<Texts> ReadAll() const;

  const std::vector<std::string> paths_;
  std::string taken_;  // fingerprint of the last returned texts
  std::string seen_;   // fingerprint of the texts of the last poll
};

}  // namespace dorad::security
