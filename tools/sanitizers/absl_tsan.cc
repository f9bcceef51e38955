// Tells ThreadSanitizer about absl::Mutex, whose library distributions build without it: without
// this, everything that a mutex guards looks like a race. Linked into programs of the thread preset
// only, where these definitions come before the library's, do its part and then call it.
//
// Between a "pre" and its "post" ThreadSanitizer ignores what the thread does, so the conditions
// that the library evaluates on behalf of waiting threads raise no false alarm.
#include <absl/synchronization/mutex.h>
#include <dlfcn.h>
#include <sanitizer/tsan_interface.h>

#include <cstdio>
#include <cstdlib>

#define DORAD_STRING_(x) #x
#define DORAD_STRING(x) DORAD_STRING_(x)
namespace {

// The library's own member of absl::Mutex, by the rest of its mangled name.
void* Find(const char* member) {
  constexpr char kInline[] = DORAD_STRING(ABSL_OPTION_INLINE_NAMESPACE_NAME);
  char symbol[256];
  std::snprintf(symbol, sizeof(symbol), "_ZN4absl%zu%s5Mutex%s", sizeof(kInline) - 1, kInline,
                member);
  void* const found = dlsym(RTLD_NEXT, symbol);
  if (found == nullptr) {
    std::fprintf(stderr, "absl_tsan: %s not found\n", symbol);
    std::abort();
  }
  return found;
}

using Plain = void (*)(absl::Mutex*);
using Try = bool (*)(absl::Mutex*);
using When = void (*)(absl::Mutex*, const absl::Condition&);
using WhenFor = bool (*)(absl::Mutex*, const absl::Condition&, absl::Duration);

}  // namespace

namespace absl {
ABSL_NAMESPACE_BEGIN

void Mutex::Lock() {
  static const auto real = reinterpret_cast<Plain>(Find("4LockEv"));
  __tsan_mutex_pre_lock(this, 0);
  real(this);
  __tsan_mutex_post_lock(this, 0, 0);
}

void Mutex::Unlock() {
  static const auto real = reinterpret_cast<Plain>(Find("6UnlockEv"));
  __tsan_mutex_pre_unlock(this, 0);
  real(this);
  __tsan_mutex_post_unlock(this, 0);
}

bool Mutex::TryLock() {
  static const auto real = reinterpret_cast<Try>(Find("7TryLockEv"));
  __tsan_mutex_pre_lock(this, __tsan_mutex_try_lock);
  const bool locked = real(this);
  __tsan_mutex_post_lock(this, __tsan_mutex_try_lock | (locked ? 0 : __tsan_mutex_try_lock_failed),
                         0);
  return locked;
}

void Mutex::ReaderLock() {
  static const auto real = reinterpret_cast<Plain>(Find("10ReaderLockEv"));
  __tsan_mutex_pre_lock(this, __tsan_mutex_read_lock);
  real(this);
  __tsan_mutex_post_lock(this, __tsan_mutex_read_lock, 0);
}

void Mutex::ReaderUnlock() {
  static const auto real = reinterpret_cast<Plain>(Find("12ReaderUnlockEv"));
  __tsan_mutex_pre_unlock(this, __tsan_mutex_read_lock);
  real(this);
  __tsan_mutex_post_unlock(this, __tsan_mutex_read_lock);
}

void Mutex::LockWhen(const Condition& condition) {
  static const auto real = reinterpret_cast<When>(Find("8LockWhenERKNS0_9ConditionE"));
  __tsan_mutex_pre_lock(this, 0);
  real(this, condition);
  __tsan_mutex_post_lock(this, 0, 0);
}

void Mutex::Await(const Condition& condition) {
  static const auto real = reinterpret_cast<When>(Find("5AwaitERKNS0_9ConditionE"));
  __tsan_mutex_pre_unlock(this, 0);
  __tsan_mutex_post_unlock(this, 0);
  __tsan_mutex_pre_lock(this, 0);
  real(this, condition);
  __tsan_mutex_post_lock(this, 0, 0);
}

bool Mutex::AwaitWithTimeout(const Condition& condition, Duration timeout) {
  static const auto real =
      reinterpret_cast<WhenFor>(Find("16AwaitWithTimeoutERKNS0_9ConditionENS0_8DurationE"));
  __tsan_mutex_pre_unlock(this, 0);
  __tsan_mutex_post_unlock(this, 0);
  __tsan_mutex_pre_lock(this, 0);
  const bool reached = real(this, condition, timeout);
  __tsan_mutex_post_lock(this, 0, 0);
  return reached;
}

bool Mutex::LockWhenWithTimeout(const Condition& condition, Duration timeout) {
  static const auto real =
      reinterpret_cast<WhenFor>(Find("19LockWhenWithTimeoutERKNS0_9ConditionENS0_8DurationE"));
  __tsan_mutex_pre_lock(this, 0);
  const bool reached = real(this, condition, timeout);
  __tsan_mutex_post_lock(this, 0, 0);
  return reached;
}

ABSL_NAMESPACE_END
}  // namespace absl
