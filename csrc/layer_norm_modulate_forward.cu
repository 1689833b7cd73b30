// y = LN(x)[* weight + bias] * (1 + scale + scale_table) + shift + shift_table, forward.
//
// forward_rows: a block owns all columns of a few rows, a thread eight columns of each. What scale, shift, tables,
// weight and bias do to a column is one gain and one offset in registers, loaded once, since all rows of a segment
// share them. x comes ahead of time into a ring in shared memory, so that memory is busy while the block reduces:
// x is read once, y written once, 4 bytes an element in 16-bit types.
// forward_any: one row at a time, everything read where it is needed: any dtypes, any alignment, a modulation row per
// token.
// Mean and variance are two passes over registers: E[x^2] - E[x]^2 loses all digits far from zero.
#include "rows.cuh"

namespace adaptiveload {
namespace {

// gain and offset of one column: LN * weight + bias, then * m + shift, is LN * (weight * m) + (bias * m + shift).
template <Access A>
__device__ __forceinline__ void load_affine(const LayerNormForward& p, int64_t batch, int64_t row, int first,
                                            float (&gain)[kPack], float (&offset)[kPack]) {
  const int width = static_cast<int>(p.shape.width);
  float term[kPack];
  load_columns<A>(gain, p.scale, batch, row, first, width, 0.f);
  load_columns<A>(term, p.scale_table, 0, 0, first, width, 0.f);
#pragma unroll
  for (int i = 0; i < kPack; ++i) gain[i] += 1.f + term[i];
  load_columns<A>(offset, p.shift, batch, row, first, width, 0.f);
  load_columns<A>(term, p.shift_table, 0, 0, first, width, 0.f);
#pragma unroll
  for (int i = 0; i < kPack; ++i) offset[i] += term[i];
  load_columns<A>(term, p.bias, 0, 0, first, width, 0.f);
#pragma unroll
  for (int i = 0; i < kPack; ++i) offset[i] += term[i] * gain[i];
  load_columns<A>(term, p.weight, 0, 0, first, width, 1.f);
#pragma unroll
  for (int i = 0; i < kPack; ++i) gain[i] *= term[i];
}

template <typename T, int R, int THREADS, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    forward_rows(const LayerNormForward p, const Segments segments, const int stages) {
  extern __shared__ uint4 ring[];  // [stages][R][pieces][threads]
  __shared__ float buffer[2][32 * R];
  const int width = static_cast<int>(p.shape.width), column = threadIdx.x * kPack;
  const bool mine = column < width;
  const int64_t segment = blockIdx.x / segments.chunks, batch = segment / p.shape.rows;
  const int64_t first = segment % p.shape.rows * segments.tokens;
  const T* const x_rows = row_of<const T>(p.x, batch, first) + column;
  T* const y_rows = row_of<T>(p.y, batch, first) + column;
  const int turns = (segments.tokens + R - 1) / R;
  const int row_pieces = Pack<T>::kPieces * blockDim.x;

  auto fetch_turn = [&](int turn, int stage) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int row = turn * R + r;
      if (mine && row < segments.tokens) {
        fetch(ring + (stage * R + r) * row_pieces, x_rows + row * p.x.row_stride);
      }
    }
    close_group();
  };

  int turn = blockIdx.x % segments.chunks;
  for (int stage = 0; stage < stages; ++stage) fetch_turn(turn + stage * segments.chunks, stage);
  float gain[kPack], offset[kPack];
  load_affine<Access::neighbours>(p, batch, segment % p.shape.rows, 0, gain, offset);

  for (int stage = 0; turn < turns; turn += segments.chunks) {
    wait_for_oldest(stages);
    Pack<T> packs[R];
    float mean[R], squares[R], x[kPack];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      mean[r] = 0.f;
      packs[r] = Pack<T>{};
      if (mine && turn * R + r < segments.tokens) packs[r] = fetched<T>(ring + (stage * R + r) * row_pieces);
      packs[r].read(x);
#pragma unroll
      for (int i = 0; i < kPack; ++i) mean[r] += x[i];
    }
    block_sum<R>(mean, buffer[0]);
    fetch_turn(turn + stages * segments.chunks, stage);
    stage = stage + 1 == stages ? 0 : stage + 1;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      mean[r] /= width;
      squares[r] = 0.f;
      keep_packed(packs[r]);
      packs[r].read(x);
#pragma unroll
      for (int i = 0; i < kPack; ++i) squares[r] += mine ? (x[i] - mean[r]) * (x[i] - mean[r]) : 0.f;
    }
    block_sum<R>(squares, buffer[1]);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int row = turn * R + r;
      if (row >= segments.tokens) break;
      const float rstd = rsqrtf(squares[r] / width + p.eps);
      if (threadIdx.x == 0) p.stats[batch * p.shape.tokens + first + row] = make_float2(mean[r], rstd);
      if (!mine) continue;
      keep_packed(packs[r]);
      packs[r].read(x);
#pragma unroll
      for (int i = 0; i < kPack; ++i) x[i] = (x[i] - mean[r]) * rstd * gain[i] + offset[i];
      store_pack_once(y_rows + row * p.y.row_stride, x);
    }
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
  const int64_t stage_bytes = static_cast<int64_t>(R) * threads * sizeof(Pack<T>);
  const int stages = stages_that_fit(stage_bytes, BLOCKS);
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
  constexpr int kRows = sizeof(T) == 4 ? 2 : 4;  // float32 packs take twice the registers
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
