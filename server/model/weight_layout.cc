#include "server/model/weight_layout.h"

#include "server/platform/check.h"

namespace dorad::model {

std::vector<LaidOutTensor> LayOut(const std::map<std::string, CheckpointTensor>& checkpoint,
                                  const std::map<std::string, PlacedTensor>& places) {
  std::vector<LaidOutTensor> tensors;
  size_t placed = 0;
  for (const auto& [name, tensor] : checkpoint) {
    LaidOutTensor laid_out{name, tensor, std::nullopt};
    if (const auto place = places.find(name); place != places.end()) {
      laid_out.place = place->second;
      ++placed;
    }
    tensors.push_back(std::move(laid_out));
  }
  DORAD_CHECK(placed == places.size());
  return tensors;
}

}  // namespace dorad::model
