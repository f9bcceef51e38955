// An append-only file of short texts. Each is on the disk before Append returns.
//
// One line a record: 8 hex digits (the text's length), a space, 16 hex digits (the beginning of the
// SHA-256 of the record before's check and of the text), a space, the text, a newline. So a
// dropped, moved or changed line is found, and an incomplete last line differs from a damaged one.
// Owns the descriptor. Belongs to one thread at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/adapter/store/disk.h"
#include "server/platform/net/unique_fd.h"

namespace dorad::adapter {

class Journal {
 public:
  // Opens or creates the file and reads all records. Cuts off (and logs) an incomplete last record:
  // its Append never returned. DATA_LOSS (STORE_DAMAGED) names the offset of any other damage;
  // otherwise as DiskError. `disk` is borrowed.
  static absl::StatusOr<std::unique_ptr<Journal>> Open(std::string path, Disk* disk,
                                                       std::vector<std::string>* records);

  // REQUIRES: the text is not empty and holds neither newlines nor NULs. After a failure
  // (DiskError) the file is unchanged. If the change cannot be undone, this and every later call
  // fails: only opening the file again shows whether the record is in it.
  absl::Status Append(std::string_view text);

  // Replaces the file with a new one of these records, in one step. After a failure (DiskError) the
  // old file stays; if it is unknown which of the two is there, this and every later call fails.
  absl::Status Rewrite(const std::vector<std::string>& texts);

  int64_t bytes() const { return bytes_; }
  // True after a failure that could not be undone.
  bool broken() const { return broken_; }

  // The content of a file with these records.
  static std::string Format(const std::vector<std::string>& texts);

 private:
  Journal(std::string path, Disk* disk) : path_(std::move(path)), disk_(disk) {}
  absl::Status Load(std::vector<std::string>* records);
  absl::Status CheckWhole() const;
  // The file that will replace the journal.
  std::string FreshPath() const { return path_ + ".new"; }

  const std::string path_;
  Disk* const disk_;
  UniqueFd fd_;
  std::string check_;  // of the last record
  int64_t bytes_ = 0;  // up to the end of the last record
  bool broken_ = false;
};

}  // namespace dorad::adapter
