// The rotary embedding's part of config.json. Torch-free. Thread-safe (a pure function).
#pragma once

#include "server/model/config_json.h"
#include "server/model/families.h"
#include "server/model/model_config.h"

namespace dorad::model {

// Reads rope_parameters (or the older rope_scaling), rope_theta, rope_local_base_freq,
// partial_rotary_factor and original_max_position_embeddings. REQUIRES: config's head_dim,
// context_length and windows are set. Sets config->ropes and each layer's, and lowers
// config->context_length where transformers would change the frequencies of keys that it has
// already cached (longrope).
void ReadRopeConfig(Fields& fields, const Family& family, ModelConfig* config);

}  // namespace dorad::model
