#include "server/security/token_table.h"

#include "server/platform/files/sha256.h"
#include "tests/unit/support/test.h"

namespace dorad::security {
namespace {

std::string HashOf(const std::string& token) {
  Sha256 sha;
  sha.Update(token.data(), token.size());
  return ToHex(sha.Final());
}

std::string Entry(const std::string& name, const std::string& token, const std::string& rest) {
  return absl::StrCat("  - {name: ", name, ", sha256: ", HashOf(token), ", ", rest, "}\n");
}

std::shared_ptr<const TokenTable> Parsed(const std::string& text) {
  auto table = TokenTable::Parse(text, "tokens.yaml");
  EXPECT_TRUE(table.ok()) << table.status();
  return table.ok() ? *std::move(table) : nullptr;
}

// "field reason" of each problem.
std::vector<std::string> Problems(const std::string& text) {
  std::vector<std::string> problems;
  const auto table = TokenTable::Parse(text, "t");
  for (const Violation& v : ViolationsOf(table.status())) {
    problems.push_back(absl::StrCat(v.field, " ", v.reason));
  }
  return problems;
}

TEST(TokenTableTest, FindsEachTokenAndNoOther) {
  std::string text = "tokens:\n";
  for (int i = 0; i < 20; ++i) {
    text += Entry(absl::StrCat("n", i), absl::StrCat("token-", i), "tenant: t, roles: [infer]");
  }
  const auto table = Parsed(text);
  ASSERT_EQ(table->num_tokens(), 20u);
  for (int i = 0; i < 20; ++i) {
    const auto found = table->FindToken(absl::StrCat("token-", i));
    ASSERT_NE(found, nullptr);
    EXPECT_EQ(found->name, absl::StrCat("n", i));
  }
  for (const std::string token : {"", "token-", "token-20", "token-1 ", "Token-1"}) {
    EXPECT_EQ(table->FindToken(token), nullptr) << token;
  }
  // The digest itself opens nothing.
  EXPECT_EQ(table->FindToken(HashOf("token-1")), nullptr);
}

TEST(TokenTableTest, ReadsRolesPrefixesAndQuotas) {
  const auto table = Parsed(
      "tenants:\n"
      "  team-a: {adapters: team-a., quota: {streams: 4, tokens_per_minute: 1000, adapters: 2, "
      "bytes: 2GiB}}\n"
      "  ops: {}\n"
      "tokens:\n" +
      Entry("worker", "w", "tenant: team-a, roles: [infer]") +
      Entry("trainer", "t", "tenant: team-a, roles: [publish, infer], adapters: team-a.rl.") +
      Entry("boss", "b", "tenant: ops, roles: [admin]") +
      "certificates:\n"
      "  - {name: cert, tenant: ops, common_name: trainer.example, roles: [publish]}\n");
  const auto worker = table->FindToken("w");
  EXPECT_TRUE(worker->roles.Has(Role::kInfer));
  EXPECT_FALSE(worker->roles.Has(Role::kPublish));
  EXPECT_FALSE(worker->roles.Has(Role::kAdmin));
  EXPECT_EQ(worker->adapters, "team-a.");
  EXPECT_TRUE(worker->MayTouch(""));
  EXPECT_TRUE(worker->MayTouch("team-a.x"));
  EXPECT_FALSE(worker->MayTouch("team-a"));
  EXPECT_FALSE(worker->MayTouch("team-b.x"));
  const auto trainer = table->FindToken("t");
  EXPECT_TRUE(trainer->roles.HasAnyOf(Role::kPublish));
  EXPECT_FALSE(trainer->MayTouch("team-a.x"));
  EXPECT_TRUE(trainer->MayTouch("team-a.rl.x"));
  const auto boss = table->FindToken("b");
  for (const Role role : {Role::kInfer, Role::kPublish, Role::kAdmin}) {
    EXPECT_TRUE(boss->roles.Has(role));
  }
  EXPECT_EQ(table->FindCertificate("trainer.example")->name, "cert");
  EXPECT_EQ(table->FindCertificate("other.example"), nullptr);
  const Quota quota = table->FindTenant("team-a").quota;
  EXPECT_EQ(quota.streams, 4);
  EXPECT_EQ(quota.tokens_per_minute, 1000);
  EXPECT_EQ(quota.adapters, 2);
  EXPECT_EQ(quota.bytes, int64_t{2} << 30);
  EXPECT_EQ(table->FindTenant("unknown").quota.streams, 0);
}

TEST(TokenTableTest, ListsEveryProblemWithItsLine) {
  const std::vector<std::string> problems = Problems(
      "tokens:\n"
      "  - {name: a, tenant: t, sha256: abc, roles: [infer]}\n" +
      Entry("a b", "1", "tenant: t, roles: [infer]") +             // line 3
      Entry("c", "2", "tenant: t, roles: [guest]") +               // line 4
      Entry("d", "3", "tenant: t, role: [infer]") +                // line 5
      Entry("e", "3", "tenant: t, roles: [infer]") +               // line 6
      Entry("e", "4", "roles: [infer]") +                          // line 7
      Entry("g", "5", "tenant: t, roles: [admin], adapters: x") +  // line 8
      "extra: 1\n");
  EXPECT_THAT(problems, Contains("t:2: sha256 TOKENS_INVALID_VALUE"));
  EXPECT_THAT(problems, Contains("t:3: name TOKENS_INVALID_VALUE"));
  EXPECT_THAT(problems, Contains("t:4: roles TOKENS_INVALID_VALUE"));
  EXPECT_THAT(problems, Contains("t:5: role TOKENS_UNKNOWN_KEY"));
  EXPECT_THAT(problems, Contains("t:6: sha256 TOKENS_DUPLICATE"));
  EXPECT_THAT(problems, Contains("t:7: name TOKENS_DUPLICATE"));
  EXPECT_THAT(problems, Contains("t:7: tenant TOKENS_INVALID_VALUE"));
  EXPECT_THAT(problems, Contains("t:8: adapters TOKENS_INVALID_VALUE"));
  EXPECT_THAT(problems, Contains("t:9: the file TOKENS_UNKNOWN_KEY"));
}

TEST(TokenTableTest, RepeatsNoUnknownKeyWhichMayBeAToken) {
  const std::string token = "dorad_8f3a9c27d4e15b60";
  const absl::Status status =
      TokenTable::Parse("tokens:\n  - {" + token + ": x, tenent: t}\n" + token + ": y\n", "t")
          .status();
  EXPECT_THAT(status.ToString(), Not(HasSubstr(token)));
  EXPECT_THAT(status.ToString(), HasSubstr("tenent"));
}

TEST(TokenTableTest, RefusesAPrefixOutsideOfItsTenants) {
  const std::string tenants = "tenants: {t: {adapters: t.}}\ntokens:\n";
  EXPECT_THAT(Problems(tenants + Entry("a", "1", "tenant: t, roles: [infer], adapters: u.")),
              Contains("t:3: adapters TOKENS_INVALID_VALUE"));
  // The whole name space would be wider than the tenant's.
  EXPECT_THAT(Problems(tenants + Entry("a", "1", "tenant: t, roles: [infer], adapters: \"\"")),
              Contains("t:3: adapters TOKENS_INVALID_VALUE"));
}

TEST(TokenTableTest, RefusesATenantThatIsNotListedWhereSomeAre) {
  const std::string stray = Entry("a", "1", "tenant: taem-a, roles: [publish]");
  const std::string tenants = "tenants: {team-a: {adapters: team-a.}}\ntokens:\n";
  const auto table = TokenTable::Parse(tenants + stray, "t");
  const std::vector<Violation> violations = ViolationsOf(table.status());
  ASSERT_EQ(violations.size(), 1u);
  EXPECT_EQ(violations[0].reason, "TOKENS_UNKNOWN_TENANT");
  EXPECT_THAT(violations[0].description, HasSubstr("did you mean team-a?"));
  const std::string certificate =
      "certificates:\n  - {name: c, common_name: c, tenant: taem-a, roles: [infer]}\n";
  EXPECT_THAT(Problems(tenants + certificate), Contains(HasSubstr("TOKENS_UNKNOWN_TENANT")));
  // An admin has no limits anyway, and without a list there are none.
  Parsed(tenants + Entry("a", "1", "tenant: ops, roles: [admin]"));
  Parsed("tokens:\n" + stray);
}

TEST(TokenTableTest, RefusesTenantsOfWhichOneHasTheOthersAdapters) {
  const auto with = [](const std::string& a, const std::string& b) {
    return Problems(absl::StrCat("tenants: {a: {adapters: ", a, "}, b: {adapters: ", b, "}}\n"));
  };
  EXPECT_THAT(with("team-1", "team-10."), Contains("t:1: tenants TOKENS_PREFIXES_OVERLAP"));
  EXPECT_THAT(with("team-10.", "team-1"), Contains("t:1: tenants TOKENS_PREFIXES_OVERLAP"));
  EXPECT_THAT(with("team-1.", "team-10."), IsEmpty());
  EXPECT_THAT(with("shared.", "shared."), IsEmpty()) << "nobody writes that by mistake";
  EXPECT_THAT(with("team-1.", "\"\""), IsEmpty()) << "nor all names";
}

TEST(TokenTableTest, RefusesQuotasOfAdaptersWithoutAPrefix) {
  EXPECT_THAT(Problems("tenants: {t: {quota: {adapters: 3}}}\ntokens: []\n"),
              Contains("t:1: quota TOKENS_INVALID_VALUE"));
  EXPECT_TRUE(TokenTable::Parse("tenants: {t: {quota: {streams: 3}}}\n", "t").ok());
}

TEST(TokenTableTest, RefusesWhatIsNoMap) {
  for (const char* text :
       {"", "[1]", "tokens: 3", "tokens: [3]", "a: [", "tokens: [{name: [x]}]"}) {
    EXPECT_FALSE(TokenTable::Parse(text, "t").ok()) << text;
  }
}

TEST(TokenTableTest, NeverShowsATokenThatWasWrittenWhereItsDigestBelongs) {
  const auto table = TokenTable::Parse(
      "tokens:\n  - {name: a, tenant: t, sha256: my-secret-token, roles: [infer]}\n", "t");
  EXPECT_THAT(std::string(table.status().message()), Not(HasSubstr("my-secret-token")));
}

}  // namespace
}  // namespace dorad::security
