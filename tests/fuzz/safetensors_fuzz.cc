// libFuzzer target: whatever the bytes are, the reader either refuses them with a SAFETENSORS_
// reason or returns views that tile the data without a hole.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "server/platform/check.h"
#include "server/platform/error.h"
#include "server/platform/files/safetensors.h"

namespace {

void CheckViews(const dorad::SafetensorsFile& file, size_t file_bytes) {
  size_t covered = 0;
  for (const auto& [name, view] : file.tensors()) {
    DORAD_CHECK(!name.empty() && name.size() <= 512);
    DORAD_CHECK(view.shape.size() <= 8);
    DORAD_CHECK(view.bytes.size() ==
                static_cast<size_t>(view.num_elements()) * dorad::SizeOf(view.dtype));
    DORAD_CHECK(file.Find(name) == &view);
    covered += view.bytes.size();
    // Reading every byte lets AddressSanitizer judge the bounds.
    volatile unsigned sum = 0;
    for (const std::byte byte : view.bytes) sum = sum + static_cast<unsigned>(byte);
  }
  DORAD_CHECK(covered + 8 <= file_bytes);
}

void Parse(ByteBuffer image) {
  const size_t bytes = image.size();
  const auto file = dorad::SafetensorsFile::Parse(dorad::Share(std::move(image)), "fuzz");
  if (file.ok()) {
    CheckViews(**file, bytes);
  } else {
    DORAD_CHECK(file.status().code() == absl::StatusCode::kInvalidArgument);
    DORAD_CHECK(dorad::ReasonOf(file.status()).rfind("SAFETENSORS_", 0) == 0);
    DORAD_CHECK(file.status().message().size() < 16384);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto* bytes = reinterpret_cast<const std::byte*>(data);
  Parse(ByteBuffer(bytes, bytes + size));
  // Once more as header text alone with a length that fits: most random lengths end early.
  ByteBuffer image(8 + size, std::byte{0});
  const uint64_t length = size;
  std::memcpy(image.data(), &length, 8);
  if (size > 0) std::memcpy(image.data() + 8, data, size);
  Parse(std::move(image));
  return 0;
}
