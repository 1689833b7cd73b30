// The second, small kernel of a backward pass: adds the chunks' partial sums, always in the same order.
//
// A block owns 8 columns of one segment, or of the totals over all segments. Each eight of its threads add every 32nd
// chunk, a thread a column; then warp w adds the 32 sums of column w. On an H200 behind 4,096 rows these small blocks
// take up to 0.6 us less than blocks of 32 columns: they find a place beside those of other kernels.
#include "column_sums.cuh"

#include "launch.cuh"

namespace adaptiveload {
namespace {

constexpr int kColumns = 8;
constexpr int kSlices = 32;
constexpr int kUnroll = 4;  // chunks whose loads wait together

// Sums over the chunks from `first` to `last` that are this warp's: P, Q, G, and, with AFFINE, m * P and m * Q.
template <int K, bool AFFINE>
__device__ __forceinline__ void add_slice(const ColumnSums& p, int64_t first, int64_t last, int column,
                                          float (&sums)[K + 2]) {
  const unsigned slice = threadIdx.x / kColumns, chunks = p.chunks, rows = p.rows;
  const float table = AFFINE ? element(p.scale_table, 0, 0, column, 0.f) : 0.f;
  unsigned segment = slice / chunks, in_segment = slice % chunks;  // counted only where m changes with them
#pragma unroll kUnroll
  for (int64_t chunk = first + slice; chunk < last; chunk += kSlices) {
    const float* const at = p.partials + chunk * K * p.width + column;
    float part[K];
#pragma unroll
    for (int k = 0; k < K; ++k) {
      part[k] = at[k * p.width];
      sums[k] += part[k];
    }
    if (!AFFINE) continue;
    const float scale = p.modulated ? 0.f : element(p.scale, segment / rows, segment % rows, column, 0.f);
    const float m = p.modulated ? 1.f : p.scale_offset + table + scale;
    sums[K] += m * part[0];
    sums[K + 1] += m * part[K > 1];
    segment += (in_segment + kSlices) / chunks;
    in_segment = (in_segment + kSlices) % chunks;
  }
}

// Block (column block, segment); the one after the last segment makes the totals.
template <int K>
__global__ void __launch_bounds__(kColumns* kSlices, 4) column_sums(const ColumnSums p, const int64_t first_segment) {
  __shared__ float slices[K + 2][kSlices][kColumns + 1];
  const int mine = threadIdx.x % kColumns, slice = threadIdx.x / kColumns;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int column_blocks = (p.width + kColumns - 1) / kColumns;
  const int first_column = static_cast<int>(blockIdx.x % column_blocks) * kColumns;
  const int64_t segment = first_segment + blockIdx.x / column_blocks;
  const bool total = segment == p.segments;
  const bool affine = K > 1 && total && (p.dweight.data != nullptr || p.dbias.data != nullptr);
  float sums[K + 2] = {};
  // On an H200 1 to 2 us of the next call, whose blocks come as multiprocessors fall free. Where several of them fit one,
  // they would come in unlike numbers, and the call takes 1 to 4 us more.
  if (p.let_next) let_next_kernel_start();
  wait_for_previous_kernel();
  const int64_t first = total ? 0 : segment * p.chunks, last = total ? p.segments * p.chunks : first + p.chunks;
  if (first_column + mine < p.width && last > first) {
    if (affine) {
      add_slice<K, true>(p, first, last, first_column + mine, sums);
    } else {
      add_slice<K, false>(p, first, last, first_column + mine, sums);
    }
  }
#pragma unroll
  for (int k = 0; k < K + 2; ++k) slices[k][slice][mine] = sums[k];
  __syncthreads();
#pragma unroll
  for (int k = 0; k < K + 2; ++k) {
    sums[k] = slices[k][lane][warp];
#pragma unroll
    for (int offset = 16; offset >= 1; offset /= 2) sums[k] += __shfl_xor_sync(~0u, sums[k], offset);
  }
  const int column = first_column + warp;
  if (lane != 0 || column >= p.width) return;
  write_column<K>(p, total, total ? 0 : segment / p.rows, total ? 0 : segment % p.rows, column, sums);
}

}  // namespace

template <int K>
cudaError_t add_column_sums(const ColumnSums& p, cudaStream_t stream) {
  const bool each = p.dscale.data != nullptr || p.dshift.data != nullptr || p.dgate.data != nullptr;
  const bool total = p.dscale_table.data || p.dshift_table.data || p.dgate_table.data || p.dweight.data || p.dbias.data;
  const int64_t first_segment = each ? 0 : p.segments;
  const int64_t column_blocks = (p.width + kColumns - 1) / kColumns;
  const int64_t blocks = column_blocks * (p.segments - first_segment + total);
  if (blocks == 0) return cudaSuccess;
  return launch_early(column_sums<K>, static_cast<unsigned>(blocks), kColumns * kSlices, 0, stream, p, first_segment);
}

cudaError_t check_device() {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, column_sums<1>);
  cudaGetLastError();  // an answer, not a failure for the next launch to report
  return error;
}

template cudaError_t add_column_sums<1>(const ColumnSums& p, cudaStream_t stream);
template cudaError_t add_column_sums<2>(const ColumnSums& p, cudaStream_t stream);
template cudaError_t add_column_sums<3>(const ColumnSums& p, cudaStream_t stream);

}  // namespace adaptiveload
