// How do the partial sums of all blocks become gradients of modulations, tables, weight and bias?
#pragma once

#include "kernels.h"

namespace adaptiveload {

// partials is [segments, chunks, K, width] with, of one chunk of rows, the sums of
//   K = 1 (gate): G = grad * y;   K = 2 (norm): P = grad * xh and Q = grad;   K = 3 (both): P, Q, and G with the
//   gradient of the sum that was normalised.
// Per segment (a modulation row): dscale = P * (weight + weight_offset) + Q * bias, dshift = Q, dgate = G.
// Over all segments, with m = scale_offset + scale + scale_table:
//   d*_table = the same sums over all segments, dweight = sum m * P, dbias = sum m * Q.
struct ColumnSums {
  const float* partials;
  int64_t segments, rows;  // rows: modulation rows of a batch item
  int chunks, width;
  float scale_offset = 1.f, weight_offset = 0.f;
  Array scale, scale_table, weight, bias;
  bool modulated = false;        // the partials have m in them already
  Array dscale, dshift, dgate;   // without data: not wanted, as below
  float *dscale_table, *dshift_table, *dgate_table, *dweight, *dbias;
};

template <int K>
cudaError_t add_column_sums(const ColumnSums& p, cudaStream_t stream);

}  // namespace adaptiveload
