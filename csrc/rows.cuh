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

// Adds N values (a power of two) over the block, always in the same order; every thread gets the sums. One barrier:
// the next call must use another buffer (32 * N floats), the one after it may use this one again.
template <int N>
__device__ __forceinline__ void block_sum(float (&values)[N], float* buffer) {
  constexpr int kGroup = 32 / N;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  float total = warp_sum<N>(values);
  if (lane % kGroup == 0) buffer[warp * N + lane / kGroup] = total;
  __syncthreads();
  total = 0;
  for (int w = lane % kGroup; w < warps; w += kGroup) total += buffer[w * N + lane / kGroup];
#pragma unroll
  for (int offset = kGroup / 2; offset >= 1; offset /= 2) total += __shfl_xor_sync(~0u, total, offset);
#pragma unroll
  for (int n = 0; n < N; ++n) values[n] = __shfl_sync(~0u, total, n * kGroup);
}

// Copies 16 bytes from global to shared memory without waiting.
__device__ __forceinline__ void copy_ahead(void* shared, const void* global) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
}
__device__ __forceinline__ void close_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until the oldest of `stages` groups of copies is there. The number is an immediate operand of the instruction.
__device__ __forceinline__ void wait_for_oldest(int stages) {
  if (stages == 4) {
    asm volatile("cp.async.wait_group 3;" ::: "memory");
  } else if (stages == 3) {
    asm volatile("cp.async.wait_group 2;" ::: "memory");
  } else {
    asm volatile("cp.async.wait_group 1;" ::: "memory");
  }
}

// Puts my eight columns of a row at `slot` of the ring. A thread reads back only what it copied itself, so no barrier
// is needed. Pieces lie blockDim apart, which keeps the 16-byte accesses of a warp side by side.
template <typename T>
__device__ __forceinline__ void fetch(uint4* slot, const T* address) {
#pragma unroll
  for (int i = 0; i < Pack<T>::kPieces; ++i) {
    copy_ahead(slot + i * blockDim.x + threadIdx.x, reinterpret_cast<const uint4*>(address) + i);
  }
}
template <typename T>
__device__ __forceinline__ Pack<T> fetched(const uint4* slot) {
  Pack<T> pack;
#pragma unroll
  for (int i = 0; i < Pack<T>::kPieces; ++i) pack.piece[i] = slot[i * blockDim.x + threadIdx.x];
  return pack;
}

// How many stages (4 to 2) of `stage_bytes` fit into shared memory, if possible so that `blocks` blocks run on a
// multiprocessor. 0: not even two fit.
inline int stages_that_fit(int64_t stage_bytes, int blocks) {
  constexpr int64_t kStatic = 4096;  // reduction buffers, and what the driver reserves
  const int64_t limit = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - kStatic;
  const int64_t share = device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor) / blocks - kStatic;
  for (int stages = 4; stages > 2; --stages) {
    if (stages * stage_bytes <= std::min(limit, share)) return stages;
  }
  return 2 * stage_bytes <= limit ? 2 : 0;
}

}  // namespace adaptiveload
