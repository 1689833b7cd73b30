// The gradients of layer_norm_modulate and rms_norm_modulate of few rows: see few_rows.cuh.
#pragma once

#include "few_rows.cuh"
#include "layer_norm_modulate_backward.cuh"

namespace adaptiveload {

// P and Q of a block's columns over a segment.
template <typename T, bool MEAN>
__device__ __forceinline__ void few_columns(const LayerNormBackward& p, const ColumnSums& sums_of,
                                            const FewRows& grid) {
  const int width = static_cast<int>(p.shape.width), step = blockDim.x / kColumnPacks;
  const Segments columns = {grid.rows.count, grid.rows.tokens, grid.column_blocks};
  const Place at(columns, blockIdx.x, p.shape.rows);
  const int first_column = at.chunk * kColumnPacks * kPack;
  const int column = min(first_column + static_cast<int>(threadIdx.x % kColumnPacks) * kPack, width - kPack);
  const T* const x_rows = row_of<const T>(p.x, at.batch, at.first) + column;
  const T* const grad_rows = row_of<const T>(p.grad, at.batch, at.first) + column;
  const int64_t first_token = at.batch * p.shape.tokens + at.first;
  float sums[2][kPack] = {};
  for (int row = threadIdx.x / kColumnPacks; row < grid.rows.tokens; row += kColumnRows * step) {
    Pack<T> x_packs[kColumnRows], grad_packs[kColumnRows];
    float2 stats[kColumnRows];
#pragma unroll
    for (int r = 0; r < kColumnRows; ++r) {
      const int64_t mine = min(row + r * step, grid.rows.tokens - 1);
      x_packs[r] = load_pack(x_rows + mine * p.x.row_stride);
      grad_packs[r] = load_pack(grad_rows + mine * p.grad.row_stride);
      stats[r] = load_stats<MEAN>(p.stats, first_token + mine);
    }
#pragma unroll
    for (int r = 0; r < kColumnRows; ++r) {
      if (row + r * step >= grid.rows.tokens) break;
      float x[kPack], grad[kPack];
      x_packs[r].read(x);
      grad_packs[r].read(grad);
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        sums[0][i] += grad[i] * ((x[i] - stats[r].x) * stats[r].y);
        sums[1][i] += grad[i];
      }
    }
  }
  sum_columns<2>(sums, first_column, width, [&](int c, float (&totals)[4]) {
    write_column<2>(sums_of, false, at.batch, at.modulation_row, c, totals);
    if (grid.rows.count > 1) return;
    const float scale = element(sums_of.scale, 0, 0, c, 0.f) + element(sums_of.scale_table, 0, 0, c, 0.f);
    const float m = sums_of.scale_offset + scale;
    totals[2] = m * totals[0];
    totals[3] = m * totals[1];
    write_column<2>(sums_of, true, 0, 0, c, totals);
  });
}

template <typename T, bool MEAN, int R>
__global__ void __launch_bounds__(kFewThreads)
    backward_few(const LayerNormBackward p, const ColumnSums sums_of, const FewRows grid, const int groups) {
  constexpr int kMeans = MEAN ? 2 : 1;
  __shared__ float buffer[R][kMeans * kFewThreads / 32];
  const int width = static_cast<int>(p.shape.width);
  const unsigned owners = static_cast<unsigned>(grid.rows.count) * grid.column_blocks;
  wait_for_previous_kernel();
  if (blockIdx.x < owners) {
    few_columns<T, MEAN>(p, sums_of, grid);
    return let_next_kernel_start();
  }
  const Place at(grid.rows, blockIdx.x - owners, p.shape.rows);
  const Group group(blockDim.x / groups);
  const int first_row = (at.chunk * groups + group.index) * R, last_row = grid.rows.tokens - 1;
  const int column = min(static_cast<int>(group.thread) * kPack, width - kPack);
  const bool mine = static_cast<int>(group.thread) * kPack < width;
  const T* const x_rows = row_of<const T>(p.x, at.batch, at.first) + column;
  const T* const grad_rows = row_of<const T>(p.grad, at.batch, at.first) + column;
  const int64_t first_token = at.batch * p.shape.tokens + at.first;
  Pack<T> x_packs[R], grad_packs[R];
  float2 stats[R];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const int64_t row = min(first_row + r, last_row);
    x_packs[r] = load_pack(x_rows + row * p.x.row_stride);
    grad_packs[r] = load_pack(grad_rows + row * p.grad.row_stride);
    stats[r] = load_stats<MEAN>(p.stats, first_token + row);
  }
  float gain[kPack], means[R][kMeans], x[kPack], grad[kPack];
  load_gain<Access::either>(p, at.batch, at.modulation_row, group.first_column(), true, gain);
  const WarpSums<kMeans> joint(group);
#pragma unroll
  for (int r = 0; r < R; ++r) {
    x_packs[r].read(x);
    grad_packs[r].read(grad);
    float sum = 0.f, product_sum = 0.f;
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      sum += grad[i] * gain[i];
      product_sum += grad[i] * gain[i] * ((x[i] - stats[r].x) * stats[r].y);
    }
    means[r][0] = mine ? product_sum : 0.f;
    if (MEAN) means[r][kMeans - 1] = mine ? sum : 0.f;
    joint.post(means[r], buffer[r]);
  }
  group.wait();
  let_next_kernel_start();
#pragma unroll
  for (int r = 0; r < R; ++r) {
    joint.add(means[r], buffer[r]);
    const float gx_mean = means[r][0] / width, g_mean = MEAN ? means[r][kMeans - 1] / width : 0.f;
    x_packs[r].read(x);
    grad_packs[r].read(grad);
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      x[i] = stats[r].y * (grad[i] * gain[i] - g_mean - (x[i] - stats[r].x) * stats[r].y * gx_mean);
    }
    if (mine && p.dx.data != nullptr && first_row + r <= last_row) {
      store_pack(row_of<T>(p.dx, at.batch, at.first + first_row + r) + column, x);
    }
  }
}

}  // namespace adaptiveload
