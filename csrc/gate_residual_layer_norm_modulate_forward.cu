// residual = x + y * factor, normed = LN(residual)[* weight + bias] * m + shift, forward, with factor = gate + gate_table
// (1 without both) and m = 1 + scale + scale_table. The statistics are those of the rounded residual.
//
// forward_rows: a block owns all columns of R rows at a time, a thread eight columns in each, whose factor, gain and
// offset stay in registers, since all rows of a segment share them. The rows of x and y to come are on their way into a
// ring in shared memory meanwhile. Both are read once, both results written once: 8 bytes an element in 16-bit types.
// Stores that leave the L2 cache first are 1% slower here. Everything else (mixed dtypes, no alignment, a modulation row
// per token) takes the kernels of gate_residual and layer_norm_modulate, one after the other: the same result, 10 bytes.
#include <initializer_list>

#include "launch.cuh"
#include "modulation.cuh"
#include "rows.cuh"

namespace adaptiveload {
namespace {

// The best of 11 block shapes on an H200 over six shapes of x. Multiprocessors do not read equally fast: blocks that take
// only a few turns and are dispatched as others end keep all busy to the end, and read close together.
constexpr int kTurnRows = 2;        // rows of a turn in 16-bit types; half in float32, whose packs are twice as big
constexpr int kMostThreads = 768;   // of a block: rows of up to 768 * 8 = 6144 columns
constexpr int kBusyThreads = 768;   // of a multiprocessor
constexpr int kWaves = 16;          // blocks that follow one another
constexpr int kFewestRows = 4;      // of a block, where there are enough for one wave
constexpr int kStages = 3;          // turns under way

__device__ __forceinline__ float columns_of_warp(int warp, int width) {
  return static_cast<float>(min(max(width - warp * 32 * kPack, 0), 32 * kPack));
}

// Mean and sum of squares about it of R rows that lie in the registers of a block, with one barrier: two passes over a
// warp's columns, then the warps' (sum, squares) are joined without cancellation. `buffer` as in block_sum.
template <int THREADS, typename T, int R>
__device__ __forceinline__ void block_moments(Pack<T> (&packs)[R], bool mine, int width, float one_by_width,
                                              float (&mean)[R], float (&squares)[R], float2* buffer) {
  constexpr int kGroup = 32 / R;  // lanes that join the warps of one row
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  float x[kPack];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    packs[r].read(x);
    const float sum = ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
    mean[r] = mine ? sum : 0.f;
  }
  const float warp_total = warp_sum<R>(mean);
  const float one_by_columns = 1.f / columns_of_warp(warp, width);
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const float center = __shfl_sync(~0u, warp_total, r * kGroup) * one_by_columns;
    keep_packed(packs[r]);
    packs[r].read(x);
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kPack; ++i) sum += (x[i] - center) * (x[i] - center);
    squares[r] = mine ? sum : 0.f;
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
    if (other >= warps) break;
    const float2 part = buffer[other * R + lane / kGroup];
    const float columns = columns_of_warp(other, width), away = part.x / columns - total;
    square += part.y + columns * away * away;
  }
#pragma unroll
  for (int offset = kGroup / 2; offset >= 1; offset /= 2) square += __shfl_xor_sync(~0u, square, offset);
#pragma unroll
  for (int r = 0; r < R; ++r) {
    mean[r] = __shfl_sync(~0u, total, r * kGroup);
    squares[r] = __shfl_sync(~0u, square, r * kGroup);
  }
}

template <typename T, int R, int THREADS>
__global__ void __launch_bounds__(THREADS)
    forward_rows(const GatedNormForward p, const Segments segments, const int stages) {
  extern __shared__ __align__(128) unsigned char ring_rows[];
  __shared__ uint64_t arrivals[Ring<T, 2 * R, 1>::kMostStages];
  __shared__ float2 buffer[2][R * THREADS / 32];
  const int width = static_cast<int>(p.shape.width);
  const float one_by_width = 1.f / width;
  const Ring<T, 2 * R, 1> ring = {ring_rows, arrivals, stages, width};  // R rows of x, then R of y
  const Place at(segments, blockIdx.x, p.shape.rows);
  const T* const x_rows = row_of<const T>(p.x, at.batch, at.first);
  const T* const y_rows = row_of<const T>(p.y, at.batch, at.first);
  T* const residual_rows = row_of<T>(p.residual, at.batch, at.first) + ring.column(0);
  T* const normed_rows = row_of<T>(p.normed, at.batch, at.first) + ring.column(0);
  const int step = segments.chunks * R;
  const bool mine = static_cast<int>(threadIdx.x) * kPack < width;
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
  float factor[kPack], gain[kPack], offset[kPack];
  load_factor<Access::neighbours>(p, at.batch, at.modulation_row, 0, factor);
  load_affine<Access::neighbours>(p, at.batch, at.modulation_row, 0, gain, offset);

  int stage = 0, round = 0, parity = 0;
  for (int row = first_row; row < segments.tokens; row += step, parity ^= 1) {
    ring.wait(stage, round);
    Pack<T> packs[R];  // of the residual, rounded
    float x[kPack], y[kPack], mean[R], squares[R];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      ring.read(stage, r, 0).read(x);
      ring.read(stage, R + r, 0).read(y);
#pragma unroll
      for (int i = 0; i < kPack; ++i) x[i] += y[i] * factor[i];
      packs[r].write(x);
      if (mine && row + r < segments.tokens) {
        store_pack(residual_rows + (row + r) * p.residual.row_stride, packs[r]);
      }
      keep_packed(packs[r]);
    }
    block_moments<THREADS>(packs, mine, width, one_by_width, mean, squares, buffer[parity]);
    fetch_turn(row + stages * step, stage);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (row + r >= segments.tokens) break;
      const float rstd = rsqrtf(squares[r] * one_by_width + p.eps);
      if (threadIdx.x == 0) p.stats[at.batch * p.shape.tokens + at.first + row + r] = make_float2(mean[r], rstd);
      keep_packed(packs[r]);
      packs[r].read(x);
#pragma unroll
      for (int i = 0; i < kPack; ++i) x[i] = (x[i] - mean[r]) * rstd * gain[i] + offset[i];
      packs[r].write(x);
      if (mine) store_pack(normed_rows + (row + r) * p.normed.row_stride, packs[r]);
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
  constexpr int R = sizeof(T) == 4 ? kTurnRows / 2 : kTurnRows;
  const int threads = threads_for(p.shape.width);
  const int blocks = std::max(1, kBusyThreads / threads);
  const int64_t stage_bytes = Ring<T, 2 * R, 1>::stage_bytes(p.shape.width);
  const int stages = stages_that_fit(stage_bytes, kStages, blocks);
  if (stages == 0 || threads > kMostThreads) return false;
  const int bytes = static_cast<int>(stages * stage_bytes);
  auto kernel = forward_rows<T, R, kMostThreads>;
  *error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (*error != cudaSuccess) return true;
  const int64_t wave = blocks * device_attribute(cudaDevAttrMultiProcessorCount);
  const bool many = p.shape.batch * p.shape.tokens >= wave * kFewestRows;
  const Segments segments = cut(p.shape, blocks * kWaves, many ? kFewestRows : R);
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
  norm.stats = reinterpret_cast<float*>(p.stats);
  return layer_norm_modulate_forward(norm, stream);
}

}  // namespace adaptiveload
