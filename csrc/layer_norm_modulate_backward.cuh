// The gradients of layer_norm_modulate and rms_norm_modulate where rows are 16-byte aligned and of one dtype.
//
// A block's threads form groups of as many as a row has packs of eight columns. A group walks down rows of one segment,
// a thread keeping P and Q of its columns in registers while it writes dx, so x and grad are read once: 6 bytes an
// element in 16-bit types, where a separate reduction over rows would read them again (10). Rows come ahead of time
// into shared memory; one barrier a row. At the end the groups add their sums, and each block writes its P and Q once;
// nothing is added atomically, and rows are dealt in advance, so every run gives the same bits.
// With a modulation row per token (TOKEN) that row comes the same way, and its gradient leaves beside dx (10 bytes an
// element).
#pragma once

#include "feed.cuh"
#include "launch.cuh"
#include "modulation.cuh"

namespace adaptiveload {

// Of a block, without those that feed it, and so rows of up to 6144 columns: with the fewer a thread has 80 registers
// instead of 72. The best on an H200 of some 150 combinations over the seven shapes of recipes/kernel_speed.py.
constexpr int kMostThreads = 768, kFewerThreads = 736;
constexpr int kStages = 3;  // rows of a group under way

// mean and rstd of a token.
template <bool MEAN>
__device__ __forceinline__ float2 load_stats(const float* stats, int64_t token) {
  if (MEAN) return reinterpret_cast<const float2*>(stats)[token];
  return make_float2(0.f, stats[token]);
}

template <typename T, bool MEAN, bool SUMS, bool TOKEN, int THREADS>
__global__ void __launch_bounds__(THREADS + kFeeders)
    backward_rows(const LayerNormBackward p, const Segments segments, const Pipeline pipeline) {
  constexpr int kMeans = MEAN ? 2 : 1, kWarps = THREADS / 32;
  using RowFeed = Feed<T, TOKEN ? 3 : 2, 1>;  // x, grad, scale
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ typename RowFeed::Signals signals;
  __shared__ float buffer[2][kMeans * kWarps];
  const int width = static_cast<int>(p.shape.width), groups = pipeline.groups;
  const Place at(segments, blockIdx.x, TOKEN ? 1 : p.shape.rows);
  RowFeed feed(memory, signals, pipeline, width, Runs(segments, groups, at.chunk, nullptr));
  const Group& group = feed.group;
  const T* const x_rows = row_of<const T>(p.x, at.batch, at.first);
  const T* const grad_rows = row_of<const T>(p.grad, at.batch, at.first);
  const T* const scale_rows = TOKEN ? row_of<const T>(p.scale, at.batch, 0) : nullptr;
  const auto fetch = [&](int row, int stage, int index) {
    feed.open(stage, index, TOKEN ? 3 : 2);
    feed.copy(stage, index, 0, x_rows + row * p.x.row_stride);
    feed.copy(stage, index, 1, grad_rows + row * p.grad.row_stride);
    if (TOKEN) feed.copy(stage, index, 2, scale_rows + row * p.scale.row_stride);
  };

  feed.start();
  wait_for_previous_kernel();
  if (feed.only_feeds()) return feed.feed_all(fetch);
  feed.begin(fetch);
  const int column = feed.column(0), step = segments.chunks * groups;
  const bool mine = static_cast<int>(group.thread) * kPack < width;
  const bool dx_wanted = mine && p.dx.data != nullptr;
  T* dx = row_of<T>(p.dx, at.batch, at.first + feed.row) + column;
  T* const dscale_rows = TOKEN && p.dscale.data != nullptr ? row_of<T>(p.dscale, at.batch, 0) + column : nullptr;
  const float* const stats_rows = p.stats + (at.batch * p.shape.tokens + at.first) * (MEAN ? 2 : 1);
  const auto stats_of = [&](int row) { return load_stats<MEAN>(stats_rows, min(row, segments.tokens - 1)); };
  float2 next_stats = stats_of(feed.row);
  float gain[kPack], sums[2][kPack] = {};
  if (TOKEN) {
    load_columns<Access::either>(gain, p.scale_table, 0, 0, group.first_column(), width, 0.f);
#pragma unroll
    for (int i = 0; i < kPack; ++i) gain[i] += p.scale_offset;
  } else {
    load_gain<Access::either>(p, at.batch, at.modulation_row, group.first_column(), true, gain);
  }

  const float one_by_width = 1.f / width;
  const WarpSums<kMeans> joint(group);
  int parity = 0;
  for (; feed.row < segments.tokens; parity ^= 1) {
    const float2 stats = next_stats;
    next_stats = stats_of(feed.row + step);
    const int row = feed.row;
    feed.wait();
    Pack<T> x_pack = feed.read(0, 0), grad_pack = feed.read(1, 0), scale_pack = {};
    if (TOKEN) scale_pack = feed.read(2, 0);
    float x[kPack], grad[kPack], m[kPack], means[kMeans];  // of g * xh and of g
    const auto unpack = [&] {
      x_pack.read(x);
      grad_pack.read(grad);
      if (TOKEN) scale_pack.read(m);
#pragma unroll
      for (int i = 0; i < kPack; ++i) m[i] = TOKEN ? m[i] + gain[i] : gain[i];
    };
    unpack();
    float sum[2] = {}, product_sum[2] = {};  // of every second column: shorter chains
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      const float xh = (x[i] - stats.x) * stats.y, g = grad[i] * m[i];
      if (SUMS) {
        sums[0][i] += grad[i] * xh;
        sums[1][i] += grad[i];
      }
      sum[i % 2] += g;
      product_sum[i % 2] += g * xh;
    }
    means[0] = mine ? product_sum[0] + product_sum[1] : 0.f;
    if (MEAN) means[kMeans - 1] = mine ? sum[0] + sum[1] : 0.f;
    joint.post(means, buffer[parity]);
    group.wait();
    feed.leave(fetch);
    joint.add(means, buffer[parity]);
    if (TOKEN) {
      keep_packed(x_pack);
      keep_packed(grad_pack);
      keep_packed(scale_pack);
      unpack();
    }
    const float gx_mean = means[0] * one_by_width * stats.y;
    const float g_mean = MEAN ? means[kMeans - 1] * one_by_width * stats.y : 0.f;
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      const float xh = (x[i] - stats.x) * stats.y;
      x[i] = stats.y * (grad[i] * m[i]) - g_mean - xh * gx_mean;
      grad[i] *= xh;
    }
    if (dx_wanted) store_pack_once(dx, x);
    dx += step * p.dx.row_stride;
    if (TOKEN && mine && dscale_rows != nullptr) store_pack_once(dscale_rows + row * p.dscale.row_stride, grad);
  }
  let_next_kernel_start();

  if (!SUMS) return;
  if (groups > 1) add_groups(sums, reinterpret_cast<float*>(memory), group, groups);
  if (group.index > 0 || !mine) return;
  float* const partial = p.partials + static_cast<int64_t>(blockIdx.x) * 2 * width + column;
#pragma unroll
  for (int k = 0; k < 2; ++k) store_pack(partial + k * width, sums[k]);
}

}  // namespace adaptiveload
