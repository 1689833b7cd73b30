// residual = x + y * factor, normed = LN(residual)[* weight + bias] * m + shift, forward, with factor = gate + gate_table
// (1 without both) and m = 1 + scale + scale_table. The statistics are those of the rounded residual.
//
// forward_rows: a block owns all columns of R rows at a time, a thread NV packs of eight columns in each, whose factor,
// gain and offset stay in registers, since all rows of a segment share them. The rows of x and y to come are on their
// way into a ring in shared memory meanwhile. Both are read once, both results written once: 8 bytes an element in
// 16-bit types. Everything else (mixed dtypes, no alignment, a modulation row per token) takes the kernels of
// gate_residual and layer_norm_modulate, one after the other: the same result, 10 bytes.
#include <initializer_list>

#include "launch.cuh"
#include "modulation.cuh"
#include "rows.cuh"

namespace adaptiveload {
namespace {

constexpr int kTurnRows = 1;        // rows of a turn in 16-bit types; half in float32, whose packs are twice as big
constexpr int kPacks = 3;           // packs of a thread in a row: fewer threads reduce faster
constexpr int kMostThreads = 256;   // of a block: rows of up to 256 * 3 * 8 = 6144 columns
constexpr int kBusyThreads = 384;   // of a multiprocessor
constexpr int kStages = 3;          // turns under way
constexpr bool kOneBarrier = true;

// How many columns of a row warp `warp` owns.
template <int NV>
__device__ __forceinline__ float columns_of_warp(int warp, int width) {
  int columns = 0;
#pragma unroll
  for (int v = 0; v < NV; ++v) {
    const int first = (v * static_cast<int>(blockDim.x) + warp * 32) * kPack;
    columns += min(max(width - first, 0), 32 * kPack);
  }
  return static_cast<float>(columns);
}

// Mean and sum of squares about it of R rows that lie in the registers of a block, with one barrier: two passes over a
// warp's columns, then the warps' (sum, squares) join without cancellation. `buffer` as in block_sum.
template <int THREADS, typename T, int R, int NV>
__device__ __forceinline__ void block_moments(Pack<T> (&packs)[R][NV], const bool (&mine)[NV], int width,
                                              float one_by_width, float (&mean)[R], float (&squares)[R],
                                              float2* buffer) {
  constexpr int kGroup = 32 / R;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  float x[kPack];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    mean[r] = 0.f;
#pragma unroll
    for (int v = 0; v < NV; ++v) {
      packs[r][v].read(x);
      const float sum = ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
      mean[r] += mine[v] ? sum : 0.f;
    }
  }
  const float warp_total = warp_sum<R>(mean);
  const float one_by_columns = 1.f / columns_of_warp<NV>(warp, width);
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const float center = __shfl_sync(~0u, warp_total, r * kGroup) * one_by_columns;
    squares[r] = 0.f;
#pragma unroll
    for (int v = 0; v < NV; ++v) {
      keep_packed(packs[r][v]);
      packs[r][v].read(x);
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < kPack; ++i) sum += (x[i] - center) * (x[i] - center);
      squares[r] += mine[v] ? sum : 0.f;
    }
  }
  const float warp_squares = warp_sum<R>(squares);
  if (lane % kGroup == 0) buffer[warp * R + lane / kGroup] = make_float2(warp_total, warp_squares);
  __syncthreads();
  float total = 0.f, square = 0.f;
#pragma unroll
  for (int w = 0; w < THREADS / 32; w += kGroup) {
    const int other = w + lane % kGroup;
    if (other < warps) total += buffer[other * R + lane / kGroup].x;
  }
#pragma unroll
  for (int offset = kGroup / 2; offset >= 1; offset /= 2) total += __shfl_xor_sync(~0u, total, offset);
  total = divide(total, width, one_by_width);
#pragma unroll
  for (int w = 0; w < THREADS / 32; w += kGroup) {
    const int other = w + lane % kGroup;
    if (other < warps) {
      const float2 part = buffer[other * R + lane / kGroup];
      const float columns = columns_of_warp<NV>(other, width), away = part.x / columns - total;
      square += part.y + columns * away * away;
    }
  }
#pragma unroll
  for (int offset = kGroup / 2; offset >= 1; offset /= 2) square += __shfl_xor_sync(~0u, square, offset);
#pragma unroll
  for (int r = 0; r < R; ++r) {
    mean[r] = __shfl_sync(~0u, total, r * kGroup);
    squares[r] = __shfl_sync(~0u, square, r * kGroup);
  }
}

template <typename T, int R, int NV, int THREADS>
__global__ void __launch_bounds__(THREADS)
    forward_rows(const GatedNormForward p, const Segments segments, const int stages) {
  extern __shared__ __align__(128) unsigned char ring_rows[];
  __shared__ uint64_t arrivals[Ring<T, 2 * R, NV>::kMostStages];
  __shared__ float2 buffer[2][R * THREADS / 32];
  const int width = static_cast<int>(p.shape.width);
  const float one_by_width = 1.f / width;
  const Ring<T, 2 * R, NV> ring = {ring_rows, arrivals, stages, width};  // R rows of x, then R of y
  const Place at(segments, blockIdx.x, p.shape.rows);
  const T* const x_rows = row_of<const T>(p.x, at.batch, at.first);
  const T* const y_rows = row_of<const T>(p.y, at.batch, at.first);
  T* const residual_rows = row_of<T>(p.residual, at.batch, at.first);
  T* const normed_rows = row_of<T>(p.normed, at.batch, at.first);
  float2* const stats_rows = p.stats + at.batch * p.shape.tokens + at.first;
  const int step = segments.chunks * R;
  bool mine[NV];
#pragma unroll
  for (int v = 0; v < NV; ++v) mine[v] = static_cast<int>(v * blockDim.x + threadIdx.x) * kPack < width;
  const auto fetch_turn = [&](int row, int stage) {
    const int count = min(R, segments.tokens - row);
    ring.open(stage, 2 * count);
    ring.fetch(stage, 0, x_rows + row * p.x.row_stride, p.x.row_stride, count);
    ring.fetch(stage, R, y_rows + row * p.y.row_stride, p.y.row_stride, count);
    ring.close();
  };

  ring.start();
  wait_for_previous_kernel();
  const int first_row = at.chunk * R;
  for (int stage = 0; stage < stages; ++stage) fetch_turn(first_row + stage * step, stage);
  float factor[NV][kPack], gain[NV][kPack], offset[NV][kPack];
#pragma unroll
  for (int v = 0; v < NV; ++v) {
    const int first = v * blockDim.x * kPack;
    load_factor<Access::neighbours>(p, at.batch, at.modulation_row, first, factor[v]);
    load_affine<Access::neighbours>(p, at.batch, at.modulation_row, first, gain[v], offset[v]);
  }

  int stage = 0, round = 0, parity = 0;
  for (int row = first_row; row < segments.tokens; row += step, parity ^= 1) {
    ring.wait(stage, round);
    Pack<T> packs[R][NV];  // of the residual, rounded
    float x[kPack], y[kPack], mean[R], squares[R];
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int v = 0; v < NV; ++v) {
        ring.read(stage, r, v).read(x);
        ring.read(stage, R + r, v).read(y);
#pragma unroll
        for (int i = 0; i < kPack; ++i) x[i] += y[i] * factor[v][i];
        packs[r][v].write(x);
        if (mine[v] && row + r < segments.tokens) {
          store_pack_once(residual_rows + (row + r) * p.residual.row_stride + ring.column(v), packs[r][v]);
        }
        keep_packed(packs[r][v]);
      }
    }
    if constexpr (kOneBarrier) {
      block_moments<THREADS>(packs, mine, width, one_by_width, mean, squares, buffer[parity]);
      fetch_turn(row + stages * step, stage);
    } else {
#pragma unroll
      for (int r = 0; r < R; ++r) {
        mean[r] = 0.f;
#pragma unroll
        for (int v = 0; v < NV; ++v) {
          packs[r][v].read(x);
          const float sum = ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
          mean[r] += mine[v] ? sum : 0.f;
        }
      }
      block_sum<R, THREADS>(mean, reinterpret_cast<float*>(buffer[0]));
      fetch_turn(row + stages * step, stage);
#pragma unroll
      for (int r = 0; r < R; ++r) {
        mean[r] = divide(mean[r], width, one_by_width);
        squares[r] = 0.f;
#pragma unroll
        for (int v = 0; v < NV; ++v) {
          keep_packed(packs[r][v]);
          packs[r][v].read(x);
          float sum = 0.f;
#pragma unroll
          for (int i = 0; i < kPack; ++i) sum += (x[i] - mean[r]) * (x[i] - mean[r]);
          squares[r] += mine[v] ? sum : 0.f;
        }
      }
      block_sum<R, THREADS>(squares, reinterpret_cast<float*>(buffer[1]));
    }
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (row + r >= segments.tokens) break;
      const float rstd = rsqrtf(squares[r] * one_by_width + p.eps);
      if (threadIdx.x == 0) stats_rows[row + r] = make_float2(mean[r], rstd);
#pragma unroll
      for (int v = 0; v < NV; ++v) {
        keep_packed(packs[r][v]);
        packs[r][v].read(x);
#pragma unroll
        for (int i = 0; i < kPack; ++i) x[i] = (x[i] - mean[r]) * rstd * gain[v][i] + offset[v][i];
        if (mine[v]) store_pack_once(normed_rows + (row + r) * p.normed.row_stride + ring.column(v), x);
      }
    }
    if (++stage == stages) {
      stage = 0;
      ++round;
    }
  }
}

// false: the ring does not fit this GPU, or a row is too wide.
template <typename T>
bool launch_rows(const GatedNormForward& p, cudaStream_t stream, cudaError_t* error) {
  constexpr int R = sizeof(T) == 4 && kTurnRows > 1 ? kTurnRows / 2 : kTurnRows;
  const int threads = threads_for((p.shape.width + kPacks - 1) / kPacks);
  const int blocks = std::max(1, kBusyThreads / threads);
  const int64_t stage_bytes = Ring<T, 2 * R, kPacks>::stage_bytes(p.shape.width);
  const int stages = stages_that_fit(stage_bytes, kStages, blocks);
  if (stages == 0 || threads > kMostThreads) return false;
  const int bytes = static_cast<int>(stages * stage_bytes);
  auto kernel = forward_rows<T, R, kPacks, kMostThreads>;
  *error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (*error != cudaSuccess) return true;
  const Segments segments = cut(p.shape, blocks, R);
  *error = launch_early(kernel, static_cast<unsigned>(segments.blocks()), threads, bytes, stream, p, segments, stages);
  return true;
}

bool launch_rows(const GatedNormForward& p, cudaStream_t stream, cudaError_t* error) {
  switch (p.x.dtype) {
    case Dtype::float32: return launch_rows<float>(p, stream, error);
    case Dtype::float16: return launch_rows<__half>(p, stream, error);
    default: return launch_rows<__nv_bfloat16>(p, stream, error);
  }
}

}  // namespace

cudaError_t gate_residual_layer_norm_modulate_forward(const GatedNormForward& p, cudaStream_t stream) {
  if (p.shape.batch * p.shape.tokens * p.shape.width == 0) return cudaSuccess;
  bool rows = p.shape.width % kPack == 0 && !row_per_token(p.shape);
  for (const Array& a : {p.x, p.y, p.residual, p.normed}) rows = rows && aligned(a) && a.dtype == p.x.dtype;
  cudaError_t error = cudaSuccess;
  if (rows && launch_rows(p, stream, &error)) return error;

  const GateForward gated = {p.shape, p.x, p.y, p.gate, p.gate_table, p.residual};
  error = gate_residual_forward(gated, stream);
  if (error != cudaSuccess) return error;
  LayerNormForward norm = {};
  norm.shape = p.shape;
  norm.eps = p.eps;
  norm.x = p.residual;
  norm.scale = p.scale;
  norm.shift = p.shift;
  norm.weight = p.weight;
  norm.bias = p.bias;
  norm.scale_table = p.scale_table;
  norm.shift_table = p.shift_table;
  norm.y = p.normed;
  norm.stats = p.stats;
  return layer_norm_modulate_forward(norm, stream);
}

}  // namespace adaptiveload
