// Makes an image's patches into rows for the decoder, with the tower of VisionConfig: a plain
// function of weights and one image. Borrows the model. Immutable and therefore thread-safe.
//
// Guarantee: the result depends on the image, its grid and the adapter only, to the last bit.
//
// Shape suffixes: P patches, E elements of a patch, W width of the tower.
#pragma once

#include <ATen/core/Tensor.h>

#include "server/backends/cpu/adapter_weights.h"
#include "server/backends/cpu/model.h"

namespace dorad::model {

class VisionEncoder {
 public:
  // REQUIRES: model.config().vision.
  explicit VisionEncoder(const LoadedModel& model);

  // patches_PE: pixel_values of the model's processor, fp32 contiguous, with the merge x merge
  // patches of a token in rows that follow each other. adapter: nullptr for the base model.
  // Returns [1 + deepstack, tokens, hidden_size] fp32: the rows that replace the image's
  // embeddings, then those that are added to the residual after decoder layers 0, 1, ...
  // REQUIRES: merge divides the grid's height and width.
  at::Tensor Encode(const at::Tensor& patches_PE, const ImageGrid& grid,
                    const adapter::CpuAdapterWeights* adapter) const;

 private:
  class Pass;
  const LoadedModel& model_;
};

}  // namespace dorad::model
