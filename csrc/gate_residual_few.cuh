// The gradients of gate_residual of few rows: see few_rows.cuh. Nothing is summed over a row, so the blocks that own
// columns write their dy, too, and there are no others.
#pragma once

#include "few_rows.cuh"

namespace adaptiveload {

constexpr int kColumnRows = 4;  // of a thread's turn
constexpr int kFewGateThreads = 256, kFewerGateThreads = 128;
constexpr int64_t kFewerGateRows = 512;            // for the latter
constexpr int64_t kFewGateElements = 4096 * 1536;  // in clusters

template <typename T, int THREADS>
__global__ void __launch_bounds__(THREADS)
    gate_backward_few(const GateBackward p, const ColumnSums sums_of, const FewRows grid) {
  const int width = static_cast<int>(p.shape.width), tokens = grid.rows.tokens;
  const Place at = FewColumns<>::place(grid, p.shape.rows);
  const FewColumns<THREADS> columns(at, width);
  const int column = columns.column();
  cluster_begins();
  if (grid.rows.count == 1) bring_columns(p.gate, 0, 0, blockIdx.x, gridDim.x, width);
  for (int r = 0; threadIdx.x % FewColumns<>::kPacks == 0 && r < kColumnRows; ++r) {
    const int row = columns.first_row + r * columns.step;
    if (row >= tokens) break;
    for (const Array& a : {p.grad, p.y}) bring_to_cache(row_of<const T>(a, at.batch, at.first + row) + column);
  }
  wait_for_previous_kernel();
  const T* const grad_rows = row_of<const T>(p.grad, at.batch, at.first) + column;
  const T* const y_rows = row_of<const T>(p.y, at.batch, at.first) + column;
  T* const dy_rows = p.dy.data == nullptr || columns.mine >= width ? nullptr : row_of<T>(p.dy, at.batch, at.first) + column;
  float factor[kPack], sums[1][kPack] = {};
  bool loaded = false;  // the factor, after the first rows are asked for: it comes with a sum, which waits
  for (int row = columns.first_row; row < tokens; row += kColumnRows * columns.step) {
    Pack<T> grad_packs[kColumnRows], y_packs[kColumnRows];
#pragma unroll
    for (int r = 0; r < kColumnRows; ++r) {
      const int64_t from = min(row + r * columns.step, tokens - 1);
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
      const int to = row + r * columns.step;
      if (to >= tokens) break;
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
  columns.add(sums, [&](int c, const float(&totals)[3]) {
    write_column<1>(sums_of, false, at.batch, at.modulation_row, c, totals);
    if (grid.rows.count == 1) write_column<1>(sums_of, true, 0, 0, c, totals);
  });
}

}  // namespace adaptiveload
