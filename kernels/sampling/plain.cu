#include <algorithm>

#include "kernels/common/status.h"
#include "kernels/isa/device.h"
#include "kernels/isa/launch.h"
#include "kernels/isa/shared.cuh"
#include "kernels/sampling/launch.h"
#include "kernels/sampling/plain.cuh"

namespace dorad::kernels {
namespace {

constexpr int kWarps = 8;
constexpr int kBlocksAtOnce = 3;  // of a multiprocessor

// Blocks of a row, `most` or fewer: as many as fill the device with two of a multiprocessor. If
// they would leave much of it idle, four, so that blocks end at different times
// (kernels_sampling_bench).
int BlocksOfRow(int rows, int processors, int most) {
  const int wanted = 2 * processors;
  const int blocks = std::min(wanted / rows, most);
  return blocks == most || 8 * blocks * rows >= 7 * wanted ? blocks : std::min(4, most);
}

// `blocks` of a row, of which each has the next `share` chunks, a warp one at a time. kLists: rows
// may need lists, for which there is more code and shared memory.
template <bool kLists>
__global__ void __launch_bounds__(kWarps* kWarp, kBlocksAtOnce)
    PlainRowsKernel(const __grid_constant__ Launch p, int blocks, int share) {
  const int index = static_cast<int>(blockIdx.x) / blocks;
  if (p.rows_in_use != nullptr && index >= *p.rows_in_use) return;
  const PlainWanted wanted(p, index);
  if (!wanted.plain || (wanted.needs_list && !kLists)) return;
  const int chunks = ChunksOf(p.vocabulary);
  const PlainRecord record(p, index);
  const int first = static_cast<int>(blockIdx.x) % blocks * share;
  const int end = min(first + share, chunks);
  for (int chunk = first + static_cast<int>(threadIdx.x) / kWarp; chunk < end; chunk += kWarps) {
    ReadChunk(p, wanted, index, chunk, record);
  }
  bool& is_last = StaticShared<bool>();
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = SignalAcquireRelease(record.arrived) == static_cast<uint32_t>(blocks) - 1;
    if (is_last) *record.arrived = 0;
  }
  __syncthreads();
  if (!is_last) return;
  const bool done = FinishRow<kLists>(p, wanted, index, record);
  if (wanted.needs_list && threadIdx.x == 0) *record.hard = done ? 0 : 1;
}

template <bool kLists>
cudaError_t Run(const Launch& p, int rows, cudaStream_t stream) {
  const int chunks = ChunksOf(p.vocabulary);
  int processors = 0;
  DORAD_CUDA_RETURN_IF_ERROR(Multiprocessors(&processors));
  const int most = (chunks + kWarps - 1) / kWarps;
  const int wanted = BlocksOfRow(rows, processors, most);
  const int share = (most + wanted - 1) / wanted * kWarps;
  const int blocks = (chunks + share - 1) / share;
  return LaunchAfter(PlainRowsKernel<kLists>, rows * blocks, kWarps * kWarp,
                     InRecord<kLists>::SharedBytes(chunks), stream, p, blocks, share);
}

}  // namespace

size_t PlainBytes(int rows, int vocabulary) {
  return sizeof(float) * PlainRecord::Floats(ChunksOf(vocabulary)) * static_cast<size_t>(rows);
}

cudaError_t SamplePlain(const Launch& p, int rows, bool lists, cudaStream_t stream) {
  return lists ? Run<true>(p, rows, stream) : Run<false>(p, rows, stream);
}

}  // namespace dorad::kernels
