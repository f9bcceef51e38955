// libFuzzer target: whatever the text is, the configuration is either refused with a CONFIG_ reason
// or survives ToYaml and a second reading unchanged. The first line goes to --set.
#include <cstdint>
#include <string>
#include <vector>

#include "server/platform/check.h"
#include "server/platform/config/config.h"
#include "server/platform/error.h"

namespace {

void Check(const absl::StatusOr<dorad::Config>& config) {
  if (!config.ok()) {
    DORAD_CHECK(config.status().code() == absl::StatusCode::kInvalidArgument);
    DORAD_CHECK(dorad::ReasonOf(config.status()).rfind("CONFIG_", 0) == 0);
    return;
  }
  const std::string yaml = dorad::ToYaml(*config);
  const auto again = dorad::ParseConfig(yaml, "again", {});
  DORAD_CHECK(again.ok());
  DORAD_CHECK(dorad::ToYaml(*again) == yaml);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  Check(dorad::ParseConfig(text, "fuzz", {}));
  const size_t line_end = text.find('\n');
  Check(dorad::ParseConfig("", "fuzz", {text.substr(0, line_end)}));
  return 0;
}
