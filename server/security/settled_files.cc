#include "server/security/settled_files.h"

#include <sys/stat.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/error.h"
#include "server/base/file.h"
#include "server/base/sha256.h"

namespace dorad::security {
namespace {

constexpr uint64_t kMaxFileBytes = 4 << 20;

absl::StatusOr<std::string> ReadOne(const std::string& path) {
  if (path.empty()) return std::string();
  struct stat info;
  if (stat(path.c_str(), &info) == 0 && (info.st_mode & S_IWOTH) != 0) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "FILE_WRITABLE_BY_OTHERS",
                     absl::StrCat(path, " can be written by every user of this host"));
  }
  return ReadFileText(path, kMaxFileBytes);
}

std::string FingerprintOf(const absl::StatusOr<SettledFiles::Texts>& texts) {
  Sha256 sha;
  if (texts.ok()) {
    for (const std::string& text : *texts) sha.UpdateFramed(text);
  } else {
    sha.UpdateFramed(texts.status().ToString());
  }
  return ToHex(sha.Final());
}

}  // namespace

absl::StatusOr<SettledFiles::Texts> SettledFiles::ReadAll() const {
  Texts texts;
  for (const std::string& path : paths_) {
    DORAD_ASSIGN_OR_RETURN(std::string text, ReadOne(path));
    texts.push_back(std::move(text));
  }
  return texts;
}

absl::StatusOr<SettledFiles::Texts> SettledFiles::Read() {
  absl::StatusOr<Texts> texts = ReadAll();
  taken_ = seen_ = FingerprintOf(texts);
  return texts;
}

std::optional<absl::StatusOr<SettledFiles::Texts>> SettledFiles::Look() {
  absl::StatusOr<Texts> texts = ReadAll();
  const std::string now = FingerprintOf(texts);
  const bool settled = now == std::exchange(seen_, now);
  if (!settled || now == taken_) return std::nullopt;
  taken_ = now;
  return texts;
}

}  // namespace dorad::security
