#include "server/platform/process/service_manager.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "server/platform/log.h"

namespace dorad {
namespace {

std::string TakeVariable(const char* name) {
  const char* value = std::getenv(name);
  std::string text = value == nullptr ? "" : value;
  unsetenv(name);
  return text;
}

// systemd compares it with the time of its own reload job.
int64_t MonotonicMicros() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000 + now.tv_nsec / 1000;
}

}  // namespace

std::unique_ptr<ServiceManager> ServiceManager::FromEnvironment() {
  const std::string socket = TakeVariable("NOTIFY_SOCKET");
  const std::string micros = TakeVariable("WATCHDOG_USEC");
  const std::string pid = TakeVariable("WATCHDOG_PID");
  int64_t watchdog = 0;
  // Ignores an inherited watchdog of another process.
  const bool is_ours = pid.empty() || pid == absl::StrCat(getpid());
  if (!is_ours || !absl::SimpleAtoi(micros, &watchdog) || watchdog < 0) watchdog = 0;
  return std::make_unique<ServiceManager>(socket, absl::Microseconds(watchdog));
}

ServiceManager::ServiceManager(const std::string& socket, absl::Duration watchdog)
    : watchdog_(watchdog) {
  if (socket.empty()) return;
  if ((socket[0] != '/' && socket[0] != '@') || socket.size() >= sizeof(sockaddr_un::sun_path)) {
    LogWarning("NOTIFY_SOCKET is neither a path nor an abstract name", {{"NOTIFY_SOCKET", socket}});
    return;
  }
  address_ = socket;
  if (address_[0] == '@') address_[0] = '\0';
  socket_ = UniqueFd(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
}

ServiceManager::~ServiceManager() {
  stop_.Notify();
  if (thread_.joinable()) thread_.join();
}

void ServiceManager::Ready(const std::string& status) {
  Send(absl::StrCat("READY=1\nSTATUS=", status));
}

void ServiceManager::Reloading() {
  Send(absl::StrCat("RELOADING=1\nMONOTONIC_USEC=", MonotonicMicros()));
}

void ServiceManager::Stopping(const std::string& status) {
  Send(absl::StrCat("STOPPING=1\nSTATUS=", status));
}

void ServiceManager::KeepAlive(std::function<bool()> alive) {
  if (watchdog_ <= absl::ZeroDuration() || !socket_.ok()) return;
  thread_ = std::thread([this, alive = std::move(alive)] {
    do {
      if (alive()) Send("WATCHDOG=1");
    } while (!stop_.WaitForNotificationWithTimeout(watchdog_ / 2));
  });
}

void ServiceManager::Send(const std::string& message) const {
  if (!socket_.ok()) return;
  sockaddr_un to{};
  to.sun_family = AF_UNIX;
  std::memcpy(to.sun_path, address_.data(), address_.size());
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + address_.size());
  const ssize_t sent =
      sendto(socket_.get(), message.data(), message.size(), MSG_NOSIGNAL | MSG_DONTWAIT,
             reinterpret_cast<const sockaddr*>(&to), length);
  if (sent < 0) {
    LogWarning("the service manager does not accept a message",
               {{"error", std::string(std::strerror(errno))}});
  }
}

}  // namespace dorad
