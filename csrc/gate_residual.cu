// out = x + y * factor with factor = gate + gate_table (1 without both), and its gradients
//   dy = grad * factor, dgate = sum grad * y over the rows of a segment; that of x is grad itself.
//
// Nothing is summed over a row. Forward, a block owns some columns of R rows, the factor in registers: 6 bytes an
// element in 16-bit types. Backward (6, and 4 without dgate), groups of threads walk down whole rows, which reach them
// ahead of time through shared memory. The sums over rows stay in registers and end as one partial sum per block, which
// column_sums.cu adds in a fixed order.
// The *_any kernels take one row at a time: any dtypes and alignment, and a gate row per token.
#include <initializer_list>

#include "feed.cuh"
#include "gate_residual_few.cuh"
#include "launch.cuh"
#include "modulation.cuh"

namespace adaptiveload {
namespace {

// The best of some 60 combinations on an H200. Forward, small blocks of few rows each come and go, as in a plain
// elementwise kernel, and keep memory busiest. Backward, each block ends with a partial sum, so there is one a
// multiprocessor.
constexpr int kForwardThreads = 192;
constexpr int kForwardRows = 2, kFewForwardRows = 4;  // the latter of few rows, in 16-bit types
constexpr int64_t kFewForwardElements = 1024 * 1536;
constexpr int kBackwardThreads = 768;  // and those that feed them
constexpr int kBackwardStages = 3;     // rows of a group under way: of one group alone; of several, 2 (at 1536 columns
                                       // 0.97 of the roof for 0.89, at 3072 0.99 for 0.95)
constexpr int kAnyThreads = 384;

// Blocks lie side by side over the columns, then over the chunks of a segment.
struct Grid {
  Segments segments;
  int threads, column_blocks;

  unsigned blocks() const { return static_cast<unsigned>(segments.blocks() * column_blocks); }
};

Grid grid_of(const Shape& shape, int most_threads, int64_t blocks_per_multiprocessor, int fewest_rows) {
  const int64_t packs = (shape.width + kPack - 1) / kPack;
  const int column_blocks = static_cast<int>(std::max<int64_t>(1, (packs + most_threads - 1) / most_threads));
  const int threads = threads_for((shape.width + column_blocks - 1) / column_blocks);
  return {cut(shape, blocks_per_multiprocessor * (most_threads / threads), fewest_rows), threads, column_blocks};
}

Grid forward_grid(const Shape& shape, int rows) {
  Grid grid = grid_of(shape, kForwardThreads, 1, 1);
  grid.segments.chunks = std::max(1, (grid.segments.tokens + rows - 1) / rows);
  return grid;
}
// Shapes alone decide, so that the workspace and every kernel agree.
Grid any_backward_grid(const Shape& shape) { return grid_of(shape, kAnyThreads, 1, 8); }
Pipeline backward_pipeline(const Shape& shape) {
  const int threads = threads_for(shape.width);
  const int groups = std::clamp(kBackwardThreads / threads, 1, kMostGroups);
  return {groups, threads, groups > 1 ? 2 : kBackwardStages};
}
Segments backward_segments(const Shape& shape) { return cut(shape, 1, backward_pipeline(shape).groups); }

// Hides a value's origin: the compiler would otherwise keep the addresses of all columns over all rows, and spill.
__device__ __forceinline__ int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// One turn of R rows, all of it asked for at once: the factor last, since the rows come from further away. Loads that
// leave the caches first take 5 to 7% longer, stores do not. The next kernel is let in at once: on an H200 10.4 us for 10.7
// at 4,096 rows of 1,536 columns, 138.9 for 139.2 at 65,536. Of few rows, the cache is asked for them while the previous
// kernel ends: on an H200 at 256, 512 and 1,024 rows of 1,536 columns 2.1, 2.4 and 3.3 us for 2.3, 3.0 and 4.1.
template <typename T, int R, bool FEW>
__global__ void __launch_bounds__(kForwardThreads, 4) forward_rows(const GateForward p, const Segments segments,
                                                            const int column_blocks) {
  const Place at(segments, blockIdx.x / column_blocks, p.shape.rows);
  const int first_column = blockIdx.x % column_blocks * blockDim.x * kPack;
  const int column = column_of<Access::pieces>(first_column, 0), row = at.chunk * R;
  let_next_kernel_start();
  if (column >= p.shape.width) return;
  const T* const x_rows = row_of<const T>(p.x, at.batch, at.first + row) + column;
  const T* const y_rows = row_of<const T>(p.y, at.batch, at.first + row) + column;
#pragma unroll
  for (int r = 0; FEW && r < R; ++r) {
    if (row + r >= segments.tokens) break;
    bring_to_cache(x_rows + r * p.x.row_stride);
    bring_to_cache(y_rows + r * p.y.row_stride);
  }
  wait_for_previous_kernel();
  T* const out_rows = row_of<T>(p.out, at.batch, at.first + row) + column;
  Pack<T> x_packs[R], y_packs[R];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    if (row + r >= segments.tokens) break;
    x_packs[r] = load_pack(x_rows + r * p.x.row_stride);
    y_packs[r] = load_pack(y_rows + r * p.y.row_stride);
  }
  float factor[kPack];
  load_factor<FEW ? Access::either : Access::neighbours>(p, at.batch, at.modulation_row, first_column, factor);
#pragma unroll
  for (int r = 0; r < R; ++r) {
    if (row + r >= segments.tokens) break;
    float x[kPack], y[kPack];
    x_packs[r].read(x);
    y_packs[r].read(y);
#pragma unroll
    for (int i = 0; i < kPack; ++i) x[i] += y[i] * factor[i];
    store_pack_once(out_rows + r * p.out.row_stride, x);
  }
}

template <Access A>
__global__ void __launch_bounds__(kForwardThreads) forward_any(const GateForward p, const Segments segments,
                                                        const int column_blocks, const bool per_token) {
  const Place at(segments, blockIdx.x / column_blocks, per_token ? 1 : p.shape.rows);
  const int first_column = blockIdx.x % column_blocks * blockDim.x * kPack;
  const int width = static_cast<int>(p.shape.width);
  for (int row = at.chunk; row < segments.tokens; row += segments.chunks) {
    const int64_t token = at.first + row;
    const int first = opaque(first_column);
    float x[kPack], y[kPack], factor[kPack];
    load_columns<A>(x, p.x, at.batch, token, first, width, 0.f);
    load_columns<A>(y, p.y, at.batch, token, first, width, 0.f);
    load_factor<A>(p, at.batch, per_token ? token : at.modulation_row, first, factor);
#pragma unroll
    for (int i = 0; i < kPack; ++i) x[i] += y[i] * factor[i];
    store_columns<A>(p.out, at.batch, token, first, width, x);
  }
}

template <typename T, bool SUMS>
__global__ void __launch_bounds__(kBackwardThreads + kFeeders, 1)
    backward_rows(const GateBackward p, const Segments segments, const Pipeline pipeline) {
  using RowFeed = Feed<T, SUMS ? 2 : 1, 1>;  // grad, y
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ typename RowFeed::Signals signals;
  const int width = static_cast<int>(p.shape.width), groups = pipeline.groups;
  const Place at(segments, blockIdx.x, p.shape.rows);
  RowFeed feed(memory, signals, pipeline, width, Runs(segments, groups, at.chunk, nullptr));
  const Group& group = feed.group;
  const T* const grad_rows = row_of<const T>(p.grad, at.batch, at.first);
  const T* const y_rows = SUMS ? row_of<const T>(p.y, at.batch, at.first) : nullptr;
  const auto fetch = [&](int row, int stage, int index) {
    feed.open(stage, index, SUMS ? 2 : 1);
    feed.copy(stage, index, 0, grad_rows + row * p.grad.row_stride);
    if (SUMS) feed.copy(stage, index, 1, y_rows + row * p.y.row_stride);
  };

  feed.start();
  wait_for_previous_kernel();
  if (feed.only_feeds()) return feed.feed_all(fetch);
  feed.begin(fetch);
  const int column = feed.column(0);
  const bool mine = static_cast<int>(group.thread) * kPack < width;
  const bool dy_wanted = mine && p.dy.data != nullptr;
  T* dy = row_of<T>(p.dy, at.batch, at.first + feed.row) + column;
  const int64_t step = segments.chunks * groups * p.dy.row_stride;
  float factor[kPack], sums[1][kPack] = {};
  load_factor<Access::either>(p, at.batch, at.modulation_row, group.first_column(), factor);

  while (feed.wait()) {
    Pack<T> grad_pack = feed.read(0, 0), y_pack = {};
    if (SUMS) y_pack = feed.read(1, 0);
    group.wait();
    feed.leave(fetch);
    float grad[kPack], y[kPack];
    grad_pack.read(grad);
    y_pack.read(y);
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      if (SUMS) sums[0][i] += grad[i] * y[i];
      grad[i] *= factor[i];
    }
    if (dy_wanted) store_pack(dy, grad);
    dy += step;
  }
  let_next_kernel_start();

  if (!SUMS) return;
  if (groups > 1) add_groups(sums, reinterpret_cast<float*>(memory), group, groups);
  if (group.index == 0 && mine) store_pack(p.partials + static_cast<int64_t>(blockIdx.x) * width + column, sums[0]);
}

template <Access A>
__global__ void __launch_bounds__(kAnyThreads) backward_any(const GateBackward p, const Segments segments,
                                                         const int column_blocks, const bool per_token,
                                                         const bool sums) {
  const Place at(segments, blockIdx.x / column_blocks, per_token ? 1 : p.shape.rows);
  const int first_column = blockIdx.x % column_blocks * blockDim.x * kPack;
  const int width = static_cast<int>(p.shape.width);
  float sum[kPack] = {};
  for (int row = at.chunk; row < segments.tokens; row += segments.chunks) {
    const int64_t token = at.first + row;
    const int first = opaque(first_column);
    float grad[kPack], y[kPack], factor[kPack];
    load_columns<A>(grad, p.grad, at.batch, token, first, width, 0.f);
    load_columns<A>(y, p.y, at.batch, token, first, width, 0.f);
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      y[i] *= grad[i];
      sum[i] += y[i];
    }
    if (per_token && p.dgate.data != nullptr) {
      store_columns<A>(p.dgate, at.batch, token, first, width, y);
    }
    if (p.dy.data == nullptr) continue;
    load_factor<A>(p, at.batch, per_token ? token : at.modulation_row, first, factor);
#pragma unroll
    for (int i = 0; i < kPack; ++i) grad[i] *= factor[i];
    store_columns<A>(p.dy, at.batch, token, first, width, grad);
  }
  if (!sums) return;
  float* const partial = p.partials + static_cast<int64_t>(blockIdx.x / column_blocks) * width;
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    const int column = column_of<A>(first_column, i);
    if (column < width) partial[column] = sum[i];
  }
}

template <typename T, int R, bool FEW>
cudaError_t launch_rows(const GateForward& p, cudaStream_t stream) {
  const Grid grid = forward_grid(p.shape, R);
  return launch_early(forward_rows<T, R, FEW>, grid.blocks(), grid.threads, 0, stream, p, grid.segments,
                      grid.column_blocks);
}
template <typename T>
cudaError_t launch_rows(const GateForward& p, cudaStream_t stream) {
  const bool few = p.shape.batch * p.shape.tokens * p.shape.width <= kFewForwardElements;
  return few ? launch_rows<T, 2 * kFewForwardRows / int{sizeof(T)}, true>(p, stream)
             : launch_rows<T, kForwardRows, false>(p, stream);
}
// false: the rows do not fit into the shared memory of this GPU, or are too wide.
template <typename T, bool SUMS>
bool launch_rows(const GateBackward& p, cudaStream_t stream, cudaError_t* error) {
  Pipeline pipeline = backward_pipeline(p.shape);
  const int64_t stage_bytes = Feed<T, SUMS ? 2 : 1, 1>::stage_bytes(pipeline.groups, p.shape.width);
  pipeline.stages = stages_that_fit(stage_bytes, pipeline.stages, 1);
  if (pipeline.stages == 0 || pipeline.threads > kBackwardThreads) return false;
  const int threads = pipeline.groups * pipeline.threads;
  const int64_t sums_bytes = SUMS ? int64_t{threads - pipeline.threads} * kPack * int64_t{sizeof(float)} : 0;
  const int bytes = static_cast<int>(std::max(pipeline.stages * stage_bytes, sums_bytes));
  const Segments segments = backward_segments(p.shape);
  auto kernel = backward_rows<T, SUMS>;
  *error = launch_fed(kernel, static_cast<unsigned>(segments.blocks()), threads, kFeeders, true, bytes, stream, p,
                      segments, pipeline);
  return true;
}
template <typename T>
bool launch_rows(const GateBackward& p, bool sums, cudaStream_t stream, cudaError_t* error) {
  return sums ? launch_rows<T, true>(p, stream, error) : launch_rows<T, false>(p, stream, error);
}

bool all_aligned(const Shape& shape, std::initializer_list<Array> arrays) {
  return shape.width % kPack == 0 && std::all_of(arrays.begin(), arrays.end(), aligned);
}

// Do these arrays allow rows in 16-byte pieces?
bool rows_in_pieces(const GateBackward& p, bool sums) {
  const bool one_dtype = (p.dy.data == nullptr || p.dy.dtype == p.grad.dtype) && (!sums || p.y.dtype == p.grad.dtype);
  return !row_per_token(p.shape) && one_dtype && all_aligned(p.shape, {p.grad, p.y, p.dy});
}

// false: nothing was launched, since rows do not come in pieces, or as above.
bool launch_rows(const GateBackward& p, bool sums, cudaStream_t stream, cudaError_t* error) {
  if (!rows_in_pieces(p, sums)) return false;
  switch (p.grad.dtype) {
    case Dtype::float32: return launch_rows<float>(p, sums, stream, error);
    case Dtype::float16: return launch_rows<__half>(p, sums, stream, error);
    default: return launch_rows<__nv_bfloat16>(p, sums, stream, error);
  }
}

bool sums_wanted(const GateBackward& p) {
  return p.dgate_table.data != nullptr || (!row_per_token(p.shape) && p.dgate.data != nullptr);
}

// Does one kernel do it all, without partial sums? In clusters, where there are some.
bool few(const GateBackward& p, bool* clusters) {
  const auto kernel = reinterpret_cast<const void*>(gate_backward_few<float, kFewGateThreads>);
  return sums_wanted(p) && rows_in_pieces(p, true) &&
         few_rows(p.shape, p.dgate_table.data != nullptr, kernel, kFewGateElements, clusters);
}

template <int THREADS>
cudaError_t launch_few(const GateBackward& p, const ColumnSums& sums_of, bool clusters, cudaStream_t stream) {
  const FewRows grid = few_rows_grid(p.shape, 0, true, clusters);
  auto kernel = gate_backward_few<__nv_bfloat16, THREADS>;
  if (p.grad.dtype == Dtype::float32) kernel = gate_backward_few<float, THREADS>;
  if (p.grad.dtype == Dtype::float16) kernel = gate_backward_few<__half, THREADS>;
  return launch_few(kernel, grid, THREADS, stream, p, sums_of, grid);
}
cudaError_t launch_few(const GateBackward& p, const ColumnSums& sums_of, bool clusters, cudaStream_t stream) {
  return p.shape.batch * p.shape.tokens <= kFewerGateRows
             ? launch_few<kFewerGateThreads>(p, sums_of, clusters, stream)
             : launch_few<kFewGateThreads>(p, sums_of, clusters, stream);
}

}  // namespace

int64_t gate_backward_partials(const GateBackward& p) {
  bool clusters = false;
  if (!sums_wanted(p) || few(p, &clusters)) return 0;
  const int64_t blocks = std::max(backward_segments(p.shape).blocks(), any_backward_grid(p.shape).segments.blocks());
  return blocks * p.shape.width;
}

cudaError_t gate_residual_forward(const GateForward& p, cudaStream_t stream) {
  if (p.shape.batch * p.shape.tokens * p.shape.width == 0) return cudaSuccess;
  const bool per_token = row_per_token(p.shape);
  const bool one_dtype = p.x.dtype == p.y.dtype && p.x.dtype == p.out.dtype;
  if (!per_token && one_dtype && all_aligned(p.shape, {p.x, p.y, p.out})) {
    switch (p.x.dtype) {
      case Dtype::float32: return launch_rows<float>(p, stream);
      case Dtype::float16: return launch_rows<__half>(p, stream);
      default: return launch_rows<__nv_bfloat16>(p, stream);
    }
  }
  const Grid grid = forward_grid(p.shape, kForwardRows);
  const bool pieces = all_aligned(p.shape, {p.x, p.y, p.out, p.gate, p.gate_table});
  auto kernel = pieces ? forward_any<Access::pieces> : forward_any<Access::strided>;
  kernel<<<grid.blocks(), grid.threads, 0, stream>>>(p, grid.segments, grid.column_blocks, per_token);
  return cudaGetLastError();
}

cudaError_t gate_residual_backward(const GateBackward& p, cudaStream_t stream) {
  const bool per_token = row_per_token(p.shape), sums = sums_wanted(p);
  const bool empty = p.shape.batch * p.shape.tokens * p.shape.width == 0;
  Segments segments = backward_segments(p.shape);
  ColumnSums totals = {};
  totals.partials = p.partials;
  totals.segments = segments.count;
  totals.rows = per_token ? 1 : p.shape.rows;
  totals.width = static_cast<int>(p.shape.width);
  if (!per_token) totals.dgate = p.dgate;
  totals.dgate_table = p.dgate_table;
  cudaError_t error = cudaSuccess;
  bool clusters = false;
  if (!empty && few(p, &clusters)) return launch_few(p, totals, clusters, stream);
  if (!empty && !launch_rows(p, sums, stream, &error)) {
    const Grid grid = any_backward_grid(p.shape);
    const bool pieces = all_aligned(p.shape, {p.grad, p.y, p.gate, p.gate_table, p.dy, p.dgate});
    auto kernel = pieces ? backward_any<Access::pieces> : backward_any<Access::strided>;
    kernel<<<grid.blocks(), grid.threads, 0, stream>>>(p, grid.segments, grid.column_blocks, per_token, sums);
    segments = grid.segments;
    error = cudaGetLastError();
  }
  if (error != cudaSuccess || !sums) return error;
  totals.chunks = empty ? 0 : segments.chunks;
  return add_column_sums<1>(totals, stream);
}

}  // namespace adaptiveload
