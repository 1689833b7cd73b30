// How are rows dealt to blocks, brought into shared memory ahead of time, and summed over a block?
#pragma once

#include <algorithm>

#include "launch.cuh"
#include "pack.cuh"

namespace adaptiveload {

// A segment is a run of tokens of one batch item that share a modulation row. `chunks` blocks walk down it; block
// `chunk` takes turns chunk, chunk + chunks, ... of R neighbouring rows each, so that all blocks read close together.
struct Segments {
  int64_t count;
  int tokens;  // of one segment
  int chunks;  // blocks of one segment

  int64_t blocks() const { return count * chunks; }
};

// Where a block works. 32-bit arithmetic: 64-bit division takes longer than loading a row.
struct Place {
  unsigned segment, chunk, batch, modulation_row;
  int64_t first;  // token of the batch item that the segment begins with

  __device__ __forceinline__ Place(const Segments& segments, unsigned block, unsigned rows) {
    segment = block / segments.chunks;
    chunk = block % segments.chunks;
    batch = segment / rows;
    modulation_row = segment % rows;
    first = static_cast<int64_t>(modulation_row) * segments.tokens;
  }
};

// With one modulation row per token there is no run of tokens that shares one: sums go over the whole batch item.
inline bool row_per_token(const Shape& shape) { return shape.rows == shape.tokens && shape.rows > 1; }

// The tokens of a segment are cut so that about `blocks_per_multiprocessor` blocks come out, none with fewer than
// `fewest_rows` rows.
inline Segments cut(const Shape& shape, int64_t blocks_per_multiprocessor, int64_t fewest_rows) {
  const int64_t rows = row_per_token(shape) ? 1 : shape.rows, segments = shape.batch * rows;
  const int64_t tokens = shape.tokens / std::max<int64_t>(1, rows);
  const int64_t blocks = blocks_per_multiprocessor * device_attribute(cudaDevAttrMultiProcessorCount);
  const int64_t most = std::max<int64_t>(1, tokens / fewest_rows);
  const int64_t chunks = std::clamp<int64_t>(blocks / std::max<int64_t>(1, segments), 1, most);
  return {segments, static_cast<int>(tokens), static_cast<int>(chunks)};
}

// As few blocks as take as many turns, of `turn_rows` rows each, as the busiest block has anyway: each ends with sums.
inline Segments with_equal_turns(Segments segments, int turn_rows) {
  const int turns = (segments.tokens + turn_rows - 1) / turn_rows;
  const int most = std::max(1, (turns + segments.chunks - 1) / segments.chunks);
  segments.chunks = std::max(1, (turns + most - 1) / most);
  return segments;
}

// The kernels for any layout take wider rows in several steps, since their registers are short.
constexpr int kMostAnyThreads = 512;

// Enough threads, in whole warps, for kPack columns each.
inline int threads_for(int64_t width) {
  return static_cast<int>(std::max<int64_t>(1, (width + 32 * kPack - 1) / (32 * kPack))) * 32;
}

// Adds N values over a warp. Afterwards lane l holds the sum of value l / (32 / N): halving the values at each step
// takes N + log2(32 / N) - 1 shuffles instead of 5 N.
template <int N>
__device__ __forceinline__ float warp_sum(float (&values)[N]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = N / 2; n >= 1; n /= 2) {
    const int offset = 32 * n / N;
    const bool upper = lane & offset;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const float sent = upper ? values[i] : values[i + n];
      const float kept = upper ? values[i + n] : values[i];
      values[i] = kept + __shfl_xor_sync(~0u, sent, offset);
    }
  }
  float total = values[0];
#pragma unroll
  for (int offset = 16 / N; offset >= 1; offset /= 2) total += __shfl_xor_sync(~0u, total, offset);
  return total;
}

// The threads that share a row: a whole block, or some whole warps of it, which wait for each other only.
struct Block {
  unsigned thread = threadIdx.x, threads = blockDim.x;

  __device__ __forceinline__ void wait() const { __syncthreads(); }
};
struct Group {
  unsigned index, thread, threads;

  __device__ __forceinline__ explicit Group(unsigned of_one)
      : index(threadIdx.x / of_one), thread(threadIdx.x % of_one), threads(of_one) {}

  // load_columns counts columns in the block; from here on they are those of the group.
  __device__ __forceinline__ int first_column() const { return -static_cast<int>(index * threads) * kPack; }

  // Barrier 0 is that of __syncthreads().
  __device__ __forceinline__ void wait() const {
    asm volatile("bar.sync %0, %1;" ::"r"(index + 1), "r"(threads) : "memory");
  }
};

// A barrier of the first `threads` threads of a block.
__device__ __forceinline__ void wait_for_threads(unsigned threads) {
  asm volatile("bar.sync 0, %0;" ::"r"(threads) : "memory");
}

// Adds N values (1 or 2) over the at most 32 warps of a group in two halves, with a barrier of the group between: what
// a warp posts, and what a lane adds. Where to is worked out once, not for every row as block_sum does.
template <int N>
struct WarpSums {
  static constexpr int kLanes = 32 / N;
  unsigned post_at, first;
  bool posts;
  int others;

  __device__ __forceinline__ explicit WarpSums(const Group& group) {
    const int lane = threadIdx.x % 32, warps = group.threads / 32;
    first = group.index * warps * N + lane % kLanes * N + lane / kLanes;
    post_at = (group.index * warps + group.thread / 32) * N + lane / kLanes;
    posts = lane % kLanes == 0;
    others = warps - lane % kLanes;  // from mine on
  }
  __device__ __forceinline__ void post(float (&values)[N], float* buffer) const {
    const float total = warp_sum<N>(values);
    if (posts) buffer[post_at] = total;
  }
  __device__ __forceinline__ void add(float (&values)[N], const float* buffer) const {
    float total = others > 0 ? buffer[first] : 0.f;
    if (N == 2 && others > kLanes) total += buffer[first + 32];
#pragma unroll
    for (int offset = kLanes / 2; offset >= 1; offset /= 2) total += __shfl_xor_sync(~0u, total, offset);
#pragma unroll
    for (int n = 0; n < N; ++n) values[n] = __shfl_sync(~0u, total, n * kLanes);
  }
};

// Adds N values (a power of two) over the sharers, at most THREADS threads, always in the same order; every thread gets
// the sums. One barrier: the next call must use another buffer (N * THREADS / 32 floats), the one after it may use this
// one again.
template <int N, int THREADS, typename Sharers = Block>
__device__ __forceinline__ void block_sum(float (&values)[N], float* buffer, const Sharers& sharers = {}) {
  constexpr int kGroup = 32 / N;
  const int lane = threadIdx.x % 32, warp = sharers.thread / 32, warps = sharers.threads / 32;
  float total = warp_sum<N>(values);
  if (lane % kGroup == 0) buffer[warp * N + lane / kGroup] = total;
  sharers.wait();
  total = 0.f;
#pragma unroll
  for (int w = 0; w < THREADS / 32; w += kGroup) {
    const int other = w + lane % kGroup;
    if (other < warps) total += buffer[other * N + lane / kGroup];
  }
#pragma unroll
  for (int offset = kGroup / 2; offset >= 1; offset /= 2) total += __shfl_xor_sync(~0u, total, offset);
#pragma unroll
  for (int n = 0; n < N; ++n) values[n] = __shfl_sync(~0u, total, n * kGroup);
}

// sum / divisor, rounded as a division rounds it: the mean of a row far from zero needs its last bit.
__device__ __forceinline__ float divide(float sum, float divisor, float reciprocal) {
  const float quotient = sum * reciprocal;
  return fmaf(fmaf(-quotient, divisor, sum), reciprocal, quotient);
}

// Rows on their way from global memory: a ring in shared memory of stages of ROWS rows each. Hopper and later have an
// engine that copies whole rows for one thread; before, every thread copies the columns that it will read itself.
template <typename T, int ROWS, int NV>
struct Ring {
  static constexpr int kMostStages = 6;

  unsigned char* rows;  // [stages][ROWS][width]
  uint64_t* arrivals;   // [kMostStages]: barriers that count the bytes of a stage
  int stages, width;
  unsigned thread = threadIdx.x, threads = blockDim.x;  // of those that use this ring

  // Where my pack `v` of a row begins; threads beyond the width look at the last pack and must not use what they see.
  __device__ __forceinline__ int column(int v) const {
    return min(static_cast<int>(v * threads + thread) * kPack, width - kPack);
  }

  static __host__ __device__ int64_t stage_bytes(int64_t width) { return ROWS * width * static_cast<int64_t>(sizeof(T)); }

  __device__ __forceinline__ unsigned char* row_at(int stage, int row) const {
    return rows + (stage * ROWS + row) * width * static_cast<int>(sizeof(T));
  }
  __device__ __forceinline__ Pack<T> read(int stage, int row, int v) const {
    return load_pack(reinterpret_cast<const T*>(row_at(stage, row)) + column(v));
  }

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  static __device__ __forceinline__ unsigned shared(const void* address) {
    return static_cast<unsigned>(__cvta_generic_to_shared(address));
  }
  __device__ __forceinline__ void start() const {
    if (thread == 0) {
      for (int stage = 0; stage < stages; ++stage) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared(arrivals + stage)) : "memory");
      }
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
  }
  // Does this thread take part in fetching? Asked once around it, so that the others jump over all of it.
  __device__ __forceinline__ bool copies() const { return thread == 0; }
  // Announces that `count` rows of a stage will come. All its readers must have passed a barrier since they read it.
  __device__ __forceinline__ void open(int stage, int count) const {
    if (thread != 0 || count <= 0) return;
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared(arrivals + stage)),
                 "r"(count * width * static_cast<int>(sizeof(T)))
                 : "memory");
  }
  __device__ __forceinline__ void copy(int stage, int row, const T* from, int elements) const {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            shared(row_at(stage, row))),
        "l"(from), "r"(elements * static_cast<int>(sizeof(T))), "r"(shared(arrivals + stage))
        : "memory");
  }
  // One copy where rows lie side by side: issuing a copy for each costs the one thread that does it too much.
  __device__ __forceinline__ void fetch(int stage, int first, const T* from, int64_t stride, int count) const {
    if (thread != 0 || count <= 0) return;
    if (stride == width) {
      copy(stage, first, from, count * width);
    } else {
      for (int r = 0; r < count; ++r) copy(stage, first + r, from + r * stride, width);
    }
  }
  __device__ __forceinline__ void close() const {}
  // Waits for a stage; `round` counts how often the ring has been gone through.
  __device__ __forceinline__ void wait(int stage, int round) const {
    asm volatile(
        "{\n"
        ".reg .pred there;\n"
        "WAIT:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 there, [%0], %1;\n"
        "@!there bra WAIT;\n"
        "}" ::"r"(shared(arrivals + stage)),
        "r"(round & 1)
        : "memory");
  }
#else
  __device__ __forceinline__ void start() const {}
  __device__ __forceinline__ bool copies() const { return true; }
  __device__ __forceinline__ void open(int, int) const {}
  __device__ __forceinline__ void fetch(int stage, int first, const T* from, int64_t stride, int count) const {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      if (r >= count) break;
#pragma unroll
      for (int i = 0; i < NV * Pack<T>::kPieces; ++i) {
        const int at = column(i / Pack<T>::kPieces) + i % Pack<T>::kPieces * (16 / static_cast<int>(sizeof(T)));
        const unsigned shared = static_cast<unsigned>(
            __cvta_generic_to_shared(reinterpret_cast<T*>(row_at(stage, first + r)) + at));
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(from + r * stride + at) : "memory");
      }
    }
  }
  __device__ __forceinline__ void close() const { asm volatile("cp.async.commit_group;" ::: "memory"); }
  // As many groups of copies are under way as there are stages; the number is an immediate operand.
  __device__ __forceinline__ void wait(int, int) const {
    switch (stages) {
      case 2: asm volatile("cp.async.wait_group 1;" ::: "memory"); break;
      case 3: asm volatile("cp.async.wait_group 2;" ::: "memory"); break;
      case 4: asm volatile("cp.async.wait_group 3;" ::: "memory"); break;
      case 5: asm volatile("cp.async.wait_group 4;" ::: "memory"); break;
      default: asm volatile("cp.async.wait_group 5;" ::: "memory");
    }
  }
#endif
};

// How many stages, up to `most`, fit into shared memory, if possible so that `blocks` blocks run on a multiprocessor.
// 0: not even two.
inline int stages_that_fit(int64_t stage_bytes, int most, int blocks) {
  constexpr int64_t kStatic = 3072;  // reduction buffers, barriers, and what the driver reserves
  const int64_t limit = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - kStatic;
  const int64_t share = device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor) / blocks - kStatic;
  for (int stages = most; stages > 2; --stages) {
    if (stages * stage_bytes <= std::min(limit, share)) return stages;
  }
  return 2 * stage_bytes <= limit ? 2 : 0;
}

}  // namespace adaptiveload
