#include "server/backends/cuda/peer_memory.h"

#include <cuda_runtime_api.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>

#include "server/backends/cuda/device_reader.h"
#include "server/backends/cuda/device_tensors.h"
#include "server/platform/net/unique_fd.h"
#include "tests/unit/cuda/small_model.h"
#include "tests/unit/kernels/device.h"

namespace dorad::cuda {
namespace {

constexpr size_t kElements = 3 << 20;  // more than one piece
constexpr char kChannel[] = "DORAD_TEST_EXPORTER";

struct Export {
  cudaIpcMemHandle_t handle;
  cudaUUID_t uuid;
};

class CudaPeerMemoryTest : public kernels::KernelTest {};

// What the child of the test below is: an allocation cannot be opened where it was made.
TEST(CudaPeerMemoryExporter, DISABLED_Runs) {
  const char* channel = std::getenv(kChannel);
  if (channel == nullptr) GTEST_SKIP() << "needs a parent";
  int to = -1, from = -1;
  ASSERT_EQ(std::sscanf(channel, "%d,%d", &to, &from), 2);
  std::vector<uint32_t> numbers(kElements);
  std::iota(numbers.begin(), numbers.end(), 7u);
  const kernels::DeviceBuffer<uint32_t> memory(numbers);
  Export out;
  DORAD_ASSERT_CUDA(cudaDeviceSynchronize());
  DORAD_ASSERT_CUDA(cudaIpcGetMemHandle(&out.handle, memory.get()));
  cudaDeviceProp properties;
  DORAD_ASSERT_CUDA(cudaGetDeviceProperties(&properties, 0));
  out.uuid = properties.uuid;
  ASSERT_EQ(write(to, &out, sizeof(out)), static_cast<ssize_t>(sizeof(out)));
  char until_closed = 0;
  (void)read(from, &until_closed, 1);
}

// A process of its own that exports memory, until the object ends.
class Exporter {
 public:
  Exporter() {
    int out[2], in[2];
    EXPECT_EQ(pipe(out), 0);
    EXPECT_EQ(pipe(in), 0);
    pid_ = fork();
    if (pid_ == 0) {
      close(out[0]);
      close(in[1]);
      setenv(kChannel, absl::StrCat(out[1], ",", in[0]).c_str(), 1);
      execl("/proc/self/exe", "exporter", "--gtest_filter=CudaPeerMemoryExporter.DISABLED_Runs",
            "--gtest_also_run_disabled_tests", nullptr);
      _exit(127);
    }
    close(out[1]);
    close(in[0]);
    const UniqueFd answer(out[0]);
    release_ = UniqueFd(in[1]);
    EXPECT_EQ(read(answer.get(), &exported_, sizeof(exported_)),
              static_cast<ssize_t>(sizeof(exported_)));
  }
  ~Exporter() {
    release_ = UniqueFd();
    waitpid(pid_, nullptr, 0);
  }

  absl::Span<const std::byte> handle() const { return Bytes(&exported_.handle, 64); }
  absl::Span<const std::byte> uuid() const { return Bytes(&exported_.uuid, 16); }

 private:
  static absl::Span<const std::byte> Bytes(const void* data, size_t size) {
    return {static_cast<const std::byte*>(data), size};
  }

  pid_t pid_ = -1;
  UniqueFd release_;
  Export exported_ = {};
};

TEST_F(CudaPeerMemoryTest, ReadsWhatAnotherProcessHasOnTheGpu) {
  ASSERT_TRUE(OpenDevice().ok());
  const Exporter exporter;
  const auto memories = Must(PeerMemories::Create());
  const size_t bytes = kElements * sizeof(uint32_t);
  {
    const auto memory = Must(memories->Open(exporter.handle(), exporter.uuid(), bytes));
    // Opened twice it is one mapping, which the first to go must not take along.
    Must(memories->Open(exporter.handle(), exporter.uuid(), bytes));
    EXPECT_EQ(memory->size(), bytes);
    std::vector<uint32_t> numbers(kElements - 1);
    const absl::Status read = memory->Read(
        4, {reinterpret_cast<std::byte*>(numbers.data()), numbers.size() * sizeof(uint32_t)});
    ASSERT_TRUE(read.ok()) << read;
    for (size_t i = 0; i < numbers.size(); ++i) ASSERT_EQ(numbers[i], i + 8);
  }
  // Beyond the end nothing may be read: it would lose the GPU. (Allocations come in steps of 2
  // MiB.)
  EXPECT_EQ(
      ReasonOf(memories->Open(exporter.handle(), exporter.uuid(), bytes + (64 << 20)).status()),
      "SHARED_MEMORY_MEMORY_INVALID");
}

TEST_F(CudaPeerMemoryTest, CopiesTensorsOnTheGpuAndAccountsForThem) {
  ASSERT_TRUE(OpenDevice().ok());
  const Exporter exporter;
  const auto memories = Must(PeerMemories::Create());
  const auto memory =
      Must(memories->Open(exporter.handle(), exporter.uuid(), kElements * sizeof(uint32_t)));
  adapter::PeerTensors peer;
  peer.tensors.push_back({"b", DType::kF32, {2, 3}, 24, memory, 4000, {}});
  peer.tensors.push_back({"a", DType::kBF16, {5}, 10, memory, 2, {}});
  peer.tensors.push_back({"c", DType::kF32, {50, 100}, 20000, memory, 64, {}});
  peer.tensors.push_back({"nothing", DType::kF32, {0, 2}, 0, memory, 0, {}});
  ASSERT_TRUE(adapter::LiesOnDevice(peer));
  MemoryLedger ledger;
  {
    const auto copies = Must(CopyTensors(peer, Must(DeviceReader::Create()), &ledger));
    EXPECT_GE(ledger.bytes("loading"), 34);
    const auto digests = Must(copies->Digests());
    for (const adapter::PeerTensor& tensor : peer.tensors) {
      const TensorView& view = copies->tensors().at(tensor.name);
      EXPECT_EQ(view.shape, tensor.shape);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(view.bytes.data()) % 256, 0u);
      ASSERT_EQ(view.bytes.size(), tensor.bytes);
      std::vector<std::byte> copied(tensor.bytes), original(tensor.bytes);
      ASSERT_TRUE(copies->Read(view.bytes.data(), absl::MakeSpan(copied)).ok());
      ASSERT_TRUE(memory->Read(tensor.offset, absl::MakeSpan(original)).ok());
      EXPECT_EQ(copied, original);
      EXPECT_EQ(digests.at(view.bytes.data()), TreeSha256(original));
    }
  }
  EXPECT_EQ(ledger.total(), 0);
  MemoryLedger full(10);
  EXPECT_EQ(ReasonOf(CopyTensors(peer, Must(DeviceReader::Create()), &full).status()),
            "OUT_OF_MEMORY");
}

TEST_F(CudaPeerMemoryTest, RefusesOtherGpusAndHandlesThatAreNone) {
  ASSERT_TRUE(OpenDevice().ok());
  const Exporter exporter;
  const auto memories = Must(PeerMemories::Create());
  const std::vector<std::byte> none(64);
  EXPECT_EQ(
      ReasonOf(memories->Open(exporter.handle(), absl::MakeConstSpan(none).first(16), 8).status()),
      "SHARED_MEMORY_DEVICE_UNSUPPORTED");
  EXPECT_EQ(ReasonOf(memories->Open(none, exporter.uuid(), 8).status()),
            "SHARED_MEMORY_MEMORY_INVALID");
  // The refusals have left the device as it was.
  EXPECT_TRUE(memories->Open(exporter.handle(), exporter.uuid(), 8).ok());
}

}  // namespace
}  // namespace dorad::cuda
