#include "server/security/tls_files.h"

#include <sys/stat.h>

#include <utility>

#include "absl/time/clock.h"
#include "server/platform/error.h"
#include "server/platform/log.h"

namespace dorad::security {
namespace {

void WarnOfReadableKey(const std::string& path) {
  struct stat info;
  if (stat(path.c_str(), &info) != 0 || (info.st_mode & S_IROTH) == 0) return;
  // Only a warning: mounted secrets have this mode on hosts without other users.
  LogWarning("every user of this host can read the TLS key", {{"path", path}});
}

}  // namespace

absl::Status TlsFiles::Check(const Paths& paths) {
  DORAD_ASSIGN_OR_RETURN(FileWatcher::Texts texts,
                         FileWatcher({paths.certificates, paths.key, paths.client_ca}).Read());
  return Identify(paths, std::move(texts)).status();
}

absl::StatusOr<std::unique_ptr<TlsFiles>> TlsFiles::Open(const Paths& paths,
                                                         std::function<void()> on_failure) {
  std::unique_ptr<TlsFiles> files(new TlsFiles(paths, std::move(on_failure)));
  DORAD_RETURN_IF_ERROR(files->Reload());
  return files;
}

TlsFiles::TlsFiles(const Paths& paths, std::function<void()> on_failure)
    : identity_(
          {paths.certificates, paths.key, paths.client_ca},
          [paths](FileWatcher::Texts texts) { return Parse(paths, std::move(texts)); },
          [paths, on_failure = std::move(on_failure)](const absl::Status& status) {
            LogError("the TLS files cannot be used", {{"certificate", paths.certificates},
                                                      {"reason", ReasonOf(status)},
                                                      {"error", std::string(status.message())}});
            if (on_failure) on_failure();
          }) {}

absl::StatusOr<TlsIdentity> TlsFiles::Identify(const Paths& paths, FileWatcher::Texts texts) {
  if (!paths.client_ca.empty() && texts[2].empty()) {
    // An empty file must not turn client certificates off.
    return MakeError(absl::StatusCode::kInvalidArgument, "TLS_CLIENT_CA_INVALID",
                     "security.tls_client_ca is empty");
  }
  return CheckTlsIdentity(std::move(texts[0]), std::move(texts[1]), std::move(texts[2]),
                          absl::Now());
}

absl::StatusOr<std::shared_ptr<const TlsIdentity>> TlsFiles::Parse(const Paths& paths,
                                                                   FileWatcher::Texts texts) {
  DORAD_ASSIGN_OR_RETURN(TlsIdentity identity, Identify(paths, std::move(texts)));
  WarnOfReadableKey(paths.key);
  LogInfo("TLS certificate loaded", {{"path", paths.certificates},
                                     {"subject", identity.subject},
                                     {"expiry", absl::FormatTime(identity.expiry)}});
  return std::make_shared<const TlsIdentity>(std::move(identity));
}

}  // namespace dorad::security
