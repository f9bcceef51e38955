#include "server/ops/torch_error.h"

#include <c10/util/Exception.h>

#include <exception>
#include <new>
#include <string>

#include "server/base/error.h"
#include "server/base/log.h"

namespace dorad::ops {
namespace {

struct Failure {
  bool out_of_memory = false;
  std::string text;
};

// The CPU's allocator throws a plain c10::Error: only its text tells.
bool IsAllocatorText(const std::string& text) {
  return text.find("DefaultCPUAllocator:") != std::string::npos ||
         text.find("not enough memory") != std::string::npos;
}

Failure Current() {
  try {
    throw;
  } catch (const c10::OutOfMemoryError& error) {
    return {true, error.what_without_backtrace()};
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    return {IsAllocatorText(text), text};
  } catch (const std::bad_alloc& error) {
    return {true, error.what()};
  } catch (const std::exception& error) {
    return {false, error.what()};
  } catch (...) {
    return {false, "an exception of an unknown type"};
  }
}

}  // namespace

absl::Status FromTorchException(std::string_view what_failed, std::string_view reason) {
  const Failure failure = Current();
  const std::string what(what_failed);
  LogError("an exception ended some work", {{"what", what}, {"error", failure.text}});
  if (failure.out_of_memory) {
    return MakeError(absl::StatusCode::kResourceExhausted, "OUT_OF_MEMORY",
                     what + " ran out of memory");
  }
  return MakeError(absl::StatusCode::kInternal, reason, what + " failed; see the server's log");
}

}  // namespace dorad::ops
