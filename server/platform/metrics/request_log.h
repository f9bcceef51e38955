// The one log line of a call. The call's gRPC side and, after Submit, the engine own it together;
// the last owner's release writes the line. Prompts and tokens never become fields. Thread-safe.
#pragma once

#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/platform/log.h"

namespace dorad {

class RequestLog {
 public:
  RequestLog() = default;
  RequestLog(const RequestLog&) = delete;
  RequestLog& operator=(const RequestLog&) = delete;
  // Writes the line, unless SetLogging has turned requests' lines off.
  ~RequestLog();

  // Adds a field, or replaces its value. key: a literal.
  void Set(const char* key, LogValue value);

 private:
  absl::Mutex mu_;
  std::vector<LogField> fields_ ABSL_GUARDED_BY(mu_);  // in order of arrival
};

}  // namespace dorad
