// y = RMS(x) * weight, each pair of columns of a head turned by the angle of its token and place in the head, forward.
//
// forward_rows: a team (rope.cuh) owns all columns of a row at a time, a thread NV packs of eight of them, all at one
// place of their heads, so that a token's angles are read once and serve all heads. weight stays in registers; the rows
// to come are on their way into the team's ring in shared memory. x is read once, y written once: 4 bytes an element in
// 16-bit types, and the tables once.
// forward_any: one row, or by_head one head, at a time, a thread a pair: any dtypes, any alignment, any head of even
// width. by_head see rms_norm_heads.cu.
#include "launch.cuh"
#include "rope.cuh"

namespace adaptiveload {
namespace {

constexpr int kMostThreads = 256;  // of a block
constexpr int kStages = 2;         // rows of a team under way

template <typename T, typename A, int NV, int BLOCKS>
__global__ void __launch_bounds__(kMostThreads, BLOCKS)
    forward_rows(const RopeForward p, const Segments segments, const int stages) {
  using Rows = Ring<T, 1, NV>;
  extern __shared__ __align__(16) unsigned char rings[];
  __shared__ uint64_t arrivals[kMostThreads / 32][Rows::kMostStages];
  __shared__ float buffers[kMostThreads / 32][2][kMostThreads / 32];
  const int width = static_cast<int>(p.shape.width), me = threadIdx.y;
  const float one_by_width = 1.f / width;
  const Rows ring = {rings + me * stages * width * static_cast<int>(sizeof(T)), arrivals[me], stages, width};
  const Place at(segments, blockIdx.x * blockDim.y + me, 1);
  const int tokens = at.segment < segments.count ? segments.tokens : 0;
  const T* const x_rows = row_of<const T>(p.x, at.batch, 0);
  T* const y_rows = row_of<T>(p.y, at.batch, 0);
  const int place = ring.column(0) % static_cast<int>(p.head_width);
  bool mine[NV];
#pragma unroll
  for (int v = 0; v < NV; ++v) mine[v] = static_cast<int>(v * blockDim.x + threadIdx.x) * kPack < width;
  const auto fetch_row = [&](int row, int stage) {
    const int count = min(1, tokens - row);
    ring.open(stage, count);
    ring.fetch(stage, 0, x_rows + row * p.x.row_stride, width, count);
    ring.close();
  };

  // The next kernel may start, and the first rows come to the cache while the previous one ends: on an H200 0.5 to 1.5 us
  // of up to 8,192 rows of 1,536 columns. weight, too: 0.4 us of up to 2,048.
  let_next_kernel_start();
  bring_columns(p.weight, 0, 0, blockIdx.x, gridDim.x, width);
  ring.start();
  for (int stage = 0; ring.copies() && stage < stages; ++stage) {
    const int row = at.chunk + stage * segments.chunks;
    if (row < tokens) bring_to_cache(x_rows + row * p.x.row_stride, width * static_cast<int>(sizeof(T)));
  }
  wait_for_previous_kernel();
  if (ring.copies()) {
    for (int stage = 0; stage < stages; ++stage) fetch_row(at.chunk + stage * segments.chunks, stage);
  }
  float weight[NV][kPack];
#pragma unroll
  for (int v = 0; v < NV; ++v) load_weight(weight[v], p.weight, v * blockDim.x * kPack, width);

  int stage = 0, round = 0, parity = 0;
  for (int row = at.chunk; row < tokens; row += segments.chunks, parity ^= 1) {
    Angles<A> angles;
    angles.load(p.cos, p.sin, at.batch, row, place);
    ring.wait(stage, round);
    Pack<T> packs[NV];
    float squares[1] = {0.f}, x[kPack], c[kPack / 2], s[kPack / 2];
#pragma unroll
    for (int v = 0; v < NV; ++v) packs[v] = ring.read(stage, 0, v);
#pragma unroll
    for (int v = 0; v < NV; ++v) {
      packs[v].read(x);
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < kPack; ++i) sum += x[i] * x[i];
      squares[0] += mine[v] ? sum : 0.f;
    }
    team_sum<1, kMostThreads>(squares, buffers[me][parity]);
    if (ring.copies()) fetch_row(row + stages * segments.chunks, stage);
    const float rstd = rsqrtf(squares[0] * one_by_width + p.eps);
    if (threadIdx.x == 0) p.rstd[at.batch * p.shape.tokens + row] = rstd;
    angles.read(rstd, c, s);
#pragma unroll
    for (int v = 0; v < NV; ++v) {
      keep_packed(packs[v]);
      packs[v].read(x);
#pragma unroll
      for (int i = 0; i < kPack / 2; ++i) {
        const float even = x[2 * i] * weight[v][2 * i], odd = x[2 * i + 1] * weight[v][2 * i + 1];
        x[2 * i] = even * c[i] - odd * s[i];
        x[2 * i + 1] = even * s[i] + odd * c[i];
      }
      if (mine[v]) store_pack(y_rows + row * p.y.row_stride + ring.column(v), x);
    }
    if (++stage == stages) {
      stage = 0;
      ++round;
    }
  }
}

__global__ void __launch_bounds__(kMostAnyThreads) forward_any(const RopeForward p) {
  __shared__ float buffer[2][kMostAnyThreads / 32];
  const int head_width = static_cast<int>(p.head_width);
  const int width = p.by_head ? head_width : static_cast<int>(p.shape.width);  // of what is normalised together: a part
  const int parts = static_cast<int>(p.shape.width) / width;
  const int64_t count = p.shape.batch * p.shape.tokens * parts;
  int parity = 0;
  for (int64_t part = blockIdx.x; part < count; part += gridDim.x, parity ^= 1) {
    const int64_t row = part / parts, batch = row / p.shape.tokens, token = row - batch * p.shape.tokens;
    const int first = static_cast<int>(part - row * parts) * width;
    const bool turns = token < p.turned;
    float squares[1] = {0.f};
    for (int column = threadIdx.x; column < width; column += blockDim.x) {
      const float x = element(p.x, batch, token, first + column, 0.f);
      squares[0] += x * x;
    }
    block_sum<1, kMostAnyThreads>(squares, buffer[parity]);
    const float rstd = rsqrtf(squares[0] / width + p.eps);
    if (threadIdx.x == 0) p.rstd[part] = rstd;
    for (int column = 2 * threadIdx.x; column < width; column += 2 * blockDim.x) {
      const int place = column % head_width, at = first + column;
      const float c = turns ? element(p.cos, batch, token, place, 0.f) : 1.f;
      const float s = turns ? element(p.sin, batch, token, place + 1, 0.f) : 0.f;
      const float even = element(p.x, batch, token, at, 0.f) * rstd * element(p.weight, 0, 0, column, 0.f);
      const float odd = element(p.x, batch, token, at + 1, 0.f) * rstd * element(p.weight, 0, 0, column + 1, 0.f);
      set_element(p.y, batch, token, at, even * c - odd * s);
      set_element(p.y, batch, token, at + 1, even * s + odd * c);
    }
  }
}

// false: the ring does not fit this GPU, or a row is too wide.
template <typename T, typename A, int NV, int BLOCKS>
bool launch_rows(const RopeForward& p, cudaStream_t stream, cudaError_t* error) {
  const int64_t stage_bytes = Ring<T, 1, NV>::stage_bytes(p.shape.width);
  const Teams teams(p.shape, p.head_width, NV, kMostThreads, 1, stage_bytes, BLOCKS * kMostThreads / 32, kStages);
  if (teams.stages == 0) return false;
  auto kernel = forward_rows<T, A, NV, BLOCKS>;
  *error = launch_early(kernel, teams.blocks, teams.threads, teams.bytes, stream, p, teams.segments, teams.stages);
  return true;
}

}  // namespace

cudaError_t rms_norm_rope_forward(const RopeForward& p, cudaStream_t stream) {
  const int64_t rows = p.shape.batch * p.shape.tokens;
  if (rows * p.shape.width == 0) return cudaSuccess;
  cudaError_t error = cudaSuccess;
  const auto launch = [&](auto types) {
    using T = typename decltype(types)::Stream;
    using A = typename decltype(types)::Table;
    // Two packs a thread leave registers for 24 warps of a multiprocessor, on an H200 the best for 1536 columns; four
    // packs and 16 warps are the best for 5120, and take rows of up to 256 * 4 * 8 = 8192 columns.
    constexpr int kFew = 4 / sizeof(T), kFewBlocks = 3, kMany = 4, kManyBlocks = 4 / sizeof(T);
    const bool few = team_threads(p.shape.width, p.head_width, kFew) <= kMostThreads;
    return few ? launch_rows<T, A, kFew, kFewBlocks>(p, stream, &error)
               : launch_rows<T, A, kMany, kManyBlocks>(p, stream, &error);
  };
  if (p.by_head ? rms_norm_heads_forward(p, stream, &error) : launch_for_types(p, launch)) return error;
  const int64_t parts = p.by_head ? rows * (p.shape.width / p.head_width) : rows;
  const int threads = pair_threads(p.by_head ? p.head_width : p.shape.width);
  forward_any<<<static_cast<unsigned>(std::min<int64_t>(parts, 1 << 30)), threads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace adaptiveload
