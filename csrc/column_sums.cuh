// How do the partial sums of all blocks become gradients of modulations, tables, weight and bias?
#pragma once

#include "pack.cuh"

namespace adaptiveload {

// partials is [segments, chunks, K, width] with, of one chunk of rows, the sums of
//   K = 1 (gate): G = grad * y; or (rope) grad * xh, whose sum is dweight;   K = 2 (norm): P = grad * xh and Q = grad;
//   K = 3 (both): P, Q, and G with the gradient of the sum that was normalised.
// Per segment (a modulation row): dscale = P * (weight + weight_offset) + Q * bias, dshift = Q, dgate = G.
// Over all segments, with m = scale_offset + scale + scale_table:
//   d*_table = the same sums over all segments, dweight = sum m * P, dbias = sum m * Q.
struct ColumnSums {
  const float* partials;
  int64_t segments, rows;  // rows: modulation rows of a batch item
  int chunks, width;
  float scale_offset = 1.f, weight_offset = 0.f;
  Array scale, scale_table, weight, bias;
  bool modulated = false;  // the partials have m in them already
  bool let_next = true;    // the next kernel start early: not one of which several blocks fit a multiprocessor
  Array dscale, dshift, dgate, dscale_table, dshift_table, dgate_table, dweight, dbias;  // without data: not wanted
};

// Writes what a column's sums make: those of a segment (a modulation row of a batch item), or of all, where sums[K] and
// sums[K + 1] are those of m * P and m * Q.
template <int K>
__device__ __forceinline__ void write_column(const ColumnSums& p, bool total, int64_t batch, int64_t row, int column,
                                             const float (&sums)[K + 2]) {
  if (total) {
    set_column(p.dgate_table, column, sums[K - 1]);
    set_column(p.dweight, column, K > 1 ? sums[K] : sums[0]);
  } else if (p.dgate.data != nullptr) {
    set_element(p.dgate, batch, row, column, sums[K - 1]);
  }
  if constexpr (K > 1) {
    const float weight = element(p.weight, 0, 0, column, 1.f) + p.weight_offset;
    const float scale = sums[0] * weight + sums[1] * element(p.bias, 0, 0, column, 0.f);
    if (total) {
      set_column(p.dscale_table, column, scale);
      set_column(p.dshift_table, column, sums[1]);
      set_column(p.dbias, column, sums[K + 1]);
    } else {
      if (p.dscale.data != nullptr) set_element(p.dscale, batch, row, column, scale);
      if (p.dshift.data != nullptr) set_element(p.dshift, batch, row, column, sums[1]);
    }
  }
}

template <int K>
cudaError_t add_column_sums(const ColumnSums& p, cudaStream_t stream);

}  // namespace adaptiveload
