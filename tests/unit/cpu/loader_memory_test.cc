// Publishing from the memory of another process, of the host or of a GPU.
#include "tests/unit/cpu/loader_fixture.h"

namespace dorad::adapter {
namespace {

// Memory of another process, to which things happen while it is read.
class FakeMemory : public PeerMemory {
 public:
  explicit FakeMemory(std::vector<std::byte> b) : bytes(std::move(b)) {}
  uint64_t size() const override { return bytes.size(); }
  absl::Status Read(uint64_t offset, absl::Span<std::byte> to) const override {
    if (on_read) on_read();
    std::copy_n(bytes.begin() + static_cast<int64_t>(offset), to.size(), to.begin());
    return absl::OkStatus();
  }

  std::vector<std::byte> bytes;
  std::function<void()> on_read;
};

PeerTensors MakePeer(const Tensors& tensors, std::shared_ptr<FakeMemory>* memory) {
  *memory = std::make_shared<FakeMemory>(std::vector<std::byte>());
  PeerTensors peer;
  for (const auto& [name, tensor] : tensors) {
    peer.tensors.push_back({name,
                            tensor.dtype == "BF16" ? DType::kBF16 : DType::kF32,
                            tensor.shape,
                            tensor.bytes.size(),
                            *memory,
                            (*memory)->bytes.size(),
                            {}});
    (*memory)->bytes.insert((*memory)->bytes.end(), tensor.bytes.begin(), tensor.bytes.end());
  }
  peer.wanted = [] { return true; };
  return peer;
}

TEST_F(AdapterLoaderTest, MemoryMakesTheVersionThatTheSameFileMakes) {
  for (const char* dtype : {"F32", "BF16"}) {
    const Json config = MakeConfig(true, {"q_proj", "down_proj"});
    const Tensors tensors = MakeTensors(modules_, {"q_proj", "down_proj"}, 2, true, dtype);
    std::shared_ptr<FakeMemory> memory;
    const PeerTensors peer = MakePeer(tensors, &memory);
    const auto from_memory = Wait([&](PublishCallback done) {
      loader_->Publish({.name = "a"}, MemorySource{config.dump(), peer}, std::move(done));
    });
    ASSERT_TRUE(from_memory.ok()) << from_memory.status();
    EXPECT_EQ(from_memory->adapter.summary.digest,
              Publish(config, tensors)->adapter.summary.digest);
  }
}

TEST_F(AdapterLoaderTest, ReadsMemoryOnceAndNothingOfItAfterwards) {
  const Tensors tensors = MakeTensors(modules_, {"q_proj"}, 2, true);
  std::shared_ptr<FakeMemory> memory;
  PeerTensors peer = MakePeer(tensors, &memory);
  size_t reads = 0;
  memory->on_read = [&] { ++reads; };
  const std::weak_ptr<FakeMemory> held = memory;
  memory.reset();
  const size_t count = peer.tensors.size();
  absl::Notification done;
  loader_->Publish({.name = "a"},
                   MemorySource{MakeConfig(true, {"q_proj"}).dump(), std::move(peer)},
                   [&](const absl::StatusOr<PublishResult>& result) {
                     EXPECT_TRUE(result.ok()) << result.status();
                     EXPECT_TRUE(held.expired()) << "answered while it is held";
                     done.Notify();
                   });
  done.WaitForNotification();
  EXPECT_EQ(reads, count);
}

TEST_F(AdapterLoaderTest, MemoryWithdrawnDuringTheLoadPublishesNothing) {
  std::shared_ptr<FakeMemory> memory;
  PeerTensors peer = MakePeer(MakeTensors(modules_, {"q_proj"}, 2, true), &memory);
  bool wanted = true;
  peer.wanted = [&] { return wanted; };
  for (const bool early : {true, false}) {
    wanted = true;
    // As a process that dies while its memory is copied, or while norms are computed.
    memory->on_read = [&] { wanted = !early; };
    base_.on_weight = [&] { wanted = false; };
    const auto result = Wait([&](PublishCallback done) {
      loader_->Publish({.name = "a", .activate = true},
                       MemorySource{MakeConfig(true, {"q_proj"}).dump(), peer}, std::move(done));
    });
    EXPECT_EQ(result.status().code(), absl::StatusCode::kAborted);
    EXPECT_EQ(ReasonOf(result.status()), "SHARED_MEMORY_CLOSED");
    EXPECT_FALSE(registry_->Acquire({"a", 0}).ok());
    EXPECT_EQ(Bytes(), 0);
  }
  // What is not wanted when its turn comes is not even read.
  memory->on_read = [] { ADD_FAILURE(); };
  EXPECT_EQ(ReasonOf(Wait([&](PublishCallback done) {
                       loader_->Publish({.name = "a"},
                                        MemorySource{MakeConfig(true, {"q_proj"}).dump(), peer},
                                        std::move(done));
                     }).status()),
            "SHARED_MEMORY_CLOSED");
  EXPECT_EQ(registry_->Get({"a", 3})->state, AdapterState::kFailed);
}

TEST_F(AdapterLoaderTest, MemoryThatIsTooLargeIsNotRead) {
  std::shared_ptr<FakeMemory> memory;
  const PeerTensors peer = MakePeer(MakeTensors(modules_, {"q_proj"}, 2, true), &memory);
  memory->on_read = [] { ADD_FAILURE(); };
  EXPECT_EQ(ReasonOf(CopyToImage(peer, 100).status()), "ADAPTER_TOO_LARGE");
}

// Memory on a GPU, as far as the loader can tell: it must not look at it.
class FakeDeviceMemory final : public FakeMemory {
 public:
  using FakeMemory::FakeMemory;
  const std::byte* device_data() const override { return bytes.data(); }
};

class FakeDeviceTensors final : public DeviceTensors {
 public:
  explicit FakeDeviceTensors(const PeerTensors& peer) {
    for (const PeerTensor& tensor : peer.tensors) {
      const std::byte* from = tensor.memory->device_data() + tensor.offset;
      copies_.emplace_back(from, from + tensor.bytes);
      tensors_[tensor.name] = {tensor.dtype, tensor.shape, copies_.back()};
    }
  }
  absl::Status Read(const std::byte* from, absl::Span<std::byte> to) const override {
    std::copy_n(from, to.size(), to.begin());
    return absl::OkStatus();
  }
  absl::StatusOr<std::map<const std::byte*, Digest>> Digests() const override {
    std::map<const std::byte*, Digest> digests;
    for (const std::vector<std::byte>& copy : copies_) digests[copy.data()] = TreeSha256(copy);
    return digests;
  }

 private:
  std::deque<std::vector<std::byte>> copies_;
};

class FakeGpuBuilder final : public AdapterBuilder {
 public:
  FakeGpuBuilder(const BaseModules* modules, AdapterBuilder* cpu)
      : AdapterBuilder(modules), cpu_(*cpu) {}

  absl::StatusOr<std::unique_ptr<DeviceTensors>> CopyOnDevice(const PeerTensors& peer) override {
    return std::make_unique<FakeDeviceTensors>(peer);
  }
  absl::StatusOr<BuiltAdapter> Build(const AdapterTensors& tensors) override {
    EXPECT_EQ(tensors.place, TensorPlace::kDevice);
    AdapterTensors host = tensors;
    host.place = TensorPlace::kHost;
    ++builds;
    return cpu_.Build(host);
  }

  int builds = 0;

 private:
  absl::StatusOr<bool> EqualsBase(const BaseCopy& copy) const override {
    AdapterTensors one;
    one.base_copies.push_back(copy);
    return cpu_.CheckBaseCopies(one).ok();
  }

  AdapterBuilder& cpu_;
};

class AdapterLoaderOnDeviceTest : public AdapterLoaderTest {
 protected:
  AdapterLoaderOnDeviceTest() {
    loader_ = std::make_unique<AdapterLoader>(options_, &pool_, &modules_, &gpu_, residency_.get(),
                                              registry_.get(), nullptr);
  }
  ~AdapterLoaderOnDeviceTest() override { loader_.reset(); }

  PeerTensors OnDevice(const Tensors& tensors) {
    std::shared_ptr<FakeMemory> host;
    PeerTensors peer = MakePeer(tensors, &host);
    memory_ = std::make_shared<FakeDeviceMemory>(host->bytes);
    memory_->on_read = [] { ADD_FAILURE() << "it was brought to the host as a whole"; };
    for (PeerTensor& tensor : peer.tensors) tensor.memory = memory_;
    return peer;
  }

  absl::StatusOr<PublishResult> PublishPeer(const Json& config, const PeerTensors& peer) {
    return Wait([&](PublishCallback done) {
      loader_->Publish({.name = "a"}, MemorySource{config.dump(), peer}, std::move(done));
    });
  }

  FakeGpuBuilder gpu_{&modules_, builder_.get()};
  std::shared_ptr<FakeDeviceMemory> memory_;
};

TEST_F(AdapterLoaderOnDeviceTest, MakesTheVersionThatTheSameFileMakes) {
  const Json config = MakeConfig(true, {"q_proj", "down_proj"});
  const Tensors tensors = MakeTensors(modules_, {"q_proj", "down_proj"}, 2, true);
  const auto result = PublishPeer(config, OnDevice(tensors));
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(gpu_.builds, 1);
  Start();
  const auto from_file = Publish(config, tensors);
  EXPECT_EQ(result->adapter.summary.digest, from_file->adapter.summary.digest);
  EXPECT_EQ(result->adapter.summary.num_parameters, from_file->adapter.summary.num_parameters);
}

TEST_F(AdapterLoaderOnDeviceTest, RefusesWhatAFileWouldBeRefusedFor) {
  const Json config = MakeConfig(true, {"q_proj"});
  const PeerTensors good = OnDevice(MakeTensors(modules_, {"q_proj"}, 2, true));
  PeerTensors twice = good, fewer = good;
  twice.tensors.push_back(good.tensors.front());
  fewer.tensors.pop_back();
  EXPECT_EQ(ReasonOf(PublishPeer(config, twice).status()), "SAFETENSORS_DUPLICATE_KEY");
  EXPECT_EQ(ReasonOf(PublishPeer(config, fewer).status()), "ADAPTER_MAGNITUDE_MISSING");
  EXPECT_EQ(ReasonOf(PublishPeer(MakeConfig(false, {"q_proj"}), good).status()),
            "ADAPTER_TENSOR_UNEXPECTED");
  EXPECT_EQ(gpu_.builds, 0);
}

TEST_F(AdapterLoaderOnDeviceTest, NamesEveryTensorThatIsNotWhatItsOwnerHashed) {
  PeerTensors peer = OnDevice(MakeTensors(modules_, {"q_proj"}, 2, true));
  peer.tensors[1].digest = peer.tensors[4].digest = std::string(32, 'x');
  const auto refused = PublishPeer(MakeConfig(true, {"q_proj"}), peer);
  EXPECT_EQ(ReasonOf(refused.status()), "SHARED_MEMORY_DIGEST_MISMATCH");
  EXPECT_EQ(ViolationsOf(refused.status()).size(), 2u);
  for (PeerTensor& tensor : peer.tensors) tensor.digest.clear();
  peer.expected_digest = std::string(64, '0');
  EXPECT_EQ(ReasonOf(PublishPeer(MakeConfig(true, {"q_proj"}), peer).status()),
            "SHARED_MEMORY_DIGEST_MISMATCH");
  EXPECT_EQ(Bytes(), 0);
}

TEST_F(AdapterLoaderOnDeviceTest, ComparesACopyOfTheBaseOnTheHost) {
  Tensors tensors = MakeTensors(modules_, {"lm_head"}, 2, true);
  const at::Tensor base = base_.weights_[static_cast<size_t>(modules_.Find("lm_head"))];
  std::vector<float> values(base.const_data_ptr<float>(),
                            base.const_data_ptr<float>() + base.numel());
  const std::string key = "base_model.model.lm_head.base_layer.weight";
  tensors[key] = MakeTensor("F32", {base.size(0), base.size(1)}, values);
  EXPECT_TRUE(PublishPeer(MakeConfig(true, {"lm_head"}), OnDevice(tensors)).ok());
  values[3] += 1;
  tensors[key] = MakeTensor("F32", {base.size(0), base.size(1)}, values);
  EXPECT_EQ(ReasonOf(PublishPeer(MakeConfig(true, {"lm_head"}), OnDevice(tensors)).status()),
            "ADAPTER_BASE_DIFFERS");
}

}  // namespace
}  // namespace dorad::adapter
