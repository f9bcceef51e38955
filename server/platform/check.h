// DORAD_CHECK: aborts with file and line when an internal invariant is broken. Never for input.
#pragma once

#include <cstdio>
#include <cstdlib>

namespace dorad::internal {
[[noreturn]] inline void CheckFailed(const char* expression, const char* file, int line) {
  std::fprintf(stderr, "%s:%d: CHECK failed: %s\n", file, line, expression);
  std::abort();
}
}  // namespace dorad::internal

#define DORAD_CHECK(condition)            \
  (static_cast<bool>(condition) ? void(0) \
                                : ::dorad::internal::CheckFailed(#condition, __FILE__, __LINE__))
