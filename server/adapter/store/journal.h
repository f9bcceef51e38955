// An append-only file of short texts, each of which is on the disk before Append returns.
//
// One line a record: 8 hex digits (the text's length), a space, 16 hex digits (the beginning of the
// SHA-256 of the record before's check and of the text), a space, the text, a newline. So a line
// that was dropped, moved or changed is found, and a last line that a crash cut short is told from
// a damaged one. Owns the descriptor. Belongs to one thread at a time.
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
  // Opens the file, or makes it, and reads all records. A last record that is not whole is cut off
  // (and logged): its Append never returned. DATA_LOSS (STORE_DAMAGED) names the offset of anything
  // else that is not as it was written; otherwise as DiskError. `disk` is borrowed.
  static absl::StatusOr<std::unique_ptr<Journal>> Open(std::string path, Disk* disk,
                                                       std::vector<std::string>* records);

  // REQUIRES: the text is not empty and holds neither newlines nor NULs. After a failure
  // (DiskError) the file is as it was before. If not even that can be had, this and every later
  // call fails: what the file then says of the last record is known only by opening it again.
  absl::Status Append(std::string_view text);

  // Puts a new file with these records in the place of the old one, in one step. After a failure
  // (DiskError) the old one goes on; where it is not known which of the two is there, this and
  // every later call fails.
  absl::Status Rewrite(const std::vector<std::string>& texts);

  int64_t bytes() const { return bytes_; }
  // True after a failure that could not be undone.
  bool broken() const { return broken_; }

  // What a file with these records has in it.
  static std::string Format(const std::vector<std::string>& texts);

 private:
  Journal(std::string path, Disk* disk) : path_(std::move(path)), disk_(disk) {}
  absl::Status Load(std::vector<std::string>* records);
  absl::Status CheckWhole() const;
  // Of a file that is to take the journal's place.
  std::string FreshPath() const { return path_ + ".new"; }

  const std::string path_;
  Disk* const disk_;
  UniqueFd fd_;
  std::string check_;  // of the last record
  int64_t bytes_ = 0;  // up to the end of the last record
  bool broken_ = false;
};

}  // namespace dorad::adapter
