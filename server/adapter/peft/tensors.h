// Maps the tensors of an adapter_model.safetensors to the factors of each targeted module.
//
// Every tensor of the file must have a place and every place its tensor; else the adapter is
// refused. Functions are thread-safe; views point into the memory of the input tensors.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "server/adapter/peft/base_modules.h"
#include "server/adapter/peft/targets.h"
#include "server/adapter/peft/violations.h"
#include "server/platform/files/safetensors.h"

namespace dorad::adapter {

// One adapted module as in the file. Linear: a [R, I], b [O, R]. Embedding: a [R, V], b [D, R].
struct ModuleTensors {
  Target target;
  TensorView a;
  TensorView b;
  const TensorView* magnitude = nullptr;  // nullptr: plain LoRA
};

// A copy of a base weight, which PEFT puts beside an adapter on the embedding or on the head.
struct BaseCopy {
  int module_id = 0;
  std::string key;
  const TensorView* tensor = nullptr;
};

// The memory of an adapter's tensors. Files and uploads are in kHost; the other places save a GPU
// builder copies.
enum class TensorPlace {
  kHost,
  kPinned,  // page-locked host memory
  kDevice,  // the GPU's memory; views are aligned to their elements and cannot be read here
};

struct AdapterTensors {
  TensorPlace place = TensorPlace::kHost;  // of the modules' tensors
  std::vector<ModuleTensors> modules;      // ascending by module id
  // Compared with the base model: an adapter of other weights is refused. Always in host memory.
  std::vector<BaseCopy> base_copies;
};

// The spelling of the modules in which most keys of these tensors have a place; the modules
// themselves if several have as many.
const BaseModules& SpellingOf(const std::map<std::string, TensorView>& tensors,
                              const BaseModules& modules);

// Adds every violation: ADAPTER_TENSOR_UNEXPECTED, ADAPTER_TENSOR_MISSING,
// ADAPTER_TENSOR_DUPLICATE, ADAPTER_MAGNITUDE_MISSING, ADAPTER_TENSOR_SHAPE, ADAPTER_RANK_MISMATCH,
// ADAPTER_NOT_FINITE. Does not check tensors on a device for NaN and infinity: the builder does.
//
// use_dora: nullopt if the configuration's value was refused. Refused values (see Target::rank and
// Targets::complete) are not held against tensors. The result is usable only without a violation
// of the configuration, the targets and the tensors.
AdapterTensors MapTensors(const std::map<std::string, TensorView>& tensors, TensorPlace place,
                          std::optional<bool> use_dora, const Targets& targets,
                          const BaseModules& modules, Violations& violations);

// Whether no element is NaN or infinite.
bool AllFinite(const TensorView& tensor);

}  // namespace dorad::adapter
