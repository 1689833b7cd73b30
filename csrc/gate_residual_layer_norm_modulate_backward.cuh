// The gradients of gate_residual_layer_norm_modulate where rows are 16-byte aligned and of one dtype; see its backward.cu.
//
// A block walks down rows of one segment, a thread owns NV packs of eight columns, keeping their sums in registers while
// it writes dx and dy: h, grad, d and y are read once, 12 bytes an element in 16-bit types (8 where x and y get the same
// gradient and the gate gets none). The rows come ahead of time through a ring in shared memory; one barrier for R rows.
// Each block writes its sums once; nothing is added atomically.
#pragma once

#include "launch.cuh"
#include "modulation.cuh"
#include "rows.cuh"

namespace adaptiveload {

template <typename T, int R, int NV, bool NORM_SUMS, bool GATE_SUM, int THREADS>
__global__ void __launch_bounds__(THREADS, NV == 1 ? 1 : 0)
    backward_rows(const GatedNormBackward p, const Segments segments, const int stages) {
  constexpr int kTensors = GATE_SUM ? 4 : 3, kSums = 2 * NORM_SUMS + GATE_SUM;
  extern __shared__ __align__(128) unsigned char ring_rows[];
  __shared__ uint64_t arrivals[Ring<T, kTensors * R, NV>::kMostStages];
  __shared__ float buffer[2][2 * R * THREADS / 32];
  const int width = static_cast<int>(p.shape.width);
  const float one_by_width = 1.f / width;
  // R rows of the residual, then of grad, of grad_residual, and of y.
  const Ring<T, kTensors * R, NV> ring = {ring_rows, arrivals, stages, width};
  const Place at(segments, blockIdx.x, p.shape.rows);
  const bool passed = p.grad_residual.data != nullptr;
  const T* const residual_rows = row_of<const T>(p.residual, at.batch, at.first);
  const T* const grad_rows = row_of<const T>(p.grad, at.batch, at.first);
  const T* const passed_rows = passed ? row_of<const T>(p.grad_residual, at.batch, at.first) : nullptr;
  const T* const y_rows = GATE_SUM ? row_of<const T>(p.y, at.batch, at.first) : nullptr;
  T* const dx_rows = p.dx.data != nullptr ? row_of<T>(p.dx, at.batch, at.first) : nullptr;
  T* const dy_rows = p.dy.data != nullptr ? row_of<T>(p.dy, at.batch, at.first) : nullptr;
  const float2* const stats_rows = p.stats + at.batch * p.shape.tokens + at.first;
  const int step = segments.chunks * R;
  bool mine[NV];
#pragma unroll
  for (int v = 0; v < NV; ++v) mine[v] = static_cast<int>(v * blockDim.x + threadIdx.x) * kPack < width;
  const auto fetch_turn = [&](int row, int stage) {
    const int count = min(R, segments.tokens - row);
    ring.open(stage, (2 + passed + GATE_SUM) * count);
    ring.fetch(stage, 0, residual_rows + row * p.residual.row_stride, p.residual.row_stride, count);
    ring.fetch(stage, R, grad_rows + row * p.grad.row_stride, p.grad.row_stride, count);
    if (passed) ring.fetch(stage, 2 * R, passed_rows + row * p.grad_residual.row_stride, p.grad_residual.row_stride, count);
    if (GATE_SUM) ring.fetch(stage, 3 * R, y_rows + row * p.y.row_stride, p.y.row_stride, count);
    ring.close();
  };
  const auto load_stats = [&](int row, float2(&stats)[R]) {
#pragma unroll
    for (int r = 0; r < R; ++r) stats[r] = stats_rows[min(row + r, segments.tokens - 1)];
  };

  bring_columns(p.gate, at.batch, at.modulation_row, at.chunk, segments.chunks, width);
  bring_columns(p.scale, at.batch, at.modulation_row, at.chunk, segments.chunks, width);
  ring.start();
  wait_for_previous_kernel();
  const int first_row = at.chunk * R;
  if (ring.copies()) {
    for (int stage = 0; stage < stages; ++stage) fetch_turn(first_row + stage * step, stage);
  }
  float2 next_stats[R];  // mean, rstd
  load_stats(first_row, next_stats);
  float gain[NV][kPack], factor[NV][kPack], scale_sum[NV][kPack] = {}, shift_sum[NV][kPack] = {},
      gate_sum[NV][kPack] = {};
#pragma unroll
  for (int v = 0; v < NV; ++v) {
    const int first = v * blockDim.x * kPack;
    load_gain<Access::either>(p, at.batch, at.modulation_row, first, true, gain[v]);
    load_factor<Access::either>(p, at.batch, at.modulation_row, first, factor[v]);
  }

  int stage = 0, round = 0, parity = 0;
  for (int row = first_row; row < segments.tokens; row += step, parity ^= 1) {
    float2 stats[R];
#pragma unroll
    for (int r = 0; r < R; ++r) stats[r] = next_stats[r];
    load_stats(row + step, next_stats);
    ring.wait(stage, round);
    Pack<T> h_packs[R][NV], grad_packs[R][NV], passed_packs[R][NV], y_packs[R][NV];
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int v = 0; v < NV; ++v) {
        h_packs[r][v] = ring.read(stage, r, v);
        grad_packs[r][v] = ring.read(stage, R + r, v);
        passed_packs[r][v] = passed ? ring.read(stage, 2 * R + r, v) : Pack<T>{};
        if (GATE_SUM) y_packs[r][v] = ring.read(stage, 3 * R + r, v);
        // Rows beyond the segment hold anything, also NaN, and must not enter the sums over rows.
        if (row + r >= segments.tokens) h_packs[r][v] = grad_packs[r][v] = Pack<T>{};
        keep_packed(passed_packs[r][v]);
        if (GATE_SUM) keep_packed(y_packs[r][v]);
      }
    }
    float h[kPack], grad[kPack], means[2 * R] = {};  // of g and of g * xh
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int v = 0; v < NV; ++v) {
        h_packs[r][v].read(h);
        grad_packs[r][v].read(grad);
        float sum = 0.f, product_sum = 0.f;
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
          const float xh = (h[i] - stats[r].x) * stats[r].y, g = grad[i] * gain[v][i];
          if (NORM_SUMS) {
            scale_sum[v][i] += grad[i] * xh;
            shift_sum[v][i] += grad[i];
          }
          sum += g;
          product_sum += g * xh;
        }
        means[2 * r] += mine[v] ? sum : 0.f;
        means[2 * r + 1] += mine[v] ? product_sum : 0.f;
      }
    }
    block_sum<2 * R, THREADS>(means, buffer[parity]);
    if (ring.copies()) fetch_turn(row + stages * step, stage);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (row + r >= segments.tokens) break;
      const float g_mean = means[2 * r] * one_by_width, gx_mean = means[2 * r + 1] * one_by_width;
#pragma unroll
      for (int v = 0; v < NV; ++v) {
        keep_packed(h_packs[r][v]);
        keep_packed(grad_packs[r][v]);
        h_packs[r][v].read(h);
        grad_packs[r][v].read(grad);
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
          const float xh = (h[i] - stats[r].x) * stats[r].y;
          h[i] = stats[r].y * (grad[i] * gain[v][i] - g_mean - xh * gx_mean);
        }
        passed_packs[r][v].read(grad);
#pragma unroll
        for (int i = 0; i < kPack; ++i) h[i] += grad[i];
        if (mine[v] && dx_rows != nullptr) store_pack_once(dx_rows + (row + r) * p.dx.row_stride + ring.column(v), h);
        if (GATE_SUM) {
          y_packs[r][v].read(grad);
#pragma unroll
          for (int i = 0; i < kPack; ++i) gate_sum[v][i] += h[i] * grad[i];
        }
        if (dy_rows == nullptr) continue;
#pragma unroll
        for (int i = 0; i < kPack; ++i) h[i] *= factor[v][i];
        if (mine[v]) store_pack_once(dy_rows + (row + r) * p.dy.row_stride + ring.column(v), h);
      }
    }
    if (++stage == stages) {
      stage = 0;
      ++round;
    }
  }

  let_next_kernel_start();
  if (kSums == 0) return;
  float* const partial = p.partials + static_cast<int64_t>(blockIdx.x) * kSums * width;
#pragma unroll
  for (int v = 0; v < NV; ++v) {
    if (!mine[v]) continue;
    if (NORM_SUMS) {
      store_pack(partial + ring.column(v), scale_sum[v]);
      store_pack(partial + width + ring.column(v), shift_sum[v]);
    }
    if (GATE_SUM) store_pack(partial + (kSums - 1) * width + ring.column(v), gate_sum[v]);
  }
}

}  // namespace adaptiveload
