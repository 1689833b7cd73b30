// y = LN(x)[* weight + bias] * (1 + scale + scale_table) + shift + shift_table, forward.
//
// forward_rows: a block owns all columns of a few rows, a thread eight columns of each. What scale, shift, tables,
// weight and bias do to a column is one gain and one offset in registers, loaded once, since all rows of a segment
// share them. x comes ahead of time into a ring in shared memory. R rows make a turn, and three turns are in work at
// once: sums of one, squares of the one before, output of the one before that. None waits for another within an
// iteration, so one barrier serves all and its latency is hidden. x is read once, y written once: 4 bytes an element
// in 16-bit types.
// forward_any: one row at a time, everything read where it is needed: any dtypes, any alignment, a modulation row per
// token.
// Mean and variance are two passes over registers: E[x^2] - E[x]^2 loses all digits far from zero.
#include "rows.cuh"

namespace adaptiveload {
namespace {

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

template <typename T, int R, int THREADS, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    forward_rows(const LayerNormForward p, const Segments segments, const int stages) {
  extern __shared__ uint4 pieces[];
  __shared__ float buffer[2][64 * R];
  const Ring<T, R> ring = {pieces, stages};
  const int width = static_cast<int>(p.shape.width), column = threadIdx.x * kPack;
  const bool mine = column < width;
  const int64_t segment = blockIdx.x / segments.chunks, batch = segment / p.shape.rows;
  const int64_t first = segment % p.shape.rows * segments.tokens;
  const T* const x_rows = row_of<const T>(p.x, batch, first) + column;
  T* const y_rows = row_of<T>(p.y, batch, first) + column;
  float2* const stats_rows = p.stats + batch * p.shape.tokens + first;
  const int chunk = blockIdx.x % segments.chunks, turns = segments.turns(chunk, R);
  const auto row_at = [&](int turn, int r) { return (chunk + turn * segments.chunks) * R + r; };
  const auto fetch_turn = [&](int turn, int stage) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int row = row_at(turn, r);
      if (mine && turn < turns && row < segments.tokens) ring.fetch(stage, r, x_rows + row * p.x.row_stride);
    }
    ring.close();
  };

  for (int stage = 0; stage < stages; ++stage) fetch_turn(stage, stage);
  float gain[kPack], offset[kPack];
  load_affine<Access::neighbours>(p, batch, segment % p.shape.rows, 0, gain, offset);

  float mean[R] = {}, older_mean[R] = {}, older_rstd[R] = {};  // of the turn before, of the one before that
  for (int turn = 0, stage = 0; turn < turns + 2; ++turn) {
    float x[kPack], sums[2 * R] = {};  // of x in this turn, of (x - mean)^2 in the turn before
    ring.wait(stages - 3);
    if (mine) {
#pragma unroll
      for (int r = 0; r < R; ++r) {
        if (turn < turns) {
          ring.read(stage, r).read(x);
#pragma unroll
          for (int i = 0; i < kPack; ++i) sums[r] += x[i];
        }
        if (turn >= 1) {
          ring.read(ring.before(stage, 1), r).read(x);
#pragma unroll
          for (int i = 0; i < kPack; ++i) sums[R + r] += (x[i] - mean[r]) * (x[i] - mean[r]);
        }
      }
    }
    offer_sums<2 * R>(sums, buffer[turn % 2]);
    const int oldest = ring.before(stage, 2);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int row = row_at(turn - 2, r);
      if (turn < 2 || row >= segments.tokens) break;
      if (threadIdx.x == 0) stats_rows[row] = make_float2(older_mean[r], older_rstd[r]);
      if (!mine) continue;
      ring.read(oldest, r).read(x);
#pragma unroll
      for (int i = 0; i < kPack; ++i) x[i] = (x[i] - older_mean[r]) * older_rstd[r] * gain[i] + offset[i];
      store_pack_once(y_rows + row * p.y.row_stride, x);
    }
    __syncthreads();
    if (turn >= 2) fetch_turn(turn - 2 + stages, oldest);
    collect_sums<2 * R>(sums, buffer[turn % 2]);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      older_mean[r] = mean[r];
      older_rstd[r] = rsqrtf(sums[R + r] / width + p.eps);
      mean[r] = sums[r] / width;
    }
    stage = stage + 1 == stages ? 0 : stage + 1;
  }
}

template <Access A>
__global__ void __launch_bounds__(kMostAnyThreads) forward_any(const LayerNormForward p) {
  __shared__ float buffer[2][32];
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
    block_sum<1>(total, buffer[0]);
    const float mean = total[0] / width;
    for (int first = 0; first < width; first += step) {
      load_columns<A>(x, p.x, batch, token, first, width, mean);
#pragma unroll
      for (int i = 0; i < kPack; ++i) squares[0] += (x[i] - mean) * (x[i] - mean);
    }
    block_sum<1>(squares, buffer[1]);
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

// false: the ring does not fit this GPU, or a row is wider than 768 threads.
template <typename T, int R, int THREADS, int BLOCKS>
bool launch_rows(const LayerNormForward& p, cudaStream_t stream, cudaError_t* error) {
  const int threads = threads_for(p.shape.width);
  const int64_t stage_bytes = Ring<T, R>::stage_bytes(threads);
  const int stages = stages_that_fit(stage_bytes, 3, 5, BLOCKS);
  if (stages == 0) return false;
  const int bytes = static_cast<int>(stages * stage_bytes);
  auto kernel = forward_rows<T, R, THREADS, BLOCKS>;
  *error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (*error != cudaSuccess) return true;
  const Segments segments = cut(p.shape, BLOCKS, R);
  kernel<<<static_cast<unsigned>(segments.blocks()), threads, bytes, stream>>>(p, segments, stages);
  *error = cudaGetLastError();
  return true;
}

template <typename T>
bool launch_rows(const LayerNormForward& p, cudaStream_t stream, cudaError_t* error) {
  constexpr int kRows = sizeof(T) == 4 ? 2 : 4;  // a float32 stage takes twice the room
  const int threads = threads_for(p.shape.width);
  if (threads <= 256) return launch_rows<T, kRows, 256, 3>(p, stream, error);
  if (threads <= 384) return launch_rows<T, kRows, 384, 2>(p, stream, error);
  if (threads <= 640) return launch_rows<T, kRows, 640, 1>(p, stream, error);
  if (threads <= 768) return launch_rows<T, kRows / 2, 768, 1>(p, stream, error);
  return false;
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
