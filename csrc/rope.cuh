// How do a few warps of a block, a team, share rows whose heads are all turned by the same angles?
#pragma once

#include <numeric>

#include "rows.cuh"

namespace adaptiveload {

// A block is blockDim.y teams of blockDim.x threads, whole warps. A team goes through rows of its own and waits for no
// other.
__device__ __forceinline__ void team_sync() {
  if (blockDim.x == 32) {
    __syncwarp();
  } else {
    asm volatile("bar.sync %0, %1;" ::"r"(threadIdx.y + 1), "r"(blockDim.x) : "memory");
  }
}

// Adds N values over a team of at most THREADS threads, always in the same order; every thread gets the sums. One
// barrier: the next call must use another buffer (N * THREADS / 32 floats), the one after it may use this one again.
template <int N, int THREADS>
__device__ __forceinline__ void team_sum(float (&values)[N], float* buffer) {
  constexpr int kGroup = 32 / N;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const float total = warp_sum<N>(values);
  if (warps == 1) {
#pragma unroll
    for (int n = 0; n < N; ++n) values[n] = __shfl_sync(~0u, total, n * kGroup);
    __syncwarp();
    return;
  }
  if (lane % kGroup == 0) buffer[lane / kGroup * warps + warp] = total;
  team_sync();
#pragma unroll
  for (int n = 0; n < N; ++n) {
    values[n] = 0.f;
#pragma unroll
    for (int w = 0; w < THREADS / 32; ++w) values[n] += w < warps ? buffer[n * warps + w] : 0.f;
  }
}

// The angles of the four pairs in a pack of a head: columns 2i and 2i + 1 take cos[2i] and sin[2i + 1].
template <typename T>
struct Angles {
  Pack<T> cos, sin;

  __device__ __forceinline__ void load(const Array& cos_table, const Array& sin_table, int64_t batch, int64_t token,
                                       int column) {
    cos = load_pack(row_of<const T>(cos_table, batch, token) + column);
    sin = load_pack(row_of<const T>(sin_table, batch, token) + column);
  }
  // Times `factor`.
  __device__ __forceinline__ void read(float factor, float (&c)[kPack / 2], float (&s)[kPack / 2]) const {
    float values[kPack];
    cos.read(values);
#pragma unroll
    for (int i = 0; i < kPack / 2; ++i) c[i] = factor * values[2 * i];
    sin.read(values);
#pragma unroll
    for (int i = 0; i < kPack / 2; ++i) s[i] = factor * values[2 * i + 1];
  }
};

// My pack of weight [width].
__device__ __forceinline__ void load_weight(float (&values)[kPack], const Array& weight, int first, int width) {
  if (reinterpret_cast<uintptr_t>(weight.data) % 16 == 0) {
    load_columns<Access::pieces>(values, weight, 0, 0, first, width, 0.f);
  } else {
    load_columns<Access::neighbours>(values, weight, 0, 0, first, width, 0.f);
  }
}

// How many threads a team needs so that each has at most `packs` packs of a row, and all of them at one place of their
// heads: then a thread's angles serve all its packs.
inline int64_t team_threads(int64_t width, int64_t head_width, int packs) {
  const int64_t step = std::lcm<int64_t>(32, head_width / kPack);
  return ((width + packs * kPack - 1) / (packs * kPack) + step - 1) / step * step;
}

// How a kernel of teams is launched for a shape. Without stages: not at all, the ring does not fit this GPU or a row is
// too wide.
struct Teams {
  Segments segments;  // a chunk is a team
  dim3 threads;
  unsigned blocks = 0;
  int stages = 0, bytes = 0;

  // most_threads: of a block. turn_rows, stage_bytes: of one team. busy_warps: of a multiprocessor.
  Teams(const Shape& shape, int64_t head_width, int packs, int most_threads, int turn_rows, int64_t stage_bytes,
        int busy_warps, int most_stages) {
    const int64_t width = team_threads(shape.width, head_width, packs), most = most_threads / width;
    if (most == 0) return;
    const int64_t busy = std::max<int64_t>(1, busy_warps * 32 / width), resident = (busy + most - 1) / most;
    int64_t teams = (busy + resident - 1) / resident;
    segments = cut(shape, teams * resident, turn_rows);
    // Little work: rather more multiprocessors than more teams in each, and no second wave of blocks.
    const int64_t places = resident * device_attribute(cudaDevAttrMultiProcessorCount);
    teams = std::clamp<int64_t>((segments.blocks() + places - 1) / places, 1, teams);
    stages = stages_that_fit(teams * stage_bytes, most_stages, static_cast<int>(resident));
    bytes = static_cast<int>(stages * teams * stage_bytes);
    threads = dim3(static_cast<unsigned>(width), static_cast<unsigned>(teams));
    blocks = static_cast<unsigned>((segments.blocks() + teams - 1) / teams);
  }
};

template <typename T, typename A>
struct Types {
  using Stream = T;
  using Table = A;
};

// Calls `launch` with the types of rows and tables if kernels of teams exist for them and can read them: 16-byte pieces
// that lie within a head, tables in float32 or in the dtype of x. false: they do not, or `launch` says so.
template <typename Operands, typename Launch>
bool launch_for_types(const Operands& p, Launch launch) {
  const bool table_dtype = p.cos.dtype == p.sin.dtype && (p.cos.dtype == Dtype::float32 || p.cos.dtype == p.x.dtype);
  const bool vectors = p.head_width % kPack == 0 && aligned(p.x) && aligned(p.cos) && aligned(p.sin);
  if (!table_dtype || !vectors) return false;
  const bool float_table = p.cos.dtype == Dtype::float32;
  switch (p.x.dtype) {
    case Dtype::float32: return launch(Types<float, float>{});
    case Dtype::float16: return float_table ? launch(Types<__half, float>{}) : launch(Types<__half, __half>{});
    default:
      return float_table ? launch(Types<__nv_bfloat16, float>{}) : launch(Types<__nv_bfloat16, __nv_bfloat16>{});
  }
}

// Of the kernels in which a thread owns a pair of columns.
inline int pair_threads(int64_t width) {
  return static_cast<int>(std::min<int64_t>(kMostAnyThreads, (width + 63) / 64 * 32));
}

}  // namespace adaptiveload
