#include "server/platform/log.h"

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <charconv>
#include <cmath>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/platform/files/utf8.h"

namespace dorad {
namespace {

// Settings and the lock live as long as the process, so that destructors can log.
std::atomic<LogLevel> min_level{LogLevel::kInfo};
std::atomic<bool> as_json{true};
std::atomic<bool> log_requests{true};
ABSL_CONST_INIT absl::Mutex write_mu(absl::kConstInit);

const char* NameOf(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return "debug";
    case LogLevel::kInfo:
      return "info";
    case LogLevel::kWarning:
      return "warning";
    case LogLevel::kError:
      return "error";
  }
  return "error";
}

// JSON string, always one line of valid UTF-8. Bytes that are not UTF-8 become U+FFFD.
void AppendQuoted(std::string_view text, std::string* out) {
  static constexpr char kHex[] = "0123456789abcdef";
  out->push_back('"');
  while (!text.empty()) {
    const size_t length = Utf8SequenceLength(text);
    const unsigned char first = static_cast<unsigned char>(text.front());
    if (length == 0) {
      out->append("\\ufffd");
    } else if (first == '"' || first == '\\') {
      out->push_back('\\');
      out->push_back(text.front());
    } else if (first == '\n') {
      out->append("\\n");
    } else if (first < 0x20 || first == 0x7f) {
      out->append("\\u00");
      out->push_back(kHex[first >> 4]);
      out->push_back(kHex[first & 15]);
    } else if (length == 2 && first == 0xc2 && static_cast<unsigned char>(text[1]) < 0xa0) {
      // C1 controls move the cursor on some terminals.
      out->append("\\u00");
      out->push_back(kHex[static_cast<unsigned char>(text[1]) >> 4]);
      out->push_back(kHex[static_cast<unsigned char>(text[1]) & 15]);
    } else if (length == 3 && (text.substr(0, 3) == "\u2028" || text.substr(0, 3) == "\u2029")) {
      // Some readers of JSON lines take these for line separators.
      out->append(text[2] == '\xa8' ? "\\u2028" : "\\u2029");
    } else {
      out->append(text.substr(0, length));
    }
    text.remove_prefix(length == 0 ? 1 : length);
  }
  out->push_back('"');
}

void AppendDouble(double value, std::string* out) {
  // JSON has no NaN and no infinity.
  if (!std::isfinite(value)) {
    out->append(std::isnan(value) ? "\"NaN\"" : value > 0 ? "\"Infinity\"" : "\"-Infinity\"");
    return;
  }
  char buffer[32];
  const auto result = std::to_chars(buffer, buffer + sizeof(buffer), value);
  out->append(buffer, result.ptr);
}

void AppendValue(const LogValue& value, std::string* out) {
  if (const auto* text = std::get_if<std::string>(&value)) {
    AppendQuoted(*text, out);
  } else if (const auto* integer = std::get_if<int64_t>(&value)) {
    out->append(std::to_string(*integer));
  } else if (const auto* real = std::get_if<double>(&value)) {
    AppendDouble(*real, out);
  } else {
    out->append(std::get<bool>(value) ? "true" : "false");
  }
}

std::string JsonLine(LogLevel level, std::string_view message, const std::string& time,
                     absl::Span<const LogField> fields) {
  std::string line = "{\"ts\":\"" + time + "\",\"level\":\"" + NameOf(level) + "\",\"msg\":";
  AppendQuoted(message, &line);
  for (const LogField& field : fields) {
    line.push_back(',');
    AppendQuoted(field.first, &line);
    line.push_back(':');
    AppendValue(field.second, &line);
  }
  line.append("}\n");
  return line;
}

std::string TextLine(LogLevel level, std::string_view message, const std::string& time,
                     absl::Span<const LogField> fields) {
  std::string quoted;
  AppendQuoted(message, &quoted);
  std::string line = time + " " + NameOf(level) + " " + quoted.substr(1, quoted.size() - 2);
  for (const LogField& field : fields) {
    line.append(" ").append(field.first).push_back('=');
    AppendValue(field.second, &line);
  }
  line.push_back('\n');
  return line;
}

// One write() for a whole line; a partial write is continued, and a closed stderr is ignored.
void WriteLine(std::string_view line) {
  absl::MutexLock lock(&write_mu);
  while (!line.empty()) {
    const ssize_t n = write(STDERR_FILENO, line.data(), line.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return;
    line.remove_prefix(static_cast<size_t>(n));
  }
}

}  // namespace

bool ParseLogLevel(std::string_view text, LogLevel* level) {
  for (const LogLevel candidate :
       {LogLevel::kDebug, LogLevel::kInfo, LogLevel::kWarning, LogLevel::kError}) {
    if (text == NameOf(candidate)) {
      *level = candidate;
      return true;
    }
  }
  return false;
}

void SetLogging(LogLevel level, bool json, bool requests) {
  min_level.store(level, std::memory_order_relaxed);
  as_json.store(json, std::memory_order_relaxed);
  log_requests.store(requests, std::memory_order_relaxed);
}

bool RequestsAreLogged() { return log_requests.load(std::memory_order_relaxed); }

void Log(LogLevel level, std::string_view message, std::initializer_list<LogField> fields) {
  LogFields(level, message, absl::MakeConstSpan(fields.begin(), fields.size()));
}

void LogFields(LogLevel level, std::string_view message, absl::Span<const LogField> fields) {
  if (level < min_level.load(std::memory_order_relaxed)) return;
  const std::string time =
      absl::FormatTime("%Y-%m-%dT%H:%M:%E6SZ", absl::Now(), absl::UTCTimeZone());
  WriteLine(as_json.load(std::memory_order_relaxed) ? JsonLine(level, message, time, fields)
                                                    : TextLine(level, message, time, fields));
}

}  // namespace dorad
