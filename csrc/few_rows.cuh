// How does a backward pass take few rows in one kernel? A second one for the sums over rows would take longer.
//
// Some blocks own columns of a segment and make their sums. On Hopper and later a cluster of blocks shares the rows, and
// its first block adds what the others leave in its shared memory; before, one block has all rows. Where something is
// summed over a row, too, other blocks of the same kernel own a few rows each and ask for all of them at once, without a
// ring: x and the gradient are read twice, once from the cache. Nobody waits for another block, but in its cluster.
#pragma once

#include "column_sums.cuh"
#include "launch.cuh"
#include "modulation.cuh"
#include "rows.cuh"

namespace adaptiveload {

constexpr int64_t kFewRows = 1024;     // without clusters; more read twice take longer than two kernels
constexpr int64_t kFewClusterRows = 4096;  // with them, and so many elements as each operation says
constexpr int64_t kFewWidth = 2048;    // wider ones too: on an H200 12 us for 11 at 512 rows of 3,072, 26 for 19 at
                                       // 1,024 of 5,120
constexpr int64_t kFewSegments = 4;
constexpr int kFewThreads = kFewWidth / kPack;  // of a block, at most
constexpr int kClusterBlocks = 8;      // as many as every GPU allows
constexpr int kClusterPacks = 8, kLonePacks = 2;  // of columns, of a block

// Blocks: first those that own columns, `column_blocks` clusters or blocks of a segment, then those that own rows.
struct FewRows {
  Segments rows;      // of R rows a block
  int column_blocks;  // 0: no sums are wanted
  bool clusters;

  unsigned blocks() const {
    const int64_t cluster = clusters ? kClusterBlocks : 1;
    const int64_t row_clusters = (rows.blocks() + cluster - 1) / cluster;
    return static_cast<unsigned>((rows.count * column_blocks + row_clusters) * cluster);
  }
};

// Segments of `rows` rows a block; 0: no blocks own rows.
inline Segments cut_to_rows(const Shape& shape, int rows) {
  Segments segments = cut(shape, 1, 1);
  segments.chunks = rows == 0 ? 0 : (segments.tokens + rows - 1) / rows;
  return segments;
}
inline FewRows few_rows_grid(const Shape& shape, int rows_of_block, bool sums, bool clusters) {
  const int64_t columns = (clusters ? kClusterPacks : kLonePacks) * kPack;
  const int column_blocks = sums ? static_cast<int>((shape.width + columns - 1) / columns) : 0;
  return {cut_to_rows(shape, rows_of_block), column_blocks, clusters};
}

// Are there few enough rows for one kernel? total: are sums over all segments wanted? `kernel` says whether in clusters,
// and then `elements` are few.
inline bool few_rows(const Shape& shape, bool total, const void* kernel, int64_t elements, bool* clusters) {
  const int64_t segments = shape.batch * shape.rows, rows = shape.batch * shape.tokens;
  if (row_per_token(shape) || segments > (total ? 1 : kFewSegments)) return false;
  if (prepare(kernel, clusters) != cudaSuccess) return false;
  return *clusters ? rows <= kFewClusterRows && rows * shape.width <= elements : rows <= kFewRows;
}

// In clusters, if the grid is cut for them.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_few(void (*kernel)(Parameters...), const FewRows& grid, int threads, cudaStream_t stream,
                       Arguments&&... arguments) {
  if (!grid.clusters) return launch_early(kernel, grid.blocks(), threads, 0, stream, std::forward<Arguments>(arguments)...);
  return launch_clusters(kernel, grid.blocks(), threads, kClusterBlocks, stream, std::forward<Arguments>(arguments)...);
}

// The columns of a block that owns some: its threads (THREADS, if that is known) go through the rows side by side, a
// pack each.
template <int THREADS = 0>
struct FewColumns {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  static constexpr int kBlocks = 1, kPacks = kLonePacks;
#else
  static constexpr int kBlocks = kClusterBlocks, kPacks = kClusterPacks;
#endif
  static constexpr int kColumns = kPacks * kPack;
  int width, first, mine, slots = (THREADS > 0 ? THREADS : static_cast<int>(blockDim.x)) / kPacks;
  int step = slots * kBlocks, first_row;

  __device__ __forceinline__ static unsigned blocks(const FewRows& grid) {
    return static_cast<unsigned>(grid.rows.count) * grid.column_blocks * kBlocks;
  }
  __device__ __forceinline__ static Place place(const FewRows& grid, unsigned rows) {
    return Place({grid.rows.count, grid.rows.tokens, grid.column_blocks}, blockIdx.x / kBlocks, rows);
  }
  __device__ __forceinline__ FewColumns(const Place& at, int width)
      : width(width), first(static_cast<int>(at.chunk) * kColumns), mine(first + threadIdx.x % kPacks * kPack),
        first_row(blockIdx.x % kBlocks * slots + threadIdx.x / kPacks) {}

  __device__ __forceinline__ int column() const { return min(mine, width - kPack); }

  // Adds up each thread's sums of its pack's columns over the cluster, and gives those of column c to `write(c, sums)`.
  template <int K, typename Write>
  __device__ __forceinline__ void add(float (&sums)[K][kPack], const Write& write) const {
    __shared__ float parts[kFewThreads / 32][K][kColumns];  // of my warps
    __shared__ float totals[kBlocks][K][kColumns];          // of the blocks, used in the first one
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32, rank = blockIdx.x % kBlocks;
#pragma unroll
    for (int k = 0; k < K; ++k) {
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
#pragma unroll
        for (int offset = kPacks; offset < 32; offset *= 2) sums[k][i] += __shfl_xor_sync(~0u, sums[k][i], offset);
        if (lane < kPacks) parts[threadIdx.x / 32][k][lane * kPack + i] = sums[k][i];
      }
    }
    __syncthreads();
    cluster_has_begun();
    for (int at = threadIdx.x; at < K * kColumns; at += blockDim.x) {
      float sum = 0.f;
      for (int warp = 0; warp < warps; ++warp) sum += parts[warp][at / kColumns][at % kColumns];
      store_in_first_block(&totals[rank][at / kColumns][at % kColumns], sum);
    }
    wait_for_cluster();
    if (rank > 0) return;
    for (int c = threadIdx.x; c < min(kColumns, width - first); c += blockDim.x) {
      float total[K + 2] = {};
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int k = 0; k < K; ++k) total[k] += totals[block][k][c];
      }
      write(first + c, total);
    }
  }
};

// The rest is for the norms. Op has the operands and says how many rows a thread of those that own columns asks for at
// once (kTurn), how many blocks should fit a multiprocessor (kBlocks), what all blocks read (bring_gain), what a row of my columns is (Row: bring, load; read gives xh and g, the gradient of what follows the
// norm), what g is multiplied by (load_gain), and what becomes of a column's sums, of g * xh and, if kSums = 2, of g.

template <typename Op>
__device__ __forceinline__ void few_columns(const typename Op::Operands& p, const ColumnSums& sums_of,
                                            const FewRows& grid) {
  constexpr int R = Op::kTurn;
  const Place at = FewColumns<>::place(grid, p.shape.rows);
  const FewColumns<> columns(at, static_cast<int>(p.shape.width));
  float sums[Op::kSums][kPack] = {}, xh[kPack], g[kPack];
  for (int first = columns.first_row; first < grid.rows.tokens; first += R * columns.step) {
    typename Op::Row rows[R];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (first + r * columns.step >= grid.rows.tokens) break;
      rows[r].load(p, at, first + r * columns.step, columns.column());
    }
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (first + r * columns.step >= grid.rows.tokens) break;
      rows[r].read(xh, g);
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        sums[0][i] += g[i] * xh[i];
        if (Op::kSums > 1) sums[Op::kSums - 1][i] += g[i];
      }
    }
  }
  let_next_kernel_start();
  columns.add(sums, [&](int c, float(&totals)[Op::kSums + 2]) { Op::write(sums_of, grid, at, c, totals); });
}

// dx = rstd * (g * gain - mean(g * gain) - xh * mean(g * gain * xh)), the second term with kMean.
template <typename Op, int R>
__global__ void __launch_bounds__(kFewThreads, Op::kBlocks)
    backward_few(const typename Op::Operands p, const ColumnSums sums_of, const FewRows grid) {
  constexpr int kMeans = Op::kMean ? 2 : 1;
  __shared__ float buffer[R][kMeans * kFewThreads / 32];
  const unsigned owners = FewColumns<>::blocks(grid);
  Op::bring_gain(p, grid);
  if (blockIdx.x < owners) {
    cluster_begins();
    wait_for_previous_kernel();
    return few_columns<Op>(p, sums_of, grid);
  }
  if (blockIdx.x - owners >= grid.rows.count * grid.rows.chunks) return;  // fills a cluster
  const Place at(grid.rows, blockIdx.x - owners, p.shape.rows);
  const int width = static_cast<int>(p.shape.width), first_row = at.chunk * R, last_row = grid.rows.tokens - 1;
  const int column = min(static_cast<int>(threadIdx.x) * kPack, width - kPack);
  const bool mine = static_cast<int>(threadIdx.x) * kPack < width;
  typename Op::Row rows[R];
#pragma unroll
  for (int r = 0; r < R; ++r) Op::Row::bring(p, at, min(first_row + r, last_row), column);
  wait_for_previous_kernel();
#pragma unroll
  for (int r = 0; r < R; ++r) rows[r].load(p, at, min(first_row + r, last_row), column);
  float gain[kPack], means[R][kMeans], xh[kPack], g[kPack];
  Op::load_gain(p, at, gain);
  const WarpSums<kMeans> joint{Group(blockDim.x)};
#pragma unroll
  for (int r = 0; r < R; ++r) {
    rows[r].read(xh, g);
    float sum = 0.f, product_sum = 0.f;
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      sum += g[i] * gain[i];
      product_sum += g[i] * gain[i] * xh[i];
    }
    means[r][0] = mine ? product_sum : 0.f;
    if (Op::kMean) means[r][kMeans - 1] = mine ? sum : 0.f;
    joint.post(means[r], buffer[r]);
  }
  __syncthreads();
  let_next_kernel_start();
#pragma unroll
  for (int r = 0; r < R; ++r) {
    joint.add(means[r], buffer[r]);
    const float gx_mean = means[r][0] / width, g_mean = Op::kMean ? means[r][kMeans - 1] / width : 0.f;
    rows[r].read(xh, g);
#pragma unroll
    for (int i = 0; i < kPack; ++i) g[i] = rows[r].rstd() * (g[i] * gain[i] - g_mean - xh[i] * gx_mean);
    if (mine && p.dx.data != nullptr && first_row + r <= last_row) {
      store_pack(Op::Row::dx(p, at, first_row + r) + column, g);
    }
  }
}

}  // namespace adaptiveload
