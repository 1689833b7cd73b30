// The gradients of layer_norm_modulate and rms_norm_modulate of few rows: see few_rows.cuh.
#pragma once

#include "few_rows.cuh"
#include "layer_norm_modulate_backward.cuh"

namespace adaptiveload {

constexpr int64_t kFewNormElements = 1024 * 1536;  // in clusters

template <typename T, bool MEAN>
struct FewNorm {
  using Operands = LayerNormBackward;
  static constexpr bool kMean = MEAN;
  static constexpr int kSums = 2, kTurn = 2, kBlocks = sizeof(T) == 4 ? 2 : 3;

  struct Row {
    Pack<T> x_pack, grad_pack;
    float2 stats;  // mean, rstd

    static __device__ __forceinline__ T* dx(const Operands& p, const Place& at, int row) {
      return row_of<T>(p.dx, at.batch, at.first + row);
    }
    static __device__ __forceinline__ void bring(const Operands& p, const Place& at, int row, int column) {
      for (const Array& a : {p.x, p.grad}) bring_to_cache(row_of<const T>(a, at.batch, at.first + row) + column);
    }
    __device__ __forceinline__ void load(const Operands& p, const Place& at, int row, int column) {
      x_pack = load_pack(row_of<const T>(p.x, at.batch, at.first + row) + column);
      grad_pack = load_pack(row_of<const T>(p.grad, at.batch, at.first + row) + column);
      stats = load_stats<MEAN>(p.stats, at.batch * p.shape.tokens + at.first + row);
    }
    __device__ __forceinline__ float rstd() const { return stats.y; }
    __device__ __forceinline__ void read(float (&xh)[kPack], float (&g)[kPack]) const {
      x_pack.read(xh);
      grad_pack.read(g);
#pragma unroll
      for (int i = 0; i < kPack; ++i) xh[i] = (xh[i] - stats.x) * stats.y;
    }
  };
  static __device__ __forceinline__ void bring_gain(const Operands& p, const FewRows& grid) {
    if (grid.rows.count > 1) return;
    bring_columns(p.scale, 0, 0, blockIdx.x, gridDim.x, static_cast<int>(p.shape.width));
  }
  static __device__ __forceinline__ void load_gain(const Operands& p, const Place& at, float (&gain)[kPack]) {
    adaptiveload::load_gain<Access::either>(p, at.batch, at.modulation_row, 0, true, gain);
  }
  static __device__ __forceinline__ void write(const ColumnSums& sums_of, const FewRows& grid, const Place& at,
                                               int column, float (&totals)[kSums + 2]) {
    write_column<2>(sums_of, false, at.batch, at.modulation_row, column, totals);
    if (grid.rows.count > 1) return;
    const float scale = element(sums_of.scale, 0, 0, column, 0.f) + element(sums_of.scale_table, 0, 0, column, 0.f);
    const float m = sums_of.scale_offset + scale;
    totals[2] = m * totals[0];
    totals[3] = m * totals[1];
    write_column<2>(sums_of, true, 0, 0, column, totals);
  }
};

}  // namespace adaptiveload
