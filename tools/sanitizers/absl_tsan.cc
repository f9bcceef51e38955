// Annotates absl::Mutex and absl::Notification for ThreadSanitizer, because distributions build
// their library without it: otherwise every access under a mutex, and every hand-over through an
// earlier notification, looks like a race. Linked into programs of the thread preset only, where
// these definitions precede the library's, annotate and then call it.
//
// Between a "pre" and its "post" ThreadSanitizer ignores the thread's accesses, so the conditions
// that the library evaluates on behalf of waiting threads raise no false alarm.
#include <absl/synchronization/mutex.h>
#include <absl/synchronization/notification.h>
#include <dlfcn.h>
#include <sanitizer/tsan_interface.h>

#include <cstdio>
#include <cstdlib>
#include <type_traits>

#define DORAD_STRING_(x) #x
#define DORAD_STRING(x) DORAD_STRING_(x)
namespace {

// The library's own function, by the rest of its mangled name after absl's inline namespace.
// nested: "N", or "NK" for a const function.
void* Find(const char* member, const char* nested) {
  constexpr char kInline[] = DORAD_STRING(ABSL_OPTION_INLINE_NAMESPACE_NAME);
  char symbol[256];
  std::snprintf(symbol, sizeof(symbol), "_Z%s4absl%zu%s%s", nested, sizeof(kInline) - 1, kInline,
                member);
  void* const found = dlsym(RTLD_NEXT, symbol);
  if (found == nullptr) {
    std::fprintf(stderr, "absl_tsan: %s not found\n", symbol);
    std::abort();
  }
  return found;
}

// The library's functions call each other: only the outermost one counts.
thread_local bool inside = false;

// Around a library call that leaves a mutex locked, or waits for something with it.
template <typename Call>
auto Locking(absl::Mutex* mutex, bool held, unsigned flags, Call call) -> decltype(call()) {
  if (inside) return call();
  if (held) {
    __tsan_mutex_pre_unlock(mutex, flags);
    __tsan_mutex_post_unlock(mutex, flags);
  }
  __tsan_mutex_pre_lock(mutex, flags);
  inside = true;
  if constexpr (std::is_void_v<decltype(call())>) {
    call();
    inside = false;
    __tsan_mutex_post_lock(mutex, flags, 0);
  } else {
    const bool result = call();
    inside = false;
    __tsan_mutex_post_lock(mutex, flags, 0);
    return result;
  }
}

template <typename Call>
void Unlocking(absl::Mutex* mutex, unsigned flags, Call call) {
  if (inside) return call();
  __tsan_mutex_pre_unlock(mutex, flags);
  inside = true;
  call();
  inside = false;
  __tsan_mutex_post_unlock(mutex, flags);
}

template <typename Function>
Function As(const char* member, const char* nested = "N") {
  return reinterpret_cast<Function>(Find(member, nested));
}

}  // namespace

namespace absl {
ABSL_NAMESPACE_BEGIN

void Mutex::Lock() {
  static const auto real = As<void (*)(Mutex*)>("5Mutex4LockEv");
  Locking(this, false, 0, [&] { real(this); });
}

void Mutex::Unlock() {
  static const auto real = As<void (*)(Mutex*)>("5Mutex6UnlockEv");
  Unlocking(this, 0, [&] { real(this); });
}

void Mutex::ReaderLock() {
  static const auto real = As<void (*)(Mutex*)>("5Mutex10ReaderLockEv");
  Locking(this, false, __tsan_mutex_read_lock, [&] { real(this); });
}

void Mutex::ReaderUnlock() {
  static const auto real = As<void (*)(Mutex*)>("5Mutex12ReaderUnlockEv");
  Unlocking(this, __tsan_mutex_read_lock, [&] { real(this); });
}

bool Mutex::TryLock() {
  static const auto real = As<bool (*)(Mutex*)>("5Mutex7TryLockEv");
  if (inside) return real(this);
  __tsan_mutex_pre_lock(this, __tsan_mutex_try_lock);
  const bool locked = real(this);
  __tsan_mutex_post_lock(this, __tsan_mutex_try_lock | (locked ? 0 : __tsan_mutex_try_lock_failed),
                         0);
  return locked;
}

void Mutex::LockWhen(const Condition& condition) {
  static const auto real =
      As<void (*)(Mutex*, const Condition&)>("5Mutex8LockWhenERKNS0_9ConditionE");
  Locking(this, false, 0, [&] { real(this, condition); });
}

bool Mutex::LockWhenWithTimeout(const Condition& condition, Duration timeout) {
  static const auto real = As<bool (*)(Mutex*, const Condition&, Duration)>(
      "5Mutex19LockWhenWithTimeoutERKNS0_9ConditionENS0_8DurationE");
  return Locking(this, false, 0, [&] { return real(this, condition, timeout); });
}

void Mutex::Await(const Condition& condition) {
  static const auto real = As<void (*)(Mutex*, const Condition&)>("5Mutex5AwaitERKNS0_9ConditionE");
  Locking(this, true, 0, [&] { real(this, condition); });
}

bool Mutex::AwaitWithTimeout(const Condition& condition, Duration timeout) {
  static const auto real = As<bool (*)(Mutex*, const Condition&, Duration)>(
      "5Mutex16AwaitWithTimeoutERKNS0_9ConditionENS0_8DurationE");
  return Locking(this, true, 0, [&] { return real(this, condition, timeout); });
}

// gRPC waits so.
void CondVar::Wait(Mutex* mutex) {
  static const auto real = As<void (*)(CondVar*, Mutex*)>("7CondVar4WaitEPNS0_5MutexE");
  Locking(mutex, true, 0, [&] { real(this, mutex); });
}

bool CondVar::WaitWithDeadline(Mutex* mutex, Time deadline) {
  static const auto real =
      As<bool (*)(CondVar*, Mutex*, Time)>("7CondVar16WaitWithDeadlineEPNS0_5MutexENS0_4TimeE");
  return Locking(mutex, true, 0, [&] { return real(this, mutex, deadline); });
}

bool CondVar::WaitWithTimeout(Mutex* mutex, Duration timeout) {
  static const auto real = As<bool (*)(CondVar*, Mutex*, Duration)>(
      "7CondVar15WaitWithTimeoutEPNS0_5MutexENS0_8DurationE");
  return Locking(mutex, true, 0, [&] { return real(this, mutex, timeout); });
}

void Notification::Notify() {
  static const auto real = As<void (*)(Notification*)>("12Notification6NotifyEv");
  __tsan_release(this);
  real(this);
}

void Notification::WaitForNotification() const {
  static const auto real =
      As<void (*)(const Notification*)>("12Notification19WaitForNotificationEv", "NK");
  real(this);
  __tsan_acquire(const_cast<Notification*>(this));
}

bool Notification::WaitForNotificationWithTimeout(Duration timeout) const {
  static const auto real = As<bool (*)(const Notification*, Duration)>(
      "12Notification30WaitForNotificationWithTimeoutENS0_8DurationE", "NK");
  const bool notified = real(this, timeout);
  if (notified) __tsan_acquire(const_cast<Notification*>(this));
  return notified;
}

ABSL_NAMESPACE_END
}  // namespace absl
