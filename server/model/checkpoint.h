// The safetensors files of a Hugging Face folder: model.safetensors, or the shards that
// model.safetensors.index.json names. Torch-free.
//
// Opening reads headers only, so a wrong model is refused before its data is read. The data is read
// once, by several threads, in blocks that fit into a cache: never as a whole. One thread calls;
// the sink is called by several.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/platform/files/file.h"
#include "server/platform/files/safetensors_header.h"

namespace dorad::model {

struct CheckpointTensor {
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  std::array<uint8_t, 32> sha256 = {};  // of its bytes; known after ReadAll
};

class Checkpoint {
 public:
  // NOT_FOUND (MODEL_NOT_FOUND) without any weights, INVALID_ARGUMENT: MODEL_FORMAT_UNSUPPORTED
  // (weights, but no safetensors), MODEL_INDEX_INVALID (every way in which index and shards
  // disagree), the reader's SAFETENSORS_*; UNAVAILABLE (FILE_UNREADABLE).
  static absl::StatusOr<Checkpoint> Open(const std::string& dir);

  const std::map<std::string, CheckpointTensor>& tensors() const { return tensors_; }

  // A block of a tensor, whole elements. offset: of its first byte in the tensor. The blocks of one
  // tensor come in order and on one thread, tensors at the same time on several. An error ends the
  // reading.
  using BlockSink = absl::FunctionRef<absl::Status(const std::string& name, uint64_t offset,
                                                   absl::Span<const std::byte> block)>;
  // REQUIRES: not called before.
  absl::Status ReadAll(BlockSink sink);

  // Lower-case hex SHA-256 over the tensors in order of their names: name, dtype, shape and the
  // SHA-256 of the bytes. Independent of the division into files. REQUIRES: ReadAll has succeeded.
  std::string Digest() const;

 private:
  struct Shard {
    RegularFile file;
    SafetensorsHeader header;
    uint64_t data_begin = 0;  // of the tensors' bytes in the file
  };

  Checkpoint() = default;
  static absl::StatusOr<Shard> OpenShard(const std::string& dir, const std::string& name);
  absl::Status AddShards(const std::string& dir, const std::map<std::string, std::string>& index);
  static absl::StatusOr<std::array<uint8_t, 32>> ReadTensor(const Shard& shard,
                                                            const std::string& name,
                                                            BlockSink sink);

  std::vector<Shard> shards_;
  std::map<std::string, CheckpointTensor> tensors_;
};

}  // namespace dorad::model
