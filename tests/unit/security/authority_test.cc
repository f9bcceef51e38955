#include "server/security/authority.h"

#include <sys/stat.h>

#include "server/platform/files/sha256.h"
#include "tests/unit/support/test.h"

namespace dorad::security {
namespace {

std::string FileOf(const std::string& token, const std::string& name) {
  Sha256 sha;
  sha.Update(token.data(), token.size());
  return absl::StrCat(
      "tokens:\n  - {name: ", name, ", tenant: t, roles: [infer], sha256: ", ToHex(sha.Final()),
      "}\n", "certificates:\n  - {name: cert, tenant: t, roles: [infer], common_name: cn}\n");
}

class AuthorityTest : public testing::Test {
 protected:
  AuthorityTest() : path_(testing::TempDir() + "/authority-tokens.yaml") {
    std::filesystem::remove(path_);
    Write(FileOf("secret", "first"));
  }

  void Write(const std::string& text) { std::ofstream(path_, std::ios::trunc) << text; }

  std::unique_ptr<Authority> Open() {
    auto authority = Authority::Open(path_, [this] { ++failures_; });
    EXPECT_TRUE(authority.ok()) << authority.status();
    return authority.ok() ? *std::move(authority) : nullptr;
  }

  // The caller's name, or why there is none.
  static std::string Who(const Authority& authority, std::vector<std::string> authorization,
                         const std::string& common_name = "") {
    const auto principal = authority.Identify({std::move(authorization), common_name});
    return principal.ok() ? (*principal)->name : ReasonOf(principal.status());
  }

  const std::string path_;
  int failures_ = 0;
};

TEST_F(AuthorityTest, KnowsATokenInTheFormOfRfc6750Only) {
  const auto authority = Open();
  EXPECT_EQ(Who(*authority, {"Bearer secret"}), "first");
  EXPECT_EQ(Who(*authority, {"bearer secret"}), "first");
  EXPECT_EQ(Who(*authority, {}), "TOKEN_MISSING");
  for (const char* wrong : {"", "secret", "Bearer", "Bearer ", "Bearer  secret", "Bearer secret ",
                            "Basic secret", "Bearer other", "Bearersecret"}) {
    EXPECT_EQ(Who(*authority, {wrong}), "TOKEN_INVALID") << wrong;
  }
  EXPECT_EQ(Who(*authority, {"Bearer secret", "Bearer secret"}), "TOKEN_INVALID");
}

TEST_F(AuthorityTest, PrefersATokenToACertificateEvenWhenItIsWrong) {
  const auto authority = Open();
  EXPECT_EQ(Who(*authority, {}, "cn"), "cert");
  EXPECT_EQ(Who(*authority, {}, "unlisted"), "TOKEN_MISSING");
  EXPECT_EQ(Who(*authority, {"Bearer secret"}, "cn"), "first");
  EXPECT_EQ(Who(*authority, {"Bearer wrong"}, "cn"), "TOKEN_INVALID");
}

TEST_F(AuthorityTest, TakesAChangedFileOnceItIsSettled) {
  const auto authority = Open();
  Write(FileOf("secret-2", "second"));
  authority->Poll();  // might be half of it
  EXPECT_EQ(Who(*authority, {"Bearer secret"}), "first");
  authority->Poll();
  EXPECT_EQ(Who(*authority, {"Bearer secret-2"}), "second");
  EXPECT_EQ(Who(*authority, {"Bearer secret"}), "TOKEN_INVALID");
  EXPECT_EQ(failures_, 0);
}

TEST_F(AuthorityTest, KeepsTheOldTokensWhenTheFileBreaks) {
  const auto authority = Open();
  for (const char* broken : {"tokens: [", "", "tokens:\n  - {name: x}\n"}) {
    Write(broken);
    const int before = failures_;
    for (int i = 0; i < 5; ++i) authority->Poll();
    EXPECT_EQ(failures_, before + 1) << "once for each change: " << broken;
    EXPECT_EQ(Who(*authority, {"Bearer secret"}), "first");
  }
  std::filesystem::remove(path_);
  for (int i = 0; i < 3; ++i) authority->Poll();
  EXPECT_EQ(failures_, 4);
  EXPECT_EQ(Who(*authority, {"Bearer secret"}), "first");
  Write(FileOf("secret-3", "third"));
  for (int i = 0; i < 2; ++i) authority->Poll();
  EXPECT_EQ(Who(*authority, {"Bearer secret-3"}), "third");
}

TEST_F(AuthorityTest, ReloadsAtOnceWhenAsked) {
  const auto authority = Open();
  Write(FileOf("secret-2", "second"));
  EXPECT_TRUE(authority->Reload().ok());
  EXPECT_EQ(Who(*authority, {"Bearer secret-2"}), "second");
  Write("tokens: [");
  EXPECT_EQ(ReasonOf(authority->Reload()), "TOKENS_SYNTAX");
  EXPECT_EQ(Who(*authority, {"Bearer secret-2"}), "second");
}

TEST_F(AuthorityTest, RefusesAFileThatAnyoneCanWrite) {
  chmod(path_.c_str(), 0666);
  EXPECT_EQ(ReasonOf(Authority::Open(path_, nullptr).status()), "FILE_WRITABLE_BY_OTHERS");
  chmod(path_.c_str(), 0644);
  EXPECT_TRUE(Authority::Open(path_, nullptr).ok());
}

}  // namespace
}  // namespace dorad::security
