// The gradients of gate_residual of few rows, in one kernel: a second one for the sums over rows would take longer.
//
// A block owns a few columns of a segment and writes their dy, too. On Hopper and later a cluster of blocks shares its
// rows, and its first block adds the sums that the others leave in its shared memory; before, one block has them all.
// On an H200 at 256, 1,024 and 4,096 rows of 1,536 columns 3.9, 5.6 and 13.5 us; without clusters 3.9 and 6.4, with two
// kernels 15.6 at 4,096.
#pragma once

#include "few_rows.cuh"

namespace adaptiveload {

constexpr int kFewGateThreads = 256;
constexpr int kClusterBlocks = 8;  // as many as every GPU allows
constexpr int kClusterPacks = 8, kLonePacks = 2;  // of columns, of a block
constexpr int64_t kFewGateElements = 4096 * 1536;

template <typename T>
__global__ void __launch_bounds__(kFewGateThreads)
    gate_backward_few(const GateBackward p, const ColumnSums sums_of, const Segments segments) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  constexpr int kBlocks = 1, kPacks = kLonePacks;
#else
  constexpr int kBlocks = kClusterBlocks, kPacks = kClusterPacks;
#endif
  constexpr int kColumns = kPacks * kPack, kSlots = kFewGateThreads / kPacks, kStep = kSlots * kBlocks;
  constexpr int kWarps = kFewGateThreads / 32;
  __shared__ float parts[kWarps][kColumns];      // of my warps
  __shared__ float totals[kBlocks][kColumns];    // of the blocks, used in the first one
  const int width = static_cast<int>(p.shape.width), rank = blockIdx.x % kBlocks;
  const Place at(segments, blockIdx.x / kBlocks, p.shape.rows);
  const int first_column = at.chunk * kColumns;
  const int own_column = first_column + static_cast<int>(threadIdx.x % kPacks) * kPack;
  const int column = min(own_column, width - kPack);
  const bool mine = own_column < width;
  cluster_begins();
  wait_for_previous_kernel();
  const T* const grad_rows = row_of<const T>(p.grad, at.batch, at.first) + column;
  const T* const y_rows = row_of<const T>(p.y, at.batch, at.first) + column;
  T* const dy_rows = p.dy.data == nullptr || !mine ? nullptr : row_of<T>(p.dy, at.batch, at.first) + column;
  float factor[kPack], sums[kPack] = {};
  bool loaded = false;  // the factor, after the first rows are asked for: it comes with a sum, which waits
  for (int row = rank * kSlots + threadIdx.x / kPacks; row < segments.tokens; row += kColumnRows * kStep) {
    Pack<T> grad_packs[kColumnRows], y_packs[kColumnRows];
#pragma unroll
    for (int r = 0; r < kColumnRows; ++r) {
      const int64_t from = min(row + r * kStep, segments.tokens - 1);
      grad_packs[r] = load_pack(grad_rows + from * p.grad.row_stride);
      y_packs[r] = load_pack(y_rows + from * p.y.row_stride);
    }
    if (!loaded) {
      const int first = column - static_cast<int>(threadIdx.x) * kPack;
      load_factor<Access::either>(p, at.batch, at.modulation_row, first, factor);
      loaded = true;
    }
#pragma unroll
    for (int r = 0; r < kColumnRows; ++r) {
      const int to = row + r * kStep;
      if (to >= segments.tokens) break;
      float grad[kPack], y[kPack];
      grad_packs[r].read(grad);
      y_packs[r].read(y);
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        sums[i] += grad[i] * y[i];
        grad[i] *= factor[i];
      }
      if (dy_rows != nullptr) store_pack(dy_rows + to * p.dy.row_stride, grad);
    }
  }
  let_next_kernel_start();

  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
#pragma unroll
    for (int offset = kPacks; offset < 32; offset *= 2) sums[i] += __shfl_xor_sync(~0u, sums[i], offset);
    if (lane < kPacks) parts[threadIdx.x / 32][lane * kPack + i] = sums[i];
  }
  __syncthreads();
  cluster_has_begun();
  const int c = threadIdx.x;
  if (c < kColumns) {
    float sum = 0.f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) sum += parts[warp][c];
    store_in_first_block(&totals[rank][c], sum);
  }
  wait_for_cluster();
  if (rank > 0 || c >= kColumns || first_column + c >= width) return;
  float total[3] = {};
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) total[0] += totals[block][c];
  write_column<1>(sums_of, false, at.batch, at.modulation_row, first_column + c, total);
  if (segments.count == 1) write_column<1>(sums_of, true, 0, 0, first_column + c, total);
}

}  // namespace adaptiveload
