// The header of a safetensors file: its JSON, checked against the rules of safetensors.h.
//
// Separate from SafetensorsFile, so that a header can be refused before any tensor data is read.
// Pure functions over plain values and therefore thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "server/platform/files/safetensors.h"

namespace dorad {

constexpr uint64_t kSafetensorsPrefixBytes = 8;
constexpr uint64_t kSafetensorsMaxHeaderBytes = 8 << 20;

struct SafetensorsEntry {
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  uint64_t begin = 0, end = 0;  // bytes, from the first byte after the header
};

struct SafetensorsHeader {
  std::map<std::string, SafetensorsEntry> tensors;
  std::map<std::string, std::string> metadata;
};

// The header's length from the file's first 8 bytes (little-endian).
// SAFETENSORS_HEADER_TOO_LARGE, SAFETENSORS_HEADER_LENGTH. REQUIRES: prefix.size() == 8.
absl::StatusOr<uint64_t> SafetensorsHeaderLength(std::string_view prefix, uint64_t file_bytes,
                                                 const std::string& subject);

// data_bytes: the number of bytes after the header.
absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(std::string_view text, uint64_t data_bytes,
                                                         const std::string& subject);

}  // namespace dorad
