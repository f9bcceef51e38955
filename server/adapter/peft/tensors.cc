#include "server/adapter/peft/tensors.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"

namespace dorad::adapter {
namespace {

constexpr char kPrefix[] = "base_model.model.";

enum Part { kA, kB, kMagnitude, kBaseCopy, kNumParts };

struct Suffix {
  const char* text;
  Part part;
  std::optional<ModuleKind> kind;  // nullopt: of both
};
// The suffixes after a module's name in a key; a key ends in at most one of them.
constexpr Suffix kSuffixes[] = {
    {".lora_A.weight", kA, ModuleKind::kLinear},
    {".lora_B.weight", kB, ModuleKind::kLinear},
    {".lora_embedding_A", kA, ModuleKind::kEmbedding},
    {".lora_embedding_B", kB, ModuleKind::kEmbedding},
    {".lora_magnitude_vector", kMagnitude, std::nullopt},
    {".lora_magnitude_vector.weight", kMagnitude, std::nullopt},
    {".base_layer.weight", kBaseCopy, std::nullopt},
};

struct Place {
  int module_id = 0;
  Part part = kA;
};

// The place of a key; nullopt: none.
std::optional<Place> PlaceOf(const std::string& key, const BaseModules& modules) {
  absl::string_view rest = key;
  if (!absl::ConsumePrefix(&rest, kPrefix)) return std::nullopt;
  for (const Suffix& suffix : kSuffixes) {
    absl::string_view name = rest;
    if (!absl::ConsumeSuffix(&name, suffix.text)) continue;
    const int id = modules.Find(std::string_view(name.data(), name.size()));
    if (id < 0 || (suffix.kind && *suffix.kind != modules.all()[id].kind)) return std::nullopt;
    return Place{id, suffix.part};
  }
  // An embedding or head that PEFT saved whole on request.
  absl::string_view name = rest;
  if (absl::ConsumeSuffix(&name, ".weight")) {
    const int id = modules.Find(std::string_view(name.data(), name.size()));
    if (id >= 0 &&
        (modules.all()[id].kind == ModuleKind::kEmbedding || modules.all()[id].is_output_head)) {
      return Place{id, kBaseCopy};
    }
  }
  return std::nullopt;
}

constexpr int64_t kAnyRank = 0;  // of a target whose rank is not known

std::string ShapeText(const std::vector<int64_t>& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

constexpr char kNoPlace[] = "no module of the base model has a tensor of that name";

// An unknown rank is "r".
std::string ExpectedText(const std::vector<int64_t>& shape) {
  const auto extent = [](std::string* out, int64_t n) {
    absl::StrAppend(out, n == kAnyRank ? "r" : absl::StrCat(n));
  };
  return absl::StrCat("[", absl::StrJoin(shape, ", ", extent), "]");
}

using NamedTensors = std::map<std::string, TensorView>;

void CheckFinite(const NamedTensors& tensors, TensorPlace place, Violations& violations) {
  if (place == TensorPlace::kDevice) return;
  for (const auto& [key, tensor] : tensors) {
    if (!AllFinite(tensor)) {
      violations.Add(key, "ADAPTER_NOT_FINITE", "the tensor contains NaN or infinity");
    }
  }
}

class Mapper {
 public:
  Mapper(const NamedTensors& tensors, TensorPlace place, std::optional<bool> use_dora,
         const Targets& targets, const BaseModules& modules, Violations& violations)
      : tensors_(tensors),
        use_dora_(use_dora),
        complete_(targets.complete),
        modules_(modules),
        violations_(violations) {
    result_.place = place;
    for (const Target& target : targets.list) {
      Slot& slot = slots_[target.module_id];
      slot.target = target;
      slot.targeted = true;
    }
  }

  AdapterTensors Map() {
    for (const auto& [key, tensor] : tensors_) Assign(key, tensor);
    for (auto& [id, slot] : slots_) CheckModule(modules_.all()[id], slot);
    CheckFinite(tensors_, result_.place, violations_);
    if (!violations_.empty()) return std::move(result_);
    for (auto& [id, slot] : slots_) {
      result_.modules.push_back({slot.target, *slot.parts[kA].tensor, *slot.parts[kB].tensor,
                                 slot.parts[kMagnitude].tensor});
    }
    return std::move(result_);
  }

 private:
  struct PartTensor {
    const std::string* key = nullptr;
    const TensorView* tensor = nullptr;
  };
  struct Slot {
    Target target;
    bool targeted = false;  // false: perhaps
    std::array<PartTensor, kNumParts> parts;
  };

  void Unexpected(const std::string& key, const std::string& why) {
    violations_.Add(key, "ADAPTER_TENSOR_UNEXPECTED", why);
  }

  void Assign(const std::string& key, const TensorView& tensor) {
    const std::optional<Place> place = PlaceOf(key, modules_);
    if (!place) {
      Unexpected(key, kNoPlace);
      return;
    }
    const BaseModule& module = modules_.all()[place->module_id];
    if (place->part == kBaseCopy) {
      CheckShape(key, tensor, {module.rows, module.cols});
      result_.base_copies.push_back({place->module_id, key, &tensor});
      return;
    }
    if (complete_ && slots_.count(place->module_id) == 0) {
      Unexpected(key, "the configuration does not target this module");
      return;
    }
    PartTensor& part = slots_[place->module_id].parts[place->part];
    if (place->part == kMagnitude && use_dora_ == false) {
      Unexpected(key, "the configuration says use_dora: false");
    } else if (part.tensor != nullptr) {
      violations_.Add(key, "ADAPTER_TENSOR_DUPLICATE",
                      absl::StrCat("the same tensor is also present as ", *part.key));
    } else {
      part = {&key, &tensor};
    }
  }

  void CheckModule(const BaseModule& module, const Slot& slot) {
    const bool linear = module.kind == ModuleKind::kLinear;
    const std::string stem = absl::StrCat(kPrefix, module.name);
    const PartTensor& a = slot.parts[kA];
    const PartTensor& b = slot.parts[kB];
    const PartTensor& magnitude = slot.parts[kMagnitude];
    if (slot.targeted && a.tensor == nullptr) {
      Missing(absl::StrCat(stem, linear ? ".lora_A.weight" : ".lora_embedding_A"), module);
    }
    if (slot.targeted && b.tensor == nullptr) {
      Missing(absl::StrCat(stem, linear ? ".lora_B.weight" : ".lora_embedding_B"), module);
    }
    if (slot.targeted && use_dora_ == true && magnitude.tensor == nullptr) {
      violations_.Add(absl::StrCat(stem, ".lora_magnitude_vector"), "ADAPTER_MAGNITUDE_MISSING",
                      "use_dora is true, but the file has no magnitude for this module");
    }
    if (magnitude.tensor != nullptr) {
      CheckShape(*magnitude.key, *magnitude.tensor, {module.magnitude_size()});
    }
    CheckFactors(module, slot.target.rank, a, b);
  }

  // Two factors with the same rank, other than the configuration's, are one problem, not two.
  void CheckFactors(const BaseModule& module, int rank, const PartTensor& a, const PartTensor& b) {
    const bool linear = module.kind == ModuleKind::kLinear;
    const int64_t inner = linear ? module.cols : module.rows;
    const int64_t outer = linear ? module.rows : module.cols;
    if (a.tensor != nullptr && b.tensor != nullptr && a.tensor->shape.size() == 2 &&
        b.tensor->shape.size() == 2 && a.tensor->shape[1] == inner && b.tensor->shape[0] == outer &&
        a.tensor->shape[0] == b.tensor->shape[1] && a.tensor->shape[0] != rank) {
      if (rank == kAnyRank) return;
      violations_.Add(*a.key, "ADAPTER_RANK_MISMATCH",
                      absl::StrCat("the factors have rank ", a.tensor->shape[0],
                                   ", the configuration says ", rank, " for this module"));
      return;
    }
    if (a.tensor != nullptr) CheckShape(*a.key, *a.tensor, {rank, inner});
    if (b.tensor != nullptr) CheckShape(*b.key, *b.tensor, {outer, rank});
  }

  void Missing(const std::string& key, const BaseModule& module) {
    violations_.Add(key, "ADAPTER_TENSOR_MISSING",
                    absl::StrCat("the configuration targets ", module.name,
                                 ", but the file has no such tensor"));
  }

  // An expected kAnyRank fits every length.
  void CheckShape(const std::string& key, const TensorView& tensor,
                  const std::vector<int64_t>& expected) {
    const auto fits = [](int64_t found, int64_t wanted) {
      return wanted == kAnyRank || found == wanted;
    };
    if (!std::equal(tensor.shape.begin(), tensor.shape.end(), expected.begin(), expected.end(),
                    fits)) {
      violations_.Add(key, "ADAPTER_TENSOR_SHAPE",
                      absl::StrCat("expected shape ", ExpectedText(expected), ", found ",
                                   ShapeText(tensor.shape)));
    }
  }

  const NamedTensors& tensors_;
  const std::optional<bool> use_dora_;
  const bool complete_;  // other modules are not targeted
  const BaseModules& modules_;
  std::map<int, Slot> slots_;
  AdapterTensors result_;
  Violations& violations_;
};

// A float is NaN or infinite exactly when all bits of its exponent are set. Blocks of fixed size
// are copied out (the bytes may be unaligned) and scanned without a branch, so that the loop
// becomes vector code.
template <typename Word>
bool AllFiniteWords(absl::Span<const std::byte> bytes, Word exponent) {
  constexpr size_t kBlock = 4096 / sizeof(Word);
  Word block[kBlock];
  for (size_t begin = 0; begin < bytes.size(); begin += sizeof(block)) {
    const size_t size = std::min(sizeof(block), bytes.size() - begin);
    if (size < sizeof(block)) std::fill(block, block + kBlock, Word{0});
    std::memcpy(block, bytes.data() + begin, size);
    Word bad = 0;
    for (size_t i = 0; i < kBlock; ++i) {
      bad |= static_cast<Word>((block[i] & exponent) == exponent);
    }
    if (bad != 0) return false;
  }
  return true;
}

}  // namespace

bool AllFinite(const TensorView& tensor) {
  switch (tensor.dtype) {
    case DType::kF32:
      return AllFiniteWords<uint32_t>(tensor.bytes, 0x7f800000u);
    case DType::kBF16:
      return AllFiniteWords<uint16_t>(tensor.bytes, 0x7f80u);
    case DType::kF16:
      return AllFiniteWords<uint16_t>(tensor.bytes, 0x7c00u);
  }
  return false;
}

const BaseModules& SpellingOf(const NamedTensors& tensors, const BaseModules& modules) {
  const auto places = [&tensors](const BaseModules& names) {
    return std::count_if(tensors.begin(), tensors.end(), [&names](const auto& tensor) {
      return PlaceOf(tensor.first, names).has_value();
    });
  };
  const BaseModules* best = &modules;
  if (modules.spellings().empty()) return *best;
  auto most = places(modules);
  for (const BaseModules& names : modules.spellings()) {
    const auto found = places(names);
    if (found > most) {
      best = &names;
      most = found;
    }
  }
  return *best;
}

AdapterTensors MapTensors(const NamedTensors& tensors, TensorPlace place,
                          std::optional<bool> use_dora, const Targets& targets,
                          const BaseModules& modules, Violations& violations) {
  return Mapper(tensors, place, use_dora, targets, modules, violations).Map();
}

}  // namespace dorad::adapter
