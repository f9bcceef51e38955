// Fresh request ids and seeds. Thread-safe.
#pragma once

#include <cstdint>
#include <string>

namespace dorad::rpc {

// A request id that is unique in this server: "r-" and 16 hex digits.
std::string ChooseRequestId();
uint64_t ChooseSeed();

}  // namespace dorad::rpc
