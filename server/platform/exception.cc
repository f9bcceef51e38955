#include "server/platform/exception.h"

#include <algorithm>
#include <exception>
#include <new>
#include <string>

#include "server/platform/error.h"
#include "server/platform/log.h"

namespace dorad {
namespace {

struct Failure {
  bool out_of_memory = false;
  std::string text;
};

// libtorch begins a backtrace with one of these lines; its allocator omits the first.
constexpr const char* kBacktraces[] = {"\nException raised from ", "\nframe #"};

// libtorch's CPU allocator throws a plain c10::Error: only its text identifies it.
bool IsAllocatorText(const std::string& text) {
  return text.find("DefaultCPUAllocator:") != std::string::npos ||
         text.find("not enough memory") != std::string::npos;
}

Failure Current() {
  try {
    throw;
  } catch (const std::bad_alloc& error) {
    return {true, error.what()};
  } catch (const std::exception& error) {
    std::string text = error.what();
    for (const char* backtrace : kBacktraces) {
      text.resize(std::min(text.size(), text.find(backtrace)));
    }
    return {IsAllocatorText(text), text};
  } catch (...) {
    return {false, "an exception of an unknown type"};
  }
}

}  // namespace

absl::Status StatusOfException(std::string_view what_failed, std::string_view reason) {
  const Failure failure = Current();
  const std::string what(what_failed);
  LogError("an exception was caught", {{"what", what}, {"error", failure.text}});
  if (failure.out_of_memory) {
    return MakeError(absl::StatusCode::kResourceExhausted, "OUT_OF_MEMORY",
                     what + " ran out of memory");
  }
  return MakeError(absl::StatusCode::kInternal, reason, what + " failed; see the server's log");
}

}  // namespace dorad
