#include "server/platform/process/stack_dump.h"

#include <dlfcn.h>
#include <execinfo.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>
#include <utility>

#include "absl/debugging/symbolize.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/platform/log.h"

namespace dorad {
namespace {

constexpr int kMaxFrames = 64;
constexpr absl::Duration kPatience = absl::Milliseconds(100);
constexpr absl::Duration kPoll = absl::Milliseconds(1);

// One interrupted thread's answer. `wanted` is the thread that may write; a thread claims that
// right by setting it to 0.
struct Answer {
  std::atomic<pid_t> wanted{0};
  std::atomic<bool> written{false};
  int frames = 0;
  void* stack[kMaxFrames];
};
// Global, because a signal handler takes no arguments. A thread that still writes after its time
// keeps its answer, which is never freed; the next thread gets another.
std::atomic<Answer*> current{new Answer};

pid_t ThreadId() { return static_cast<pid_t>(syscall(SYS_gettid)); }

void AnswerWithStack(int) {
  pid_t self = ThreadId();
  Answer* const answer = current;
  if (!answer->wanted.compare_exchange_strong(self, 0)) return;
  answer->frames = backtrace(answer->stack, kMaxFrames);
  answer->written = true;
}

std::string NameOf(void* address) {
  char name[256];
  // A return address may be the first of the next function.
  void* const call = static_cast<char*>(address) - 1;
  if (absl::Symbolize(call, name, sizeof(name))) return name;
  Dl_info info;
  if (dladdr(call, &info) == 0 || info.dli_fname == nullptr) {
    return absl::StrCat("0x", absl::Hex(reinterpret_cast<uintptr_t>(address)));
  }
  const auto offset =
      reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(info.dli_fbase);
  return absl::StrCat(std::filesystem::path(info.dli_fname).filename().string(), "+0x",
                      absl::Hex(offset));
}

// Without the frames of the handler and of the signal's delivery.
std::string FramesOf(const Answer& answer) {
  constexpr int kOwnFrames = 2;
  std::string text;
  for (int i = kOwnFrames; i < answer.frames; ++i) {
    absl::StrAppend(&text, text.empty() ? "" : " < ", NameOf(answer.stack[i]));
  }
  return text;
}

std::string ThreadName(pid_t thread) {
  std::ifstream file(absl::StrCat("/proc/self/task/", thread, "/comm"));
  std::string name;
  std::getline(file, name);
  return name;
}

std::string StackOf(pid_t thread) {
  Answer& answer = *current;
  answer.written = false;
  answer.wanted = thread;
  if (syscall(SYS_tgkill, getpid(), thread, SIGRTMIN) != 0) return "";
  const absl::Time deadline = absl::Now() + kPatience;
  while (!answer.written && absl::Now() < deadline) absl::SleepFor(kPoll);
  if (!answer.written) {
    pid_t still = thread;
    if (answer.wanted.compare_exchange_strong(still, 0)) return "does not answer";
    // It is writing right now.
    absl::SleepFor(kPatience);
    if (!answer.written) {
      current = new Answer;
      return "does not answer";
    }
  }
  return FramesOf(answer);
}

}  // namespace

void InitializeStackDump(const char* program) { absl::InitializeSymbolizer(program); }

void DumpStacks() {
  static absl::Mutex* const one_at_a_time = new absl::Mutex();
  absl::MutexLock lock(one_at_a_time);
  // Loads the unwinder: a handler must not do that.
  void* here[1];
  backtrace(here, 1);
  struct sigaction action {};
  action.sa_handler = AnswerWithStack;
  action.sa_flags = SA_RESTART;
  sigaction(SIGRTMIN, &action, nullptr);
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task", error)) {
    int32_t thread = 0;
    if (!absl::SimpleAtoi(entry.path().filename().string(), &thread)) continue;
    const std::string name = ThreadName(thread);
    std::string stack = StackOf(thread);
    if (stack.empty()) continue;  // has ended meanwhile
    LogError("stack of a thread",
             {{"thread", name}, {"tid", int64_t{thread}}, {"stack", std::move(stack)}});
  }
}

}  // namespace dorad
