// Memory for the bytes of files and messages: a vector that does not write zeros when it grows, so
// that several threads can fill gigabytes and touch each page once. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <utility>
#include <vector>

namespace dorad {

// std::allocator, but new elements without a value stay uninitialised.
template <typename T>
class UninitialisedAllocator : public std::allocator<T> {
 public:
  template <typename Other>
  struct rebind {
    using other = UninitialisedAllocator<Other>;
  };
  UninitialisedAllocator() = default;
  template <typename Other>
  UninitialisedAllocator(const UninitialisedAllocator<Other>& /*other*/) noexcept {}

  template <typename Element, typename... Args>
  void construct(Element* at, Args&&... args) {
    if constexpr (sizeof...(Args) == 0) {
      ::new (static_cast<void*>(at)) Element;
    } else {
      ::new (static_cast<void*>(at)) Element(std::forward<Args>(args)...);
    }
  }
};

// resize(n) and ByteBuffer(n) leave the new bytes undefined.
using ByteBuffer = std::vector<std::byte, UninitialisedAllocator<std::byte>>;

// Bytes with several owners. Immutable, except for one writer that appends within the capacity and
// tells the readers how far they may read.
using SharedBytes = std::shared_ptr<const ByteBuffer>;

inline SharedBytes Share(ByteBuffer bytes) {
  return std::make_shared<const ByteBuffer>(std::move(bytes));
}

// As out->reserve(bytes), in huge pages where the system has them: a large buffer then costs some
// hundred page faults instead of some hundred thousand, and giving it back does not hold up the
// process's other threads.
void ReserveBytes(uint64_t bytes, ByteBuffer* out);

}  // namespace dorad
