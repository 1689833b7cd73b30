// gate_residual_layer_norm_modulate of few rows, forward: a block asks for its one or two rows at once, without a ring.
#pragma once

#include "layer_norm_modulate_forward.cuh"

namespace adaptiveload {

// One row a block up to the first number of elements, two up to the second. Their lines are asked for, in the cache, while
// the previous kernel ends. On an H200 at 256, 512, 1,024 and 2,048 rows of 1,536 columns 2.9, 3.4, 5.3 and 9.3 us; with
// rows fetched ahead 4.4, 4.9, 6.2 and 9.5.
constexpr int64_t kOneGatedElements = 512 * 1536, kFewGatedElements = 2048 * 1536;
constexpr int kFewGatedThreads = 384;

template <typename T, int R>
__global__ void __launch_bounds__(kFewGatedThreads)
    gated_few(const GatedNormForward p, const Segments segments, const int joined) {
  __shared__ float2 joints[R][kFewGatedThreads / 32];
  const int width = static_cast<int>(p.shape.width);
  const Place at(segments, blockIdx.x, p.shape.rows);
  const int first_row = at.chunk * R, last_row = segments.tokens - 1;
  const bool mine = static_cast<int>(threadIdx.x) * kPack < width;
  const int column = mine ? threadIdx.x * kPack : width - kPack;
  const auto row_at = [&](const Array& rows, int r) {
    return row_of<T>(rows, at.batch, at.first + min(first_row + r, last_row)) + column;
  };
  let_next_kernel_start();
  for (const Array& a : {p.gate, p.scale, p.shift}) {
    bring_columns(a, at.batch, at.modulation_row, at.chunk, segments.chunks, width);
  }
#pragma unroll
  for (int r = 0; r < R; ++r) {
    bring_to_cache(row_at(p.x, r));
    bring_to_cache(row_at(p.y, r));
  }
  wait_for_previous_kernel();
  Pack<T> packs[R], y_packs[R];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    packs[r] = load_pack(row_at(p.x, r));
    y_packs[r] = load_pack(row_at(p.y, r));
  }
  float factor[kPack], gain[kPack], offset[kPack], x[kPack], y[kPack];
  load_factor<Access::either>(p, at.batch, at.modulation_row, 0, factor);
  load_affine_apart<Access::either>(p, at.batch, at.modulation_row, 0, gain, offset);
  const RowMoments<true> moments(Group(blockDim.x), width, joined);
#pragma unroll
  for (int r = 0; r < R; ++r) {
    packs[r].read(x);
    y_packs[r].read(y);
#pragma unroll
    for (int i = 0; i < kPack; ++i) x[i] += y[i] * factor[i];
    packs[r].write(x);
    if (mine && first_row + r <= last_row) store_pack(row_at(p.residual, r), packs[r]);
    packs[r].read(x);  // the moments are those of the rounded residual
    moments.post(x, mine, joints[r]);
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < R; ++r) {
    if (first_row + r > last_row) break;
    const float2 moment = moments.read(joints[r], p.eps);
    if (threadIdx.x == 0) p.stats[at.batch * p.shape.tokens + at.first + first_row + r] = moment;
    packs[r].read(x);
#pragma unroll
    for (int i = 0; i < kPack; ++i) x[i] = (x[i] - moment.x) * moment.y * gain[i] + offset[i];
    if (mine) store_pack(row_at(p.normed, r), x);
  }
}

}  // namespace adaptiveload
