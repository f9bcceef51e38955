#include <algorithm>

#include "kernels/common/status.h"
#include "kernels/hash/sha256.h"

namespace dorad::kernels {
namespace {

// Two warps for each scheduler keep its integer units busy; more would not be faster.
constexpr int kThreads = 256;
constexpr int kWords = 16;  // of a block of 64 bytes
constexpr int64_t kBlockBytes = 64;

// FIPS 180-4, 4.2.2: the first 32 bits of the fractional parts of cube roots of primes.
__constant__ constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

struct State {
  uint32_t h[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                   0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
};

__device__ uint32_t Rotated(uint32_t x, int by) { return __funnelshift_r(x, x, by); }
__device__ uint32_t Swapped(uint32_t x) { return __byte_perm(x, 0, 0x0123); }

// FIPS 180-4, 6.2.2. w: the block as big-endian words; overwritten.
__device__ void Compress(State& state, uint32_t (&w)[kWords]) {
  uint32_t a = state.h[0], b = state.h[1], c = state.h[2], d = state.h[3];
  uint32_t e = state.h[4], f = state.h[5], g = state.h[6], h = state.h[7];
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    uint32_t& word = w[i % kWords];
    if (i >= kWords) {
      const uint32_t x = w[(i + 1) % kWords];
      const uint32_t y = w[(i + 14) % kWords];
      word += (Rotated(x, 7) ^ Rotated(x, 18) ^ (x >> 3)) + w[(i + 9) % kWords] +
              (Rotated(y, 17) ^ Rotated(y, 19) ^ (y >> 10));
    }
    const uint32_t t1 = h + (Rotated(e, 6) ^ Rotated(e, 11) ^ Rotated(e, 25)) +
                        ((e & f) ^ (~e & g)) + kRound[i] + word;
    const uint32_t t2 =
        (Rotated(a, 2) ^ Rotated(a, 13) ^ Rotated(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
    h = g;
    g = f;
    f = e;
    e = d + t1;
    d = c;
    c = b;
    b = a;
    a = t1 + t2;
  }
  state.h[0] += a;
  state.h[1] += b;
  state.h[2] += c;
  state.h[3] += d;
  state.h[4] += e;
  state.h[5] += f;
  state.h[6] += g;
  state.h[7] += h;
}

__device__ void CompressWhole(State& state, const uint4* block) {
  uint32_t w[kWords];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint4 words = __ldg(block + i);
    w[4 * i] = Swapped(words.x);
    w[4 * i + 1] = Swapped(words.y);
    w[4 * i + 2] = Swapped(words.z);
    w[4 * i + 3] = Swapped(words.w);
  }
  Compress(state, w);
}

// The last partial block of a message of `bytes` from `at` on, and the padding.
__device__ void CompressEnd(State& state, const uint8_t* data, int64_t at, int64_t bytes) {
  const int left = static_cast<int>(bytes - at);
  const bool fits = left < 56;  // the length, too
  for (int part = 0; part < (fits ? 1 : 2); ++part) {
    uint32_t w[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      uint32_t word = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int place = 64 * part + 4 * i + j;
        const uint32_t byte = place < left ? data[at + place] : place == left ? 0x80u : 0u;
        word = word << 8 | byte;
      }
      w[i] = word;
    }
    if (fits || part == 1) {
      const uint64_t bits = static_cast<uint64_t>(bytes) * 8;
      w[14] = static_cast<uint32_t>(bits >> 32);
      w[15] = static_cast<uint32_t>(bits);
    }
    Compress(state, w);
  }
}

__global__ void __launch_bounds__(kThreads)
    PieceHashesKernel(const HashedTensor* tensors, int count, int64_t pieces, uint4* digests) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t piece = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; piece < pieces;
       piece += step) {
    int low = 0;
    int high = count;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (tensors[middle].first_piece <= piece ? low : high) = middle;
    }
    const HashedTensor tensor = tensors[low];
    const int64_t begin = (piece - tensor.first_piece) * kHashPieceBytes;
    const int64_t bytes = min(kHashPieceBytes, tensor.bytes - begin);
    const uint8_t* const data = static_cast<const uint8_t*>(tensor.data) + begin;
    State state;
    int64_t at = 0;
    for (; at + kBlockBytes <= bytes; at += kBlockBytes) {
      CompressWhole(state, reinterpret_cast<const uint4*>(data + at));
    }
    CompressEnd(state, data, at, bytes);
    uint32_t h[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) h[i] = Swapped(state.h[i]);
    digests[2 * piece] = make_uint4(h[0], h[1], h[2], h[3]);
    digests[2 * piece + 1] = make_uint4(h[4], h[5], h[6], h[7]);
  }
}

}  // namespace

cudaError_t PieceHashes(const HashedTensor* tensors, int count, int64_t pieces, void* digests,
                        cudaStream_t stream) {
  if (count < 0 || pieces < 0) return cudaErrorInvalidValue;
  if (count == 0 || pieces == 0) return cudaSuccess;
  int device = 0;
  int processors = 0;
  DORAD_CUDA_RETURN_IF_ERROR(cudaGetDevice(&device));
  DORAD_CUDA_RETURN_IF_ERROR(
      cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  const int64_t blocks = std::min<int64_t>(processors, (pieces + kThreads - 1) / kThreads);
  PieceHashesKernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
      tensors, count, pieces, static_cast<uint4*>(digests));
  return cudaGetLastError();
}

}  // namespace dorad::kernels
