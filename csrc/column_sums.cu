// The second, small kernel of a backward pass: adds the chunks' partial sums, always in the same order.
//
// A block owns 32 columns; its eight warps each add every eighth chunk, then warp 0 adds the eight. Without sums over
// segments each segment has its own blocks; with them a block walks through all segments.
#include "column_sums.cuh"

#include "pack.cuh"

namespace adaptiveload {
namespace {

constexpr int kColumns = 32;
constexpr int kSlices = 8;

template <int K>
__global__ void __launch_bounds__(kColumns* kSlices) column_sums(const ColumnSums p, const bool over_segments) {
  __shared__ float slices[K][kSlices][kColumns];
  const int lane = threadIdx.x % kColumns, slice = threadIdx.x / kColumns;
  const int column_blocks = (p.width + kColumns - 1) / kColumns;
  const int column = static_cast<int>(blockIdx.x % column_blocks) * kColumns + lane;
  const bool mine = column < p.width;
  const int64_t first = over_segments ? 0 : blockIdx.x / column_blocks;
  const int64_t last = over_segments ? p.segments : first + 1;
  const bool adds = slice == 0 && mine;
  const float weight = adds ? element(p.weight, 0, 0, column, 1.f) : 0.f;
  const float bias = adds ? element(p.bias, 0, 0, column, 0.f) : 0.f;
  const float table = adds ? element(p.scale_table, 0, 0, column, 0.f) : 0.f;
  float scale_total = 0.f, shift_total = 0.f, weight_total = 0.f, bias_total = 0.f;

  for (int64_t segment = first; segment < last; ++segment) {
    float sums[K] = {};
    if (mine) {
      for (int chunk = slice; chunk < p.chunks; chunk += kSlices) {
        const float* at = p.partials + (segment * p.chunks + chunk) * K * p.width + column;
#pragma unroll
        for (int k = 0; k < K; ++k) sums[k] += at[k * p.width];
      }
    }
#pragma unroll
    for (int k = 0; k < K; ++k) slices[k][slice][lane] = sums[k];
    __syncthreads();
    if (adds) {
#pragma unroll
      for (int k = 0; k < K; ++k) {
        for (int s = 1; s < kSlices; ++s) sums[k] += slices[k][s][lane];
      }
      const int64_t batch = segment / p.rows, row = segment % p.rows;
      const float shift = K == 2 ? sums[K - 1] : 0.f;
      const float scale = sums[0] * weight + shift * bias;
      if (p.dscale.data != nullptr) set_element(p.dscale, batch, row, column, scale);
      if (p.dshift.data != nullptr) set_element(p.dshift, batch, row, column, shift);
      const float m = p.modulated ? 1.f : 1.f + element(p.scale, batch, row, column, 0.f) + table;
      scale_total += scale;
      shift_total += shift;
      weight_total += m * sums[0];
      bias_total += m * shift;
    }
    __syncthreads();
  }
  if (!adds) return;
  if (p.dscale_table != nullptr) p.dscale_table[column] = scale_total;
  if (p.dshift_table != nullptr) p.dshift_table[column] = shift_total;
  if (p.dweight != nullptr) p.dweight[column] = weight_total;
  if (p.dbias != nullptr) p.dbias[column] = bias_total;
}

}  // namespace

template <int K>
cudaError_t add_column_sums(const ColumnSums& p, cudaStream_t stream) {
  const bool over_segments = p.dscale_table || p.dshift_table || p.dweight || p.dbias;
  const int64_t column_blocks = (p.width + kColumns - 1) / kColumns;
  const int64_t blocks = column_blocks * (over_segments ? 1 : p.segments);
  if (blocks == 0) return cudaSuccess;
  column_sums<K><<<static_cast<unsigned>(blocks), kColumns * kSlices, 0, stream>>>(p, over_segments);
  return cudaGetLastError();
}

cudaError_t check_device() {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, column_sums<1>);
  cudaGetLastError();  // an answer, not a failure for the next launch to report
  return error;
}

template cudaError_t add_column_sums<1>(const ColumnSums& p, cudaStream_t stream);
template cudaError_t add_column_sums<2>(const ColumnSums& p, cudaStream_t stream);

}  // namespace adaptiveload
