// JSON logs: one object a line on stderr, with ts (RFC 3339, microseconds), level, msg and fields.
// Values are escaped, so a caller's text can never start a new line. Prompts and tokens are never
// logged. Thread-safe.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "absl/types/span.h"

namespace dorad {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

using LogValue = std::variant<std::string, int64_t, double, bool>;
using LogField = std::pair<const char*, LogValue>;

// "debug", "info", "warning", "error". False: any other text.
bool ParseLogLevel(std::string_view text, LogLevel* level);
// json false: human-readable lines (for terminals). requests: whether RequestLog writes its lines.
void SetLogging(LogLevel level, bool json, bool requests = true);
bool RequestsAreLogged();
void Log(LogLevel level, std::string_view message, std::initializer_list<LogField> fields = {});
// As Log, with fields known only at run time.
void LogFields(LogLevel level, std::string_view message, absl::Span<const LogField> fields);

inline void LogInfo(std::string_view message, std::initializer_list<LogField> fields = {}) {
  Log(LogLevel::kInfo, message, fields);
}
inline void LogWarning(std::string_view message, std::initializer_list<LogField> fields = {}) {
  Log(LogLevel::kWarning, message, fields);
}
inline void LogError(std::string_view message, std::initializer_list<LogField> fields = {}) {
  Log(LogLevel::kError, message, fields);
}

}  // namespace dorad
