#include "server/security/tls_identity.h"

#include <openssl/asn1.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>

#include <ctime>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/platform/check.h"
#include "server/platform/error.h"

namespace dorad::security {
namespace {

template <auto kFree>
struct Free {
  template <typename T>
  void operator()(T* object) const {
    kFree(object);
  }
};
using Bio = std::unique_ptr<BIO, Free<&BIO_free_all>>;
using Certificate = std::unique_ptr<X509, Free<&X509_free>>;
using Key = std::unique_ptr<EVP_PKEY, Free<&EVP_PKEY_free>>;
using Context = std::unique_ptr<SSL_CTX, Free<&SSL_CTX_free>>;

absl::Status Invalid(const char* reason, const std::string& message) {
  return MakeError(absl::StatusCode::kInvalidArgument, reason, message);
}

// OpenSSL's error as text; clears its error queue for later calls.
std::string OpenSslError() {
  const unsigned long code = ERR_peek_last_error();
  ERR_clear_error();
  const char* text = code == 0 ? nullptr : ERR_reason_error_string(code);
  return text == nullptr ? "not PEM" : text;
}

// A server has no user to type a passphrase.
int NoPassphrase(char*, int, int, void*) { return -1; }

Bio Open(const std::string& text) {
  Bio bio(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())));
  DORAD_CHECK(bio != nullptr);
  return bio;
}

// All certificates of the text; empty when one of them is broken.
std::vector<Certificate> ReadCertificates(const std::string& text) {
  const Bio bio = Open(text);
  std::vector<Certificate> certificates;
  while (Certificate one{PEM_read_bio_X509(bio.get(), nullptr, NoPassphrase, nullptr)}) {
    certificates.push_back(std::move(one));
  }
  // The end of the text looks like a missing first line.
  const bool at_end = ERR_GET_REASON(ERR_peek_last_error()) == PEM_R_NO_START_LINE;
  if (!at_end) certificates.clear();
  if (!certificates.empty()) ERR_clear_error();
  return certificates;
}

absl::Time ToTime(const ASN1_TIME* time) {
  std::tm parts{};
  if (ASN1_TIME_to_tm(time, &parts) != 1) return absl::InfinitePast();
  return absl::FromTM(parts, absl::UTCTimeZone());
}

std::string SubjectOf(const X509* certificate) {
  const Bio bio(BIO_new(BIO_s_mem()));
  X509_NAME_print_ex(bio.get(), X509_get_subject_name(certificate), 0, XN_FLAG_RFC2253);
  char* text = nullptr;
  const long size = BIO_get_mem_data(bio.get(), &text);
  return std::string(text, static_cast<size_t>(size));
}

// Whether a server would accept them: includes OpenSSL's policy on key sizes and algorithms.
absl::Status TryOut(const std::vector<Certificate>& chain, EVP_PKEY* key) {
  const Context context(SSL_CTX_new(TLS_server_method()));
  DORAD_CHECK(context != nullptr);
  if (SSL_CTX_use_certificate(context.get(), chain.front().get()) != 1) {
    return Invalid("TLS_CERTIFICATE_INVALID",
                   absl::StrCat("the certificate cannot be used: ", OpenSslError()));
  }
  for (size_t i = 1; i < chain.size(); ++i) {
    if (SSL_CTX_add1_chain_cert(context.get(), chain[i].get()) != 1) {
      return Invalid(
          "TLS_CERTIFICATE_INVALID",
          absl::StrCat("certificate ", i + 1, " of the chain cannot be used: ", OpenSslError()));
    }
  }
  if (SSL_CTX_use_PrivateKey(context.get(), key) != 1) {
    return Invalid("TLS_KEY_INVALID", absl::StrCat("the key cannot be used: ", OpenSslError()));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<TlsIdentity> CheckTlsIdentity(std::string certificates, std::string key,
                                             std::string client_ca, absl::Time now) {
  ERR_clear_error();
  const std::vector<Certificate> chain = ReadCertificates(certificates);
  if (chain.empty()) {
    return Invalid("TLS_CERTIFICATE_INVALID",
                   absl::StrCat("not a chain of PEM certificates: ", OpenSslError()));
  }
  const Bio key_bio = Open(key);
  const Key parsed(PEM_read_bio_PrivateKey(key_bio.get(), nullptr, NoPassphrase, nullptr));
  if (parsed == nullptr) {
    return Invalid("TLS_KEY_INVALID",
                   absl::StrCat("not a PEM key without a passphrase: ", OpenSslError()));
  }
  if (X509_check_private_key(chain.front().get(), parsed.get()) != 1) {
    ERR_clear_error();
    return Invalid("TLS_KEY_MISMATCH", "the key does not match the first certificate");
  }
  DORAD_RETURN_IF_ERROR(TryOut(chain, parsed.get()));
  if (!client_ca.empty() && ReadCertificates(client_ca).empty()) {
    return Invalid("TLS_CLIENT_CA_INVALID",
                   absl::StrCat("not a list of PEM certificates: ", OpenSslError()));
  }
  const X509* const own = chain.front().get();
  const absl::Time begin = ToTime(X509_get0_notBefore(own));
  if (now < begin) {
    return Invalid("TLS_CERTIFICATE_INVALID",
                   absl::StrCat("the certificate is not valid before ", absl::FormatTime(begin)));
  }
  TlsIdentity identity;
  identity.expiry = ToTime(X509_get0_notAfter(own));
  if (now > identity.expiry) {
    return MakeError(
        absl::StatusCode::kFailedPrecondition, "TLS_CERTIFICATE_EXPIRED",
        absl::StrCat("the certificate expired on ", absl::FormatTime(identity.expiry)));
  }
  identity.subject = SubjectOf(own);
  identity.key = std::move(key);
  identity.certificates = std::move(certificates);
  identity.client_ca = std::move(client_ca);
  return identity;
}

}  // namespace dorad::security
