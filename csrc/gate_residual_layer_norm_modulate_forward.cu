// residual = x + y * factor, normed = LN(residual)[* weight + bias] * m + shift, forward, with factor = gate + gate_table
// (1 without both) and m = 1 + scale + scale_table. The statistics are those of the rounded residual.
//
// forward_rows: a block owns all columns of R rows at a time, a thread eight columns in each, whose factor, gain and
// offset stay in registers as long as the rows share them. The rows of x and y to come are on their way into a ring in
// shared memory meanwhile. Both are read once, both results written once: 8 bytes an element in 16-bit types. Stores that
// leave the L2 cache first are 1% slower here.
// gated_few (gate_residual_layer_norm_modulate_few.cuh): few rows, without a ring.
// Everything else (mixed dtypes, no alignment, a modulation row per token) takes the kernels of gate_residual and
// layer_norm_modulate, one after the other: the same result, 10 bytes.
#include <initializer_list>

#include "gate_residual_layer_norm_modulate_few.cuh"
#include "launch.cuh"
#include "modulation.cuh"
#include "rows.cuh"

namespace adaptiveload {
namespace {

// The best of 40 combinations on an H200 over seven shapes of x.
constexpr int kTurnRows = 2;        // rows of a turn in 16-bit types; half in float32, whose packs are twice as big
constexpr int kMostThreads = 768;   // of a block: rows of up to 768 * 8 = 6144 columns
constexpr int kBusyThreads = 768;   // of a multiprocessor, if a block has no more
constexpr int64_t kWide = 4096;
constexpr int kWideRun = 8, kWideStages = 3;      // of wide rows: turns of a block, and of those under way
constexpr int kNarrowRun = 4, kNarrowStages = 2;  // of others

// All rows, segment after segment, in turns of R neighbours, of which a block takes a run. Blocks come in the order of
// their rows: on an H200 2 to 4% (11% at 2432 columns) faster than blocks that stay and take every n-th turn.
struct Turns {
  int tokens;           // of one segment
  unsigned of_segment;  // turns of one segment
  unsigned count;       // of all
  unsigned run;         // of a block

  unsigned blocks() const { return (count + run - 1) / run; }
};

struct Turn {
  int segment, row;  // segment < 0: there is none
};

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
__global__ void __launch_bounds__(THREADS) forward_rows(const GatedNormForward p, const Turns all, const int stages) {
  extern __shared__ __align__(128) unsigned char ring_rows[];
  __shared__ uint64_t arrivals[Ring<T, 2 * R, 1>::kMostStages];
  __shared__ Turn turns[Ring<T, 2 * R, 1>::kMostStages];
  __shared__ float2 buffer[2][R * THREADS / 32];
  const int width = static_cast<int>(p.shape.width);
  const unsigned rows_of_batch = p.shape.rows;
  const float one_by_width = 1.f / width;
  const Ring<T, 2 * R, 1> ring = {ring_rows, arrivals, stages, width};  // R rows of x, then R of y
  const bool mine = static_cast<int>(threadIdx.x) * kPack < width;

  unsigned next = blockIdx.x * all.run;  // turn to fetch
  const unsigned last = min(next + all.run, all.count);
  const auto fetch_turn = [&](int stage) {
    Turn turn = {-1, 0};
    if (next < last) {
      turn.segment = next / all.of_segment;
      turn.row = next % all.of_segment * R;
      const unsigned batch = turn.segment / rows_of_batch, modulation_row = turn.segment % rows_of_batch;
      const int64_t token = static_cast<int64_t>(modulation_row) * all.tokens + turn.row;
      const int count = min(R, all.tokens - turn.row);
      ring.open(stage, 2 * count);
      ring.fetch(stage, 0, row_of<const T>(p.x, batch, token), p.x.row_stride, count);
      ring.fetch(stage, R, row_of<const T>(p.y, batch, token), p.y.row_stride, count);
      ++next;
    }
    ring.close();
    if (threadIdx.x == 0) turns[stage] = turn;
  };

  let_next_kernel_start();
  ring.start();
  wait_for_previous_kernel();
  if (ring.copies()) {
    for (int stage = 0; stage < stages; ++stage) fetch_turn(stage);
  }
  __syncthreads();
  float factor[kPack], gain[kPack], offset[kPack];
  int segment = -1;

  int stage = 0, round = 0, parity = 0;
  for (;; parity ^= 1) {
    // Written before the last barrier at the latest.
    const Turn turn = turns[stage];
    if (turn.segment < 0) break;
    if (turn.segment != segment) {
      segment = turn.segment;
      load_factor<Access::either>(p, segment / rows_of_batch, segment % rows_of_batch, 0, factor);
      load_affine<Access::either>(p, segment / rows_of_batch, segment % rows_of_batch, 0, gain, offset);
    }
    // The results are contiguous: one offset for both takes fewer registers than two pointers.
    const int64_t row = static_cast<int64_t>(segment) * all.tokens + turn.row, at = row * width + ring.column(0);
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
      if (mine && turn.row + r < all.tokens) store_pack(static_cast<T*>(p.residual.data) + at + r * width, packs[r]);
      keep_packed(packs[r]);
    }
    block_moments<THREADS>(packs, mine, width, one_by_width, mean, squares, buffer[parity]);
    if (ring.copies()) fetch_turn(stage);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (turn.row + r >= all.tokens) break;
      const float rstd = rsqrtf(squares[r] * one_by_width + p.eps);
      if (threadIdx.x == 0) p.stats[row + r] = make_float2(mean[r], rstd);
      keep_packed(packs[r]);
      packs[r].read(x);
#pragma unroll
      for (int i = 0; i < kPack; ++i) x[i] = (x[i] - mean[r]) * rstd * gain[i] + offset[i];
      packs[r].write(x);
      if (mine) store_pack(static_cast<T*>(p.normed.data) + at + r * width, packs[r]);
    }
    if (++stage == stages) {
      stage = 0;
      ++round;
    }
  }
}

// Of a multiprocessor.
int row_blocks(const Shape& shape) { return std::max(1, kBusyThreads / threads_for(shape.width)); }

// false: the ring does not fit this GPU, or a row is too wide.
template <typename T>
bool launch_rows(const GatedNormForward& p, cudaStream_t stream, cudaError_t* error) {
  constexpr int R = sizeof(T) == 4 ? kTurnRows / 2 : kTurnRows;
  const bool wide = p.shape.width >= kWide;
  const int threads = threads_for(p.shape.width), resident = row_blocks(p.shape);
  const int64_t stage_bytes = Ring<T, 2 * R, 1>::stage_bytes(p.shape.width);
  const int stages = stages_that_fit(stage_bytes, wide ? kWideStages : kNarrowStages, resident);
  if (stages == 0 || threads > kMostThreads) return false;
  const int64_t tokens = p.shape.tokens / p.shape.rows, of_segment = (tokens + R - 1) / R;
  const int64_t count = of_segment * p.shape.rows * p.shape.batch;
  const int64_t places = int64_t{resident} * device_attribute(cudaDevAttrMultiProcessorCount);
  const int64_t run = std::clamp<int64_t>((count + places - 1) / places, 1, wide ? kWideRun : kNarrowRun);
  const Turns turns = {static_cast<int>(tokens), static_cast<unsigned>(of_segment), static_cast<unsigned>(count),
                       static_cast<unsigned>(run)};
  *error = launch_early(forward_rows<T, R, kMostThreads>, turns.blocks(), threads,
                        static_cast<int>(stages * stage_bytes), stream, p, turns, stages);
  return true;
}

template <typename T>
cudaError_t launch_few(const GatedNormForward& p, cudaStream_t stream) {
  const int threads = threads_for(p.shape.width);
  const int rows = p.shape.batch * p.shape.tokens * p.shape.width <= kOneGatedElements ? 1 : 2;
  const Segments segments = cut_to_rows(p.shape, rows);
  auto kernel = rows == 1 ? gated_few<T, 1> : gated_few<T, 2>;
  return launch_early(kernel, static_cast<unsigned>(segments.blocks()), threads, 0, stream, p, segments,
                      joined_warps(threads));
}

bool launch_rows(const GatedNormForward& p, cudaStream_t stream, cudaError_t* error) {
  if (p.shape.batch * p.shape.tokens * p.shape.width <= kFewGatedElements &&
      threads_for(p.shape.width) <= kFewGatedThreads) {
    switch (p.x.dtype) {
      case Dtype::float32: *error = launch_few<float>(p, stream); break;
      case Dtype::float16: *error = launch_few<__half>(p, stream); break;
      default: *error = launch_few<__nv_bfloat16>(p, stream);
    }
    return true;
  }
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
