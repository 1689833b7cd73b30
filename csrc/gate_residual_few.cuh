// The gradients of gate_residual of few rows: see few_rows.cuh. A block that owns columns writes their dy as well.
#pragma once

#include "few_rows.cuh"

namespace adaptiveload {

// Of a block. On an H200 at 256, 512 and 1,024 rows of 1,536 columns 3.7, 4.4 and 6.6 us with 256, 3.8, 4.4 and 5.9 with
// 512, and 3.8, 4.8 and 6.0 with 768.
constexpr int kFewGateThreads = 512, kFewestGateThreads = 256;

template <typename T>
__global__ void __launch_bounds__(kFewGateThreads)
    gate_backward_few(const GateBackward p, const ColumnSums sums_of, const Segments segments) {
  const int width = static_cast<int>(p.shape.width);
  const int step = blockDim.x / kColumnPacks;
  const Place at(segments, blockIdx.x, p.shape.rows);
  const int first_column = at.chunk * kColumnPacks * kPack;
  const int own_column = first_column + static_cast<int>(threadIdx.x % kColumnPacks) * kPack;
  const int column = min(own_column, width - kPack);
  const bool mine = own_column < width;
  wait_for_previous_kernel();
  const T* const grad_rows = row_of<const T>(p.grad, at.batch, at.first) + column;
  const T* const y_rows = row_of<const T>(p.y, at.batch, at.first) + column;
  T* const dy_rows = p.dy.data == nullptr || !mine ? nullptr : row_of<T>(p.dy, at.batch, at.first) + column;
  float factor[kPack], sums[1][kPack] = {};
  load_factor<Access::either>(p, at.batch, at.modulation_row, column - static_cast<int>(threadIdx.x) * kPack, factor);
  for (int row = threadIdx.x / kColumnPacks; row < segments.tokens; row += kColumnRows * step) {
    Pack<T> grad_packs[kColumnRows], y_packs[kColumnRows];
#pragma unroll
    for (int r = 0; r < kColumnRows; ++r) {
      const int64_t from = min(row + r * step, segments.tokens - 1);
      grad_packs[r] = load_pack(grad_rows + from * p.grad.row_stride);
      y_packs[r] = load_pack(y_rows + from * p.y.row_stride);
    }
#pragma unroll
    for (int r = 0; r < kColumnRows; ++r) {
      const int to = row + r * step;
      if (to >= segments.tokens) break;
      float grad[kPack], y[kPack];
      grad_packs[r].read(grad);
      y_packs[r].read(y);
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        sums[0][i] += grad[i] * y[i];
        grad[i] *= factor[i];
      }
      if (dy_rows != nullptr) store_pack(dy_rows + to * p.dy.row_stride, grad);
    }
  }
  let_next_kernel_start();
  sum_columns<1>(sums, first_column, width, [&](int c, float (&totals)[3]) {
    write_column<1>(sums_of, false, at.batch, at.modulation_row, c, totals);
    if (segments.count == 1) write_column<1>(sums_of, true, 0, 0, c, totals);
  });
}

}  // namespace adaptiveload
