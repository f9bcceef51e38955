#include "server/security/tls_files.h"

#include "tests/unit/support/certificates.h"

namespace dorad::security {
namespace {

std::string ReasonFor(const std::string& certificate, const std::string& key,
                      const std::string& client_ca = "") {
  return ReasonOf(CheckTlsIdentity(certificate, key, client_ca, absl::Now()).status());
}

TEST(TlsIdentityTest, TakesAPairAndTellsWhoseItIsAndWhenItEnds) {
  const TestCertificate made = MakeCertificate("server.example");
  const auto identity = CheckTlsIdentity(made.certificate, made.key, made.certificate, absl::Now());
  ASSERT_TRUE(identity.ok()) << identity.status();
  EXPECT_EQ(identity->subject, "CN=server.example");
  EXPECT_NEAR(absl::ToDoubleSeconds(identity->expiry - absl::Now()), 24 * 3600, 60);
}

TEST(TlsIdentityTest, TakesAChain) {
  const TestCertificate made = MakeCertificate("server.example");
  const TestCertificate other = MakeCertificate("authority");
  EXPECT_EQ(ReasonFor(made.certificate + other.certificate, made.key), "");
  EXPECT_EQ(ReasonFor(other.certificate + made.certificate, made.key), "TLS_KEY_MISMATCH");
}

TEST(TlsIdentityTest, RefusesWhatIsBroken) {
  const TestCertificate made = MakeCertificate("server.example");
  const TestCertificate other = MakeCertificate("server.example");
  EXPECT_EQ(ReasonFor("", made.key), "TLS_CERTIFICATE_INVALID");
  EXPECT_EQ(ReasonFor("garbage", made.key), "TLS_CERTIFICATE_INVALID");
  EXPECT_EQ(ReasonFor(made.certificate, ""), "TLS_KEY_INVALID");
  EXPECT_EQ(ReasonFor(made.certificate, made.certificate), "TLS_KEY_INVALID");
  EXPECT_EQ(ReasonFor(made.certificate, other.key), "TLS_KEY_MISMATCH");
  EXPECT_EQ(ReasonFor(made.certificate, made.key, "garbage"), "TLS_CLIENT_CA_INVALID");
  // Cut anywhere: a certificate that is being written.
  for (size_t size = 1; size + 2 < made.certificate.size(); size += 7) {
    EXPECT_NE(ReasonFor(made.certificate.substr(0, size), made.key), "") << size;
    // Text behind the certificates is none of the chain, until it begins like one.
    if (size < sizeof("-----BEGIN CERTIFICATE-----")) continue;
    EXPECT_NE(ReasonFor(made.certificate + made.certificate.substr(0, size), made.key), "") << size;
  }
}

TEST(TlsIdentityTest, RefusesWhatIsNotValidNow) {
  const TestCertificate expired = MakeCertificate("s", -absl::Hours(48), -absl::Hours(1));
  EXPECT_EQ(ReasonFor(expired.certificate, expired.key), "TLS_CERTIFICATE_EXPIRED");
  const TestCertificate future = MakeCertificate("s", absl::Hours(1), absl::Hours(48));
  EXPECT_EQ(ReasonFor(future.certificate, future.key), "TLS_CERTIFICATE_INVALID");
}

TEST(TlsIdentityTest, RefusesKeysThatOpenSslWouldNotUse) {
  const TestCertificate weak = MakeCertificate("s", -absl::Hours(1), absl::Hours(1), /*weak=*/true);
  EXPECT_NE(ReasonFor(weak.certificate, weak.key), "");
}

class TlsFilesTest : public testing::Test {
 protected:
  TlsFilesTest() : directory_(testing::TempDir() + "/tls-files/") {
    std::filesystem::remove_all(directory_);
    std::filesystem::create_directory(directory_);
    Write(first_);
  }

  void Write(const std::string& name, const std::string& text) {
    std::ofstream(directory_ + name, std::ios::trunc) << text;
  }
  void Write(const TestCertificate& made) {
    Write("cert", made.certificate);
    Write("key", made.key);
  }
  std::unique_ptr<TlsFiles> Open(const std::string& ca = "") {
    auto files =
        TlsFiles::Open({directory_ + "cert", directory_ + "key", ca}, [this] { ++failures_; });
    EXPECT_TRUE(files.ok()) << files.status();
    return files.ok() ? *std::move(files) : nullptr;
  }
  static void Settle(TlsFiles* files) {
    for (int i = 0; i < 3; ++i) files->Poll();
  }

  const std::string directory_;
  const TestCertificate first_ = MakeCertificate("first");
  const TestCertificate second_ = MakeCertificate("second");
  int failures_ = 0;
};

TEST_F(TlsFilesTest, TakesANewPairWhenBothFilesHaveBeenReplaced) {
  const auto files = Open();
  const auto before = files->identity();
  Settle(files.get());
  EXPECT_EQ(files->identity(), before) << "nothing has changed";
  Write("cert", second_.certificate);
  files->Poll();  // the key is still to come
  Write("key", second_.key);
  Settle(files.get());
  EXPECT_EQ(files->identity()->subject, "CN=second");
  EXPECT_EQ(failures_, 0);
}

TEST_F(TlsFilesTest, KeepsTheOldPairWhileTheNewOneIsBroken) {
  const auto files = Open();
  Write("cert", "broken");
  Settle(files.get());
  EXPECT_EQ(files->identity()->subject, "CN=first");
  EXPECT_EQ(failures_, 1);
  Write("cert", second_.certificate);  // not its key
  Settle(files.get());
  EXPECT_EQ(files->identity()->subject, "CN=first");
  EXPECT_EQ(failures_, 2);
  Write(second_);
  Settle(files.get());
  EXPECT_EQ(files->identity()->subject, "CN=second");
  EXPECT_EQ(failures_, 2);
}

TEST_F(TlsFilesTest, TakesACertificateThatWasNotValidYetWhenItIs) {
  const auto files = Open();
  Write(MakeCertificate("soon", absl::Seconds(3), absl::Hours(1)));
  Settle(files.get());
  EXPECT_EQ(files->identity()->subject, "CN=first");
  const absl::Time limit = absl::Now() + absl::Seconds(30);
  while (files->identity()->subject != "CN=soon" && absl::Now() < limit) {
    files->Poll();
    absl::SleepFor(absl::Milliseconds(50));
  }
  EXPECT_EQ(files->identity()->subject, "CN=soon");
  EXPECT_EQ(failures_, 1) << "one for all looks";
}

TEST_F(TlsFilesTest, DoesNotTakeAnEmptyClientCaForNone) {
  Write("ca", first_.certificate);
  const auto files = Open(directory_ + "ca");
  Write("ca", "");
  Settle(files.get());
  EXPECT_EQ(files->identity()->client_ca, first_.certificate);
  EXPECT_EQ(failures_, 1);
  EXPECT_EQ(ReasonOf(files->Reload()), "TLS_CLIENT_CA_INVALID");
}

}  // namespace
}  // namespace dorad::security
