#include <cuda.h>
#include <cuda_runtime_api.h>

#include "server/backends/cuda/driver.h"
#include "server/backends/cuda/mapped_memory.h"
#include "server/backends/cuda/model.h"
#include "tests/unit/cuda/small_model.h"
#include "tests/unit/kernels/device.h"
#include "tests/unit/support/model_folder.h"
#include "tests/unit/support/safetensors_writer.h"

namespace dorad::cuda {
namespace {

template <typename Function>
Function LookUp(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  EXPECT_EQ(cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result),
            cudaSuccess);
  return reinterpret_cast<Function>(found);
}

// Pieces of shared memory, mapped for reading as another process would map them.
class Imported {
 public:
  Imported(const std::vector<UniqueFd>& fds, const std::vector<uint64_t>& sizes)
      : driver_(*Must(Driver::Get())), sizes_(sizes) {
    const auto import =
        LookUp<decltype(&cuMemImportFromShareableHandle)>("cuMemImportFromShareableHandle");
    for (const uint64_t size : sizes_) size_ += size;
    EXPECT_EQ(driver_.address_reserve(&address_, size_, 0, 0, 0), CUDA_SUCCESS);
    uint64_t at = 0;
    for (size_t i = 0; i < fds.size(); ++i) {
      CUmemGenericAllocationHandle handle = 0;
      EXPECT_EQ(import(&handle, reinterpret_cast<void*>(static_cast<uintptr_t>(fds[i].get())),
                       CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
                CUDA_SUCCESS);
      EXPECT_EQ(driver_.map(address_ + at, sizes_[i], 0, handle, 0), CUDA_SUCCESS);
      EXPECT_EQ(driver_.release(handle), CUDA_SUCCESS);
      at += sizes_[i];
    }
    CUmemAccessDesc access = {};
    access.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READ;
    EXPECT_EQ(driver_.set_access(address_, size_, &access, 1), CUDA_SUCCESS);
  }
  ~Imported() {
    uint64_t at = 0;
    for (const uint64_t size : sizes_) {
      EXPECT_EQ(driver_.unmap(address_ + at, size), CUDA_SUCCESS);
      at += size;
    }
    EXPECT_EQ(driver_.address_free(address_, size_), CUDA_SUCCESS);
  }

  std::vector<char> Read(uint64_t offset, size_t bytes) const {
    std::vector<char> read(bytes);
    EXPECT_EQ(cudaMemcpy(read.data(), reinterpret_cast<const void*>(address_ + offset), bytes,
                         cudaMemcpyDeviceToHost),
              cudaSuccess);
    return read;
  }

 private:
  const Driver& driver_;
  const std::vector<uint64_t> sizes_;
  uint64_t size_ = 0;
  CUdeviceptr address_ = 0;
};

class CudaSharedWeightsTest : public kernels::KernelTest {
 protected:
  // A checkpoint in bf16 of SmallModel(2), with the bytes that each tensor has.
  std::map<std::string, test::TestTensor> WriteCheckpoint(const model::ModelConfig& config) {
    std::map<std::string, test::TestTensor> tensors;
    int seed = 0;
    const auto fill = [&](const std::string& name, std::vector<int64_t> shape) {
      int64_t elements = 1;
      for (const int64_t extent : shape) elements *= extent;
      std::vector<float> values(elements);
      ++seed;
      for (int64_t i = 0; i < elements; ++i) {
        values[i] = static_cast<float>((i * 7 + seed * 13) % 31 - 15) / 64.0f;
      }
      tensors[name] = test::MakeTensor("BF16", std::move(shape), values);
    };
    const adapter::BaseModules modules = model::MakeModules(config);
    for (const adapter::BaseModule& module : modules.all()) {
      fill(module.name + ".weight", {module.rows, module.cols});
      for (const char* biased : {"q_proj", "k_proj", "v_proj"}) {
        if (module.name.ends_with(biased)) fill(module.name + ".bias", {module.rows});
      }
    }
    for (int64_t i = 0; i < config.num_layers(); ++i) {
      const std::string layer = "model.layers." + std::to_string(i);
      fill(layer + ".input_layernorm.weight", {config.hidden_size});
      fill(layer + ".post_attention_layernorm.weight", {config.hidden_size});
    }
    fill("model.norm.weight", {config.hidden_size});
    folder_.Write("model.safetensors", test::WriteSafetensors(tensors));
    return tensors;
  }

  MemoryLedger ledger_;
  model::ModelFolder folder_;
};

TEST_F(CudaSharedWeightsTest, SharedPiecesAreTheSameMemoryAndOutliveTheirUnmapping) {
  ASSERT_TRUE(OpenDevice().ok());
  constexpr int64_t kBytes = (64 << 20) + (3 << 20);  // a whole piece, and a smaller one
  auto memory = Must(MappedMemory::Create(&ledger_, "weights", kBytes, /*shareable=*/true));
  const std::vector<uint64_t> sizes = memory.piece_bytes();
  EXPECT_EQ(sizes, (std::vector<uint64_t>{64 << 20, 4 << 20}));
  std::vector<UniqueFd> fds;
  for (size_t i = 0; i < sizes.size(); ++i) fds.push_back(Must(memory.Share(i)));
  const Imported imported(fds, sizes);
  fds.clear();
  DORAD_ASSERT_CUDA(cudaMemset(memory.as<>(), 7, kBytes));
  DORAD_ASSERT_CUDA(cudaDeviceSynchronize());
  EXPECT_EQ(imported.Read((64 << 20) - 1, 2), std::vector<char>(2, 7));
  memory.Unmap();
  EXPECT_EQ(imported.Read(kBytes - 2, 2), std::vector<char>(2, 7));
}

TEST_F(CudaSharedWeightsTest, EachTensorLiesWhereTheLayoutSays) {
  ASSERT_TRUE(OpenDevice().ok());
  const model::ModelConfig config = SmallModel(2);
  const auto tensors = WriteCheckpoint(config);
  const auto model = Must(CudaModel::Load(folder_.path(), config, &ledger_, /*shareable=*/true));
  const model::WeightLayout& layout = *model->layout();
  ASSERT_TRUE(model->BeginSharing().ok());
  const Imported imported(Must(model->Share(0, 100)), layout.piece_bytes);
  EXPECT_TRUE(Must(model->Share(layout.piece_bytes.size(), 100)).empty());
  ASSERT_EQ(layout.tensors.size(), tensors.size());
  for (const model::LaidOutTensor& tensor : layout.tensors) {
    const ByteBuffer& bytes = tensors.at(tensor.name).bytes;
    ASSERT_TRUE(tensor.place.has_value()) << tensor.name;
    if (tensor.place->dtype == DType::kBF16) {
      const std::vector<char> read = imported.Read(tensor.place->offset, bytes.size());
      EXPECT_EQ(std::memcmp(read.data(), bytes.data(), bytes.size()), 0) << tensor.name;
      continue;
    }
    // Widened: the file's bits are the upper half of each number.
    const std::vector<char> read = imported.Read(tensor.place->offset, 2 * bytes.size());
    for (size_t i = 0; i < bytes.size(); i += 2) {
      ASSERT_EQ(std::memcmp(&read[2 * i + 2], &bytes[i], 2), 0) << tensor.name;
    }
  }
  model->EndSharing();
}

TEST_F(CudaSharedWeightsTest, LeasedWeightsStayInMemoryDuringSleepUntilTheLastLeaseEnds) {
  ASSERT_TRUE(OpenDevice().ok());
  const model::ModelConfig config = SmallModel(2);
  WriteCheckpoint(config);
  const auto model = Must(CudaModel::Load(folder_.path(), config, &ledger_, /*shareable=*/true));
  const int64_t held = ledger_.by_kind().at("weights");
  EXPECT_EQ(model->shared_bytes(), 0);
  ASSERT_TRUE(model->BeginSharing().ok());
  ASSERT_TRUE(model->BeginSharing().ok());
  EXPECT_EQ(model->shared_bytes(), held);
  EXPECT_EQ(model->Sleep(), 0);
  EXPECT_EQ(ReasonOf(model->UseWeights().status()), "SERVER_SLEEPING");
  EXPECT_EQ(ReasonOf(model->BeginSharing()), "SERVER_SLEEPING");
  EXPECT_EQ(ledger_.by_kind().at("weights"), held);
  // Nothing to restore: the files are not even there any more.
  folder_.Remove("model.safetensors");
  ASSERT_TRUE(model->Wake().ok());
  EXPECT_TRUE(model->UseWeights().ok());

  EXPECT_EQ(model->Sleep(), 0);
  model->EndSharing();
  EXPECT_EQ(ledger_.by_kind().at("weights"), held) << "one lease is left";
  model->EndSharing();
  EXPECT_EQ(ledger_.by_kind()["weights"], 0);
  EXPECT_EQ(model->shared_bytes(), 0);
  WriteCheckpoint(config);
  ASSERT_TRUE(model->Wake().ok());
  EXPECT_EQ(ledger_.by_kind().at("weights"), held);
  EXPECT_TRUE(model->BeginSharing().ok());
  model->EndSharing();
  EXPECT_EQ(model->Sleep(), held) << "no lease is left";
}

TEST_F(CudaSharedWeightsTest, LeasesOfAwakeWeightsDoNotWaitForTheirUsers) {
  ASSERT_TRUE(OpenDevice().ok());
  const model::ModelConfig config = SmallModel(2);
  WriteCheckpoint(config);
  const auto model = Must(CudaModel::Load(folder_.path(), config, &ledger_, /*shareable=*/true));
  const CudaModel::Use use = Must(model->UseWeights());
  ASSERT_TRUE(model->BeginSharing().ok());
  model->EndSharing();
  EXPECT_TRUE(model->BeginSharing().ok());
  model->EndSharing();
  EXPECT_EQ(model->shared_bytes(), 0);
}

}  // namespace
}  // namespace dorad::cuda
