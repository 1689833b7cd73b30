// Gradients of h = x + y * factor and normed = LN(h)[* weight + bias] * m + shift; see the forward. With d = d_residual:
//   total = d + rstd * (g - mean(g) - xh * mean(g * xh)),  xh = (h - mean) * rstd,  g = grad * m * weight,
//   dx = total, dy = total * factor,
// and over the rows of a segment P = sum grad * xh, Q = sum grad, G = sum total * y, from which column_sums.cu makes all
// others.
//
// backward_rows (in the .cuh) is the fast kernel; backward_any takes one row at a time, any dtypes and alignment, and a
// modulation row per token.
#include "column_sums.cuh"
#include "gate_residual_layer_norm_modulate_backward.cuh"

namespace adaptiveload {
namespace {

// Of 12 combinations over five widths on an H200 the best that spills on no architecture. More than two blocks a
// multiprocessor are slower, since every block ends with a partial sum.
constexpr int kPacks = 2, kTurnRows = 1;  // packs of a thread in a row, rows of a turn
constexpr int kFewPacks = 1, kFewTurnRows = 2;  // of few rows, in 16-bit types: on an H200 at 256, 1,024 and 4,096 rows of 1,536 columns
                                                // 8.4, 12.6 and 27.5 us for 9.6, 14.7 and 28.7; 3% more at 65,536
constexpr int64_t kFewElements = 8192 * 1536;
constexpr int kMostThreads = 384;   // of a block: rows of up to 384 * 2 * 8 = 6144 columns
constexpr int kBusyThreads = 320;   // of a multiprocessor, but at most kMostBlocks
constexpr int kMostBlocks = 2;
constexpr int kStages = 3;          // turns under way

// Which sums over rows are wanted: P and Q, and G.
struct Wanted {
  bool norm_sums, gate_sum;

  __host__ __device__ int count() const { return 2 * norm_sums + gate_sum; }
};

// modulated: P and Q are those of grad * m (for weight and bias where every token has its own m), and nothing else.
// P, Q and G lie in shared memory, so that the width is not bounded by registers.
template <Access A>
__global__ void __launch_bounds__(kMostAnyThreads)
    backward_any(const GatedNormBackward p, const Segments segments, const Wanted wanted, const bool per_token,
                 const bool modulated) {
  extern __shared__ float sums[];  // P, Q, G, each [width]
  __shared__ float buffer[2][2 * kMostAnyThreads / 32];
  const int width = static_cast<int>(p.shape.width), step = kPack * blockDim.x;
  const Place at(segments, blockIdx.x, per_token ? 1 : p.shape.rows);
  for (int c = threadIdx.x; c < 3 * width; c += blockDim.x) sums[c] = 0.f;
  __syncthreads();

  int parity = 0;
  for (int row = at.chunk; row < segments.tokens; row += segments.chunks, parity ^= 1) {
    const int64_t token = at.first + row, modulation_row = token * p.shape.rows / p.shape.tokens;
    const float2 stats = p.stats[at.batch * p.shape.tokens + token];
    float xh[kPack], g[kPack], term[kPack], means[2] = {};
    const auto load_normed = [&](int first) {
      load_columns<A>(xh, p.residual, at.batch, token, first, width, stats.x);
#pragma unroll
      for (int i = 0; i < kPack; ++i) xh[i] = (xh[i] - stats.x) * stats.y;
      load_columns<A>(g, p.grad, at.batch, token, first, width, 0.f);
    };
    for (int first = 0; first < width; first += step) {
      load_normed(first);
      load_gain<A>(p, at.batch, modulation_row, first, !modulated, term);
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        const int column = column_of<A>(first, i);
        const float summed = modulated ? g[i] * term[i] : g[i];
        if (column < width) {
          sums[column] += summed * xh[i];
          sums[width + column] += summed;
        }
        means[0] += g[i] * term[i];
        means[1] += g[i] * term[i] * xh[i];
      }
    }
    block_sum<2, kMostAnyThreads>(means, buffer[parity]);
    if (modulated) continue;
    for (int first = 0; first < width; first += step) {
      load_normed(first);
      if (per_token && p.dscale.data != nullptr) {
        float normed[kPack];
        load_columns<A>(normed, p.weight, 0, 0, first, width, 1.f);
        load_columns<A>(term, p.bias, 0, 0, first, width, 0.f);
#pragma unroll
        for (int i = 0; i < kPack; ++i) normed[i] = g[i] * (xh[i] * normed[i] + term[i]);
        store_columns<A>(p.dscale, at.batch, token, first, width, normed);
      }
      load_gain<A>(p, at.batch, modulation_row, first, true, term);
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        g[i] = stats.y * (g[i] * term[i] - means[0] / width - xh[i] * (means[1] / width));
      }
      load_columns<A>(term, p.grad_residual, at.batch, token, first, width, 0.f);
#pragma unroll
      for (int i = 0; i < kPack; ++i) g[i] += term[i];
      if (p.dx.data != nullptr) store_columns<A>(p.dx, at.batch, token, first, width, g);
      load_columns<A>(xh, p.y, at.batch, token, first, width, 0.f);
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        const int column = column_of<A>(first, i);
        xh[i] *= g[i];
        if (column < width) sums[2 * width + column] += xh[i];
      }
      if (per_token && p.dgate.data != nullptr) store_columns<A>(p.dgate, at.batch, token, first, width, xh);
      if (p.dy.data == nullptr) continue;
      load_factor<A>(p, at.batch, modulation_row, first, term);
#pragma unroll
      for (int i = 0; i < kPack; ++i) g[i] *= term[i];
      store_columns<A>(p.dy, at.batch, token, first, width, g);
    }
  }

  __syncthreads();
  float* const partial = p.partials + static_cast<int64_t>(blockIdx.x) * wanted.count() * width;
  for (int c = threadIdx.x; c < width; c += blockDim.x) {
    if (wanted.norm_sums) {
      partial[c] = sums[c];
      partial[width + c] = sums[width + c];
    }
    if (wanted.gate_sum) partial[(wanted.count() - 1) * width + c] = sums[2 * width + c];
  }
}

bool few(const Shape& shape) {
  return shape.batch * shape.tokens * shape.width <= kFewElements && threads_for(shape.width) <= kMostThreads;
}
int row_threads(const Shape& shape) {
  const int packs = few(shape) ? kFewPacks : kPacks;
  return threads_for((shape.width + packs - 1) / packs);
}
int row_blocks(const Shape& shape) { return std::clamp(kBusyThreads / row_threads(shape), 1, kMostBlocks); }
// Of few rows: is one block a multiprocessor meant, and then alone there?
bool alone(const Shape& shape) { return few(shape) && row_blocks(shape) == 1; }

// Shapes alone decide, so that the workspace and every kernel agree.
Segments segments_of(const Shape& shape) {
  return with_equal_turns(cut(shape, row_blocks(shape), 2), few(shape) ? kFewTurnRows : kTurnRows);
}

// false: the ring does not fit this GPU, or a row is too wide.
template <typename T, int R, int NV, bool NORM_SUMS, bool GATE_SUM>
bool launch_rows(const GatedNormBackward& p, const Segments& segments, cudaStream_t stream, cudaError_t* error) {
  const int threads = row_threads(p.shape);
  const int64_t stage_bytes = Ring<T, (3 + GATE_SUM) * R, NV>::stage_bytes(p.shape.width);
  const int stages = stages_that_fit(stage_bytes, kStages, row_blocks(p.shape));
  if (stages == 0 || threads > kMostThreads) return false;
  // Alone by its shared memory, so that column_sums can let the next call in: on an H200 at 256, 1,024 and 4,096 rows of
  // 1,536 columns 6.8, 11.1 and 25.4 us for 7.7, 12.1 and 26.1; with room for a second block 8.4, 14.3 and 30.1.
  const int64_t half = device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor) / 2;
  const int bytes = static_cast<int>(std::max(stages * stage_bytes, alone(p.shape) ? half : 0));
  auto kernel = backward_rows<T, R, NV, NORM_SUMS, GATE_SUM, kMostThreads>;
  *error = launch_early(kernel, static_cast<unsigned>(segments.blocks()), threads, bytes, stream, p, segments, stages);
  return true;
}

template <typename T, bool NORM_SUMS, bool GATE_SUM>
bool launch_rows(const GatedNormBackward& p, const Segments& segments, cudaStream_t stream, cudaError_t* error) {
  if (!few(p.shape)) return launch_rows<T, kTurnRows, kPacks, NORM_SUMS, GATE_SUM>(p, segments, stream, error);
  constexpr int R = 2 * kFewTurnRows / static_cast<int>(sizeof(T));
  return launch_rows<T, R, kFewPacks, NORM_SUMS, GATE_SUM>(p, segments, stream, error);
}

template <typename T>
bool launch_rows(const GatedNormBackward& p, const Wanted& wanted, const Segments& segments, cudaStream_t stream,
                 cudaError_t* error) {
  if (wanted.norm_sums && wanted.gate_sum) return launch_rows<T, true, true>(p, segments, stream, error);
  if (wanted.norm_sums) return launch_rows<T, true, false>(p, segments, stream, error);
  if (wanted.gate_sum) return launch_rows<T, false, true>(p, segments, stream, error);
  return launch_rows<T, false, false>(p, segments, stream, error);
}

bool launch_rows(const GatedNormBackward& p, const Wanted& wanted, const Segments& segments, cudaStream_t stream,
                 cudaError_t* error) {
  switch (p.residual.dtype) {
    case Dtype::float32: return launch_rows<float>(p, wanted, segments, stream, error);
    case Dtype::float16: return launch_rows<__half>(p, wanted, segments, stream, error);
    default: return launch_rows<__nv_bfloat16>(p, wanted, segments, stream, error);
  }
}

cudaError_t launch_any(const GatedNormBackward& p, const Wanted& wanted, bool modulated, const Segments& segments,
                       cudaStream_t stream) {
  bool vectors = p.shape.width % kPack == 0;
  for (const Array& a : {p.grad_residual, p.grad, p.residual, p.y, p.gate, p.gate_table, p.scale, p.weight, p.bias,
                         p.scale_table, p.dx, p.dy, p.dgate, p.dscale}) {
    vectors = vectors && aligned(a);
  }
  const auto blocks = static_cast<unsigned>(segments.blocks());
  const int threads = std::min(threads_for(p.shape.width), kMostAnyThreads);
  const int bytes = 3 * static_cast<int>(p.shape.width * sizeof(float));
  auto kernel = vectors ? backward_any<Access::pieces> : backward_any<Access::strided>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  kernel<<<blocks, threads, bytes, stream>>>(p, segments, wanted, row_per_token(p.shape), modulated);
  return cudaGetLastError();
}

}  // namespace

int64_t gated_norm_backward_partials(const Shape& shape) { return segments_of(shape).blocks() * 3 * shape.width; }

cudaError_t gate_residual_layer_norm_modulate_backward(const GatedNormBackward& p, cudaStream_t stream) {
  const bool per_token = row_per_token(p.shape);
  const bool rows_wanted = p.dscale.data != nullptr || p.dshift.data != nullptr;
  const bool tables_wanted = p.dscale_table.data != nullptr || p.dshift_table.data != nullptr;
  const bool affine_wanted = p.dweight.data != nullptr || p.dbias.data != nullptr;
  const Wanted wanted = {tables_wanted || (!per_token && (rows_wanted || affine_wanted)),
                         p.dgate_table.data != nullptr || (!per_token && p.dgate.data != nullptr)};
  const Segments segments = segments_of(p.shape);
  const bool empty = p.shape.batch * p.shape.tokens * p.shape.width == 0;
  cudaError_t error = cudaSuccess;
  if (!empty) {
    bool rows = p.shape.width % kPack == 0 && !per_token;
    for (const Array& a : {p.grad_residual, p.grad, p.residual, p.y, p.dx, p.dy}) {
      rows = rows && aligned(a) && (a.data == nullptr || a.dtype == p.residual.dtype);
    }
    if (!rows || !launch_rows(p, wanted, segments, stream, &error)) {
      error = launch_any(p, wanted, false, segments, stream);
    }
  }

  if (error != cudaSuccess) return error;

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
  totals.dgate_table = p.dgate_table;
  totals.rows = 1;
  totals.let_next = wanted.count() < 3 || alone(p.shape);
  if (!per_token) {
    totals.rows = p.shape.rows;
    totals.scale = p.scale;
    totals.dscale = p.dscale;
    totals.dshift = p.dshift;
    totals.dgate = p.dgate;
    totals.dweight = p.dweight;
    totals.dbias = p.dbias;
  }
  switch (wanted.count()) {
    case 0: break;
    case 1: error = add_column_sums<1>(totals, stream); break;
    case 2: error = add_column_sums<2>(totals, stream); break;
    default: error = add_column_sums<3>(totals, stream);
  }
  if (error != cudaSuccess || !per_token || !affine_wanted) return error;

  // Every token has its own m: weight and bias need sums of grad * m, which P and Q cannot give. Another pass.
  if (!empty) error = launch_any(p, {true, false}, true, segments, stream);
  totals.modulated = true;
  totals.dscale_table = totals.dshift_table = totals.dgate_table = {};
  totals.dweight = p.dweight;
  totals.dbias = p.dbias;
  return error == cudaSuccess ? add_column_sums<2>(totals, stream) : error;
}

}  // namespace adaptiveload
