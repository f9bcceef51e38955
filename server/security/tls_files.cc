#include "server/security/tls_files.h"

#include <sys/stat.h>

#include <optional>
#include <utility>

#include "absl/time/clock.h"
#include "server/base/error.h"
#include "server/base/log.h"

namespace dorad::security {
namespace {

void WarnOfReadableKey(const std::string& path) {
  struct stat info;
  if (stat(path.c_str(), &info) != 0 || (info.st_mode & S_IROTH) == 0) return;
  // No refusal: mounted secrets look like this where no other user is.
  LogWarning("every user of this host can read the TLS key", {{"path", path}});
}

}  // namespace

absl::StatusOr<std::unique_ptr<TlsFiles>> TlsFiles::Open(const Paths& paths,
                                                         std::function<void()> on_failure) {
  std::unique_ptr<TlsFiles> files(new TlsFiles(paths, std::move(on_failure)));
  absl::MutexLock reading(&files->reading_);
  DORAD_RETURN_IF_ERROR(files->Take(files->files_.Read()));
  return files;
}

TlsFiles::TlsFiles(const Paths& paths, std::function<void()> on_failure)
    : paths_(paths),
      on_failure_(std::move(on_failure)),
      files_({paths.certificates, paths.key, paths.client_ca}) {}

std::shared_ptr<const TlsIdentity> TlsFiles::identity() const {
  absl::MutexLock lock(&mu_);
  return identity_;
}

void TlsFiles::Poll() {
  absl::MutexLock reading(&reading_);
  if (auto texts = files_.Look()) Take(*std::move(texts)).IgnoreError();
}

absl::Status TlsFiles::Reload() {
  absl::MutexLock reading(&reading_);
  return Take(files_.Read());
}

absl::Status TlsFiles::Take(absl::StatusOr<SettledFiles::Texts> texts) {
  absl::StatusOr<TlsIdentity> identity;
  if (!texts.ok()) {
    identity = texts.status();
  } else if (!paths_.client_ca.empty() && (*texts)[2].empty()) {
    // An empty file is no way to stop asking clients for certificates.
    identity = MakeError(absl::StatusCode::kInvalidArgument, "TLS_CLIENT_CA_INVALID",
                         "security.tls_client_ca is empty");
  } else {
    identity = CheckTlsIdentity(std::move((*texts)[0]), std::move((*texts)[1]),
                                std::move((*texts)[2]), absl::Now());
  }
  if (!identity.ok()) {
    LogError("the TLS files cannot be used", {{"certificate", paths_.certificates},
                                              {"reason", ReasonOf(identity.status())},
                                              {"error", std::string(identity.status().message())}});
    if (on_failure_) on_failure_();
    return identity.status();
  }
  WarnOfReadableKey(paths_.key);
  LogInfo("TLS certificate loaded", {{"path", paths_.certificates},
                                     {"subject", identity->subject},
                                     {"expiry", absl::FormatTime(identity->expiry)}});
  absl::MutexLock lock(&mu_);
  identity_ = std::make_shared<const TlsIdentity>(*std::move(identity));
  return absl::OkStatus();
}

}  // namespace dorad::security
