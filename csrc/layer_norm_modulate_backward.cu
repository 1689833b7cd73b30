// Gradients of y = LN(x)[* weight + bias] * m + shift, with m = 1 + scale + scale_table:
//   dx = rstd * (g - mean(g) - xh * mean(g * xh)),  xh = (x - mean) * rstd,  g = grad * m * weight,
// and over the rows of a segment P = sum grad * xh, Q = sum grad, from which column_sums.cu makes all others.
//
// backward_rows: a block walks down rows of one segment, a thread owns NV packs of eight columns, keeping their P and Q
// in registers while it writes dx, so x and grad are read once: 6 bytes an element in 16-bit types, where a separate
// reduction over rows would read them again (10). Both come ahead of time through a ring in shared memory; one barrier
// for R rows. Each block writes its P and Q once; nothing is added atomically, so every run gives the same bits.
// backward_any: the same, one row at a time, for any dtypes and alignment and for a modulation row per token.
#include "column_sums.cuh"
#include "rows.cuh"

namespace adaptiveload {
namespace {

// The best of 10 combinations on an H200, over the six shapes of recipes/kernel_speed.py.
constexpr int kTurnRows = 1;        // rows of a turn
constexpr int kPacks = 2;           // packs of a thread in a row: fewer threads reduce faster
constexpr int kMostThreads = 384;   // of a block: rows of up to 384 * 2 * 8 = 6144 columns
constexpr int kBusyThreads = 384;   // of a multiprocessor
constexpr int kStages = 6;          // turns under way

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

template <typename T, int R, int NV, bool SUMS, int THREADS>
__global__ void __launch_bounds__(THREADS)
    backward_rows(const LayerNormBackward p, const Segments segments, const int stages) {
  extern __shared__ __align__(16) unsigned char ring_rows[];
  __shared__ uint64_t arrivals[Ring<T, 2 * R, NV>::kMostStages];
  __shared__ float buffer[2][2 * R * THREADS / 32];
  const int width = static_cast<int>(p.shape.width);
  const float one_by_width = 1.f / width;
  const Ring<T, 2 * R, NV> ring = {ring_rows, arrivals, stages, width};  // R rows of x, then R of grad
  const Place at(segments, blockIdx.x, p.shape.rows);
  const T* const x_rows = row_of<const T>(p.x, at.batch, at.first);
  const T* const grad_rows = row_of<const T>(p.grad, at.batch, at.first);
  T* const dx_rows = p.dx.data != nullptr ? row_of<T>(p.dx, at.batch, at.first) : nullptr;
  const float2* const stats_rows = p.stats + at.batch * p.shape.tokens + at.first;
  const int step = segments.chunks * R;
  bool mine[NV];
#pragma unroll
  for (int v = 0; v < NV; ++v) mine[v] = static_cast<int>(v * blockDim.x + threadIdx.x) * kPack < width;
  const auto fetch_turn = [&](int row, int stage) {
    const int count = min(R, segments.tokens - row);
    ring.open(stage, 2 * count);
    ring.fetch(stage, 0, x_rows + row * p.x.row_stride, p.x.row_stride, count);
    ring.fetch(stage, R, grad_rows + row * p.grad.row_stride, p.grad.row_stride, count);
    ring.close();
  };
  const auto load_stats = [&](int row, float2(&stats)[R]) {
#pragma unroll
    for (int r = 0; r < R; ++r) stats[r] = stats_rows[min(row + r, segments.tokens - 1)];
  };

  ring.start();
  const int first_row = at.chunk * R;
  for (int stage = 0; stage < stages; ++stage) fetch_turn(first_row + stage * step, stage);
  float2 next_stats[R];  // mean, rstd
  load_stats(first_row, next_stats);
  float gain[NV][kPack], scale_sum[NV][kPack] = {}, shift_sum[NV][kPack] = {};
#pragma unroll
  for (int v = 0; v < NV; ++v) {
    load_gain<Access::neighbours>(p, at.batch, at.modulation_row, v * blockDim.x * kPack, true, gain[v]);
  }

  int stage = 0, round = 0, parity = 0;
  for (int row = first_row; row < segments.tokens; row += step, parity ^= 1) {
    float2 stats[R];
#pragma unroll
    for (int r = 0; r < R; ++r) stats[r] = next_stats[r];
    load_stats(row + step, next_stats);
    ring.wait(stage, round);
    Pack<T> x_packs[R][NV], grad_packs[R][NV];
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int v = 0; v < NV; ++v) {
        x_packs[r][v] = ring.read(stage, r, v);
        grad_packs[r][v] = ring.read(stage, R + r, v);
        // Rows beyond the segment hold anything, also NaN, and must not enter the sums over rows.
        if (row + r >= segments.tokens) x_packs[r][v] = grad_packs[r][v] = Pack<T>{};
      }
    }
    float x[kPack], grad[kPack], means[2 * R] = {};  // of g and of g * xh
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int v = 0; v < NV; ++v) {
        x_packs[r][v].read(x);
        grad_packs[r][v].read(grad);
        float sum = 0.f, product_sum = 0.f;
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
          const float xh = (x[i] - stats[r].x) * stats[r].y, g = grad[i] * gain[v][i];
          if (SUMS) {
            scale_sum[v][i] += grad[i] * xh;
            shift_sum[v][i] += grad[i];
          }
          sum += g;
          product_sum += g * xh;
        }
        means[2 * r] += mine[v] ? sum : 0.f;
        means[2 * r + 1] += mine[v] ? product_sum : 0.f;
      }
    }
    block_sum<2 * R, THREADS>(means, buffer[parity]);
    fetch_turn(row + stages * step, stage);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (dx_rows == nullptr || row + r >= segments.tokens) break;
      const float g_mean = means[2 * r] * one_by_width, gx_mean = means[2 * r + 1] * one_by_width;
#pragma unroll
      for (int v = 0; v < NV; ++v) {
        keep_packed(x_packs[r][v]);
        keep_packed(grad_packs[r][v]);
        x_packs[r][v].read(x);
        grad_packs[r][v].read(grad);
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
          const float xh = (x[i] - stats[r].x) * stats[r].y;
          x[i] = stats[r].y * (grad[i] * gain[v][i] - g_mean - xh * gx_mean);
        }
        if (mine[v]) store_pack_once(dx_rows + (row + r) * p.dx.row_stride + ring.column(v), x);
      }
    }
    if (++stage == stages) {
      stage = 0;
      ++round;
    }
  }

  if (SUMS) {
    float* const partial = p.partials + static_cast<int64_t>(blockIdx.x) * 2 * width;
#pragma unroll
    for (int v = 0; v < NV; ++v) {
      if (!mine[v]) continue;
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        partial[ring.column(v) + i] = scale_sum[v][i];
        partial[width + ring.column(v) + i] = shift_sum[v][i];
      }
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
  __shared__ float buffer[2][2 * kMostAnyThreads / 32];
  const int width = static_cast<int>(p.shape.width), step = kPack * blockDim.x;
  float* const shift_sum = scale_sum + width;
  const Place at(segments, blockIdx.x, per_token ? 1 : p.shape.rows);
  for (int c = threadIdx.x; c < width; c += blockDim.x) scale_sum[c] = shift_sum[c] = 0.f;
  __syncthreads();

  int parity = 0;
  for (int row = at.chunk; row < segments.tokens; row += segments.chunks, parity ^= 1) {
    const int64_t token = at.first + row, modulation_row = token * p.shape.rows / p.shape.tokens;
    float xh[kPack], g[kPack], gain[kPack], means[2] = {};
    for (int first = 0; first < width; first += step) {
      load_normed<A>(p, at.batch, token, first, xh);
      load_columns<A>(g, p.grad, at.batch, token, first, width, 0.f);
      load_gain<A>(p, at.batch, modulation_row, first, !modulated, gain);
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
    block_sum<2, kMostAnyThreads>(means, buffer[parity]);
    if (modulated) continue;
    const float rstd = p.stats[at.batch * p.shape.tokens + token].y;
    for (int first = 0; first < width; first += step) {
      load_normed<A>(p, at.batch, token, first, xh);
      load_columns<A>(g, p.grad, at.batch, token, first, width, 0.f);
      if (p.dx.data != nullptr) {
        load_gain<A>(p, at.batch, modulation_row, first, true, gain);
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
          gain[i] = rstd * (g[i] * gain[i] - means[0] / width - xh[i] * (means[1] / width));
        }
        store_columns<A>(p.dx, at.batch, token, first, width, gain);
      }
      if (per_token && p.dscale.data != nullptr) {
        load_columns<A>(gain, p.weight, 0, 0, first, width, 1.f);
#pragma unroll
        for (int i = 0; i < kPack; ++i) xh[i] *= gain[i];
        load_columns<A>(gain, p.bias, 0, 0, first, width, 0.f);
#pragma unroll
        for (int i = 0; i < kPack; ++i) g[i] *= xh[i] + gain[i];
        store_columns<A>(p.dscale, at.batch, token, first, width, g);
      }
    }
  }

  if (!sums) return;
  __syncthreads();
  float* const partial = p.partials + static_cast<int64_t>(blockIdx.x) * 2 * width;
  for (int c = threadIdx.x; c < width; c += blockDim.x) {
    partial[c] = scale_sum[c];
    partial[width + c] = shift_sum[c];
  }
}

int row_threads(const Shape& shape) { return threads_for((shape.width + kPacks - 1) / kPacks); }
int row_blocks(const Shape& shape) { return std::max(1, kBusyThreads / row_threads(shape)); }

// Shapes alone decide, so that the workspace and every kernel agree. A chunk's partial sums cost 16 bytes a column, a
// row of it 6: fewer than 8 rows a chunk would not pay.
Segments segments_of(const Shape& shape) { return cut(shape, row_blocks(shape), 8); }

// false: the ring does not fit this GPU, or a row is too wide.
template <typename T, bool SUMS>
bool launch_rows(const LayerNormBackward& p, const Segments& segments, cudaStream_t stream, cudaError_t* error) {
  const int threads = row_threads(p.shape);
  const int64_t stage_bytes = Ring<T, 2 * kTurnRows, kPacks>::stage_bytes(p.shape.width);
  const int stages = stages_that_fit(stage_bytes, kStages, row_blocks(p.shape));
  if (stages == 0 || threads > kMostThreads) return false;
  const int bytes = static_cast<int>(stages * stage_bytes);
  auto kernel = backward_rows<T, kTurnRows, kPacks, SUMS, kMostThreads>;
  *error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (*error != cudaSuccess) return true;
  kernel<<<static_cast<unsigned>(segments.blocks()), threads, bytes, stream>>>(p, segments, stages);
  *error = cudaGetLastError();
  return true;
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
