// The roles for each method of dorad.v1. Constant and therefore thread-safe.
#pragma once

#include <string_view>
#include <vector>

#include "server/security/principal.h"

namespace dorad::security {

struct MethodRule {
  const char* method;     // "Generate": the names are unique over all services
  Roles any_of;           // one of these roles suffices
  bool is_stream = true;  // counts as one of its tenant's streams while it runs
};

// One for each method; a test compares them with the wire contract.
const std::vector<MethodRule>& MethodRules();

// REQUIRES: the method exists.
const MethodRule& RuleOf(std::string_view method);

}  // namespace dorad::security
