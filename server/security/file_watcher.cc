#include "server/security/file_watcher.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/platform/error.h"
#include "server/platform/files/file.h"
#include "server/platform/files/sha256.h"

namespace dorad::security {
namespace {

constexpr uint64_t kMaxFileBytes = 4 << 20;

absl::StatusOr<std::string> ReadOne(const std::string& path) {
  if (path.empty()) return std::string();
  // Checks the mode of the opened file: its name may change to another file.
  DORAD_ASSIGN_OR_RETURN(RegularFile file, RegularFile::Open(path, kMaxFileBytes));
  if (file.writable_by_others()) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "FILE_WRITABLE_BY_OTHERS",
                     absl::StrCat(path, " can be written by every user of this host"));
  }
  DORAD_ASSIGN_OR_RETURN(const ByteBuffer bytes, file.ReadAll());
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

std::string FingerprintOf(const absl::StatusOr<FileWatcher::Texts>& texts) {
  Sha256 sha;
  if (texts.ok()) {
    for (const std::string& text : *texts) sha.UpdateFramed(text);
  } else {
    sha.UpdateFramed(texts.status().ToString());
  }
  return ToHex(sha.Final());
}

}  // namespace

absl::StatusOr<FileWatcher::Texts> FileWatcher::ReadAll() const {
  Texts texts;
  for (const std::string& path : paths_) {
    DORAD_ASSIGN_OR_RETURN(std::string text, ReadOne(path));
    texts.push_back(std::move(text));
  }
  return texts;
}

absl::StatusOr<FileWatcher::Texts> FileWatcher::Read() {
  absl::StatusOr<Texts> texts = ReadAll();
  taken_ = seen_ = FingerprintOf(texts);
  return texts;
}

std::optional<absl::StatusOr<FileWatcher::Texts>> FileWatcher::Look() {
  absl::StatusOr<Texts> texts = ReadAll();
  const std::string now = FingerprintOf(texts);
  const bool settled = now == std::exchange(seen_, now);
  if (!settled || now == taken_) return std::nullopt;
  taken_ = now;
  return texts;
}

}  // namespace dorad::security
