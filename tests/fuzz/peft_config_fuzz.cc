// libFuzzer target: whatever the text is, an adapter_config.json is either refused with reasons of
// its own or says something that the server can honour; and JSON that is strict is so when written
// out and read again.
#include <cmath>
#include <cstdint>
#include <string>

#include "server/adapter/peft/peft_config.h"
#include "server/adapter/peft/strict_json.h"
#include "server/platform/check.h"
#include "server/platform/error.h"

namespace {

constexpr int kMaxRank = 64;

void CheckRefusal(const absl::Status& status) {
  DORAD_CHECK(status.code() == absl::StatusCode::kInvalidArgument);
  DORAD_CHECK(dorad::ReasonOf(status).rfind("ADAPTER_", 0) == 0);
  DORAD_CHECK(status.message().size() < 65536);
}

void CheckJson(const std::string& text) {
  const auto json = dorad::adapter::ParseStrictJson(text, {});
  if (!json.ok()) return CheckRefusal(json.status());
  DORAD_CHECK(json->is_object());
  const auto again = dorad::adapter::ParseStrictJson(json->dump(), {.max_bytes = 8 << 20});
  DORAD_CHECK(again.ok());
  DORAD_CHECK(*again == *json);
}

void CheckConfig(const std::string& text) {
  dorad::adapter::Violations violations;
  const auto config = dorad::adapter::ParsePeftConfig(text, kMaxRank, violations);
  if (!violations.empty()) {
    DORAD_CHECK(!config || !config->refused.empty());
    return CheckRefusal(violations.ToStatus("adapter"));
  }
  DORAD_CHECK(config->rank >= 1 && config->rank <= kMaxRank);
  DORAD_CHECK(std::isfinite(config->alpha));
  for (const auto& [pattern, rank] : config->rank_pattern) {
    DORAD_CHECK(!pattern.empty() && rank >= 1 && rank <= kMaxRank);
  }
  for (const auto& [pattern, alpha] : config->alpha_pattern) {
    DORAD_CHECK(!pattern.empty() && std::isfinite(alpha));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  CheckJson(text);
  CheckConfig(text);
  return 0;
}
