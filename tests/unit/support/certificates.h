// Certificates for tests, made on the spot with OpenSSL.
#pragma once

#include <openssl/bio.h>
#include <openssl/ec.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/rsa.h>
#include <openssl/x509.h>

#include "tests/unit/support/test.h"

namespace dorad {

struct TestCertificate {
  std::string certificate;  // PEM
  std::string key;          // PEM
};

inline std::string TakeText(BIO* bio) {
  char* data = nullptr;
  const long size = BIO_get_mem_data(bio, &data);
  std::string text(data, static_cast<size_t>(size));
  BIO_free(bio);
  return text;
}

// Signed by its own key. begin, end: relative to now.
inline TestCertificate MakeCertificate(const std::string& common_name,
                                       absl::Duration begin = -absl::Hours(1),
                                       absl::Duration end = absl::Hours(24), bool weak = false) {
  EVP_PKEY* const key = weak ? EVP_RSA_gen(1024) : EVP_EC_gen("P-256");
  X509* const certificate = X509_new();
  ASN1_INTEGER_set(X509_get_serialNumber(certificate), 1);
  X509_gmtime_adj(X509_getm_notBefore(certificate), absl::ToInt64Seconds(begin));
  X509_gmtime_adj(X509_getm_notAfter(certificate), absl::ToInt64Seconds(end));
  X509_set_pubkey(certificate, key);
  X509_NAME* const name = X509_get_subject_name(certificate);
  X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_ASC,
                             reinterpret_cast<const unsigned char*>(common_name.c_str()), -1, -1,
                             0);
  X509_set_issuer_name(certificate, name);
  EXPECT_GT(X509_sign(certificate, key, EVP_sha256()), 0);
  TestCertificate made;
  BIO* bio = BIO_new(BIO_s_mem());
  PEM_write_bio_X509(bio, certificate);
  made.certificate = TakeText(bio);
  bio = BIO_new(BIO_s_mem());
  PEM_write_bio_PrivateKey(bio, key, nullptr, nullptr, 0, nullptr, nullptr);
  made.key = TakeText(bio);
  X509_free(certificate);
  EVP_PKEY_free(key);
  return made;
}

}  // namespace dorad
