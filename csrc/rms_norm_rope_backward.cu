// Gradients of y = RMS(x) * weight with its pairs of columns turned: with g the gradient turned back and xh = x * rstd,
//   dx = rstd * (g * weight - xh * mean(g * weight * xh)),  dweight = sum g * xh over all rows.
//
// backward_rows: teams (rope.cuh) as in the forward pass, which keep their part of dweight in registers while they
// write dx, so that x and the gradient are read once: 6 bytes an element in 16-bit types, and the tables once. The
// teams of a block add their sums in shared memory, the blocks theirs by column_sums.cu, both in a fixed order.
// backward_any: one row, or by_head one head, at a time, a thread a pair, the sums in shared memory. by_head see
// rms_norm_heads.cu.
#include "column_sums.cuh"
#include "launch.cuh"
#include "rms_norm_rope_few.cuh"

namespace adaptiveload {
namespace {

// The best of 25 combinations on an H200 at 32,760 rows of 1536 and 5120 columns.
constexpr int kTurnRows = 2;       // rows of a turn in 16-bit types; half in float32, whose packs are twice as big
constexpr int kPacks = 2;          // packs of a thread in a row
constexpr int kMostThreads = 384;  // of a block: rows of up to 384 * 2 * 8 = 6144 columns
constexpr int kBlocks = 1;         // of a multiprocessor
constexpr int kStages = 2;         // turns under way
constexpr int kAnyBlocks = 8;      // of a multiprocessor, for backward_any

template <typename T, typename A, int R, int NV, int BLOCKS, bool SUMS>
__global__ void __launch_bounds__(kMostThreads, BLOCKS)
    backward_rows(const RopeBackward p, const Segments segments, const int stages) {
  using Rows = Ring<T, 2 * R, NV>;  // R rows of x, then R of grad
  extern __shared__ __align__(16) unsigned char rings[];
  __shared__ uint64_t arrivals[kMostThreads / 32][Rows::kMostStages];
  __shared__ float buffers[kMostThreads / 32][2][R * kMostThreads / 32];
  const int width = static_cast<int>(p.shape.width), me = threadIdx.y;
  const float one_by_width = 1.f / width;
  const Rows ring = {rings + me * stages * 2 * R * width * static_cast<int>(sizeof(T)), arrivals[me], stages, width};
  const Place at(segments, blockIdx.x * blockDim.y + me, 1);
  const int step = segments.chunks * R, tokens = at.segment < segments.count ? segments.tokens : 0;
  const T* const x_rows = row_of<const T>(p.x, at.batch, 0);
  const T* const grad_rows = row_of<const T>(p.grad, at.batch, 0);
  T* const dx_rows = p.dx.data != nullptr ? row_of<T>(p.dx, at.batch, 0) : nullptr;
  const float* const rstd_rows = p.rstd + at.batch * p.shape.tokens;
  const int place = ring.column(0) % static_cast<int>(p.head_width);
  bool mine[NV];
#pragma unroll
  for (int v = 0; v < NV; ++v) mine[v] = static_cast<int>(v * blockDim.x + threadIdx.x) * kPack < width;
  const auto fetch_turn = [&](int row, int stage) {
    const int count = min(R, tokens - row);
    ring.open(stage, 2 * count);
    ring.fetch(stage, 0, x_rows + row * p.x.row_stride, p.x.row_stride, count);
    ring.fetch(stage, R, grad_rows + row * p.grad.row_stride, p.grad.row_stride, count);
    ring.close();
  };
  const auto bring_turn = [&](int row) {
    for (int r = row; r < min(row + R, tokens); ++r) {
      bring_to_cache(x_rows + r * p.x.row_stride, width * static_cast<int>(sizeof(T)));
      bring_to_cache(grad_rows + r * p.grad.row_stride, width * static_cast<int>(sizeof(T)));
    }
  };
  const auto load_angles = [&](int row, Angles<A>(&angles)[R], float(&rstd)[R]) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      angles[r].load(p.cos, p.sin, at.batch, min(row + r, tokens - 1), place);
      rstd[r] = rstd_rows[min(row + r, tokens - 1)];
    }
  };

  const int first_row = at.chunk * R;
  bring_columns(p.weight, 0, 0, blockIdx.x, gridDim.x, width);
  ring.start();
  if (ring.copies()) {
    for (int row = first_row; row < min(first_row + stages * step, tokens); row += step) bring_turn(row);
  }
  wait_for_previous_kernel();
  if (ring.copies()) {
    for (int stage = 0; stage < stages; ++stage) fetch_turn(first_row + stage * step, stage);
  }
  let_next_kernel_start();
  Angles<A> next_angles[R];
  float next_rstd[R];
  if (tokens > 0) load_angles(first_row, next_angles, next_rstd);
  float weight[NV][kPack], weight_sum[NV][kPack] = {};
#pragma unroll
  for (int v = 0; v < NV; ++v) load_weight(weight[v], p.weight, v * blockDim.x * kPack, width);

  int stage = 0, round = 0, parity = 0;
  for (int row = first_row; row < tokens; row += step, parity ^= 1) {
    float rstd[R], c[R][kPack / 2], s[R][kPack / 2];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      rstd[r] = next_rstd[r];
      next_angles[r].read(rstd[r], c[r], s[r]);
    }
    load_angles(row + step, next_angles, next_rstd);
    ring.wait(stage, round);
    Pack<T> x_packs[R][NV], grad_packs[R][NV];
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int v = 0; v < NV; ++v) {
        x_packs[r][v] = ring.read(stage, r, v);
        grad_packs[r][v] = ring.read(stage, R + r, v);
        // Rows beyond the last hold anything, also NaN, and must not enter the sums over rows.
        if (row + r >= tokens) x_packs[r][v] = grad_packs[r][v] = Pack<T>{};
      }
    }
    float x[kPack], g[kPack], mean[R];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      mean[r] = 0.f;
#pragma unroll
      for (int v = 0; v < NV; ++v) {
        x_packs[r][v].read(x);
        grad_packs[r][v].read(g);
        turn_back(g, c[r], s[r]);  // g * rstd: the angles have rstd in them
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
          const float product = g[i] * x[i];
          if (SUMS) weight_sum[v][i] += product;
          sum += product * weight[v][i];
        }
        mean[r] += mine[v] ? sum : 0.f;
      }
    }
    team_sum<R, kMostThreads>(mean, buffers[me][parity]);
    if (ring.copies()) fetch_turn(row + stages * step, stage);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (dx_rows == nullptr || row + r >= tokens) break;
      const float factor = mean[r] * one_by_width * rstd[r] * rstd[r];
#pragma unroll
      for (int v = 0; v < NV; ++v) {
        keep_packed(x_packs[r][v]);
        keep_packed(grad_packs[r][v]);
        x_packs[r][v].read(x);
        grad_packs[r][v].read(g);
        turn_back(g, c[r], s[r]);
#pragma unroll
        for (int i = 0; i < kPack; ++i) x[i] = g[i] * weight[v][i] - x[i] * factor;
        if (mine[v]) store_pack_once(dx_rows + (row + r) * p.dx.row_stride + ring.column(v), x);
      }
    }
    if (++stage == stages) {
      stage = 0;
      ++round;
    }
  }

  if (!SUMS) return;
  float* const sums = reinterpret_cast<float*>(rings);  // [teams][width]
  __syncthreads();
#pragma unroll
  for (int v = 0; v < NV; ++v) {
    if (me > 0 && mine[v]) store_pack(sums + me * width + ring.column(v), weight_sum[v]);
  }
  __syncthreads();
  // The first team reads from each other where that team's thread of the same number wrote: 3 to 7% of the time of few
  // rows, and racecheck follows it, also where teams had unlike numbers of turns.
  if (me > 0) return;
#pragma unroll
  for (int v = 0; v < NV; ++v) {
    if (!mine[v]) continue;
    for (int team = 1; team < static_cast<int>(blockDim.y); ++team) {
      float other[kPack];
      load_pack(sums + team * width + ring.column(v)).read(other);
#pragma unroll
      for (int i = 0; i < kPack; ++i) weight_sum[v][i] += other[i];
    }
    store_pack(p.partials + static_cast<int64_t>(blockIdx.x) * width + ring.column(v), weight_sum[v]);
  }
}

// The gradient of the pair at `place` of a head turned back.
__device__ __forceinline__ float2 pair_turned_back(const RopeBackward& p, int64_t batch, int64_t token, int head,
                                                   int place) {
  const bool turns = token < p.turned;
  const float c = turns ? element(p.cos, batch, token, place, 0.f) : 1.f;
  const float s = turns ? element(p.sin, batch, token, place + 1, 0.f) : 0.f;
  const int column = head * static_cast<int>(p.grad_head_stride) + place;
  const float even = element(p.grad, batch, token, column, 0.f), odd = element(p.grad, batch, token, column + 1, 0.f);
  return make_float2(even * c + odd * s, odd * c - even * s);
}

__global__ void __launch_bounds__(kMostAnyThreads, 2) backward_any(const RopeBackward p) {
  extern __shared__ float weight_sum[];  // [width]; a thread's own columns, so it needs no barrier
  __shared__ float buffer[2][kMostAnyThreads / 32];
  const int head_width = static_cast<int>(p.head_width);
  const int width = p.by_head ? head_width : static_cast<int>(p.shape.width);  // of what is normalised together: a part
  const int parts = static_cast<int>(p.shape.width) / width, first = 2 * threadIdx.x, step = 2 * blockDim.x;
  const int64_t count = p.shape.batch * p.shape.tokens * parts;
  let_next_kernel_start();
  for (int c = first; c < width; c += step) weight_sum[c] = weight_sum[c + 1] = 0.f;
  int parity = 0;
  for (int64_t part = blockIdx.x; part < count; part += gridDim.x, parity ^= 1) {
    const int64_t row = part / parts, batch = row / p.shape.tokens, token = row - batch * p.shape.tokens;
    const int begin = static_cast<int>(part - row * parts) * width;
    const float rstd = p.rstd[part];
    float mean[1] = {0.f};
    for (int c = first; c < width; c += step) {
      const int at = begin + c;
      const float2 g = pair_turned_back(p, batch, token, at / head_width, at % head_width);
      const float even = g.x * element(p.x, batch, token, at, 0.f) * rstd;
      const float odd = g.y * element(p.x, batch, token, at + 1, 0.f) * rstd;
      weight_sum[c] += even;
      weight_sum[c + 1] += odd;
      mean[0] += even * element(p.weight, 0, 0, c, 0.f) + odd * element(p.weight, 0, 0, c + 1, 0.f);
    }
    block_sum<1, kMostAnyThreads>(mean, buffer[parity]);
    if (p.dx.data == nullptr) continue;
    const float factor = mean[0] / width * rstd;
    for (int c = first; c < width; c += step) {
      const int at = begin + c;
      const float2 g = pair_turned_back(p, batch, token, at / head_width, at % head_width);
      const float even = g.x * element(p.weight, 0, 0, c, 0.f), odd = g.y * element(p.weight, 0, 0, c + 1, 0.f);
      set_element(p.dx, batch, token, at, rstd * (even - element(p.x, batch, token, at, 0.f) * factor));
      set_element(p.dx, batch, token, at + 1, rstd * (odd - element(p.x, batch, token, at + 1, 0.f) * factor));
    }
  }
  if (p.partials == nullptr) return;
  float* const partial = p.partials + static_cast<int64_t>(blockIdx.x) * width;
  for (int c = first; c < width; c += step) {
    partial[c] = weight_sum[c];
    partial[c + 1] = weight_sum[c + 1];
  }
}

template <typename T>
constexpr int turn_rows() {
  return sizeof(T) == 4 ? kTurnRows / 2 : kTurnRows;
}

// Shapes and dtypes alone decide, so that the workspace and the kernels agree.
template <typename T>
Teams teams_of(const RopeBackward& p) {
  constexpr int R = turn_rows<T>();
  const int64_t stage_bytes = Ring<T, 2 * R, kPacks>::stage_bytes(p.shape.width);
  return Teams(p.shape, p.head_width, kPacks, kMostThreads, R, stage_bytes, kBlocks * kMostThreads / 32, kStages);
}

// false: the ring does not fit this GPU, or a row is too wide.
template <typename T, typename A, bool SUMS>
bool launch_rows(const RopeBackward& p, unsigned* blocks, cudaStream_t stream, cudaError_t* error) {
  const Teams teams = teams_of<T>(p);
  if (teams.stages == 0) return false;
  auto kernel = backward_rows<T, A, turn_rows<T>(), kPacks, kBlocks, SUMS>;
  *blocks = teams.blocks;
  *error = launch_early(kernel, teams.blocks, teams.threads, teams.bytes, stream, p, teams.segments, teams.stages);
  return true;
}

// Does one kernel do it all, without partial sums? Where there are clusters.
template <typename T, typename A>
bool few(const RopeBackward& p) {
  bool clusters = false;
  const auto kernel = reinterpret_cast<const void*>(backward_few<FewRope<T, A, 1>, 2>);
  const Shape rows = {1, p.shape.batch * p.shape.tokens, p.shape.width, 1};
  return p.dweight.data != nullptr && p.shape.width <= kFewWidth && aligned(p.grad) && aligned(p.dx) &&
         p.grad.dtype == p.x.dtype && few_rows(rows, true, kernel, kFewRopeElements, &clusters) && clusters;
}

template <typename T, typename A>
cudaError_t launch_few(const RopeBackward& p, cudaStream_t stream) {
  const int64_t rows = p.shape.batch * p.shape.tokens;
  constexpr int R = 2;
  const FewRows grid = few_rows_grid({1, rows, p.shape.width, 1}, R, true, true);
  ColumnSums sums = {};
  sums.dweight = p.dweight;
  auto kernel = rows <= kTwoTurnRows ? backward_few<FewRope<T, A, 2>, R> : backward_few<FewRope<T, A, 1>, R>;
  return launch_few(kernel, grid, threads_for(p.shape.width), stream, p, sums, grid);
}

int64_t norm_width(const RopeBackward& p) { return p.by_head ? p.head_width : p.shape.width; }

unsigned any_blocks(const RopeBackward& p) {
  const int64_t most = kAnyBlocks * device_attribute(cudaDevAttrMultiProcessorCount);
  const int64_t parts = p.shape.batch * p.shape.tokens * (p.shape.width / norm_width(p));
  return static_cast<unsigned>(std::min<int64_t>(parts, most));
}

}  // namespace

int64_t rope_backward_partials(const RopeBackward& p) {
  if (p.dweight.data == nullptr) return 0;
  int64_t blocks = any_blocks(p);
  if (p.by_head) return std::max<int64_t>(blocks, rms_norm_heads_blocks(p)) * p.head_width;
  launch_for_types(p, [&](auto types) {
    using T = typename decltype(types)::Stream;
    const bool one_kernel = few<T, typename decltype(types)::Table>(p);
    blocks = one_kernel ? 0 : std::max<int64_t>(blocks, teams_of<T>(p).blocks);
    return true;
  });
  return blocks * p.shape.width;
}

cudaError_t rms_norm_rope_backward(const RopeBackward& p, cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  unsigned blocks = 0;
  bool one_kernel = false;
  if (p.shape.batch * p.shape.tokens * p.shape.width > 0) {
    const auto launch = [&](auto types) {
      using T = typename decltype(types)::Stream;
      using A = typename decltype(types)::Table;
      if (few<T, A>(p)) {
        one_kernel = true;
        error = launch_few<T, A>(p, stream);
        return true;
      }
      if (p.grad.dtype != p.x.dtype || !aligned(p.grad) || !aligned(p.dx)) return false;
      return p.dweight.data != nullptr ? launch_rows<T, A, true>(p, &blocks, stream, &error)
                                  : launch_rows<T, A, false>(p, &blocks, stream, &error);
    };
    blocks = p.by_head ? rms_norm_heads_blocks(p) : 0;
    if (!(p.by_head ? rms_norm_heads_backward(p, stream, &error) : launch_for_types(p, launch))) {
      blocks = any_blocks(p);
      const auto bytes = static_cast<unsigned>(norm_width(p) * sizeof(float));
      backward_any<<<blocks, pair_threads(norm_width(p)), bytes, stream>>>(p);
      error = cudaGetLastError();
    }
  }
  if (error != cudaSuccess || one_kernel || p.dweight.data == nullptr) return error;
  ColumnSums totals = {};
  totals.partials = p.partials;
  totals.segments = totals.rows = 1;
  totals.chunks = static_cast<int>(blocks);
  totals.width = static_cast<int>(norm_width(p));
  totals.dweight = p.dweight;
  return add_column_sums<1>(totals, stream);
}

}  // namespace adaptiveload
