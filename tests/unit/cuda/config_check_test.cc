// What a GPU refuses of a configuration. Needs no GPU.
#include "server/backends/backend.h"
#include "server/backends/cuda/kv_layout.h"
#include "tests/unit/cuda/model_forms.h"
#include "tests/unit/support/test.h"

namespace dorad::cuda {
namespace {

Config OfGpu() {
  Config config;
  config.model.compute_dtype = "bf16";
  return config;
}

TEST(CudaConfig, TheKvCacheMayHaveAsManyBytesAsKernelsCanAddress) {
  for (const model::ModelConfig& model : {SmallQwen3(), WithFp8Kv<SmallQwen3>()}) {
    Config config = OfGpu();
    EXPECT_TRUE(CheckCudaConfig(config, model).ok());
    config.engine.kv_bytes = MostKvBytes(model);
    EXPECT_TRUE(CheckCudaConfig(config, model).ok());
    ++config.engine.kv_bytes;
    const absl::Status status = CheckCudaConfig(config, model);
    EXPECT_EQ(ReasonOf(status), "KV_TOO_LARGE");
    EXPECT_THAT(status.message(), testing::HasSubstr(std::to_string(MostKvBytes(model))));
  }
}

TEST(CudaConfig, EightBitsNeedHeadsThatTheKernelsHave) {
  EXPECT_TRUE(CheckCudaConfig(OfGpu(), WithFp8Kv<SmallGemma3>()).ok());
  EXPECT_TRUE(CheckCudaConfig(OfGpu(), WithFp8Kv<SmallQwen35>()).ok());
  model::ModelConfig other_heads = WithFp8Kv<SmallQwen3>();
  other_heads.head_dim = 96;
  model::ModelConfig many_heads = WithFp8Kv<SmallQwen3>();
  many_heads.num_heads = 17 * many_heads.num_kv_heads;
  model::ModelConfig other_rope = WithFp8Kv<SmallQwen3>();
  other_rope.ropes[0].width = 48;
  for (model::ModelConfig model : {other_heads, many_heads, other_rope}) {
    EXPECT_EQ(ReasonOf(CheckCudaConfig(OfGpu(), model)), "KV_DTYPE_UNSUPPORTED");
    model.fp8_kv = false;
    EXPECT_TRUE(CheckCudaConfig(OfGpu(), model).ok());
  }
}

}  // namespace
}  // namespace dorad::cuda
