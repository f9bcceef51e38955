// A 64-byte aligned buffer that keeps its memory from call to call. Not thread-safe: used as a
// thread_local of the thread that issues an op.
#pragma once

#include <cstddef>
#include <memory>
#include <new>

namespace dorad::ops::cpu {

class Scratch {
 public:
  // At least `bytes` of memory with any contents; valid until the next call.
  char* Get(size_t bytes) {
    if (bytes > size_) {
      data_.reset();
      data_.reset(static_cast<char*>(::operator new (bytes, std::align_val_t{64})));
      size_ = bytes;
    }
    return data_.get();
  }

 private:
  struct Free {
    void operator()(char* p) const { ::operator delete (p, std::align_val_t{64}); }
  };
  std::unique_ptr<char, Free> data_;
  size_t size_ = 0;
};

}  // namespace dorad::ops::cpu
