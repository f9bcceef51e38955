// Every method of the wire contract has a rule, so that none is open by oversight.
#include "server/security/method_rules.h"

#include "dorad/v1/adapters.pb.h"
#include "dorad/v1/control.pb.h"
#include "dorad/v1/inference.pb.h"
#include "tests/unit/support/test.h"

namespace dorad::rpc {
namespace {

using security::MethodRule;
using security::Role;

std::multiset<std::string> MethodsOfContract() {
  std::multiset<std::string> names;
  for (const google::protobuf::FileDescriptor* file :
       {v1::GenerateRequest::descriptor()->file(), v1::PublishRequest::descriptor()->file(),
        v1::GetInfoRequest::descriptor()->file()}) {
    for (int s = 0; s < file->service_count(); ++s) {
      for (int m = 0; m < file->service(s)->method_count(); ++m) {
        names.insert(file->service(s)->method(m)->name());
      }
    }
  }
  return names;
}

TEST(MethodRulesTest, CoverEveryMethodOfTheContractOnceAndNothingElse) {
  std::multiset<std::string> ruled;
  for (const MethodRule& rule : security::MethodRules()) ruled.insert(rule.method);
  const std::multiset<std::string> methods = MethodsOfContract();
  EXPECT_EQ(ruled, methods);
  EXPECT_EQ(std::set<std::string>(methods.begin(), methods.end()).size(), methods.size())
      << "rules go by a method's name without its service";
}

TEST(MethodRulesTest, OpenNothingToNobodyAndEverythingToAdmins) {
  for (const MethodRule& rule : security::MethodRules()) {
    EXPECT_FALSE(security::Roles().HasAnyOf(rule.any_of)) << rule.method;
    EXPECT_TRUE(security::Roles(Role::kAdmin).HasAnyOf(rule.any_of)) << rule.method;
  }
}

TEST(MethodRulesTest, KeepChangesFromThoseWhoOnlyInfer) {
  for (const char* method :
       {"Publish", "PublishFromPath", "PublishFromMemory", "PublishFromPeer", "FetchAdapter",
        "Activate", "Retire", "Pause", "Resume", "Sleep", "Wake", "LimitGpuShare",
        "EndGpuShareLimit", "ShareBaseWeights", "GetUpload"}) {
    EXPECT_FALSE(security::Roles(Role::kInfer).HasAnyOf(security::RuleOf(method).any_of)) << method;
  }
  for (const char* method :
       {"Generate", "Score", "Sleep", "Wake", "LimitGpuShare", "EndGpuShareLimit"}) {
    EXPECT_FALSE(security::Roles(Role::kPublish).HasAnyOf(security::RuleOf(method).any_of))
        << method;
  }
}

}  // namespace
}  // namespace dorad::rpc
