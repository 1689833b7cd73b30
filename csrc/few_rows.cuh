// How does the norm's backward take few rows? It ends before rows fetched ahead of time would pay, and a second kernel
// for the sums over rows would take longer than it does. So a group of threads asks for all of its R rows at once, and
// other blocks of the same kernel own 16 columns of a segment each, read them of all its rows, which the cache has by
// then, and make the sums. Nobody waits for another block.
#pragma once

#include "column_sums.cuh"
#include "launch.cuh"
#include "modulation.cuh"
#include "rows.cuh"

namespace adaptiveload {

constexpr int64_t kFewRows = 1024;     // more read twice take longer than two kernels
constexpr int64_t kFewWidth = 2048;    // wider ones too: on an H200 12 us for 11 at 512 rows of 3,072, 26 for 19 at
                                       // 1,024 of 5,120
constexpr int64_t kFewSegments = 4;
constexpr int kFewThreads = 768;       // of a block, and so rows of up to 6144 columns
constexpr int kFewGroups = 2;          // that own rows, of a block: more threads for those that own columns
constexpr int kColumnPacks = 2;        // of a block that owns columns
constexpr int kColumnRows = 4;         // of a thread's turn there

// Blocks: first those that own columns, then those that own rows.
struct FewRows {
  Segments rows;     // of R rows a block
  int column_blocks; // of a segment; 0: no sums are wanted

  unsigned blocks() const { return static_cast<unsigned>(rows.count * (rows.chunks + column_blocks)); }
};

// total: are sums over all segments wanted?
inline bool few_rows(const Shape& shape, bool total) {
  const int64_t segments = shape.batch * shape.rows;
  return !row_per_token(shape) && shape.batch * shape.tokens <= kFewRows && segments <= (total ? 1 : kFewSegments) &&
         shape.width <= kFewWidth;
}
inline FewRows few_rows_grid(const Shape& shape, int rows_of_block, bool sums) {
  Segments segments = cut(shape, 1, 1);
  segments.chunks = (segments.tokens + rows_of_block - 1) / rows_of_block;
  const int64_t columns = int64_t{kColumnPacks} * kPack;
  return {segments, sums ? static_cast<int>((shape.width + columns - 1) / columns) : 0};
}

// Adds up each thread's sums of its pack's columns over the block, and gives those of column c to `write(c, sums)`.
template <int K, typename Write>
__device__ __forceinline__ void sum_columns(float (&sums)[K][kPack], int first_column, int width, const Write& write) {
  __shared__ float parts[kFewThreads / 32][kColumnPacks][K][kPack];
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
#pragma unroll
  for (int k = 0; k < K; ++k) {
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
#pragma unroll
      for (int offset = kColumnPacks; offset < 32; offset *= 2) sums[k][i] += __shfl_xor_sync(~0u, sums[k][i], offset);
      if (lane < kColumnPacks) parts[threadIdx.x / 32][lane][k][i] = sums[k][i];
    }
  }
  __syncthreads();
  const int column = threadIdx.x;
  if (column >= kColumnPacks * kPack || first_column + column >= width) return;
  float totals[K + 2] = {};
  for (int warp = 0; warp < warps; ++warp) {
#pragma unroll
    for (int k = 0; k < K; ++k) totals[k] += parts[warp][column / kPack][k][column % kPack];
  }
  write(first_column + column, totals);
}

}  // namespace adaptiveload
