// What is known of a plain row after its logits were read once. Internal to kernels/sampling.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/sampling/launch.h"
#include "kernels/sampling/row.cuh"

namespace dorad::kernels {

// A row's part of Launch::records.
struct PlainRecord {
  uint32_t* arrived;    // blocks; zero between launches
  uint32_t* hard;       // whether the second launch must do the row
  float* chunk_max;     // [chunks]
  float* raw_sums;      // [chunks], SumChunk
  float* sums;          // [chunks]
  float* group_maxima;  // [chunks, kWarp]

  static constexpr size_t kHead = 32;  // floats; a part is of whole lines of 128 bytes
  static constexpr size_t Padded(int chunks) {
    return (static_cast<size_t>(chunks) + 31) / 32 * 32;
  }
  static constexpr size_t Floats(int chunks) {
    return kHead + 3 * Padded(chunks) + kWarp * static_cast<size_t>(chunks);
  }

  __device__ PlainRecord(const Launch& p, int index) {
    const int chunks = ChunksOf(p.vocabulary);
    float* const at = p.records + index * Floats(chunks);
    arrived = reinterpret_cast<uint32_t*>(at);
    hard = arrived + 1;
    chunk_max = at + kHead;
    raw_sums = chunk_max + Padded(chunks);
    sums = raw_sums + Padded(chunks);
    group_maxima = sums + Padded(chunks);
  }
};

}  // namespace dorad::kernels
