// Fresh request ids and seeds. Thread-safe.
#pragma once

#include "server/rpc/convert.h"

namespace dorad::rpc {

// A request id that no other request of this server has ("r-" and 16 hex digits), and a random
// seed.
RequestDefaults ChooseDefaults();

}  // namespace dorad::rpc
