// A disk that notes what is asked of it and fails when a test says so, and a folder that goes when
// the test ends.
#pragma once

#include <unistd.h>

#include <cerrno>

#include "server/adapter/store/disk.h"
#include "tests/unit/support/test.h"

namespace dorad::test {

class FakeDisk : public adapter::Disk {
 public:
  // An errno; 0: the calls succeed.
  int write_error = 0, sync_error = 0, truncate_error = 0, rename_error = 0;
  size_t bytes_before_write_error = 0;
  std::function<void()> on_rename;  // once, after a rename
  // "write PATH", "sync PATH", "rename FROM TO" in order.
  std::vector<std::string> calls;
  bool note_calls = false;

  ssize_t Write(int fd, const void* data, size_t bytes) override {
    Note("write ", fd);
    if (write_error == 0) return Disk::Write(fd, data, bytes);
    if (bytes_before_write_error == 0) return Fail(write_error);
    const ssize_t n = Disk::Write(fd, data, std::min(bytes, bytes_before_write_error));
    bytes_before_write_error -= static_cast<size_t>(n);
    return n;
  }
  int Sync(int fd) override {
    Note("sync ", fd);
    return sync_error != 0 ? Fail(sync_error) : Disk::Sync(fd);
  }
  int Truncate(int fd, int64_t bytes) override {
    return truncate_error != 0 ? Fail(truncate_error) : Disk::Truncate(fd, bytes);
  }
  int Rename(const std::string& from, const std::string& to) override {
    if (note_calls) calls.push_back("rename " + from + " " + to);
    if (rename_error != 0) return Fail(rename_error);
    const int result = Disk::Rename(from, to);
    if (on_rename) std::exchange(on_rename, nullptr)();
    return result;
  }

 private:
  void Note(const char* call, int fd) {
    if (!note_calls) return;
    const auto path = std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(fd));
    calls.push_back(call + path.string());
  }
  static int Fail(int error) {
    errno = error;
    return -1;
  }
};

class ScratchFolder {
 public:
  ScratchFolder()
      : path_(std::filesystem::path(::testing::TempDir()) /
              (std::to_string(getpid()) + "_" +
               ::testing::UnitTest::GetInstance()->current_test_info()->name())) {
    std::filesystem::create_directories(path_);
    // Temporary folders may themselves be reached through a link.
    path_ = std::filesystem::canonical(path_);
  }
  ~ScratchFolder() { std::filesystem::remove_all(path_); }

  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

}  // namespace dorad::test
