// gate_residual_layer_norm_modulate of few rows, forward: a block a row, which it asks for at once, without a ring.
#pragma once

#include "layer_norm_modulate_forward.cuh"

namespace adaptiveload {

// On an H200 at 256 and 512 rows of 1,536 columns 3.3 and 4.1 us, with rows fetched ahead 4.4 and 4.9; at 1,024 7.2, and
// 5.9 with two or four rows a block, 6.2 with rows fetched ahead. At 256 and 512 of 3,072 4.1 for 4.9, and 7.3 for 6.2.
constexpr int64_t kFewGatedElements = 512 * 1536;
constexpr int kFewGatedThreads = 384;

template <typename T>
__global__ void __launch_bounds__(kFewGatedThreads) gated_few(const GatedNormForward p, const int joined) {
  __shared__ float2 joints[kFewGatedThreads / 32];
  const int width = static_cast<int>(p.shape.width);
  const unsigned tokens = p.shape.tokens, batch = blockIdx.x / tokens, token = blockIdx.x % tokens;
  const unsigned modulation_row = token / (tokens / static_cast<unsigned>(p.shape.rows));
  const bool mine = static_cast<int>(threadIdx.x) * kPack < width;
  const int column = mine ? threadIdx.x * kPack : width - kPack;
  wait_for_previous_kernel();
  Pack<T> pack = load_pack(row_of<const T>(p.x, batch, token) + column);
  const Pack<T> y_pack = load_pack(row_of<const T>(p.y, batch, token) + column);
  float factor[kPack], gain[kPack], offset[kPack], x[kPack], y[kPack];
  load_factor<Access::either>(p, batch, modulation_row, 0, factor);
  load_affine<Access::either>(p, batch, modulation_row, 0, gain, offset);
  pack.read(x);
  y_pack.read(y);
#pragma unroll
  for (int i = 0; i < kPack; ++i) x[i] += y[i] * factor[i];
  pack.write(x);
  if (mine) store_pack(row_of<T>(p.residual, batch, token) + column, pack);
  pack.read(x);  // the moments are those of the rounded residual
  const RowMoments<true> moments(width, joined);
  moments.post(x, mine, joints);
  __syncthreads();
  let_next_kernel_start();
  const float2 moment = moments.read(joints, p.eps);
  if (threadIdx.x == 0) p.stats[blockIdx.x] = moment;
#pragma unroll
  for (int i = 0; i < kPack; ++i) x[i] = (x[i] - moment.x) * moment.y * gain[i] + offset[i];
  if (mine) store_pack(row_of<T>(p.normed, batch, token) + column, x);
}

}  // namespace adaptiveload
