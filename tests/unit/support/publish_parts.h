// The parts of a Publish stream.
#pragma once

#include <cstdint>
#include <string>

#include "dorad/v1/adapters.pb.h"

namespace dorad::rpc {

inline v1::PublishRequest Begin(uint64_t size) {
  v1::PublishRequest part;
  part.mutable_begin()->set_name("a");
  part.mutable_begin()->set_adapter_config_json("{}");
  part.mutable_begin()->set_safetensors_size(size);
  return part;
}

inline v1::PublishRequest Chunk(uint64_t offset, const std::string& data) {
  v1::PublishRequest part;
  part.mutable_chunk()->set_offset(offset);
  part.mutable_chunk()->set_data(data);
  return part;
}

inline v1::PublishRequest Commit() {
  v1::PublishRequest part;
  part.mutable_commit();
  return part;
}

}  // namespace dorad::rpc
