// Which tensors a model of a configuration has, of which shape, and where they go. Thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "server/model/weights.h"

namespace dorad::model {

struct TensorSlot {
  std::vector<int64_t> shape;
  at::Tensor* destination = nullptr;  // undefined so far
  int module_id = -1;                 // of weight matrices; -1: a bias or a norm, stored in fp32
};

// By Hugging Face name. Sizes weights->layers; the slots point into *weights, which must not move.
// A tied head has no slot.
std::map<std::string, TensorSlot> ListTensorSlots(const ModelConfig& config, ModelWeights* weights);

}  // namespace dorad::model
