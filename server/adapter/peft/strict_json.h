// Parses JSON from a caller: bounded in size, depth and width, without duplicate keys (parsers
// differ in which one they keep). Keeps the order of keys. Thread-safe.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/statusor.h"

namespace dorad::adapter {

struct JsonLimits {
  size_t max_bytes = 1 << 20;
  int max_depth = 16;
  // Of one object; lookups in ordered objects are linear.
  size_t max_keys = 8192;
};

// The document, whose top level is an object. INVALID_ARGUMENT: ADAPTER_CONFIG_TOO_LARGE,
// ADAPTER_CONFIG_NOT_JSON, ADAPTER_CONFIG_DUPLICATE_KEY, ADAPTER_CONFIG_TOO_DEEP.
absl::StatusOr<nlohmann::ordered_json> ParseStrictJson(const std::string& text,
                                                       const JsonLimits& limits);

}  // namespace dorad::adapter
