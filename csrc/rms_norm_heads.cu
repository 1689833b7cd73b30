// y = RMS(x) * weight of each head of a row by itself, and the pairs of columns of the first tokens turned by the angle
// of their token and place in the head; forward, and the gradients, which rms_norm_rope_backward.cu writes down.
//
// A warp goes along a row. Its lanes are groups, a group takes every so many-th head, a lane eight columns at one place
// of all its heads, so that weight and the token's angles stay in registers; several heads of a lane are read before
// the first is used. No warp waits for another. forward_heads: a warp a row. backward_heads: blocks that stay and go
// down the rows, a lane keeps its columns of dweight in registers; the warps of a block add theirs in shared memory,
// the blocks theirs by column_sums.cu, both in a fixed order. 4 and 6 bytes an element in 16-bit types.
#include "column_sums.cuh"
#include "launch.cuh"
#include "rope.cuh"

namespace adaptiveload {
namespace {

constexpr int kWarps = 8;          // of a block
constexpr int kBlocks = 2;         // of a multiprocessor, backward: with three the registers do not suffice
constexpr int kMostLanes = 32;     // of a group: heads of up to 256 columns
constexpr int kHeadsUnderWay = 4;  // of a lane, in 16-bit types; half in float32, whose packs are twice as big

template <typename T>
constexpr int kUnderWay = sizeof(T) == 4 ? kHeadsUnderWay / 2 : kHeadsUnderWay;

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

template <typename T, int LANES>
__global__ void __launch_bounds__(kWarps * 32) forward_heads(const RopeForward p) {
  constexpr int N = kUnderWay<T>;
  const Lane<LANES> lane(p.head_width);
  const int head_width = static_cast<int>(p.head_width), heads = static_cast<int>(p.shape.width / p.head_width);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int64_t batch = row / p.shape.tokens, token = row % p.shape.tokens;
  wait_for_previous_kernel();
  if (batch >= p.shape.batch) return;
  const T* const x_row = row_of<const T>(p.x, batch, token) + lane.column;
  T* const y_row = row_of<T>(p.y, batch, token) + lane.column;
  float weight[kPack], c[kPack / 2], s[kPack / 2];
  lane.load_weight(weight, p.weight, p.head_width);
  lane.load_angles(c, s, p, batch, token);
  for (int first = lane.group; first - lane.group < heads; first += N * Lane<LANES>::kGroups) {
    Pack<T> packs[N] = {};
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const int head = first + n * Lane<LANES>::kGroups;
      if (lane.mine && head < heads) packs[n] = load_pack_once(x_row + head * head_width);
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const int head = first + n * Lane<LANES>::kGroups;
      float x[kPack], squares = 0.f;
      packs[n].read(x);
#pragma unroll
      for (int i = 0; i < kPack; ++i) squares += x[i] * x[i];
      const float rstd = rsqrtf(group_sum<LANES>(squares) / head_width + p.eps);
      if (!lane.mine || head >= heads) continue;
      if (lane.column == 0) p.rstd[row * heads + head] = rstd;
#pragma unroll
      for (int i = 0; i < kPack / 2; ++i) {
        const float even = x[2 * i] * rstd * weight[2 * i], odd = x[2 * i + 1] * rstd * weight[2 * i + 1];
        x[2 * i] = even * c[i] - odd * s[i];
        x[2 * i + 1] = even * s[i] + odd * c[i];
      }
      store_pack(y_row + head * head_width, x);
    }
  }
}

template <typename T, int LANES>
__global__ void __launch_bounds__(kWarps * 32, kBlocks) backward_heads(const RopeBackward p) {
  constexpr int N = kUnderWay<T>;
  __shared__ float sums[kWarps][kMostLanes * kPack];
  const Lane<LANES> lane(p.head_width);
  const int head_width = static_cast<int>(p.head_width), heads = static_cast<int>(p.shape.width / p.head_width);
  const int warp = threadIdx.x / 32;
  const int64_t rows = p.shape.batch * p.shape.tokens;
  float weight[kPack], weight_sum[kPack] = {};
  wait_for_previous_kernel();
  let_next_kernel_start();
  lane.load_weight(weight, p.weight, p.head_width);
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + warp; row < rows;
       row += static_cast<int64_t>(gridDim.x) * kWarps) {
    const int64_t batch = row / p.shape.tokens, token = row % p.shape.tokens;
    const T* const x_row = row_of<const T>(p.x, batch, token) + lane.column;
    const T* const grad_row = row_of<const T>(p.grad, batch, token) + lane.column;
    T* const dx_row = p.dx.data != nullptr ? row_of<T>(p.dx, batch, token) + lane.column : nullptr;
    float c[kPack / 2], s[kPack / 2];
    lane.load_angles(c, s, p, batch, token);
    for (int first = lane.group; first - lane.group < heads; first += N * Lane<LANES>::kGroups) {
      Pack<T> x_packs[N] = {}, grad_packs[N] = {};
      float rstd[N] = {};
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const int head = first + n * Lane<LANES>::kGroups;
        if (!lane.mine || head >= heads) continue;
        x_packs[n] = load_pack_once(x_row + head * head_width);
        grad_packs[n] = load_pack_once(grad_row + head * p.grad_head_stride);
        rstd[n] = p.rstd[row * heads + head];
      }
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const int head = first + n * Lane<LANES>::kGroups;
        float x[kPack], g[kPack], mean = 0.f;
        x_packs[n].read(x);
        grad_packs[n].read(g);
#pragma unroll
        for (int i = 0; i < kPack / 2; ++i) {
          const float even = g[2 * i] * rstd[n], odd = g[2 * i + 1] * rstd[n];
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
        if (dx_row == nullptr || !lane.mine || head >= heads) continue;
        const float factor = mean * rstd[n] * rstd[n];
#pragma unroll
        for (int i = 0; i < kPack; ++i) x[i] = g[i] * weight[i] - x[i] * factor;
        store_pack(dx_row + head * head_width, x);
      }
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
    for (int w = 0; w < kWarps; ++w) total += sums[w][column];
    p.partials[static_cast<int64_t>(blockIdx.x) * head_width + column] = total;
  }
}

// 16-byte pieces that lie within a head, tables in float32.
template <typename Operands>
bool fits(const Operands& p) {
  const bool tables = p.turned == 0 || (p.cos.dtype == Dtype::float32 && p.sin.dtype == Dtype::float32 &&
                                        aligned(p.cos) && aligned(p.sin));
  return p.head_width % kPack == 0 && p.head_width <= kMostLanes * kPack && aligned(p.x) && tables;
}

// Calls `launch` with the type of x and the lanes of a head.
template <typename Operands, typename Launch>
cudaError_t launch_for_lanes(const Operands& p, Launch launch) {
  const auto of_type = [&](auto type) {
    using T = typename decltype(type)::Stream;
    if (p.head_width <= 8 * kPack) return launch(T(), std::integral_constant<int, 8>());
    if (p.head_width <= 16 * kPack) return launch(T(), std::integral_constant<int, 16>());
    return launch(T(), std::integral_constant<int, 32>());
  };
  switch (p.x.dtype) {
    case Dtype::float32: return of_type(Types<float, float>());
    case Dtype::float16: return of_type(Types<__half, float>());
    default: return of_type(Types<__nv_bfloat16, float>());
  }
}

unsigned blocks_of(const Shape& shape, int64_t most) {
  return static_cast<unsigned>(std::min<int64_t>((shape.batch * shape.tokens + kWarps - 1) / kWarps, most));
}

}  // namespace

unsigned rms_norm_heads_blocks(const RopeBackward& p) {
  return blocks_of(p.shape, kBlocks * device_attribute(cudaDevAttrMultiProcessorCount));
}

bool rms_norm_heads_forward(const RopeForward& p, cudaStream_t stream, cudaError_t* error) {
  if (!fits(p)) return false;
  *error = launch_for_lanes(p, [&](auto value, auto lanes) {
    const auto kernel = forward_heads<decltype(value), decltype(lanes)::value>;
    return launch_early(kernel, blocks_of(p.shape, int64_t{1} << 30), dim3(kWarps * 32), 0, stream, p);
  });
  return true;
}

bool rms_norm_heads_backward(const RopeBackward& p, cudaStream_t stream, cudaError_t* error) {
  if (!fits(p) || p.grad.dtype != p.x.dtype || !aligned(p.grad) || p.grad_head_stride % kPack != 0 || !aligned(p.dx)) {
    return false;
  }
  *error = launch_for_lanes(p, [&](auto value, auto lanes) {
    const auto kernel = backward_heads<decltype(value), decltype(lanes)::value>;
    return launch_early(kernel, rms_norm_heads_blocks(p), dim3(kWarps * 32), 0, stream, p);
  });
  return true;
}

}  // namespace adaptiveload
