#include "server/adapter/store/journal.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/platform/check.h"
#include "server/platform/error.h"
#include "server/platform/files/file.h"
#include "server/platform/files/sha256.h"
#include "server/platform/log.h"
#include "server/platform/process/failpoint.h"

namespace dorad::adapter {
namespace {

constexpr size_t kLengthDigits = 8;
constexpr size_t kCheckDigits = 16;
constexpr size_t kPrefixBytes = kLengthDigits + 1 + kCheckDigits + 1;

// Chained: `previous` is the check of the record before, empty for the first.
std::string CheckOf(std::string_view previous, std::string_view text) {
  Sha256 hash;
  hash.UpdateFramed(previous);
  hash.UpdateFramed(text);
  return ToHex(hash.Final()).substr(0, kCheckDigits);
}

std::string Line(std::string_view text, const std::string& check) {
  DORAD_CHECK(!text.empty() && text.size() <= std::numeric_limits<uint32_t>::max());
  return absl::StrCat(absl::StrFormat("%08x", text.size()), " ", check, " ", std::string(text),
                      "\n");
}

// The length at the begin of a line; false: none.
bool ReadLength(std::string_view line, size_t* length) {
  *length = 0;
  for (const char c : line.substr(0, kLengthDigits)) {
    const bool digit = c >= '0' && c <= '9';
    if (!digit && !(c >= 'a' && c <= 'f')) return false;
    *length = *length * 16 + static_cast<size_t>(digit ? c - '0' : c - 'a' + 10);
  }
  return true;
}

// Whether `rest` is the rest of an interrupted append. Texts hold no newline, so a newline means
// that a record was written wholly.
bool IsTorn(std::string_view rest) {
  if (rest.find('\n') != std::string_view::npos) return false;
  size_t length = 0;
  return rest.size() < kPrefixBytes ||
         (ReadLength(rest, &length) && rest.size() < kPrefixBytes + length + 1);
}

}  // namespace

std::string Journal::Format(const std::vector<std::string>& texts) {
  std::string content;
  std::string check;
  for (const std::string& text : texts) {
    check = CheckOf(check, text);
    absl::StrAppend(&content, Line(text, check));
  }
  return content;
}

absl::StatusOr<std::unique_ptr<Journal>> Journal::Open(std::string path, Disk* disk,
                                                       std::vector<std::string>* records) {
  std::unique_ptr<Journal> journal(new Journal(std::move(path), disk));
  DORAD_RETURN_IF_ERROR(journal->Load(records));
  (void)unlink(journal->FreshPath().c_str());  // of a crash
  return journal;
}

absl::Status Journal::Load(std::vector<std::string>* records) {
  fd_ = UniqueFd(open(path_.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0640));
  if (!fd_.ok()) return DiskError("open", path_, errno);
  const std::string folder = std::filesystem::path(path_).parent_path().string();
  DORAD_RETURN_IF_ERROR(SyncFolder(*disk_, folder));
  DORAD_ASSIGN_OR_RETURN(const std::string content,
                         ReadFileText(path_, std::numeric_limits<int64_t>::max()));
  // A crash may leave a file extended but unwritten; the rest reads as NULs, and no record ends
  // with NUL.
  const std::string_view written(content.data(), content.find_last_not_of('\0') + 1);
  check_.clear();
  size_t at = 0;
  while (at < written.size()) {
    const std::string_view rest = written.substr(at);
    if (IsTorn(rest)) break;
    size_t length = 0;
    std::string_view text;
    const bool whole = rest.size() >= kPrefixBytes && ReadLength(rest, &length) &&
                       rest.size() > kPrefixBytes + length && rest[kLengthDigits] == ' ' &&
                       rest[kPrefixBytes - 1] == ' ' && rest[kPrefixBytes + length] == '\n';
    if (whole) text = rest.substr(kPrefixBytes, length);
    const std::string check = CheckOf(check_, text);
    if (!whole || rest.substr(kLengthDigits + 1, kCheckDigits) != check) {
      return MakeError(absl::StatusCode::kDataLoss, "STORE_DAMAGED",
                       absl::StrCat(path_, " is damaged at byte ", at, " of ", content.size()));
    }
    records->emplace_back(text);
    check_ = check;
    at += kPrefixBytes + length + 1;
  }
  bytes_ = static_cast<int64_t>(at);
  if (at == content.size()) return absl::OkStatus();
  LogWarning(
      "the journal's last record is not whole and is cut off",
      {{"file", path_}, {"offset", bytes_}, {"bytes", static_cast<int64_t>(content.size() - at)}});
  if (disk_->Truncate(fd_.get(), bytes_) != 0 || disk_->Sync(fd_.get()) != 0) {
    return DiskError("cut", path_, errno);
  }
  return absl::OkStatus();
}

absl::Status Journal::CheckWhole() const {
  if (!broken_) return absl::OkStatus();
  return MakeError(absl::StatusCode::kUnavailable, "STORE_UNAVAILABLE",
                   "the store accepts no changes: an earlier failure to write its journal could "
                   "not be undone; restart the server");
}

absl::Status Journal::Append(std::string_view text) {
  DORAD_RETURN_IF_ERROR(CheckWhole());
  const std::string check = CheckOf(check_, text);
  const std::string line = Line(text, check);
  Failpoint("journal_mid_append",
            [&] { (void)disk_->Write(fd_.get(), line.data(), line.size() / 2); });
  absl::Status status = WriteAll(*disk_, fd_.get(), line, path_);
  if (status.ok()) Failpoint("journal_before_sync");
  if (status.ok() && disk_->Sync(fd_.get()) != 0) status = DiskError("sync", path_, errno);
  if (!status.ok()) {
    broken_ = disk_->Truncate(fd_.get(), bytes_) != 0 || disk_->Sync(fd_.get()) != 0;
    if (broken_) LogError("the journal cannot be repaired; the store accepts no changes");
    return status;
  }
  Failpoint("journal_after_sync");
  check_ = check;
  bytes_ += static_cast<int64_t>(line.size());
  return absl::OkStatus();
}

absl::Status Journal::Rewrite(const std::vector<std::string>& texts) {
  DORAD_RETURN_IF_ERROR(CheckWhole());
  const std::string fresh = FreshPath();
  const std::string content = Format(texts);
  Failpoint("compaction_mid_write", [&] {
    (void)WriteNewFile(*disk_, fresh, {std::string_view(content).substr(0, content.size() / 2)});
  });
  absl::Status written = WriteNewFile(*disk_, fresh, {content});
  if (!written.ok()) {
    (void)unlink(fresh.c_str());
    return written;
  }
  Failpoint("compaction_before_rename");
  if (disk_->Rename(fresh, path_) != 0) {
    const int error = errno;
    // Any other error leaves the old file in its place.
    broken_ = error == EIO;
    (void)unlink(fresh.c_str());
    return DiskError("rename", fresh, error);
  }
  Failpoint("compaction_after_rename");
  broken_ = true;  // until the new file is read
  std::vector<std::string> read;
  DORAD_RETURN_IF_ERROR(Load(&read));  // also syncs the new name
  broken_ = false;
  return absl::OkStatus();
}

}  // namespace dorad::adapter
