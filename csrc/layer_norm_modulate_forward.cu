// layer_norm_modulate and rms_norm_modulate, forward: y = (xh * weight + bias) * m + shift + shift_table.
//
// forward_rows: a block's threads form groups, a thread of which owns NV packs of eight columns, and each group takes a
// row at a time. What scale, shift, tables, weight and bias do to a column is one gain and one offset in registers,
// loaded once, since all rows of a segment share them. The rows to come are on their way into shared memory meanwhile.
// x is read once, y written once: 4 bytes an element in 16-bit types. With a modulation row per token (TOKEN) its scale
// and shift come the same way (8 bytes).
// forward_few (in the .cuh): few rows, without a ring.
// forward_any: one row at a time, everything read where it is needed: any dtypes, any alignment.
// Mean and variance take two passes over a thread's registers, and are joined over threads, then warps, by Chan's
// formula, with one barrier a row: E[x^2] - E[x]^2 would lose all digits far from zero.
#include "feed.cuh"
#include "layer_norm_modulate_forward.cuh"

namespace adaptiveload {
namespace {

// The best on an H200 of some 700 combinations over the seven shapes of recipes/kernel_speed.py.
// A thread's packs of a row, more of wide rows, which would otherwise need so many threads that registers run short.
enum class Rows { slim, narrow, dealt, wide, with_token };
template <Rows KIND>
struct Tile {
  static constexpr bool kToken = KIND == Rows::with_token, kDealt = KIND == Rows::dealt || KIND == Rows::wide;
  static constexpr int kPacks = kToken ? 1 : KIND == Rows::wide ? 3 : 2;
  // And a warp that feeds them.
  static constexpr int kMostThreads = kToken ? 992 : KIND == Rows::wide ? 480 : KIND == Rows::narrow ? 512 : 608;
};
constexpr int64_t kWide = 4608;

// Rows up to this width are short for the time that issuing a copy takes: each group has a lane of the feeding warp that
// issues its own. At 65,536 rows of 768, 1,152 and 1,280 columns 60, 84 and 88 us for 90, 97 and 97 on an H200.
constexpr int64_t kSlim = 1280;

// From a width on, rows go by another kind of tile. Rows this wide and this many are dealt by tickets: 2 to 5 points of
// the roof on an H200. Narrow rows stay together without, and would ask too often; few do not make up for zeroing them.
constexpr int64_t kDealtWidth = 3072, kTicketWidth = 2240, kTicketRows = 1 << 14;

// Narrow rows lose by being asked for early up to here: 10.9 us for 9.7 at 4,096 rows of 1,536 columns.
constexpr int kAskedWidth = 2048;

template <typename T, bool MEAN, Rows KIND>
__global__ void __launch_bounds__(Tile<KIND>::kMostThreads + kFeeders)
    forward_rows(const LayerNormForward p, const Segments segments, const Pipeline pipeline, const int joined) {
  constexpr bool TOKEN = Tile<KIND>::kToken;
  constexpr int NV = Tile<KIND>::kPacks;
  using RowFeed = Feed<T, TOKEN ? 3 : 1, NV, Tile<KIND>::kDealt>;  // x, scale, shift
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ typename RowFeed::Signals signals;
  __shared__ float2 joints[2][Tile<KIND>::kMostThreads / 32];
  const int width = static_cast<int>(p.shape.width);
  const Place at(segments, blockIdx.x, TOKEN ? 1 : p.shape.rows);
  unsigned* const tickets = p.tickets == nullptr ? nullptr : p.tickets + at.segment;
  RowFeed feed(memory, signals, pipeline, width, Runs(segments, pipeline.groups, at.chunk, tickets));
  const Group& group = feed.group;
  const T* const x_rows = row_of<const T>(p.x, at.batch, at.first);
  const T* const scale_rows = TOKEN ? row_of<const T>(p.scale, at.batch, 0) : nullptr;
  const T* const shift_rows = TOKEN ? row_of<const T>(p.shift, at.batch, 0) : nullptr;
  const bool scaled = TOKEN && p.scale.data != nullptr, shifted = TOKEN && p.shift.data != nullptr;
  const auto fetch = [&](int row, int stage, int index) {
    feed.open(stage, index, 1 + scaled + shifted);
    feed.copy(stage, index, 0, x_rows + row * p.x.row_stride);
    if (scaled) feed.copy(stage, index, 1, scale_rows + row * p.scale.row_stride);
    if (shifted) feed.copy(stage, index, 2, shift_rows + row * p.shift.row_stride);
  };

  let_next_kernel_start();
  // A block's first rows, and the modulation, come to the cache while the previous kernel ends: on an H200 2 points of the
  // roof at 2x8192x5120, up to 1 in larger work.
  const auto bring_row = [&](int row) { bring_to_cache(x_rows + row * p.x.row_stride, width * sizeof(T)); };
  if (KIND == Rows::narrow) {
    if (width >= kAskedWidth) {
      if (feed.only_feeds()) {
        feed.for_first_rows(bring_row);
      } else {
        for (const Array& a : {p.scale, p.shift}) bring_to_cache(a, at.batch, at.modulation_row, feed.column(0));
      }
    }
  } else if (!TOKEN) {
    for (const Array& a : {p.scale, p.shift}) {
      bring_columns(a, at.batch, at.modulation_row, at.chunk, segments.chunks, width);
    }
    if (feed.only_feeds()) feed.for_first_rows(bring_row);
  }
  feed.start();
  wait_for_previous_kernel();
  if (feed.only_feeds()) {
    if (KIND == Rows::slim) return feed.feed_in_lanes(fetch);
    return feed.feed_all(fetch);
  }
  feed.begin(fetch);
  float gain[NV][kPack], offset[NV][kPack], own = 0.f;  // own: how many columns are mine
  bool mine[NV];
#pragma unroll
  for (int v = 0; v < NV; ++v) {
    const int first = group.first_column() + v * static_cast<int>(group.threads) * kPack;
    mine[v] = static_cast<int>(v * group.threads + group.thread) * kPack < width;
    own += mine[v] ? kPack : 0;
    if (TOKEN) {
      load_columns<Access::either>(gain[v], p.scale_table, 0, 0, first, width, 0.f);
      load_columns<Access::either>(offset[v], p.shift_table, 0, 0, first, width, 0.f);
#pragma unroll
      for (int i = 0; i < kPack; ++i) gain[v][i] += p.scale_offset;
    } else {
      load_affine<Access::either>(p, at.batch, at.modulation_row, first, gain[v], offset[v]);
    }
  }

  // After the barrier a lane reads the part of warp `other`.
  const int warp = group.thread / 32, first_warp = group.index * group.threads / 32, warps = group.threads / 32;
  const int other = threadIdx.x % joined;
  const float other_columns = other < warps ? columns_of<NV>(other, group.threads, width) : 0.f;
  const float one_by_width = 1.f / width, one_by_own = 1.f / fmaxf(own, 1.f);
  const float one_by_warp = 1.f / fmaxf(columns_of<NV>(warp, group.threads, width), 1.f);
  T* const y_rows = row_of<T>(p.y, at.batch, at.first);
  const int64_t first_token = at.batch * p.shape.tokens + at.first;
  int parity = 0;
  for (; feed.wait(); parity ^= 1) {
    const int row = feed.row;
    Pack<T> packs[NV], scale_packs[NV] = {}, shift_packs[NV] = {};
    float x[kPack], mean = 0.f, squares = 0.f;
#pragma unroll
    for (int v = 0; v < NV; ++v) {
      packs[v] = feed.read(0, v);
      if (scaled) scale_packs[v] = feed.read(1, v);
      if (shifted) shift_packs[v] = feed.read(2, v);
    }
#pragma unroll
    for (int v = 0; MEAN && v < NV; ++v) {
      packs[v].read(x);
      const float sum = ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
      mean += mine[v] ? sum : 0.f;
    }
    mean *= one_by_own;
#pragma unroll
    for (int v = 0; v < NV; ++v) {
      keep_packed(packs[v]);
      packs[v].read(x);
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < kPack; ++i) sum += (x[i] - mean) * (x[i] - mean);
      squares += mine[v] ? sum : 0.f;
    }
    join<MEAN>(mean, squares, own, __shfl_sync(~0u, mean, 0), one_by_warp, 32);
    if (threadIdx.x % 32 == 0) joints[parity][first_warp + warp] = make_float2(mean, squares);
    group.wait();
    feed.leave(fetch);
    const float2 joint = joints[parity][first_warp + min(other, warps - 1)];
    const float about = joints[parity][first_warp].x;
    mean = joint.x;
    squares = other < warps ? joint.y : 0.f;
    join<MEAN>(mean, squares, other_columns, about, one_by_width, joined);
    const float rstd = rsqrtf(squares * one_by_width + p.eps);
    if (group.thread == 0) store_stats<MEAN>(p.stats, first_token + row, mean, rstd);
#pragma unroll
    for (int v = 0; v < NV; ++v) {
      keep_packed(packs[v]);
      packs[v].read(x);
      if (TOKEN) {
        float scale[kPack], shift[kPack];
        scale_packs[v].read(scale);
        shift_packs[v].read(shift);
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
          x[i] = (x[i] - mean) * rstd * (gain[v][i] + scale[i]) + (offset[v][i] + shift[i]);
        }
      } else {
#pragma unroll
        for (int i = 0; i < kPack; ++i) x[i] = (x[i] - mean) * rstd * gain[v][i] + offset[v][i];
      }
      if (mine[v]) store_pack(y_rows + row * p.y.row_stride + feed.column(v), x);
    }
  }
}

template <Access A, bool MEAN>
__global__ void __launch_bounds__(kMostAnyThreads) forward_any(const LayerNormForward p) {
  __shared__ float buffer[2][kMostAnyThreads / 32];
  const int width = static_cast<int>(p.shape.width), step = kPack * blockDim.x;
  const int64_t rows = p.shape.batch * p.shape.tokens;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const int64_t batch = row / p.shape.tokens, token = row % p.shape.tokens;
    float x[kPack], total[1] = {0.f}, squares[1] = {0.f};
    for (int first = 0; MEAN && first < width; first += step) {
      load_columns<A>(x, p.x, batch, token, first, width, 0.f);
#pragma unroll
      for (int i = 0; i < kPack; ++i) total[0] += x[i];
    }
    block_sum<1, kMostAnyThreads>(total, buffer[0]);
    const float mean = total[0] / width;
    for (int first = 0; first < width; first += step) {
      load_columns<A>(x, p.x, batch, token, first, width, mean);
#pragma unroll
      for (int i = 0; i < kPack; ++i) squares[0] += (x[i] - mean) * (x[i] - mean);
    }
    block_sum<1, kMostAnyThreads>(squares, buffer[1]);
    const float rstd = rsqrtf(squares[0] / width + p.eps);
    if (threadIdx.x == 0) store_stats<MEAN>(p.stats, row, mean, rstd);
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

Rows kind_of(const Shape& shape) {
  if (row_per_token(shape)) return Rows::with_token;
  const bool many = shape.width >= kTicketWidth && shape.batch * shape.tokens >= kTicketRows;
  if (shape.width > kWide) return Rows::wide;
  if (many || shape.width >= kDealtWidth) return Rows::dealt;
  return shape.width <= kSlim ? Rows::slim : Rows::narrow;
}

template <Rows KIND>
Pipeline pipeline_of(const Shape& shape) {
  using Tiling = Tile<KIND>;
  const int threads = threads_for((shape.width + Tiling::kPacks - 1) / Tiling::kPacks);
  return {std::clamp(Tiling::kMostThreads / threads, 1, kMostGroups), threads, 3};
}

template <Rows KIND>
Segments segments_of(const Shape& shape) {
  return cut(shape, 1, pipeline_of<KIND>(shape).groups);
}

template <Rows KIND>
int64_t tickets_of(const Shape& shape) {
  const Segments segments = segments_of<KIND>(shape);
  return segments.chunks > 1 && segments.count * segments.tokens >= kTicketRows ? segments.count : 0;
}

// false: the rows do not fit into the shared memory of this GPU, or are too wide.
template <typename T, bool MEAN, Rows KIND>
bool launch_rows(const LayerNormForward& p, cudaStream_t stream, cudaError_t* error) {
  using Tiling = Tile<KIND>;
  Pipeline pipeline = pipeline_of<KIND>(p.shape);
  const Segments segments = segments_of<KIND>(p.shape);
  const bool tickets = Tiling::kDealt && p.tickets != nullptr;
  const int64_t stage_bytes = Feed<T, Tiling::kToken ? 3 : 1, 1>::stage_bytes(pipeline.groups, p.shape.width);
  constexpr bool kShort = KIND == Rows::slim || KIND == Rows::narrow;
  // Wide rows that are dealt in advance run apart the more, the more are under way.
  pipeline.stages = stages_that_fit(stage_bytes, Tiling::kDealt && !tickets ? 2 : kShort ? 4 : 3, 1);
  if (pipeline.stages == 0 || pipeline.threads > Tiling::kMostThreads) return false;
  const int bytes = static_cast<int>(pipeline.stages * stage_bytes);
  auto kernel = forward_rows<T, MEAN, KIND>;
  if (tickets) *error = cudaMemsetAsync(p.tickets, 0, segments.count * sizeof(unsigned), stream);
  if (*error != cudaSuccess) return true;
  *error = launch_fed(kernel, static_cast<unsigned>(segments.blocks()), pipeline.groups * pipeline.threads, kFeeders,
                      !tickets, bytes, stream, p, segments, pipeline, joined_warps(pipeline.threads));
  return true;
}

template <typename T, Rows KIND>
bool launch_rows(const LayerNormForward& p, cudaStream_t stream, cudaError_t* error) {
  return p.mean ? launch_rows<T, true, KIND>(p, stream, error) : launch_rows<T, false, KIND>(p, stream, error);
}

template <typename T>
bool launch_rows(const LayerNormForward& p, cudaStream_t stream, cudaError_t* error) {
  switch (kind_of(p.shape)) {
    case Rows::slim: return launch_rows<T, Rows::slim>(p, stream, error);
    case Rows::narrow: return launch_rows<T, Rows::narrow>(p, stream, error);
    case Rows::dealt: return launch_rows<T, Rows::dealt>(p, stream, error);
    case Rows::wide: return launch_rows<T, Rows::wide>(p, stream, error);
    case Rows::with_token: break;
  }
  if constexpr (sizeof(T) == 2) return launch_rows<T, true, Rows::with_token>(p, stream, error);
  return false;
}

template <typename T, bool MEAN>
cudaError_t launch_few(const LayerNormForward& p, cudaStream_t stream) {
  constexpr int kTwo = 4 / sizeof(T), kFour = 8 / sizeof(T);  // in 16-bit types
  const int64_t rows = p.shape.batch * p.shape.tokens;
  const int of_group = rows <= kOneRow ? 1 : rows * p.shape.width <= kTwoRowsElements ? kTwo : kFour;
  const int threads = threads_for(p.shape.width);
  const int groups = of_group == kTwo && kTwo > 1 && 2 * threads <= kFewForwardThreads ? 2 : 1;
  auto kernel = forward_few<T, MEAN, kFour, 1>;
  if (of_group == kTwo) kernel = groups == 2 ? forward_few<T, MEAN, kTwo, 2> : forward_few<T, MEAN, kTwo, 1>;
  if (of_group == 1) kernel = forward_few<T, MEAN, 1, 1>;
  const Segments segments = cut_to_rows(p.shape, of_group * groups);
  return launch_early(kernel, static_cast<unsigned>(segments.blocks()), threads * groups, 0, stream, p, segments,
                      joined_warps(threads));
}
template <typename T>
cudaError_t launch_few(const LayerNormForward& p, cudaStream_t stream) {
  return p.mean ? launch_few<T, true>(p, stream) : launch_few<T, false>(p, stream);
}

// false: nothing was launched, since these arrays do not allow rows in 16-byte pieces, or as above.
bool launch_rows(const LayerNormForward& p, cudaStream_t stream, cudaError_t* error) {
  const bool per_token = row_per_token(p.shape);
  bool fits = p.shape.width % kPack == 0 && aligned(p.x) && aligned(p.y) && p.x.dtype == p.y.dtype;
  if (per_token) {
    fits = fits && p.mean && !p.weight.data && !p.bias.data && p.x.dtype != Dtype::float32;
    for (const Array& a : {p.scale, p.shift}) fits = fits && aligned(a) && (!a.data || a.dtype == p.x.dtype);
  }
  if (!fits) return false;
  const int64_t elements = p.shape.batch * p.shape.tokens * p.shape.width;
  if (!per_token && elements <= kFewForwardElements && threads_for(p.shape.width) <= kFewForwardThreads) {
    switch (p.x.dtype) {
      case Dtype::float32: *error = launch_few<float>(p, stream); break;
      case Dtype::float16: *error = launch_few<__half>(p, stream); break;
      default: *error = launch_few<__nv_bfloat16>(p, stream);
    }
    return true;
  }
  switch (p.x.dtype) {
    case Dtype::float32: return launch_rows<float>(p, stream, error);
    case Dtype::float16: return launch_rows<__half>(p, stream, error);
    default: return launch_rows<__nv_bfloat16>(p, stream, error);
  }
}

}  // namespace

int64_t layer_norm_forward_tickets(const Shape& shape) {
  switch (kind_of(shape)) {
    case Rows::dealt: return tickets_of<Rows::dealt>(shape);
    case Rows::wide: return tickets_of<Rows::wide>(shape);
    default: return 0;
  }
}

cudaError_t layer_norm_modulate_forward(const LayerNormForward& p, cudaStream_t stream) {
  const int64_t rows = p.shape.batch * p.shape.tokens;
  if (rows * p.shape.width == 0) return cudaSuccess;
  cudaError_t error = cudaSuccess;
  if (launch_rows(p, stream, &error)) return error;

  bool all_aligned = p.shape.width % kPack == 0;
  for (const Array& a : {p.x, p.y, p.scale, p.shift, p.weight, p.bias, p.scale_table, p.shift_table}) {
    all_aligned = all_aligned && aligned(a);
  }
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(rows, 1 << 30));
  const int threads = std::min(threads_for(p.shape.width), kMostAnyThreads);
  auto kernel = all_aligned ? forward_any<Access::pieces, true> : forward_any<Access::strided, true>;
  if (!p.mean) kernel = all_aligned ? forward_any<Access::pieces, false> : forward_any<Access::strided, false>;
  kernel<<<blocks, threads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace adaptiveload
