// y = RMS(x) * weight of each head of a row by itself, and the pairs of columns of the first tokens turned by the angle
// of their token and place in the head; forward, and the gradients, which rms_norm_rope_backward.cu writes down.
//
// A warp's lanes are groups. A group takes HEADS heads of a row at once, a lane eight columns at one place of all of
// them, so that weight and the token's angles are read once; what a warp takes at once is a turn, of which a row has a
// few. All heads of a turn are read before the first is used, and no warp waits for another. forward_heads: a warp has
// one turn. backward_heads: blocks that stay take every so many-th turn, a lane keeps its columns of dweight in
// registers; the warps of a block add theirs in shared memory, the blocks theirs by column_sums.cu, both in a fixed
// order. 4 and 6 bytes an element in 16-bit types.
#include <limits>

#include "column_sums.cuh"
#include "launch.cuh"
#include "rope.cuh"

namespace adaptiveload {
namespace {

constexpr int kMostLanes = 32;  // of a group: heads of up to 256 columns

constexpr int kForwardWarps = 4;  // of a block
constexpr int kForwardHeads = 3;
// Up to so many elements a warp asks for its rows while the previous kernel ends; with more, 1% is lost by it.
constexpr int64_t kFewElements = int64_t{1} << 23;

constexpr int kBackwardWarps = 8;   // of a block
constexpr int kBackwardBlocks = 3;  // of a multiprocessor
template <typename T>
constexpr int kBackwardHeads = sizeof(T) == 4 ? 1 : 2;

template <int LANES>
__device__ __forceinline__ float group_sum(float value) {
#pragma unroll
  for (int offset = LANES / 2; offset >= 1; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
  return value;
}

// Which columns of which heads are a lane's.
template <int LANES>
struct Lane {
  static constexpr int kGroups = 32 / LANES;
  int group, column;
  bool mine;  // false: the head ends before these columns

  __device__ __forceinline__ explicit Lane(int64_t head_width) {
    group = threadIdx.x % 32 / LANES;
    column = threadIdx.x % LANES * kPack;
    mine = column < head_width;
  }
  __device__ __forceinline__ void load_weight(float (&values)[kPack], const Array& weight, int64_t head_width) const {
    adaptiveload::load_weight(values, weight, column - static_cast<int>(threadIdx.x) * kPack,
                              static_cast<int>(head_width));
  }
  // Tokens beyond the tables are not turned.
  template <typename Operands>
  __device__ __forceinline__ void load_angles(float (&c)[kPack / 2], float (&s)[kPack / 2], const Operands& p,
                                              int64_t batch, int64_t token) const {
    if (token < p.turned && mine) {
      Angles<float> angles;
      angles.load(p.cos, p.sin, batch, token, column);
      angles.read(1.f, c, s);
      return;
    }
#pragma unroll
    for (int i = 0; i < kPack / 2; ++i) {
      c[i] = 1.f;
      s[i] = 0.f;
    }
  }
};

// Which heads of which row are a group's in a turn: every kGroups-th one from `first` on.
template <int LANES, int HEADS>
struct Turn {
  static constexpr int kStep = Lane<LANES>::kGroups;
  int64_t row, batch, token;
  int first, heads;

  __device__ __forceinline__ Turn(unsigned turn, unsigned turns_of_row, const Shape& shape, int head_width,
                                  const Lane<LANES>& lane) {
    const unsigned row_index = turn / turns_of_row, tokens = static_cast<unsigned>(shape.tokens);
    row = row_index;
    batch = row_index / tokens;
    token = row_index % tokens;
    first = static_cast<int>(turn % turns_of_row) * HEADS * kStep + lane.group;
    heads = static_cast<int>(shape.width) / head_width;
  }
  __device__ __forceinline__ int head(int n) const { return first + n * kStep; }
  // Brings the cache lines of my heads' columns; one of the lanes that share a line asks for it.
  template <typename T>
  __device__ __forceinline__ void bring(const Array& a, int64_t head_stride, const Lane<LANES>& lane) const {
    constexpr int kLine = 128 / sizeof(T);
    if (!lane.mine || lane.column % kLine != 0) return;
    const T* const row_at = row_of<const T>(a, batch, token) + lane.column;
#pragma unroll
    for (int n = 0; n < HEADS; ++n) {
      if (head(n) < heads) bring_to_cache(row_at + head(n) * head_stride);
    }
  }
};

template <typename T, int LANES, bool TURNED>
__global__ void __launch_bounds__(kForwardWarps * 32)
    forward_heads(const RopeForward p, const unsigned turns_of_row, const bool early) {
  constexpr int HEADS = kForwardHeads;
  const Lane<LANES> lane(p.head_width);
  const int head_width = static_cast<int>(p.head_width);
  const Turn<LANES, HEADS> turn(blockIdx.x * kForwardWarps + threadIdx.x / 32, turns_of_row, p.shape, head_width, lane);
  let_next_kernel_start();
  if (early && turn.batch < p.shape.batch) turn.template bring<T>(p.x, head_width, lane);
  wait_for_previous_kernel();
  if (turn.batch >= p.shape.batch) return;
  const T* const x_row = row_of<const T>(p.x, turn.batch, turn.token) + lane.column;
  T* const y_row = row_of<T>(p.y, turn.batch, turn.token) + lane.column;
  Pack<T> packs[HEADS] = {};
#pragma unroll
  for (int n = 0; n < HEADS; ++n) {
    if (lane.mine && turn.head(n) < turn.heads) packs[n] = load_pack(x_row + turn.head(n) * head_width);
  }
  float weight[kPack], c[kPack / 2], s[kPack / 2];
  if constexpr (TURNED) lane.load_angles(c, s, p, turn.batch, turn.token);
  lane.load_weight(weight, p.weight, p.head_width);
#pragma unroll
  for (int n = 0; n < HEADS; ++n) {
    float x[kPack], squares = 0.f;
    packs[n].read(x);
#pragma unroll
    for (int i = 0; i < kPack; ++i) squares += x[i] * x[i];
    const float rstd = rsqrtf(group_sum<LANES>(squares) / head_width + p.eps);
    if (!lane.mine || turn.head(n) >= turn.heads) continue;
    if (lane.column == 0) p.rstd[turn.row * turn.heads + turn.head(n)] = rstd;
#pragma unroll
    for (int i = 0; i < kPack; ++i) x[i] *= rstd * weight[i];
#pragma unroll
    for (int i = 0; TURNED && i < kPack / 2; ++i) {
      const float even = x[2 * i], odd = x[2 * i + 1];
      x[2 * i] = even * c[i] - odd * s[i];
      x[2 * i + 1] = even * s[i] + odd * c[i];
    }
    store_pack_once(y_row + turn.head(n) * head_width, x);
  }
}

template <typename T, int LANES, bool TURNED>
__global__ void __launch_bounds__(kBackwardWarps * 32, kBackwardBlocks)
    backward_heads(const RopeBackward p, const unsigned turns_of_row) {
  constexpr int HEADS = kBackwardHeads<T>;
  __shared__ float sums[kBackwardWarps][kMostLanes * kPack];
  const Lane<LANES> lane(p.head_width);
  const int head_width = static_cast<int>(p.head_width), warp = threadIdx.x / 32;
  const unsigned turns = static_cast<unsigned>(p.shape.batch * p.shape.tokens) * turns_of_row;
  const unsigned first = blockIdx.x * kBackwardWarps + warp;
  if (first < turns) {
    const Turn<LANES, HEADS> turn(first, turns_of_row, p.shape, head_width, lane);
    turn.template bring<T>(p.x, head_width, lane);
    turn.template bring<T>(p.grad, p.grad_head_stride, lane);
  }
  float weight[kPack], weight_sum[kPack] = {};
  wait_for_previous_kernel();
  let_next_kernel_start();
  lane.load_weight(weight, p.weight, p.head_width);
  for (unsigned index = first; index < turns; index += gridDim.x * kBackwardWarps) {
    const Turn<LANES, HEADS> turn(index, turns_of_row, p.shape, head_width, lane);
    const T* const x_row = row_of<const T>(p.x, turn.batch, turn.token) + lane.column;
    const T* const grad_row = row_of<const T>(p.grad, turn.batch, turn.token) + lane.column;
    Pack<T> x_packs[HEADS] = {}, grad_packs[HEADS] = {};
    float rstd[HEADS] = {};
#pragma unroll
    for (int n = 0; n < HEADS; ++n) {
      if (!lane.mine || turn.head(n) >= turn.heads) continue;
      x_packs[n] = load_pack(x_row + turn.head(n) * head_width);
      grad_packs[n] = load_pack(grad_row + turn.head(n) * p.grad_head_stride);
      rstd[n] = p.rstd[turn.row * turn.heads + turn.head(n)];
    }
    float c[kPack / 2], s[kPack / 2];
    if constexpr (TURNED) lane.load_angles(c, s, p, turn.batch, turn.token);
#pragma unroll
    for (int n = 0; n < HEADS; ++n) {
      float x[kPack], g[kPack], mean = 0.f;
      x_packs[n].read(x);
      grad_packs[n].read(g);
#pragma unroll
      for (int i = 0; i < kPack; ++i) g[i] *= rstd[n];
#pragma unroll
      for (int i = 0; TURNED && i < kPack / 2; ++i) {
        const float even = g[2 * i], odd = g[2 * i + 1];
        g[2 * i] = even * c[i] + odd * s[i];
        g[2 * i + 1] = odd * c[i] - even * s[i];
      }
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        const float product = g[i] * x[i];
        weight_sum[i] += product;
        mean += product * weight[i];
      }
      mean = group_sum<LANES>(mean) / head_width;
      if (p.dx.data == nullptr || !lane.mine || turn.head(n) >= turn.heads) continue;
      const float factor = mean * rstd[n] * rstd[n];
#pragma unroll
      for (int i = 0; i < kPack; ++i) x[i] = g[i] * weight[i] - x[i] * factor;
      store_pack_once(row_of<T>(p.dx, turn.batch, turn.token) + lane.column + turn.head(n) * head_width, x);
    }
  }

  if (p.partials == nullptr) return;
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
#pragma unroll
    for (int offset = LANES; offset < 32; offset *= 2) weight_sum[i] += __shfl_xor_sync(~0u, weight_sum[i], offset);
    if (lane.group == 0) sums[warp][lane.column + i] = weight_sum[i];
  }
  __syncthreads();
  for (int column = threadIdx.x; column < head_width; column += blockDim.x) {
    float total = 0.f;
#pragma unroll
    for (int w = 0; w < kBackwardWarps; ++w) total += sums[w][column];
    p.partials[static_cast<int64_t>(blockIdx.x) * head_width + column] = total;
  }
}

// 16-byte pieces that lie within a head, tables in float32, and turns that 32 bits count.
template <typename Operands>
bool fits(const Operands& p) {
  const bool tables = p.turned == 0 || (p.cos.dtype == Dtype::float32 && p.sin.dtype == Dtype::float32 &&
                                        aligned(p.cos) && aligned(p.sin));
  const int64_t heads = p.shape.batch * p.shape.tokens * (p.shape.width / p.head_width);
  return p.head_width % kPack == 0 && p.head_width <= kMostLanes * kPack && aligned(p.x) && tables &&
         heads <= std::numeric_limits<int>::max();
}

int lanes_of(int64_t head_width) { return head_width <= 8 * kPack ? 8 : head_width <= 16 * kPack ? 16 : 32; }

int64_t turns_of_row(const Shape& shape, int64_t head_width, int heads) {
  const int64_t at_once = heads * 32 / lanes_of(head_width);
  return (shape.width / head_width + at_once - 1) / at_once;
}

// Calls `launch` with the type of x, the lanes of a head and whether there is any token to turn.
template <typename Operands, typename Launch>
cudaError_t launch_for_lanes(const Operands& p, Launch launch) {
  const auto of_lanes = [&](auto value, auto lanes) {
    return p.turned > 0 ? launch(value, lanes, std::true_type()) : launch(value, lanes, std::false_type());
  };
  const auto of_type = [&](auto type) {
    using T = typename decltype(type)::Stream;
    switch (lanes_of(p.head_width)) {
      case 8: return of_lanes(T(), std::integral_constant<int, 8>());
      case 16: return of_lanes(T(), std::integral_constant<int, 16>());
      default: return of_lanes(T(), std::integral_constant<int, 32>());
    }
  };
  switch (p.x.dtype) {
    case Dtype::float32: return of_type(Types<float, float>());
    case Dtype::float16: return of_type(Types<__half, float>());
    default: return of_type(Types<__nv_bfloat16, float>());
  }
}

int64_t backward_turns_of_row(const RopeBackward& p) {
  const int heads = p.x.dtype == Dtype::float32 ? kBackwardHeads<float> : kBackwardHeads<__half>;
  return turns_of_row(p.shape, p.head_width, heads);
}

}  // namespace

unsigned rms_norm_heads_blocks(const RopeBackward& p) {
  const int64_t turns = p.shape.batch * p.shape.tokens * backward_turns_of_row(p);
  const int64_t most = kBackwardBlocks * device_attribute(cudaDevAttrMultiProcessorCount);
  return static_cast<unsigned>(std::min((turns + kBackwardWarps - 1) / kBackwardWarps, most));
}

bool rms_norm_heads_forward(const RopeForward& p, cudaStream_t stream, cudaError_t* error) {
  if (!fits(p)) return false;
  const int64_t of_row = turns_of_row(p.shape, p.head_width, kForwardHeads), rows = p.shape.batch * p.shape.tokens;
  *error = launch_for_lanes(p, [&](auto value, auto lanes, auto turned) {
    const auto kernel = forward_heads<decltype(value), decltype(lanes)::value, decltype(turned)::value>;
    const auto blocks = static_cast<unsigned>((rows * of_row + kForwardWarps - 1) / kForwardWarps);
    return launch_early(kernel, blocks, dim3(kForwardWarps * 32), 0, stream, p, static_cast<unsigned>(of_row),
                        rows * p.shape.width <= kFewElements);
  });
  return true;
}

bool rms_norm_heads_backward(const RopeBackward& p, cudaStream_t stream, cudaError_t* error) {
  if (!fits(p) || p.grad.dtype != p.x.dtype || !aligned(p.grad) || p.grad_head_stride % kPack != 0 || !aligned(p.dx)) {
    return false;
  }
  *error = launch_for_lanes(p, [&](auto value, auto lanes, auto turned) {
    const auto kernel = backward_heads<decltype(value), decltype(lanes)::value, decltype(turned)::value>;
    return launch_early(kernel, rms_norm_heads_blocks(p), dim3(kBackwardWarps * 32), 0, stream, p,
                        static_cast<unsigned>(backward_turns_of_row(p)));
  });
  return true;
}

}  // namespace adaptiveload
