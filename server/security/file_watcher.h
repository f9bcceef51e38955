// Watches small files that belong together (a key and its certificate) for changes, debounced: a
// change counts when two looks in a row see the same contents, because a writer may have replaced
// only one of the files at the first look. Contents are compared, not times: a file may change
// twice in one tick of a clock. Owned by ReloadableFiles. Confined to one thread at a time.
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

  // The files' texts now, one for each path. Statuses of ReadFileText, and FAILED_PRECONDITION
  // (FILE_WRITABLE_BY_OTHERS): any user of the host could give himself rights.
  absl::StatusOr<Texts> Read();

  // As Read, once for each change since the last Read or Look that gave something; else nullopt.
  std::optional<absl::StatusOr<Texts>> Look();

 private:
  absl::StatusOr<Texts> ReadAll() const;

  const std::vector<std::string> paths_;
  std::string taken_;  // fingerprint of the texts that were given last
  std::string seen_;   // fingerprint of the texts that the last look saw
};

}  // namespace dorad::security
