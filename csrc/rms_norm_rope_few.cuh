// The gradients of rms_norm_rope of few rows: see few_rows.cuh.
#pragma once

#include "few_rows.cuh"
#include "rope.cuh"

namespace adaptiveload {

constexpr int64_t kFewRopeElements = 2048 * 1536;  // in clusters

// The gradient of a pack turned back by its angles.
__device__ __forceinline__ void turn_back(float (&grad)[kPack], const float (&c)[kPack / 2],
                                          const float (&s)[kPack / 2]) {
#pragma unroll
  for (int i = 0; i < kPack / 2; ++i) {
    const float even = grad[2 * i], odd = grad[2 * i + 1];
    grad[2 * i] = even * c[i] + odd * s[i];
    grad[2 * i + 1] = odd * c[i] - even * s[i];
  }
}

// All batch items are one segment. TURN: kTurn, 1 beyond kTwoTurnRows: on an H200 3.7, 5.4, 7.8 and 12.5 us at 256, 512,
// 1,024 and 2,048 rows of 1,536 columns; with 2 throughout 3.7, 5.7, 8.5 and 14.0, with 1 4.3 at 256.
constexpr int64_t kTwoTurnRows = 256;

template <typename T, typename A, int TURN>
struct FewRope {
  using Operands = RopeBackward;
  static constexpr bool kMean = false;
  static constexpr int kSums = 1, kTurn = TURN, kBlocks = 2;

  struct Row {
    Pack<T> x_pack, grad_pack;
    Angles<A> angles;
    float one_by_rms;

    template <typename E>
    static __device__ __forceinline__ E* of(const Array& rows, const Operands& p, unsigned row) {
      const unsigned tokens = p.shape.tokens;
      return row_of<E>(rows, row / tokens, row % tokens);
    }
    static __device__ __forceinline__ T* dx(const Operands& p, const Place&, int row) { return of<T>(p.dx, p, row); }
    static __device__ __forceinline__ void bring(const Operands&, const Place&, int, int) {}  // loses 2%
    __device__ __forceinline__ void load(const Operands& p, const Place&, int row, int column) {
      const unsigned tokens = p.shape.tokens;
      x_pack = load_pack(of<const T>(p.x, p, row) + column);
      grad_pack = load_pack(of<const T>(p.grad, p, row) + column);
      angles.load(p.cos, p.sin, row / tokens, row % tokens, column % static_cast<int>(p.head_width));
      one_by_rms = p.rstd[row];
    }
    __device__ __forceinline__ float rstd() const { return one_by_rms; }
    __device__ __forceinline__ void read(float (&xh)[kPack], float (&g)[kPack]) const {
      float c[kPack / 2], s[kPack / 2];
      x_pack.read(xh);
      grad_pack.read(g);
      angles.read(1.f, c, s);
      turn_back(g, c, s);
#pragma unroll
      for (int i = 0; i < kPack; ++i) xh[i] *= one_by_rms;
    }
  };
  static __device__ __forceinline__ void bring_gain(const Operands&, const FewRows&) {}  // likewise
  static __device__ __forceinline__ void load_gain(const Operands& p, const Place&, float (&gain)[kPack]) {
    load_weight(gain, p.weight, 0, static_cast<int>(p.shape.width));
  }
  static __device__ __forceinline__ void write(const ColumnSums& sums_of, const FewRows&, const Place&, int column,
                                               float (&totals)[kSums + 2]) {
    set_column(sums_of.dweight, column, totals[0]);
  }
};

}  // namespace adaptiveload
