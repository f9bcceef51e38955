// Keys of config.json that would change the result of a forward pass in a way this server does not
// support. The families' own transformers classes mostly ignore them: a model with such a key was
// made for other code. Thread-safe (a pure function).
#pragma once

#include "server/model/config_json.h"

namespace dorad::model {

// One violation (MODEL_UNSUPPORTED) for each such key with a value that is not neutral.
// has_parts: text_config and vision_config are the family's. has_scalar: query_pre_attn_scalar is.
void RefuseUnsupportedKeys(Fields& config, bool has_parts, bool has_scalar);

}  // namespace dorad::model
