#include "server/security/method_rules.h"

#include "server/platform/check.h"

namespace dorad::security {

const std::vector<MethodRule>& MethodRules() {
  constexpr Roles kInfer = Role::kInfer;
  constexpr Roles kPublish = Role::kPublish;
  constexpr Roles kAdmin = Role::kAdmin;
  // Methods that end or pause work are no streams: a tenant without free streams must be able to
  // call them.
  static const auto* const rules = new std::vector<MethodRule>{
      {"Generate", kInfer, true},
      {"Score", kInfer, true},
      {"Abort", kInfer, false},
      {"Publish", kPublish, true},
      {"GetUpload", kPublish, false},
      {"PublishFromPath", kPublish, true},
      {"PublishFromMemory", kPublish, true},
      {"PublishFromPeer", kPublish, true},
      {"FetchAdapter", kPublish, true},
      {"Activate", kPublish, false},
      {"Get", kInfer | kPublish, false},
      {"List", kInfer | kPublish, false},
      {"Watch", kInfer | kPublish, true},
      {"Retire", kPublish, false},
      {"GetInfo", kInfer | kPublish, false},
      // Of an adapter; the service restricts pauses of everything to admins.
      {"Pause", kPublish, false},
      {"Resume", kPublish, false},
      // These change the server for all tenants.
      {"Sleep", kAdmin, false},
      {"Wake", kAdmin, false},
      {"LimitGpuShare", kAdmin, false},
      {"EndGpuShareLimit", kAdmin, false},
      // A caller with a session_token runs as the server's own user on its host.
      {"ShareBaseWeights", kPublish, false},
  };
  return *rules;
}

const MethodRule& RuleOf(std::string_view method) {
  for (const MethodRule& rule : MethodRules()) {
    if (method == rule.method) return rule;
  }
  DORAD_CHECK(false);
}

}  // namespace dorad::security
