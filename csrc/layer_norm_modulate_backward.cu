// Gradients of y = LN(x)[* weight + bias] * m + shift, with m = 1 + scale + scale_table:
//   dx = rstd * (g - mean(g) - xh * mean(g * xh)),  xh = (x - mean) * rstd,  g = grad * m * weight,
// and over the rows of a segment P = sum grad * xh, Q = sum grad, from which column_sums.cu makes all others.
//
// backward_rows: a block walks down rows of one segment, a thread owns eight columns of each and keeps their P and Q in
// registers while it writes dx, so x and grad are read once: 6 bytes an element in 16-bit types, where a separate
// reduction over rows would read them again (10). Both come ahead of time through a ring in shared memory; one barrier
// for R rows. Each block writes its P and Q once; nothing is added atomically, so every run gives the same bits.
// backward_any: the same, one row at a time, for any dtypes and alignment and for a modulation row per token.
#include "column_sums.cuh"
#include "rows.cuh"

namespace adaptiveload {
namespace {

// What grad is multiplied by on its way to g, m * weight, of my columns; m alone without `weighted`.
template <Access A>
__device__ __forceinline__ void load_gain(const LayerNormBackward& p, int64_t batch, int64_t row, int first,
                                          bool weighted, float (&gain)[kPack]) {
  const int width = static_cast<int>(p.shape.width);
  float term[kPack];
  load_columns<A>(gain, p.scale, batch, row, first, width, 0.f);
  load_columns<A>(term, p.scale_table, 0, 0, first, width, 0.f);
#pragma unroll
  for (int i = 0; i < kPack; ++i) gain[i] += 1.f + term[i];
  if (!weighted) return;
  load_columns<A>(term, p.weight, 0, 0, first, width, 1.f);
#pragma unroll
  for (int i = 0; i < kPack; ++i) gain[i] *= term[i];
}

// xh of my columns.
template <Access A>
__device__ __forceinline__ void load_normed(const LayerNormBackward& p, int64_t batch, int64_t token, int first,
                                            float (&xh)[kPack]) {
  const float2 stats = p.stats[batch * p.shape.tokens + token];
  load_columns<A>(xh, p.x, batch, token, first, static_cast<int>(p.shape.width), stats.x);
#pragma unroll
  for (int i = 0; i < kPack; ++i) xh[i] = (xh[i] - stats.x) * stats.y;
}

template <typename T, int R, bool SUMS, int THREADS, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    backward_rows(const LayerNormBackward p, const Segments segments, const int stages) {
  extern __shared__ uint4 pieces[];
  __shared__ float buffer[2][64 * R];
  const Ring<T, 2 * R> ring = {pieces, stages};  // R rows of x, then R of grad
  const int width = static_cast<int>(p.shape.width), column = threadIdx.x * kPack;
  const bool mine = column < width;
  const int64_t segment = blockIdx.x / segments.chunks, batch = segment / p.shape.rows;
  const int64_t first = segment % p.shape.rows * segments.tokens;
  const T* const x_rows = row_of<const T>(p.x, batch, first) + column;
  const T* const grad_rows = row_of<const T>(p.grad, batch, first) + column;
  T* const dx_rows = p.dx.data == nullptr ? nullptr : row_of<T>(p.dx, batch, first) + column;
  const float2* const stats_rows = p.stats + batch * p.shape.tokens + first;
  const int chunk = blockIdx.x % segments.chunks, turns = segments.turns(chunk, R);
  const auto row_at = [&](int turn, int r) { return (chunk + turn * segments.chunks) * R + r; };
  const auto fetch_turn = [&](int turn, int stage) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int row = row_at(turn, r);
      if (mine && turn < turns && row < segments.tokens) {
        ring.fetch(stage, r, x_rows + row * p.x.row_stride);
        ring.fetch(stage, R + r, grad_rows + row * p.grad.row_stride);
      }
    }
    ring.close();
  };
  const auto stats_at = [&](int turn, int r) {
    const int row = row_at(turn, r);
    return turn < turns && row < segments.tokens ? stats_rows[row] : make_float2(0.f, 0.f);
  };

  for (int stage = 0; stage < stages; ++stage) fetch_turn(stage, stage);
  float gain[kPack], scale_sum[kPack] = {}, shift_sum[kPack] = {};
  load_gain<Access::neighbours>(p, batch, segment % p.shape.rows, 0, true, gain);
  float2 stats[R], older_stats[R], next_stats[R];  // mean, rstd of this turn, the one before, the one to come
#pragma unroll
  for (int r = 0; r < R; ++r) next_stats[r] = stats_at(0, r);

  float means[2 * R] = {};  // of g and g * xh, in the turn before
  for (int turn = 0, stage = 0; turn <= turns; ++turn) {
    float x[kPack], grad[kPack], sums[2 * R] = {};
#pragma unroll
    for (int r = 0; r < R; ++r) {
      older_stats[r] = stats[r];
      stats[r] = next_stats[r];
      next_stats[r] = stats_at(turn + 1, r);
    }
    ring.wait(stages - 2);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (!mine || turn == turns || row_at(turn, r) >= segments.tokens) break;
      ring.read(stage, r).read(x);
      ring.read(stage, R + r).read(grad);
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        const float xh = (x[i] - stats[r].x) * stats[r].y, g = grad[i] * gain[i];
        if (SUMS) {
          scale_sum[i] += grad[i] * xh;
          shift_sum[i] += grad[i];
        }
        sums[2 * r] += g;
        sums[2 * r + 1] += g * xh;
      }
    }
    offer_sums<2 * R>(sums, buffer[turn % 2]);
    const int older = ring.before(stage, 1);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int row = row_at(turn - 1, r);
      if (!mine || dx_rows == nullptr || turn == 0 || row >= segments.tokens) break;
      ring.read(older, r).read(x);
      ring.read(older, R + r).read(grad);
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        const float xh = (x[i] - older_stats[r].x) * older_stats[r].y;
        x[i] = older_stats[r].y * (grad[i] * gain[i] - means[2 * r] - xh * means[2 * r + 1]);
      }
      store_pack_once(dx_rows + row * p.dx.row_stride, x);
    }
    __syncthreads();
    if (turn >= 1) fetch_turn(turn - 1 + stages, older);
    collect_sums<2 * R>(sums, buffer[turn % 2]);
#pragma unroll
    for (int n = 0; n < 2 * R; ++n) means[n] = sums[n] / width;
    stage = stage + 1 == stages ? 0 : stage + 1;
  }

  if (SUMS && mine) {
    float* const partial = p.partials + static_cast<int64_t>(blockIdx.x) * 2 * width + column;
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      partial[i] = scale_sum[i];
      partial[width + i] = shift_sum[i];
    }
  }
}

// modulated: P and Q are those of grad * m (for weight and bias where every token has its own m), and nothing else.
// P and Q lie in shared memory, so that the width is not bounded by registers.
template <Access A>
__global__ void __launch_bounds__(kMostAnyThreads)
    backward_any(const LayerNormBackward p, const Segments segments, const bool per_token, const bool sums,
                 const bool modulated) {
  extern __shared__ float scale_sum[];  // P, then Q, each [width]
  __shared__ float buffer[2][64];
  const int width = static_cast<int>(p.shape.width), step = kPack * blockDim.x;
  float* const shift_sum = scale_sum + width;
  const int64_t segment = blockIdx.x / segments.chunks;
  const int64_t batch = per_token ? segment : segment / p.shape.rows;
  const int64_t first_token = per_token ? 0 : segment % p.shape.rows * segments.tokens;
  for (int at = threadIdx.x; at < width; at += blockDim.x) scale_sum[at] = shift_sum[at] = 0.f;
  __syncthreads();

  int parity = 0;
  for (int row = blockIdx.x % segments.chunks; row < segments.tokens; row += segments.chunks, parity ^= 1) {
    const int64_t token = first_token + row, modulation_row = token * p.shape.rows / p.shape.tokens;
    float xh[kPack], g[kPack], gain[kPack], means[2] = {};
    for (int first = 0; first < width; first += step) {
      load_normed<A>(p, batch, token, first, xh);
      load_columns<A>(g, p.grad, batch, token, first, width, 0.f);
      load_gain<A>(p, batch, modulation_row, first, !modulated, gain);
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        const int column = column_of<A>(first, i);
        const float summed = modulated ? g[i] * gain[i] : g[i];
        if (column < width) {
          scale_sum[column] += summed * xh[i];
          shift_sum[column] += summed;
        }
        means[0] += g[i] * gain[i];
        means[1] += g[i] * gain[i] * xh[i];
      }
    }
    block_sum<2>(means, buffer[parity]);
    if (modulated) continue;
    const float rstd = p.stats[batch * p.shape.tokens + token].y;
    for (int first = 0; first < width; first += step) {
      load_normed<A>(p, batch, token, first, xh);
      load_columns<A>(g, p.grad, batch, token, first, width, 0.f);
      if (p.dx.data != nullptr) {
        load_gain<A>(p, batch, modulation_row, first, true, gain);
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
          gain[i] = rstd * (g[i] * gain[i] - means[0] / width - xh[i] * (means[1] / width));
        }
        store_columns<A>(p.dx, batch, token, first, width, gain);
      }
      if (per_token && p.dscale.data != nullptr) {
        load_columns<A>(gain, p.weight, 0, 0, first, width, 1.f);
#pragma unroll
        for (int i = 0; i < kPack; ++i) xh[i] *= gain[i];
        load_columns<A>(gain, p.bias, 0, 0, first, width, 0.f);
#pragma unroll
        for (int i = 0; i < kPack; ++i) g[i] *= xh[i] + gain[i];
        store_columns<A>(p.dscale, batch, token, first, width, g);
      }
    }
  }

  if (!sums) return;
  __syncthreads();
  float* const partial = p.partials + static_cast<int64_t>(blockIdx.x) * 2 * width;
  for (int at = threadIdx.x; at < width; at += blockDim.x) {
    partial[at] = scale_sum[at];
    partial[width + at] = shift_sum[at];
  }
}

int blocks_per_multiprocessor(int threads) { return threads <= 256 ? 3 : threads <= 384 ? 2 : 1; }

// Shapes alone decide, so that the workspace and every kernel agree. A chunk's partial sums cost 16 bytes a column, a
// row of it 6: fewer than 8 rows a chunk would not pay.
Segments segments_of(const Shape& shape) {
  return cut(shape, blocks_per_multiprocessor(threads_for(shape.width)), 8);
}

// false: the ring does not fit this GPU, or a row is wider than 768 threads.
template <typename T, int R, bool SUMS, int THREADS, int BLOCKS>
bool launch_rows(const LayerNormBackward& p, const Segments& segments, cudaStream_t stream, cudaError_t* error) {
  const int threads = threads_for(p.shape.width);
  const int64_t stage_bytes = Ring<T, 2 * R>::stage_bytes(threads);
  const int stages = stages_that_fit(stage_bytes, 2, 5, BLOCKS);
  if (stages == 0) return false;
  const int bytes = static_cast<int>(stages * stage_bytes);
  auto kernel = backward_rows<T, R, SUMS, THREADS, BLOCKS>;
  *error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (*error != cudaSuccess) return true;
  kernel<<<static_cast<unsigned>(segments.blocks()), threads, bytes, stream>>>(p, segments, stages);
  *error = cudaGetLastError();
  return true;
}

template <typename T, bool SUMS>
bool launch_rows(const LayerNormBackward& p, const Segments& segments, cudaStream_t stream, cudaError_t* error) {
  constexpr int kRows = sizeof(T) == 4 ? 1 : 2;  // float32 packs take twice the registers
  const int threads = threads_for(p.shape.width);
  if (threads <= 256) return launch_rows<T, 2 * kRows, SUMS, 256, 2>(p, segments, stream, error);
  if (threads <= 384) return launch_rows<T, kRows, SUMS, 384, 1>(p, segments, stream, error);
  if (threads <= 640) return launch_rows<T, kRows, SUMS, 640, 1>(p, segments, stream, error);
  if (threads <= 768) return launch_rows<T, 1, SUMS, 768, 1>(p, segments, stream, error);
  return false;
}

template <typename T>
bool launch_rows(const LayerNormBackward& p, bool sums, const Segments& segments, cudaStream_t stream,
                 cudaError_t* error) {
  return sums ? launch_rows<T, true>(p, segments, stream, error) : launch_rows<T, false>(p, segments, stream, error);
}

bool launch_rows(const LayerNormBackward& p, bool sums, const Segments& segments, cudaStream_t stream,
                 cudaError_t* error) {
  switch (p.x.dtype) {
    case Dtype::float32: return launch_rows<float>(p, sums, segments, stream, error);
    case Dtype::float16: return launch_rows<__half>(p, sums, segments, stream, error);
    default: return launch_rows<__nv_bfloat16>(p, sums, segments, stream, error);
  }
}

cudaError_t launch_any(const LayerNormBackward& p, bool sums, bool modulated, const Segments& segments,
                       cudaStream_t stream) {
  bool vectors = p.shape.width % kPack == 0;
  for (const Array& a : {p.grad, p.x, p.scale, p.weight, p.bias, p.scale_table, p.dx, p.dscale}) {
    vectors = vectors && aligned(a);
  }
  const auto blocks = static_cast<unsigned>(segments.blocks());
  const int threads = std::min(threads_for(p.shape.width), kMostAnyThreads);
  const int bytes = 2 * static_cast<int>(p.shape.width * sizeof(float));
  auto kernel = vectors ? backward_any<Access::pieces> : backward_any<Access::strided>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  kernel<<<blocks, threads, bytes, stream>>>(p, segments, row_per_token(p.shape), sums, modulated);
  return cudaGetLastError();
}

}  // namespace

int64_t layer_norm_backward_partials(const Shape& shape) { return segments_of(shape).blocks() * 2 * shape.width; }

cudaError_t layer_norm_modulate_backward(const LayerNormBackward& p, cudaStream_t stream) {
  const bool per_token = row_per_token(p.shape);
  const bool rows_wanted = p.dscale.data != nullptr || p.dshift.data != nullptr;
  const bool tables_wanted = p.dscale_table != nullptr || p.dshift_table != nullptr;
  const bool affine_wanted = p.dweight != nullptr || p.dbias != nullptr;
  const bool sums = tables_wanted || (!per_token && (rows_wanted || affine_wanted));
  const Segments segments = segments_of(p.shape);
  const bool empty = p.shape.batch * p.shape.tokens * p.shape.width == 0;
  cudaError_t error = cudaSuccess;
  if (!empty) {
    const bool vectors = p.shape.width % kPack == 0 && aligned(p.x) && aligned(p.grad) && aligned(p.dx);
    const bool one_dtype = p.x.dtype == p.grad.dtype;
    if (per_token || !vectors || !one_dtype || !launch_rows(p, sums, segments, stream, &error)) {
      error = launch_any(p, sums, false, segments, stream);
    }
  }

  ColumnSums totals = {};
  totals.partials = p.partials;
  totals.segments = segments.count;
  totals.chunks = empty ? 0 : segments.chunks;
  totals.width = static_cast<int>(p.shape.width);
  totals.weight = p.weight;
  totals.bias = p.bias;
  totals.scale_table = p.scale_table;
  totals.dscale_table = p.dscale_table;
  totals.dshift_table = p.dshift_table;
  totals.rows = 1;
  if (!per_token) {
    totals.rows = p.shape.rows;
    totals.scale = p.scale;
    totals.dscale = p.dscale;
    totals.dshift = p.dshift;
    totals.dweight = p.dweight;
    totals.dbias = p.dbias;
  }
  if (error == cudaSuccess && sums) error = add_column_sums<2>(totals, stream);
  if (error != cudaSuccess || !per_token || !affine_wanted) return error;

  // Every token has its own m: weight and bias need sums of grad * m, which P and Q cannot give. Another pass.
  if (!empty) error = launch_any(p, true, true, segments, stream);
  totals.modulated = true;
  totals.dscale_table = totals.dshift_table = nullptr;
  totals.dweight = p.dweight;
  totals.dbias = p.dbias;
  return error == cudaSuccess ? add_column_sums<2>(totals, stream) : error;
}

}  // namespace adaptiveload
