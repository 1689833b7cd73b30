// How do the forward kernels of the norms join mean and variance, and what do they do with few rows?
#pragma once

#include "few_rows.cuh"

namespace adaptiveload {

// mean and 1 / standard deviation of a token, or 1 / root mean square alone.
template <bool MEAN>
__device__ __forceinline__ void store_stats(float* stats, int64_t token, float mean, float rstd) {
  if (MEAN) {
    reinterpret_cast<float2*>(stats)[token] = make_float2(mean, rstd);
  } else {
    stats[token] = rstd;
  }
}

// Joins (mean, squares about it) of `weight` numbers each over `lanes` neighbouring lanes, by Chan's formula about one
// of the means, so that nothing large is subtracted from something large.
template <bool MEAN>
__device__ __forceinline__ void join(float& mean, float& squares, float weight, float about, float one_by_total,
                                     int lanes) {
  const float apart = mean - about;
  float sum = weight * apart;
  squares += sum * apart;
  for (int offset = lanes / 2; offset >= 1; offset /= 2) {
    if (MEAN) sum += __shfl_xor_sync(~0u, sum, offset);
    squares += __shfl_xor_sync(~0u, squares, offset);
  }
  mean = about + sum * one_by_total;
  squares -= sum * sum * one_by_total;
}

// The warps of `threads` threads, rounded up to a power of two: lanes that join their moments.
inline int joined_warps(int threads) {
  int warps = 1;
  while (warps * 32 < threads) warps *= 2;
  return warps;
}

// How many columns of a row of `width` are those of warp `warp` of `threads` threads.
template <int NV>
__device__ __forceinline__ float columns_of(int warp, int threads, int width) {
  int columns = 0;
#pragma unroll
  for (int v = 0; v < NV; ++v) columns += min(max(width - (v * threads + warp * 32) * kPack, 0), 32 * kPack);
  return static_cast<float>(columns);
}

// Few rows end before rows fetched ahead of time would pay: a group asks for all of its R rows at once, one row up to
// kOneRow of them, then two, beyond kTwoRowsElements four in 16-bit types. More than one are asked for, in the cache,
// while the previous kernel ends, and a block has two groups of two rows where they fit. On an H200 at 256, 512, 1,024 and 2,048
// rows of 1,536 columns 2.6, 3.0, 3.6 and 5.7 us; with rows fetched ahead 4.3 at 256 and 7.6 at 2,048.
constexpr int64_t kFewForwardElements = 2048 * 1536, kTwoRowsElements = 1024 * 1536, kOneRow = 256;
constexpr int kFewForwardThreads = 768;  // of a block, and so rows of up to 6144 columns

// Mean and 1 / standard deviation of a row of which each thread of a group has a pack in registers.
template <bool MEAN>
struct RowMoments {
  int lanes, first_warp, other;
  float one_by_width, one_by_warp, other_columns;  // 0: there is no warp `other`

  // lanes: joined_warps(of a group). After the barrier a lane reads the part of warp `other`.
  __device__ __forceinline__ RowMoments(const Group& group, int width, int lanes)
      : lanes(lanes), first_warp(group.index * group.threads / 32), one_by_width(1.f / width) {
    const int warps = group.threads / 32, mine = threadIdx.x % lanes;
    one_by_warp = 1.f / fmaxf(columns_of<1>(group.thread / 32, group.threads, width), 1.f);
    other_columns = mine < warps ? columns_of<1>(mine, group.threads, width) : 0.f;
    other = first_warp + min(mine, warps - 1);
  }

  // Before a barrier of the group.
  __device__ __forceinline__ void post(const float (&x)[kPack], bool mine, float2* joints) const {
    float mean = 0.f, squares = 0.f;
    if (MEAN) mean = (((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]))) * (1.f / kPack);
#pragma unroll
    for (int i = 0; i < kPack; ++i) squares += (x[i] - mean) * (x[i] - mean);
    squares = mine ? squares : 0.f;
    join<MEAN>(mean, squares, mine ? kPack : 0.f, __shfl_sync(~0u, mean, 0), one_by_warp, 32);
    if (threadIdx.x % 32 == 0) joints[threadIdx.x / 32] = make_float2(mean, squares);
  }
  // After it.
  __device__ __forceinline__ float2 read(const float2* joints, float eps) const {
    const float2 joint = joints[other];
    float mean = joint.x, squares = other_columns > 0.f ? joint.y : 0.f;
    join<MEAN>(mean, squares, other_columns, joints[first_warp].x, one_by_width, lanes);
    return make_float2(mean, rsqrtf(squares * one_by_width + eps));
  }
};

template <typename T, bool MEAN, int R, int GROUPS>
__global__ void __launch_bounds__(kFewForwardThreads)
    forward_few(const LayerNormForward p, const Segments segments, const int joined) {
  __shared__ float2 joints[R][kFewForwardThreads / 32];
  const int width = static_cast<int>(p.shape.width);
  const Place at(segments, blockIdx.x, p.shape.rows);
  Group group(blockDim.x / GROUPS);
  if (GROUPS == 1) group.index = 0;  // known to the compiler, too
  const int first_row = (at.chunk * GROUPS + group.index) * R, last_row = segments.tokens - 1;
  const bool mine = static_cast<int>(group.thread) * kPack < width;
  const int column = mine ? group.thread * kPack : width - kPack;
  const auto row_at = [&](const Array& rows, int r) {
    return row_of<T>(rows, at.batch, at.first + min(first_row + r, last_row));
  };
  for (const Array& a : {p.scale, p.shift}) {
    bring_columns(a, at.batch, at.modulation_row, at.chunk, segments.chunks, width);
  }
  if (R > 1) {
    let_next_kernel_start();
#pragma unroll
    for (int r = 0; r < R; ++r) bring_to_cache(row_at(p.x, r) + column);
  }
  wait_for_previous_kernel();
  Pack<T> packs[R];
#pragma unroll
  for (int r = 0; r < R; ++r) packs[r] = load_pack(row_at(p.x, r) + column);
  float gain[kPack], offset[kPack], x[kPack];
  load_affine_apart<Access::either>(p, at.batch, at.modulation_row, group.first_column(), gain, offset);
  const RowMoments<MEAN> moments(group, width, joined);
#pragma unroll
  for (int r = 0; r < R; ++r) {
    packs[r].read(x);
    moments.post(x, mine, joints[r]);
  }
  group.wait();
  if (R == 1) let_next_kernel_start();
#pragma unroll
  for (int r = 0; r < R; ++r) {
    if (first_row + r > last_row) break;
    const float2 moment = moments.read(joints[r], p.eps);
    if (group.thread == 0) {
      store_stats<MEAN>(p.stats, at.batch * p.shape.tokens + at.first + first_row + r, moment.x, moment.y);
    }
    packs[r].read(x);
#pragma unroll
    for (int i = 0; i < kPack; ++i) x[i] = (x[i] - moment.x) * moment.y * gain[i] + offset[i];
    if (mine) store_pack(row_at(p.y, r) + column, x);
  }
}

}  // namespace adaptiveload
