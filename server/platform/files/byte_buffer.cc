#include "server/platform/files/byte_buffer.h"

#include <sys/mman.h>

namespace dorad {

void ReserveBytes(uint64_t bytes, ByteBuffer* out) {
  constexpr uintptr_t kPage = 4096;
  // Malloc maps such blocks separately, at any threshold: the hint must not stick to its heap.
  constexpr uint64_t kWorthIt = 64 << 20;
  out->reserve(bytes);
  if (out->capacity() < kWorthIt) return;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(out->data()) + kPage - 1) / kPage * kPage;
  const uintptr_t end =
      (reinterpret_cast<uintptr_t>(out->data()) + out->capacity()) / kPage * kPage;
  // A hint: a refusal changes nothing.
  (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

}  // namespace dorad
