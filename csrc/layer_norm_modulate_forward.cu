// y = LN(x)[* weight + bias] * (1 + scale + scale_table) + shift + shift_table, forward.
//
// forward_rows: a block owns all columns of R rows at a time, a thread NV packs of eight columns in each. What scale,
// shift, tables, weight and bias do to a column is one gain and one offset in registers, loaded once, since all rows of
// a segment share them. The rows to come are on their way into a ring in shared memory meanwhile, so that memory is
// busy while the block reduces. x is read once, y written once: 4 bytes an element in 16-bit types.
// forward_any: one row at a time, everything read where it is needed: any dtypes, any alignment, a modulation row per
// token.
// Mean and variance are two passes over registers: E[x^2] - E[x]^2 loses all digits far from zero.
#include "rows.cuh"

namespace adaptiveload {
namespace {

// The best of 11 combinations on an H200, over the six shapes of recipes/kernel_speed.py.
constexpr int kTurnRows = 2;        // rows of a turn in 16-bit types; half in float32, whose packs are twice as big
constexpr int kPacks = 2;           // packs of a thread in a row: fewer threads reduce faster
constexpr int kMostThreads = 384;   // of a block: rows of up to 384 * 2 * 8 = 6144 columns
constexpr int kBusyThreads = 384;   // of a multiprocessor
constexpr int kStages = 6;          // turns under way

// gain and offset of my columns: LN * weight + bias, then * m + shift, is LN * (weight * m) + (bias * m + shift).
// Everything is loaded before anything is used, so that the loads wait together.
template <Access A>
__device__ __forceinline__ void load_affine(const LayerNormForward& p, int64_t batch, int64_t row, int first,
                                            float (&gain)[kPack], float (&offset)[kPack]) {
  const int width = static_cast<int>(p.shape.width);
  float scale_table[kPack], shift_table[kPack], weight[kPack], bias[kPack];
  load_columns<A>(gain, p.scale, batch, row, first, width, 0.f);
  load_columns<A>(offset, p.shift, batch, row, first, width, 0.f);
  load_columns<A>(scale_table, p.scale_table, 0, 0, first, width, 0.f);
  load_columns<A>(shift_table, p.shift_table, 0, 0, first, width, 0.f);
  load_columns<A>(weight, p.weight, 0, 0, first, width, 1.f);
  load_columns<A>(bias, p.bias, 0, 0, first, width, 0.f);
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    gain[i] += 1.f + scale_table[i];
    offset[i] += shift_table[i] + bias[i] * gain[i];
    gain[i] *= weight[i];
  }
}

template <typename T, int R, int NV, int THREADS>
__global__ void __launch_bounds__(THREADS)
    forward_rows(const LayerNormForward p, const Segments segments, const int stages) {
  extern __shared__ __align__(16) unsigned char ring_rows[];
  __shared__ uint64_t arrivals[Ring<T, R, NV>::kMostStages];
  __shared__ float buffer[2][R * THREADS / 32];
  const int width = static_cast<int>(p.shape.width);
  const float one_by_width = 1.f / width;
  const Ring<T, R, NV> ring = {ring_rows, arrivals, stages, width};
  const Place at(segments, blockIdx.x, p.shape.rows);
  const T* const x_rows = row_of<const T>(p.x, at.batch, at.first);
  T* const y_rows = row_of<T>(p.y, at.batch, at.first);
  float2* const stats_rows = p.stats + at.batch * p.shape.tokens + at.first;
  const int step = segments.chunks * R;
  bool mine[NV];
#pragma unroll
  for (int v = 0; v < NV; ++v) mine[v] = static_cast<int>(v * blockDim.x + threadIdx.x) * kPack < width;
  const auto fetch_turn = [&](int row, int stage) {
    const int count = min(R, segments.tokens - row);
    ring.open(stage, count);
    ring.fetch(stage, 0, x_rows + row * p.x.row_stride, p.x.row_stride, count);
    ring.close();
  };

  ring.start();
  const int first_row = at.chunk * R;
  for (int stage = 0; stage < stages; ++stage) fetch_turn(first_row + stage * step, stage);
  float gain[NV][kPack], offset[NV][kPack];
#pragma unroll
  for (int v = 0; v < NV; ++v) {
    load_affine<Access::neighbours>(p, at.batch, at.modulation_row, v * blockDim.x * kPack, gain[v], offset[v]);
  }

  int stage = 0, round = 0;
  for (int row = first_row; row < segments.tokens; row += step) {
    ring.wait(stage, round);
    Pack<T> packs[R][NV];
    float mean[R], squares[R], x[kPack];
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int v = 0; v < NV; ++v) packs[r][v] = ring.read(stage, r, v);
    }
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
    block_sum<R, THREADS>(mean, buffer[0]);
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
    block_sum<R, THREADS>(squares, buffer[1]);
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
        if (mine[v]) store_pack_once(y_rows + (row + r) * p.y.row_stride + ring.column(v), x);
      }
    }
    if (++stage == stages) {
      stage = 0;
      ++round;
    }
  }
}

template <Access A>
__global__ void __launch_bounds__(kMostAnyThreads) forward_any(const LayerNormForward p) {
  __shared__ float buffer[2][kMostAnyThreads / 32];
  const int width = static_cast<int>(p.shape.width), step = kPack * blockDim.x;
  const int64_t rows = p.shape.batch * p.shape.tokens;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const int64_t batch = row / p.shape.tokens, token = row % p.shape.tokens;
    float x[kPack], total[1] = {0.f}, squares[1] = {0.f};
    for (int first = 0; first < width; first += step) {
      load_columns<A>(x, p.x, batch, token, first, width, 0.f);
#pragma unroll
      for (int i = 0; i < kPack; ++i) total[0] += x[i];
    }
    block_sum<1, kMostAnyThreads>(total, buffer[0]);
    const float mean = total[0] / width;
    for (int first = 0; first < width; first += step) {
      load_columns<A>(x, p.x, batch, token, first, width, mean);
#pragma unroll
      for (int i = 0; i < kPack; ++i) squares[0] += (x[i] - mean) * (x[i] - mean);
    }
    block_sum<1, kMostAnyThreads>(squares, buffer[1]);
    const float rstd = rsqrtf(squares[0] / width + p.eps);
    if (threadIdx.x == 0) p.stats[row] = make_float2(mean, rstd);
    for (int first = 0; first < width; first += step) {
      float gain[kPack], offset[kPack];
      load_columns<A>(x, p.x, batch, token, first, width, 0.f);
      load_affine<A>(p, batch, token * p.shape.rows / p.shape.tokens, first, gain, offset);
#pragma unroll
      for (int i = 0; i < kPack; ++i) x[i] = (x[i] - mean) * rstd * gain[i] + offset[i];
      store_columns<A>(p.y, batch, token, first, width, x);
    }
  }
}

// false: the ring does not fit this GPU, or a row is too wide.
template <typename T>
bool launch_rows(const LayerNormForward& p, cudaStream_t stream, cudaError_t* error) {
  constexpr int R = sizeof(T) == 4 ? kTurnRows / 2 : kTurnRows;
  const int threads = threads_for((p.shape.width + kPacks - 1) / kPacks);
  const int blocks = std::max(1, kBusyThreads / threads);
  const int64_t stage_bytes = Ring<T, R, kPacks>::stage_bytes(p.shape.width);
  const int stages = stages_that_fit(stage_bytes, kStages, blocks);
  if (stages == 0 || threads > kMostThreads) return false;
  const int bytes = static_cast<int>(stages * stage_bytes);
  auto kernel = forward_rows<T, R, kPacks, kMostThreads>;
  *error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (*error != cudaSuccess) return true;
  const Segments segments = cut(p.shape, blocks, R);
  kernel<<<static_cast<unsigned>(segments.blocks()), threads, bytes, stream>>>(p, segments, stages);
  *error = cudaGetLastError();
  return true;
}

bool launch_rows(const LayerNormForward& p, cudaStream_t stream, cudaError_t* error) {
  switch (p.x.dtype) {
    case Dtype::float32: return launch_rows<float>(p, stream, error);
    case Dtype::float16: return launch_rows<__half>(p, stream, error);
    default: return launch_rows<__nv_bfloat16>(p, stream, error);
  }
}

}  // namespace

cudaError_t layer_norm_modulate_forward(const LayerNormForward& p, cudaStream_t stream) {
  const int64_t rows = p.shape.batch * p.shape.tokens;
  if (rows * p.shape.width == 0) return cudaSuccess;
  const bool vectors = p.shape.width % kPack == 0 && aligned(p.x) && aligned(p.y);
  cudaError_t error = cudaSuccess;
  if (vectors && !row_per_token(p.shape) && p.x.dtype == p.y.dtype && launch_rows(p, stream, &error)) return error;

  bool all_aligned = vectors;
  for (const Array& a : {p.scale, p.shift, p.weight, p.bias, p.scale_table, p.shift_table}) {
    all_aligned = all_aligned && aligned(a);
  }
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(rows, 1 << 30));
  const int threads = std::min(threads_for(p.shape.width), kMostAnyThreads);
  if (all_aligned) {
    forward_any<Access::pieces><<<blocks, threads, 0, stream>>>(p);
  } else {
    forward_any<Access::strided><<<blocks, threads, 0, stream>>>(p);
  }
  return cudaGetLastError();
}

}  // namespace adaptiveload
