// Small files that mean something together (a key and its certificate), read again when they have
// changed. A change counts when two looks in a row see the same: whoever replaces them may be at
// the second one. Contents are compared, not times: a file may change twice in one tick of a clock.
// Confined to one thread at a time.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace dorad::security {

class SettledFiles {
 public:
  using Texts = std::vector<std::string>;

  // An empty path stands for an empty text.
  explicit SettledFiles(std::vector<std::string> paths) : paths_(std::move(paths)) {}

  // What they hold now, one text for each path. As ReadFileText, and FAILED_PRECONDITION
  // (FILE_WRITABLE_BY_OTHERS): anyone on the host could give himself rights.
  absl::StatusOr<Texts> Read();

  // What Read gives, once for each change since the last Read or Look that gave something.
  std::optional<absl::StatusOr<Texts>> Look();

 private:
  absl::StatusOr<Texts> ReadAll() const;

  const std::vector<std::string> paths_;
  std::string taken_;  // fingerprint of what was given last
  std::string seen_;   // of what the last look saw
};

}  // namespace dorad::security
