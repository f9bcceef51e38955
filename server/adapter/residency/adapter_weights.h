// A version's weights as a backend computes with them. Owned by shared pointers; immutable, hence
// thread-safe.
#pragma once

namespace dorad::adapter {

// The tensors of one version in the serving layout of a backend, which alone knows that layout.
class AdapterWeights {
 public:
  virtual ~AdapterWeights() = default;
};

}  // namespace dorad::adapter
