// How are rows dealt to blocks, brought into shared memory ahead of time, and summed over a block?
#pragma once

#include <algorithm>

#include "pack.cuh"

namespace adaptiveload {

// A segment is a run of tokens of one batch item that share a modulation row. A chunk of blocks walks down it; block
// `chunk` takes turns chunk, chunk + chunks, ... of R neighbouring rows each, so that all blocks read close together.
struct Segments {
  int64_t count;
  int tokens;  // of one segment
  int chunks;  // blocks of one segment

  int64_t blocks() const { return count * chunks; }

  // How many turns of `rows` rows a chunk has.
  __device__ __forceinline__ int turns(int chunk, int rows) const {
    return ((tokens + rows - 1) / rows - chunk + chunks - 1) / chunks;
  }
};

inline int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&value, attribute, device);
  return value;
}

// With one modulation row per token there is no run of tokens that shares one: sums go over the whole batch item.
inline bool row_per_token(const Shape& shape) { return shape.rows == shape.tokens && shape.rows > 1; }

// The tokens of a segment are cut so that about `blocks_per_multiprocessor` blocks come out, none with fewer than
// `fewest_rows` rows.
inline Segments cut(const Shape& shape, int64_t blocks_per_multiprocessor, int64_t fewest_rows) {
  const int64_t rows = row_per_token(shape) ? 1 : shape.rows, segments = shape.batch * rows;
  const int64_t tokens = shape.tokens / std::max<int64_t>(1, rows);
  const int64_t blocks = blocks_per_multiprocessor * device_attribute(cudaDevAttrMultiProcessorCount);
  const int64_t most = std::max<int64_t>(1, tokens / fewest_rows);
  const int64_t chunks = std::clamp<int64_t>(blocks / std::max<int64_t>(1, segments), 1, most);
  return {segments, static_cast<int>(tokens), static_cast<int>(chunks)};
}

// The kernels for any layout take wider rows in several steps, since their registers are short.
constexpr int kMostAnyThreads = 512;

// Enough threads, in whole warps, for kPack columns each.
inline int threads_for(int64_t width) {
  return static_cast<int>(std::max<int64_t>(1, (width + 32 * kPack - 1) / (32 * kPack))) * 32;
}

// Adds N values over a warp. Afterwards lane l holds the sum of value l / (32 / N): halving the values at each step
// takes N + log2(32 / N) - 1 shuffles instead of 5 N.
template <int N>
__device__ __forceinline__ float warp_sum(float (&values)[N]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = N / 2; n >= 1; n /= 2) {
    const int offset = 32 * n / N;
    const bool upper = lane & offset;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const float sent = upper ? values[i] : values[i + n];
      const float kept = upper ? values[i + n] : values[i];
      values[i] = kept + __shfl_xor_sync(~0u, sent, offset);
    }
  }
  float total = values[0];
#pragma unroll
  for (int offset = 16 / N; offset >= 1; offset /= 2) total += __shfl_xor_sync(~0u, total, offset);
  return total;
}

// Adds N values (a power of two) over the block, always in the same order, in two halves with a barrier between them
// that other work can precede. Two buffers of 32 * N floats, used by turns, make one barrier a turn enough.
template <int N>
__device__ __forceinline__ void offer_sums(float (&values)[N], float* buffer) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const float total = warp_sum<N>(values);
  if (lane % (32 / N) == 0) buffer[warp * N + lane / (32 / N)] = total;
}
template <int N>
__device__ __forceinline__ void collect_sums(float (&values)[N], const float* buffer) {
  constexpr int kGroup = 32 / N;
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  float total = 0;
  for (int w = lane % kGroup; w < warps; w += kGroup) total += buffer[w * N + lane / kGroup];
#pragma unroll
  for (int offset = kGroup / 2; offset >= 1; offset /= 2) total += __shfl_xor_sync(~0u, total, offset);
#pragma unroll
  for (int n = 0; n < N; ++n) values[n] = __shfl_sync(~0u, total, n * kGroup);
}
template <int N>
__device__ __forceinline__ void block_sum(float (&values)[N], float* buffer) {
  offer_sums<N>(values, buffer);
  __syncthreads();
  collect_sums<N>(values, buffer);
}

// Rows on their way from global memory: a ring in shared memory of `stages` stages of ROWS rows each. A thread copies
// its own eight columns of a row and reads back only those, so that no barrier is needed.
template <typename T, int ROWS>
struct Ring {
  uint4* pieces;  // [stages][ROWS][pieces of a pack][threads]: a warp's accesses lie side by side
  int stages;

  static int64_t stage_bytes(int threads) { return static_cast<int64_t>(ROWS) * threads * sizeof(Pack<T>); }

  __device__ __forceinline__ uint4* slot(int stage, int row) const {
    return pieces + (stage * ROWS + row) * Pack<T>::kPieces * blockDim.x + threadIdx.x;
  }
  // Copies without waiting. Every stage ends with close(), also one without copies.
  __device__ __forceinline__ void fetch(int stage, int row, const T* address) const {
#pragma unroll
    for (int i = 0; i < Pack<T>::kPieces; ++i) {
      const unsigned shared = static_cast<unsigned>(__cvta_generic_to_shared(slot(stage, row) + i * blockDim.x));
      const uint4* const global = reinterpret_cast<const uint4*>(address) + i;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
    }
  }
  __device__ __forceinline__ void close() const { asm volatile("cp.async.commit_group;" ::: "memory"); }

  // Waits until all but the newest `younger` closed stages are there (an immediate operand of the instruction).
  __device__ __forceinline__ void wait(int younger) const {
    switch (younger) {
      case 0: asm volatile("cp.async.wait_group 0;" ::: "memory"); break;
      case 1: asm volatile("cp.async.wait_group 1;" ::: "memory"); break;
      case 2: asm volatile("cp.async.wait_group 2;" ::: "memory"); break;
      case 3: asm volatile("cp.async.wait_group 3;" ::: "memory"); break;
      default: asm volatile("cp.async.wait_group 4;" ::: "memory");
    }
  }
  __device__ __forceinline__ Pack<T> read(int stage, int row) const {
    Pack<T> pack;
#pragma unroll
    for (int i = 0; i < Pack<T>::kPieces; ++i) pack.piece[i] = slot(stage, row)[i * blockDim.x];
    return pack;
  }
  // The stage that lies `back` before `stage`.
  __device__ __forceinline__ int before(int stage, int back) const {
    return stage >= back ? stage - back : stage - back + stages;
  }
};

// How many stages, of `most` at most and `fewest` at least, fit into shared memory, if possible so that `blocks` blocks
// run on a multiprocessor. 0: not even the fewest fit.
inline int stages_that_fit(int64_t stage_bytes, int fewest, int most, int blocks) {
  constexpr int64_t kStatic = 3072;  // reduction buffers, and what the driver reserves
  const int64_t limit = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - kStatic;
  const int64_t share = device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor) / blocks - kStatic;
  for (int stages = most; stages > fewest; --stages) {
    if (stages * stage_bytes <= std::min(limit, share)) return stages;
  }
  return fewest * stage_bytes <= limit ? fewest : 0;
}

}  // namespace adaptiveload
