// Runs independent pieces of work on several threads. Thread-safe.
#pragma once

#include <cstddef>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"

namespace dorad {

// Cores that this process may use, at most `most`, at least 1.
int UsableCores(int most);

// Calls work(0) ... work(count - 1) on up to `threads` threads, the caller's among them; each
// thread takes the next index. Returns when all have ended. After an error no further index is
// taken; returns the first error. An exception of `work` becomes INTERNAL, or RESOURCE_EXHAUSTED
// as StatusOfException says. New threads have the caller's priority.
absl::Status ParallelFor(int threads, size_t count, absl::FunctionRef<absl::Status(size_t)> work);

}  // namespace dorad
