// out = x + y * factor with factor = gate + gate_table (1 without both), and its gradients
//   dy = grad * factor, dgate = sum grad * y over the rows of a segment; that of x is grad itself.
//
// Nothing is summed over a row, so a block owns some columns, R rows at a time, the factor in registers: 6 bytes an
// element in 16-bit types forward, and 6 backward (4 without dgate), where it walks down the rows of a segment. The
// sums over rows stay in registers and end as one partial sum per block, which column_sums.cu adds in a fixed order.
// The *_any kernels take one row at a time: any dtypes and alignment, and a gate row per token.
#include <initializer_list>

#include "column_sums.cuh"
#include "launch.cuh"
#include "modulation.cuh"
#include "rows.cuh"

namespace adaptiveload {
namespace {

// The best of some 60 combinations on an H200. Forward, small blocks of few rows each come and go, as in a plain
// elementwise kernel, and keep memory busiest. Backward, each block ends with a partial sum, so there are only as many
// as it takes.
constexpr int kForwardThreads = 192;
constexpr int kForwardRows = 2;
constexpr int kBackwardThreads = 384;

// Rows of a turn: enough loads in flight, and no more registers than there are.
template <typename T>
constexpr int kBackwardRows = sizeof(T) == 4 ? 2 : 4;

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

Grid forward_grid(const Shape& shape) {
  Grid grid = grid_of(shape, kForwardThreads, 1, 1);
  grid.segments.chunks = std::max(1, (grid.segments.tokens + kForwardRows - 1) / kForwardRows);
  return grid;
}
// Shapes alone decide, so that the workspace and every kernel agree.
Grid backward_grid(const Shape& shape) { return grid_of(shape, kBackwardThreads, 1, 8); }

// Hides a value's origin: the compiler would otherwise keep the addresses of all columns over all rows, and spill.
__device__ __forceinline__ int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// One turn of R rows, all of it asked for at once: the factor last, since the rows come from further away.
template <typename T>
__global__ void __launch_bounds__(kForwardThreads, 4) forward_rows(const GateForward p, const Segments segments,
                                                            const int column_blocks) {
  constexpr int R = kForwardRows;
  const Place at(segments, blockIdx.x / column_blocks, p.shape.rows);
  const int first_column = blockIdx.x % column_blocks * blockDim.x * kPack;
  const int column = column_of<Access::pieces>(first_column, 0), row = at.chunk * R;
  wait_for_previous_kernel();
  if (column >= p.shape.width) return;
  const T* const x_rows = row_of<const T>(p.x, at.batch, at.first + row) + column;
  const T* const y_rows = row_of<const T>(p.y, at.batch, at.first + row) + column;
  T* const out_rows = row_of<T>(p.out, at.batch, at.first + row) + column;
  Pack<T> x_packs[R], y_packs[R];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    if (row + r >= segments.tokens) break;
    x_packs[r] = load_pack_once(x_rows + r * p.x.row_stride);
    y_packs[r] = load_pack_once(y_rows + r * p.y.row_stride);
  }
  float factor[kPack];
  load_factor<Access::neighbours>(p, at.batch, at.modulation_row, first_column, factor);
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
__global__ void __launch_bounds__(kBackwardThreads, 2) backward_rows(const GateBackward p, const Segments segments,
                                                             const int column_blocks) {
  constexpr int R = kBackwardRows<T>;
  const Place at(segments, blockIdx.x / column_blocks, p.shape.rows);
  const int first_column = blockIdx.x % column_blocks * blockDim.x * kPack;
  const int width = static_cast<int>(p.shape.width), column = column_of<Access::pieces>(first_column, 0);
  wait_for_previous_kernel();
  if (column >= width) return;
  float factor[kPack], sum[kPack] = {};
  load_factor<Access::neighbours>(p, at.batch, at.modulation_row, first_column, factor);
  const T* const grad_rows = row_of<const T>(p.grad, at.batch, at.first) + column;
  const T* const y_rows = SUMS ? row_of<const T>(p.y, at.batch, at.first) + column : nullptr;
  T* const dy_rows = p.dy.data == nullptr ? nullptr : row_of<T>(p.dy, at.batch, at.first) + column;

  for (int row = at.chunk * R; row < segments.tokens; row += segments.chunks * R) {
    Pack<T> grad_packs[R], y_packs[R];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (row + r >= segments.tokens) break;
      grad_packs[r] = load_pack(grad_rows + (row + r) * p.grad.row_stride);
      if (SUMS) y_packs[r] = load_pack(y_rows + (row + r) * p.y.row_stride);
    }
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (row + r >= segments.tokens) break;
      float grad[kPack], y[kPack];
      grad_packs[r].read(grad);
      if (SUMS) {
        y_packs[r].read(y);
#pragma unroll
        for (int i = 0; i < kPack; ++i) sum[i] += grad[i] * y[i];
      }
      if (dy_rows == nullptr) continue;
#pragma unroll
      for (int i = 0; i < kPack; ++i) grad[i] *= factor[i];
      store_pack(dy_rows + (row + r) * p.dy.row_stride, grad);
    }
  }
  let_next_kernel_start();
  if (SUMS) {
    float* const partial = p.partials + static_cast<int64_t>(blockIdx.x / column_blocks) * width;
#pragma unroll
    for (int i = 0; i < kPack; ++i) partial[column + i] = sum[i];
  }
}

template <Access A>
__global__ void __launch_bounds__(kBackwardThreads) backward_any(const GateBackward p, const Segments segments,
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

template <typename T>
cudaError_t launch_rows(const GateForward& p, const Grid& grid, cudaStream_t stream) {
  return launch_early(forward_rows<T>, grid.blocks(), grid.threads, 0, stream, p, grid.segments, grid.column_blocks);
}
template <typename T>
cudaError_t launch_rows(const GateBackward& p, const Grid& grid, bool sums, cudaStream_t stream) {
  auto kernel = sums ? backward_rows<T, true> : backward_rows<T, false>;
  return launch_early(kernel, grid.blocks(), grid.threads, 0, stream, p, grid.segments, grid.column_blocks);
}

bool all_aligned(const Shape& shape, std::initializer_list<Array> arrays) {
  return shape.width % kPack == 0 && std::all_of(arrays.begin(), arrays.end(), aligned);
}

}  // namespace

int64_t gate_backward_partials(const Shape& shape) { return backward_grid(shape).segments.blocks() * shape.width; }

cudaError_t gate_residual_forward(const GateForward& p, cudaStream_t stream) {
  if (p.shape.batch * p.shape.tokens * p.shape.width == 0) return cudaSuccess;
  const Grid grid = forward_grid(p.shape);
  const bool per_token = row_per_token(p.shape);
  const bool one_dtype = p.x.dtype == p.y.dtype && p.x.dtype == p.out.dtype;
  if (!per_token && one_dtype && all_aligned(p.shape, {p.x, p.y, p.out})) {
    switch (p.x.dtype) {
      case Dtype::float32: return launch_rows<float>(p, grid, stream);
      case Dtype::float16: return launch_rows<__half>(p, grid, stream);
      default: return launch_rows<__nv_bfloat16>(p, grid, stream);
    }
  }
  const bool pieces = all_aligned(p.shape, {p.x, p.y, p.out, p.gate, p.gate_table});
  auto kernel = pieces ? forward_any<Access::pieces> : forward_any<Access::strided>;
  kernel<<<grid.blocks(), grid.threads, 0, stream>>>(p, grid.segments, grid.column_blocks, per_token);
  return cudaGetLastError();
}

cudaError_t gate_residual_backward(const GateBackward& p, cudaStream_t stream) {
  const Grid grid = backward_grid(p.shape);
  const bool per_token = row_per_token(p.shape);
  const bool sums = p.dgate_table != nullptr || (!per_token && p.dgate.data != nullptr);
  const bool empty = p.shape.batch * p.shape.tokens * p.shape.width == 0;
  const bool one_dtype = (p.dy.data == nullptr || p.dy.dtype == p.grad.dtype) && (!sums || p.y.dtype == p.grad.dtype);
  cudaError_t error = cudaSuccess;
  if (empty) {
    // Nothing to read; the sums below become zeros.
  } else if (!per_token && one_dtype && all_aligned(p.shape, {p.grad, p.y, p.dy})) {
    switch (p.grad.dtype) {
      case Dtype::float32: error = launch_rows<float>(p, grid, sums, stream); break;
      case Dtype::float16: error = launch_rows<__half>(p, grid, sums, stream); break;
      default: error = launch_rows<__nv_bfloat16>(p, grid, sums, stream);
    }
  } else {
    const bool pieces = all_aligned(p.shape, {p.grad, p.y, p.gate, p.gate_table, p.dy, p.dgate});
    auto kernel = pieces ? backward_any<Access::pieces> : backward_any<Access::strided>;
    kernel<<<grid.blocks(), grid.threads, 0, stream>>>(p, grid.segments, grid.column_blocks, per_token, sums);
    error = cudaGetLastError();
  }
  if (error != cudaSuccess || !sums) return error;

  ColumnSums totals = {};
  totals.partials = p.partials;
  totals.segments = grid.segments.count;
  totals.rows = per_token ? 1 : p.shape.rows;
  totals.chunks = empty ? 0 : grid.segments.chunks;
  totals.width = static_cast<int>(p.shape.width);
  if (!per_token) totals.dgate = p.dgate;
  totals.dgate_table = p.dgate_table;
  return add_column_sums<1>(totals, stream);
}

}  // namespace adaptiveload
