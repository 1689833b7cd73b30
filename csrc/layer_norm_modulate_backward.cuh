// The gradients of layer_norm_modulate and rms_norm_modulate where rows are 16-byte aligned and of one dtype.
//
// A block's threads form groups of as many as a row has packs of eight columns. A group walks down rows of one segment,
// a thread keeping P and Q of its columns in registers while it writes dx, so x and grad are read once: 6 bytes an
// element in 16-bit types, where a separate reduction over rows would read them again (10). Rows come ahead of time
// through the group's ring in shared memory; one barrier a row. At the end the groups add their sums, and each block
// writes its P and Q once; nothing is added atomically, so every run gives the same bits.
// With a modulation row per token (TOKEN) that row comes through the ring too, and its gradient leaves beside dx (10
// bytes an element).
#pragma once

#include "launch.cuh"
#include "modulation.cuh"
#include "rows.cuh"

namespace adaptiveload {

// The best on an H200 of some 100 combinations over the six shapes of recipes/kernel_speed.py. With more rows a turn or
// more stages multiprocessors run apart: those nearer to memory end early, the others late.
constexpr int kMostThreads = 768;  // of a block, and so rows of up to 6144 columns
constexpr int kMostGroups = 8;
constexpr int kStages = 3;         // rows of a group under way

// mean and rstd of a token.
template <bool MEAN>
__device__ __forceinline__ float2 load_stats(const float* stats, int64_t token) {
  if (MEAN) return reinterpret_cast<const float2*>(stats)[token];
  return make_float2(0.f, stats[token]);
}

// Adds the groups' sums of my columns in the order of the groups; afterwards those of group 0 are the block's.
__device__ __forceinline__ void add_groups(float (&sums)[2][kPack], float* buffer, const Group& group, int groups) {
  __syncthreads();
  if (group.index > 0) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        buffer[(((group.index - 1) * 2 + k) * kPack + i) * group.threads + group.thread] = sums[k][i];
      }
    }
  }
  __syncthreads();
  if (group.index > 0) return;
  for (int other = 0; other < groups - 1; ++other) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        sums[k][i] += buffer[((other * 2 + k) * kPack + i) * group.threads + group.thread];
      }
    }
  }
}

struct Pipeline {
  int groups, stages;
};

template <typename T, bool MEAN, bool SUMS, bool TOKEN>
__global__ void __launch_bounds__(kMostThreads)
    backward_rows(const LayerNormBackward p, const Segments segments, const Pipeline pipeline) {
  constexpr int kRows = TOKEN ? 3 : 2;  // of a stage: x, grad, scale
  constexpr int kMeans = MEAN ? 2 : 1;
  using RowRing = Ring<T, kRows, 1>;
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ uint64_t arrivals[kMostGroups][RowRing::kMostStages];
  __shared__ float buffer[2][kMeans * kMostThreads / 32];
  const int width = static_cast<int>(p.shape.width), groups = pipeline.groups;
  const float one_by_width = 1.f / width;
  const Group group(groups);
  const int64_t ring_bytes = pipeline.stages * RowRing::stage_bytes(width);
  const RowRing ring = {memory + group.index * ring_bytes, arrivals[group.index], pipeline.stages, width,
                        group.thread, group.threads};
  const Place at(segments, blockIdx.x, TOKEN ? 1 : p.shape.rows);
  const T* const x_rows = row_of<const T>(p.x, at.batch, at.first);
  const T* const grad_rows = row_of<const T>(p.grad, at.batch, at.first);
  const T* const scale_rows = TOKEN ? row_of<const T>(p.scale, at.batch, 0) : nullptr;
  T* const dx_rows = p.dx.data != nullptr ? row_of<T>(p.dx, at.batch, at.first) : nullptr;
  T* const dscale_rows = TOKEN && p.dscale.data != nullptr ? row_of<T>(p.dscale, at.batch, 0) : nullptr;
  const int64_t first_token = at.batch * p.shape.tokens + at.first;
  const int step = segments.chunks * groups, column = ring.column(0);
  const bool mine = static_cast<int>(group.thread) * kPack < width;
  const auto fetch_row = [&](int row, int stage) {
    if (!ring.copies()) return;
    const int count = row < segments.tokens;
    ring.open(stage, kRows * count);
    ring.fetch(stage, 0, x_rows + row * p.x.row_stride, width, count);
    ring.fetch(stage, 1, grad_rows + row * p.grad.row_stride, width, count);
    if (TOKEN) ring.fetch(stage, 2, scale_rows + row * p.scale.row_stride, width, count);
    ring.close();
  };

  ring.start();
  wait_for_previous_kernel();
  const int first_row = at.chunk * groups + group.index;
  for (int stage = 0; stage < ring.stages; ++stage) fetch_row(first_row + stage * step, stage);
  float2 next_stats = load_stats<MEAN>(p.stats, first_token + min(first_row, segments.tokens - 1));
  float gain[kPack], sums[2][kPack] = {};
  if (TOKEN) {
    load_columns<Access::neighbours>(gain, p.scale_table, 0, 0, group.first_column(), width, 0.f);
#pragma unroll
    for (int i = 0; i < kPack; ++i) gain[i] += p.scale_offset;
  } else {
    load_gain<Access::neighbours>(p, at.batch, at.modulation_row, group.first_column(), true, gain);
  }

  int stage = 0, round = 0, parity = 0;
  for (int row = first_row; row < segments.tokens; row += step, parity ^= 1) {
    const float2 stats = next_stats;
    next_stats = load_stats<MEAN>(p.stats, first_token + min(row + step, segments.tokens - 1));
    ring.wait(stage, round);
    Pack<T> x_pack = ring.read(stage, 0, 0), grad_pack = ring.read(stage, 1, 0), scale_pack = {};
    if (TOKEN) scale_pack = ring.read(stage, 2, 0);
    float x[kPack], grad[kPack], m[kPack], means[kMeans];  // of g * xh and of g
    const auto unpack = [&] {
      x_pack.read(x);
      grad_pack.read(grad);
      if (TOKEN) scale_pack.read(m);
#pragma unroll
      for (int i = 0; i < kPack; ++i) m[i] = TOKEN ? m[i] + gain[i] : gain[i];
    };
    unpack();
    float sum = 0.f, product_sum = 0.f;
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      const float xh = (x[i] - stats.x) * stats.y, g = grad[i] * m[i];
      if (SUMS) {
        sums[0][i] += grad[i] * xh;
        sums[1][i] += grad[i];
      }
      sum += g;
      product_sum += g * xh;
    }
    means[0] = mine ? product_sum : 0.f;
    if (MEAN) means[kMeans - 1] = mine ? sum : 0.f;
    block_sum<kMeans, kMostThreads>(means, &buffer[parity][kMeans * group.index * group.threads / 32], group);
    fetch_row(row + ring.stages * step, stage);
    keep_packed(x_pack);
    keep_packed(grad_pack);
    keep_packed(scale_pack);
    unpack();
    const float gx_mean = means[0] * one_by_width, g_mean = MEAN ? means[kMeans - 1] * one_by_width : 0.f;
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      const float xh = (x[i] - stats.x) * stats.y;
      x[i] = stats.y * (grad[i] * m[i] - g_mean - xh * gx_mean);
      grad[i] *= xh;
    }
    if (mine && dx_rows != nullptr) store_pack_once(dx_rows + row * p.dx.row_stride + column, x);
    if (TOKEN && mine && dscale_rows != nullptr) store_pack_once(dscale_rows + row * p.dscale.row_stride + column, grad);
    if (++stage == ring.stages) {
      stage = 0;
      ++round;
    }
  }
  let_next_kernel_start();

  if (!SUMS) return;
  if (groups > 1) add_groups(sums, reinterpret_cast<float*>(memory), group, groups);
  if (group.index > 0 || !mine) return;
  float* const partial = p.partials + static_cast<int64_t>(blockIdx.x) * 2 * width + column;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
#pragma unroll
    for (int i = 0; i < kPack; ++i) partial[k * width + i] = sums[k][i];
  }
}

}  // namespace adaptiveload
