// The addresses of the base model's weights in memory, in the checkpoint's terms, for use by
// another process. Torch-free plain data and a pure function and therefore thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "server/model/checkpoint.h"
#include "server/platform/files/safetensors.h"

namespace dorad::model {

// Row-major and without gaps.
struct PlacedTensor {
  DType dtype = DType::kF32;
  uint64_t offset = 0;  // bytes
};

struct LaidOutTensor {
  std::string name;
  CheckpointTensor checkpoint;
  // nullopt: without an effect on the result and not held, or held otherwise: as 1 + the tensor,
  // or transposed.
  std::optional<PlacedTensor> place;
};

struct WeightLayout {
  std::string digest;                  // Checkpoint::Digest
  std::vector<LaidOutTensor> tensors;  // all of the checkpoint, by name
  std::vector<uint64_t> piece_bytes;   // of the memory's pieces, in order
  std::string device_uuid;             // 16 bytes; "": the host's memory
};

// The tensors of a layout. REQUIRES: `places` names tensors of the checkpoint.
std::vector<LaidOutTensor> LayOut(const std::map<std::string, CheckpointTensor>& checkpoint,
                                  const std::map<std::string, PlacedTensor>& places);

}  // namespace dorad::model
