#include "server/platform/metrics/request_log.h"

#include <algorithm>
#include <string_view>
#include <utility>

namespace dorad {

RequestLog::~RequestLog() {
  if (RequestsAreLogged()) LogFields(LogLevel::kInfo, "request ended", fields_);
}

void RequestLog::Set(const char* key, LogValue value) {
  absl::MutexLock lock(&mu_);
  const auto same = std::find_if(fields_.begin(), fields_.end(), [key](const LogField& field) {
    return std::string_view(field.first) == key;
  });
  if (same != fields_.end()) {
    same->second = std::move(value);
  } else {
    fields_.emplace_back(key, std::move(value));
  }
}

}  // namespace dorad
