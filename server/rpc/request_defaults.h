// Fresh request ids and seeds. Thread-safe.
#pragma once

#include <cstdint>
#include <string>

namespace dorad::rpc {

// An id that no other request of this server has: "r-" and 16 hex digits.
std::string ChooseRequestId();
uint64_t ChooseSeed();

}  // namespace dorad::rpc
