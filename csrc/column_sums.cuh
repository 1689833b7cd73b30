// How do the partial sums of all blocks become gradients of modulations, tables, weight and bias?
#pragma once

#include "kernels.h"

namespace adaptiveload {

// partials is [segments, chunks, K, width] with, of one chunk of rows, the sums of
//   K = 2 (norm): P = grad * xh and Q = grad;   K = 1 (gate): P = grad * y.
// Per segment (a modulation row): dscale or dgate = P * weight + Q * bias, dshift = Q.
// Over all segments, with m = 1 + scale + scale_table:
//   dscale_table or dgate_table = sum dscale, dshift_table = sum Q, dweight = sum m * P, dbias = sum m * Q.
struct ColumnSums {
  const float* partials;
  int64_t segments, rows;  // rows: modulation rows of a batch item
  int chunks, width;
  Array scale, scale_table, weight, bias;
  bool modulated;         // the partials have m in them already
  Array dscale, dshift;   // without data: not wanted, as below
  float *dscale_table, *dshift_table, *dweight, *dbias;
};

template <int K>
cudaError_t add_column_sums(const ColumnSums& p, cudaStream_t stream);

}  // namespace adaptiveload
