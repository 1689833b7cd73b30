// Gradients of layer_norm_modulate and rms_norm_modulate, y = (xh * w + bias) * m + shift with the offsets of w and m:
//   dx = rstd * (g - mean(g) - xh * mean(g * xh)),  xh = (x - mean) * rstd,  g = grad * m * w,
// without mean and mean(g) where rows are not centred, and over the rows of a segment P = sum grad * xh, Q = sum grad,
// from which column_sums.cu makes all others.
//
// layer_norm_modulate_backward.cuh has the kernel for aligned rows of one dtype. backward_any: the same, one row at a
// time, for any dtypes and alignment, and for weight and bias with a modulation row per token.
#include "layer_norm_modulate_backward.cuh"
#include "layer_norm_modulate_few.cuh"

namespace adaptiveload {
namespace {

// xh of my columns.
template <Access A, bool MEAN>
__device__ __forceinline__ void load_normed(const LayerNormBackward& p, int64_t batch, int64_t token, int first,
                                            float (&xh)[kPack]) {
  const float2 stats = load_stats<MEAN>(p.stats, batch * p.shape.tokens + token);
  load_columns<A>(xh, p.x, batch, token, first, static_cast<int>(p.shape.width), stats.x);
#pragma unroll
  for (int i = 0; i < kPack; ++i) xh[i] = (xh[i] - stats.x) * stats.y;
}

// modulated: P and Q are those of grad * m (for weight and bias where every token has its own m), and nothing else.
// P and Q lie in shared memory, so that the width is not bounded by registers.
template <Access A, bool MEAN>
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
      load_normed<A, MEAN>(p, at.batch, token, first, xh);
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
    const float rstd = load_stats<MEAN>(p.stats, at.batch * p.shape.tokens + token).y;
    const float g_mean = MEAN ? means[0] / width : 0.f;
    for (int first = 0; first < width; first += step) {
      load_normed<A, MEAN>(p, at.batch, token, first, xh);
      load_columns<A>(g, p.grad, at.batch, token, first, width, 0.f);
      if (p.dx.data != nullptr) {
        load_gain<A>(p, at.batch, modulation_row, first, true, gain);
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
          gain[i] = rstd * (g[i] * gain[i] - g_mean - xh[i] * (means[1] / width));
        }
        store_columns<A>(p.dx, at.batch, token, first, width, gain);
      }
      if (per_token && p.dscale.data != nullptr) {
        load_columns<A>(gain, p.weight, 0, 0, first, width, 1.f);
#pragma unroll
        for (int i = 0; i < kPack; ++i) xh[i] *= gain[i] + p.weight_offset;
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

Pipeline pipeline_of(const Shape& shape) {
  const int threads = threads_for(shape.width);
  // A group less of narrow rows, for eight registers more a thread: 1% at 1536 columns.
  const int most = row_per_token(shape) || 3 * threads <= kFewerThreads ? kFewerThreads : kMostThreads;
  return {std::clamp(most / threads, 1, kMostGroups), threads, kStages};
}

// Shapes alone decide, so that the workspace and every kernel agree. One block a multiprocessor.
Segments segments_of(const Shape& shape) { return cut(shape, 1, pipeline_of(shape).groups); }

// false: the rows do not fit into the shared memory of this GPU, or are too wide.
template <typename T, bool MEAN, bool SUMS, bool TOKEN, int THREADS>
bool launch_rows(const LayerNormBackward& p, const Segments& segments, cudaStream_t stream, cudaError_t* error) {
  Pipeline pipeline = pipeline_of(p.shape);
  const int64_t stage_bytes = Feed<T, TOKEN ? 3 : 2, 1>::stage_bytes(pipeline.groups, p.shape.width);
  pipeline.stages = stages_that_fit(stage_bytes, kStages, 1);
  if (pipeline.stages == 0 || pipeline.groups * pipeline.threads > THREADS) return false;
  const int threads = pipeline.groups * pipeline.threads;
  const int64_t sums_bytes = SUMS ? int64_t{threads - pipeline.threads} * 2 * kPack * int64_t{sizeof(float)} : 0;
  const int bytes = static_cast<int>(std::max(pipeline.stages * stage_bytes, sums_bytes));
  auto kernel = backward_rows<T, MEAN, SUMS, TOKEN, THREADS>;
  const auto blocks = static_cast<unsigned>(segments.blocks());
  *error = launch_fed(kernel, blocks, threads, kFeeders, true, bytes, stream, p, segments, pipeline);
  return true;
}

template <typename T, bool MEAN>
bool launch_rows(const LayerNormBackward& p, bool sums, const Segments& segments, cudaStream_t stream,
                 cudaError_t* error) {
  if (!sums) return launch_rows<T, MEAN, false, false, kMostThreads>(p, segments, stream, error);
  const Pipeline pipeline = pipeline_of(p.shape);
  if (pipeline.groups * pipeline.threads > kFewerThreads) {
    return launch_rows<T, MEAN, true, false, kMostThreads>(p, segments, stream, error);
  }
  return launch_rows<T, MEAN, true, false, kFewerThreads>(p, segments, stream, error);
}

template <typename T>
bool launch_rows(const LayerNormBackward& p, bool sums, bool token, const Segments& segments, cudaStream_t stream,
                 cudaError_t* error) {
  if constexpr (sizeof(T) == 2) {
    if (token) {
      return sums ? launch_rows<T, true, true, true, kFewerThreads>(p, segments, stream, error)
                  : launch_rows<T, true, false, true, kFewerThreads>(p, segments, stream, error);
    }
  }
  return p.mean ? launch_rows<T, true>(p, sums, segments, stream, error)
                : launch_rows<T, false>(p, sums, segments, stream, error);
}

// Do these arrays allow rows in 16-byte pieces?
bool rows_in_pieces(const LayerNormBackward& p, bool per_token) {
  bool fits = p.shape.width % kPack == 0;
  if (per_token) fits = fits && p.mean && !p.weight.data && !p.bias.data && p.x.dtype != Dtype::float32;
  for (const Array& a : {p.x, p.grad, p.dx}) fits = fits && aligned(a) && (a.data == nullptr || a.dtype == p.x.dtype);
  for (const Array& a : {p.scale, p.dscale}) {
    fits = fits && (!per_token || (aligned(a) && (a.data == nullptr || a.dtype == p.x.dtype)));
  }
  return fits;
}

// false: nothing was launched, since rows do not come in pieces, or as above.
bool launch_rows(const LayerNormBackward& p, bool sums, bool per_token, const Segments& segments, cudaStream_t stream,
                 cudaError_t* error) {
  if (!rows_in_pieces(p, per_token)) return false;
  switch (p.x.dtype) {
    case Dtype::float32: return launch_rows<float>(p, sums, per_token, segments, stream, error);
    case Dtype::float16: return launch_rows<__half>(p, sums, per_token, segments, stream, error);
    default: return launch_rows<__nv_bfloat16>(p, sums, per_token, segments, stream, error);
  }
}

// Which sums over rows are wanted: of segments, or over all?
struct Wanted {
  bool rows, tables, affine, sums;

  explicit Wanted(const LayerNormBackward& p)
      : rows(p.dscale.data != nullptr || p.dshift.data != nullptr),
        tables(p.dscale_table.data != nullptr || p.dshift_table.data != nullptr),
        affine(p.dweight.data != nullptr || p.dbias.data != nullptr),
        sums(tables || (!row_per_token(p.shape) && (rows || affine))) {}
};

// Of few rows.
template <typename T>
constexpr int few_rows_of_block() {
  return 8 / sizeof(T);
}

// Does one kernel do it all, without partial sums?
bool few(const LayerNormBackward& p, bool* clusters) {
  const Wanted wanted(p);
  const auto kernel = reinterpret_cast<const void*>(backward_few<FewNorm<float, true>, few_rows_of_block<float>()>);
  return p.shape.width <= kFewWidth && rows_in_pieces(p, false) &&
         few_rows(p.shape, wanted.tables || wanted.affine, kernel, kFewNormElements, clusters);
}

template <typename T, bool MEAN>
cudaError_t launch_few(const LayerNormBackward& p, const ColumnSums& sums, bool wanted, bool clusters,
                       cudaStream_t stream) {
  constexpr int R = few_rows_of_block<T>();
  const FewRows grid = few_rows_grid(p.shape, R, wanted, clusters);
  return launch_few(backward_few<FewNorm<T, MEAN>, R>, grid, threads_for(p.shape.width), stream, p, sums, grid);
}
template <typename T>
cudaError_t launch_few(const LayerNormBackward& p, const ColumnSums& sums, bool wanted, bool clusters,
                       cudaStream_t stream) {
  return p.mean ? launch_few<T, true>(p, sums, wanted, clusters, stream)
                : launch_few<T, false>(p, sums, wanted, clusters, stream);
}

cudaError_t launch_few(const LayerNormBackward& p, const ColumnSums& sums, bool wanted, bool clusters,
                       cudaStream_t stream) {
  switch (p.x.dtype) {
    case Dtype::float32: return launch_few<float>(p, sums, wanted, clusters, stream);
    case Dtype::float16: return launch_few<__half>(p, sums, wanted, clusters, stream);
    default: return launch_few<__nv_bfloat16>(p, sums, wanted, clusters, stream);
  }
}

template <bool MEAN>
cudaError_t launch_any(const LayerNormBackward& p, bool sums, bool modulated, const Segments& segments,
                       cudaStream_t stream) {
  bool vectors = p.shape.width % kPack == 0;
  for (const Array& a : {p.grad, p.x, p.scale, p.weight, p.bias, p.scale_table, p.dx, p.dscale}) {
    vectors = vectors && aligned(a);
  }
  const auto blocks = static_cast<unsigned>(segments.blocks());
  const int threads = std::min(threads_for(p.shape.width), kMostAnyThreads);
  const int bytes = 2 * static_cast<int>(p.shape.width * sizeof(float));
  auto kernel = vectors ? backward_any<Access::pieces, MEAN> : backward_any<Access::strided, MEAN>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  kernel<<<blocks, threads, bytes, stream>>>(p, segments, row_per_token(p.shape), sums, modulated);
  return cudaGetLastError();
}

cudaError_t launch_any(const LayerNormBackward& p, bool sums, bool modulated, const Segments& segments,
                       cudaStream_t stream) {
  return p.mean ? launch_any<true>(p, sums, modulated, segments, stream)
                : launch_any<false>(p, sums, modulated, segments, stream);
}

}  // namespace

int64_t layer_norm_backward_partials(const LayerNormBackward& p) {
  const Wanted wanted(p);
  bool clusters = false;
  if (!wanted.sums && !wanted.affine) return 0;
  return few(p, &clusters) ? 0 : segments_of(p.shape).blocks() * 2 * p.shape.width;
}

cudaError_t layer_norm_modulate_backward(const LayerNormBackward& given, cudaStream_t stream) {
  LayerNormBackward p = given;
  // A shift per token alone leaves m the same for all tokens, and its gradient is grad itself.
  if (row_per_token(p.shape) && p.scale.data == nullptr) p.shape.rows = 1;
  const bool per_token = row_per_token(p.shape);
  const Wanted wanted(p);
  const bool sums = wanted.sums;
  const Segments segments = segments_of(p.shape);
  const bool empty = p.shape.batch * p.shape.tokens * p.shape.width == 0;
  ColumnSums totals = {};
  totals.partials = p.partials;
  totals.segments = segments.count;
  totals.chunks = empty ? 0 : segments.chunks;
  totals.width = static_cast<int>(p.shape.width);
  totals.scale_offset = p.scale_offset;
  totals.weight_offset = p.weight_offset;
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
  cudaError_t error = cudaSuccess;
  bool clusters = false;
  if (!empty && few(p, &clusters)) return launch_few(p, totals, sums, clusters, stream);
  if (!empty && !launch_rows(p, sums, per_token, segments, stream, &error)) {
    error = launch_any(p, sums, false, segments, stream);
  }
  if (error == cudaSuccess && sums) error = add_column_sums<2>(totals, stream);
  if (error != cudaSuccess || !per_token || !wanted.affine) return error;

  // Every token has its own m: weight and bias need sums of grad * m, which P and Q cannot give. Another pass.
  if (!empty) error = launch_any(p, true, true, segments, stream);
  totals.modulated = true;
  totals.dscale_table = totals.dshift_table = {};
  totals.dweight = p.dweight;
  totals.dbias = p.dbias;
  return error == cudaSuccess ? add_column_sums<2>(totals, stream) : error;
}

}  // namespace adaptiveload
