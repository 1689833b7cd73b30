// How do rows reach the groups of a block ahead of time, and who gets which?
//
// A block's groups take runs of as many neighbouring rows as there are groups, one row each. On Hopper and later a warp
// of its own has the copy engine bring them: deciding, waiting and issuing a copy takes one thread some hundred
// dependent instructions, and all others would wait for it at the next barrier. Before Hopper every thread copies the
// columns that it will read itself.
#pragma once

#include <climits>

#include "rows.cuh"

namespace adaptiveload {

// The last threads of a block, which launch_fed adds.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kFeeders = 0;
#else
constexpr int kFeeders = 32;
#endif

// The runs of a segment. A block takes every chunks-th, or, with `tickets` (a zero in global memory), after its first
// ones the next that no block has taken: blocks nearer to memory are faster, and with runs dealt in advance they end
// early, and the others read and write memory that lies far apart.
struct Runs {
  int count, chunk, chunks;
  int rows;  // of the segment: the last run may be short
  unsigned* tickets;

  __device__ __forceinline__ Runs(const Segments& segments, int groups, unsigned chunk, unsigned* tickets)
      : count((segments.tokens + groups - 1) / groups), chunk(chunk), chunks(segments.chunks),
        rows(segments.tokens), tickets(tickets) {}
};

constexpr int kMostGroups = 8;

struct Pipeline {
  int groups, threads, stages;  // threads: of a group
};

// Adds the groups' sums of my columns in the order of the groups; afterwards those of group 0 are the block's.
template <int K>
__device__ __forceinline__ void add_groups(float (&sums)[K][kPack], float* buffer, const Group& group, int groups) {
  wait_for_threads(groups * group.threads);
  if (group.index > 0) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        buffer[(((group.index - 1) * K + k) * kPack + i) * group.threads + group.thread] = sums[k][i];
      }
    }
  }
  wait_for_threads(groups * group.threads);
  if (group.index > 0) return;
  for (int other = 0; other < groups - 1; ++other) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        sums[k][i] += buffer[((other * K + k) * kPack + i) * group.threads + group.thread];
      }
    }
  }
}

// A thread reads NV packs of each of the ROWS rows that belong to a turn, and says so: one for all of its group, after a
// barrier, would save registers, but racecheck follows that only in blocks of one group. DEALT: on Hopper a group learns
// which row is its own with the row, as tickets need it; otherwise it knows before, which spares narrow rows 5% of their
// time.
template <typename T, int ROWS, int NV, bool DEALT = false>
struct Feed {
  static constexpr int kMostStages = 4;
  struct Signals {
    uint64_t arrivals[kMostStages][kMostGroups], departures[kMostStages][kMostGroups];
    int rows[kMostStages][kMostGroups];
  };

  unsigned char* memory;  // [stages][groups][ROWS][width]
  Signals& signals;
  int groups, stages, width;
  Group group;
  Runs runs;
  int row;  // of my turn; beyond the segment: there is none
  int stage = 0, round = 0;

  __device__ __forceinline__ Feed(unsigned char* memory, Signals& signals, const Pipeline& pipeline, int width,
                                  const Runs& runs)
      : memory(memory), signals(signals), groups(pipeline.groups), stages(pipeline.stages), width(width),
        group(pipeline.threads), runs(runs), row(runs.chunk * groups + group.index) {}

  static __host__ __device__ int64_t stage_bytes(int64_t groups, int64_t width) {
    return groups * ROWS * width * static_cast<int64_t>(sizeof(T));
  }

  // Where my pack `v` of a row begins; threads beyond the width look at the last pack and must not use what they see.
  __device__ __forceinline__ int column(int v) const {
    return min(static_cast<int>(v * group.threads + group.thread) * kPack, width - kPack);
  }
  __device__ __forceinline__ unsigned char* row_at(int at_stage, int index, int row) const {
    return memory + ((at_stage * groups + index) * ROWS + row) * width * static_cast<int>(sizeof(T));
  }
  __device__ __forceinline__ Pack<T> read(int row, int v) const {
    return load_pack(reinterpret_cast<const T*>(row_at(stage, group.index, row)) + column(v));
  }

  // How to use it, with fetch(row, stage, index) that opens a stage of group `index` and copies the ROWS rows to it:
  //   start(); if (only_feeds()) return feed_all(fetch); begin(fetch);
  //   while (wait()) { read(..) ..; a barrier of the group; leave(fetch); ... }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  static __device__ __forceinline__ unsigned shared(const void* address) {
    return static_cast<unsigned>(__cvta_generic_to_shared(address));
  }
  static __device__ __forceinline__ void arrive(uint64_t& barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared(&barrier)) : "memory");
  }
  static __device__ __forceinline__ void wait_for(uint64_t& barrier, int round) {
    asm volatile(
        "{\n"
        ".reg .pred there;\n"
        "WAIT:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 there, [%0], %1;\n"
        "@!there bra WAIT;\n"
        "}" ::"r"(shared(&barrier)),
        "r"(round & 1)
        : "memory");
  }
  __device__ __forceinline__ void start() const {
    if (threadIdx.x == 0) {
#pragma unroll 1
      for (int i = 0; i < stages * kMostGroups; ++i) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared(signals.arrivals) + 8 * i) : "memory");
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared(signals.departures) + 8 * i),
                     "r"(group.threads)
                     : "memory");
      }
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
  }
  __device__ __forceinline__ bool only_feeds() const { return group.index >= groups; }

  // The rows that the block's stages will hold first, by one of those that feed.
  template <typename Use>
  __device__ __forceinline__ void for_first_rows(const Use& use) const {
    if (group.thread != 0) return;
    for (int stage = 0; stage < stages; ++stage) {
      const int first = (runs.chunk + stage * runs.chunks) * groups;
      for (int row = first; row < min(first + groups, runs.rows); ++row) use(row);
    }
  }

  __device__ __forceinline__ void open(int at_stage, int index, int count) const {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                     shared(&signals.arrivals[at_stage][index])),
                 "r"(count * width * static_cast<int>(sizeof(T)))
                 : "memory");
  }
  __device__ __forceinline__ void copy(int at_stage, int index, int row, const T* from) const {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            shared(row_at(at_stage, index, row))),
        "l"(from), "r"(width * static_cast<int>(sizeof(T))), "r"(shared(&signals.arrivals[at_stage][index]))
        : "memory");
  }

  template <typename Fetch>
  __device__ __forceinline__ void feed_all(const Fetch& fetch) const {
    if (group.thread != 0) return;
    int run = runs.chunk, at_stage = 0, passed = 0;
    // Asked for a turn ahead: the answer takes longer than a turn.
    unsigned ticket = !DEALT || runs.tickets == nullptr ? 0 : atomicAdd(runs.tickets, 1);
    for (int turns = 1;; ++turns) {
      const bool more = run < runs.count;
#pragma unroll 1
      for (int index = 0; index < groups; ++index) {
        const int row = run * groups + index;
        const bool present = more && row < runs.rows;
        if (passed > 0 && (DEALT || present)) wait_for(signals.departures[at_stage][index], passed - 1);
        if (DEALT) signals.rows[at_stage][index] = present ? row : INT_MAX;
        if (present) {
          fetch(row, at_stage, index);
        } else if (DEALT) {
          arrive(signals.arrivals[at_stage][index]);
        }
      }
      if (!more) return;
      if (!DEALT || runs.tickets == nullptr || turns < stages) {
        run += runs.chunks;
      } else {
        run = stages * runs.chunks + static_cast<int>(ticket);
        if (run < runs.count) ticket = atomicAdd(runs.tickets, 1);
      }
      if (++at_stage == stages) {
        at_stage = 0;
        ++passed;
      }
    }
  }
  // The same by a lane for each group, all at once. Only for turns of one row: of several racecheck reports the copies.
  template <typename Fetch>
  __device__ __forceinline__ void feed_in_lanes(const Fetch& fetch) const {
    const int index = group.thread;
    if (index >= groups) return;
    int at_stage = 0, passed = 0;
    for (int run = runs.chunk; run < runs.count; run += runs.chunks) {
      const int row = run * groups + index;
      const bool present = row < runs.rows;
      if (passed > 0 && present) wait_for(signals.departures[at_stage][index], passed - 1);
      if (present) fetch(row, at_stage, index);
      if (++at_stage == stages) {
        at_stage = 0;
        ++passed;
      }
    }
  }
  template <typename Fetch>
  __device__ __forceinline__ void begin(const Fetch&) const {}
  // Waits for my row; false: there is none.
  __device__ __forceinline__ bool wait() {
    if (!DEALT && row >= runs.rows) return false;
    wait_for(signals.arrivals[stage][group.index], round);
    if (DEALT) row = signals.rows[stage][group.index];
    return row < runs.rows;
  }
  // After a barrier of the group since it was read.
  template <typename Fetch>
  __device__ __forceinline__ void leave(const Fetch&) {
    arrive(signals.departures[stage][group.index]);
    row += runs.chunks * groups;
    if (++stage == stages) {
      stage = 0;
      ++round;
    }
  }
#else
  __device__ __forceinline__ void start() const {}
  __device__ __forceinline__ bool only_feeds() const { return false; }
  template <typename Use>
  __device__ __forceinline__ void for_first_rows(const Use&) const {}
  template <typename Fetch>
  __device__ __forceinline__ void feed_all(const Fetch&) const {}
  template <typename Fetch>
  __device__ __forceinline__ void feed_in_lanes(const Fetch&) const {}
  __device__ __forceinline__ void open(int, int, int) const {}
  __device__ __forceinline__ void copy(int at_stage, int index, int row, const T* from) const {
    constexpr int kPiece = 16 / static_cast<int>(sizeof(T));
#pragma unroll
    for (int i = 0; i < NV * Pack<T>::kPieces; ++i) {
      const int at = column(i / Pack<T>::kPieces) + i % Pack<T>::kPieces * kPiece;
      const unsigned to =
          static_cast<unsigned>(__cvta_generic_to_shared(reinterpret_cast<T*>(row_at(at_stage, index, row)) + at));
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from + at) : "memory");
    }
  }
  template <typename Fetch>
  __device__ __forceinline__ void fetch_ahead(int turns, int at_stage, const Fetch& fetch) const {
    const int next = row + turns * runs.chunks * groups;
    if (next < runs.rows) fetch(next, at_stage, group.index);
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  template <typename Fetch>
  __device__ __forceinline__ void begin(const Fetch& fetch) const {
    for (int t = 0; t < stages; ++t) fetch_ahead(t, t, fetch);
  }
  // As many groups of copies are under way as there are stages; the number is an immediate operand.
  __device__ __forceinline__ bool wait() const {
    switch (stages) {
      case 2: asm volatile("cp.async.wait_group 1;" ::: "memory"); break;
      case 3: asm volatile("cp.async.wait_group 2;" ::: "memory"); break;
      default: asm volatile("cp.async.wait_group 3;" ::: "memory");
    }
    return row < runs.rows;
  }
  template <typename Fetch>
  __device__ __forceinline__ void leave(const Fetch& fetch) {
    fetch_ahead(stages, stage, fetch);
    row += runs.chunks * groups;
    if (++stage == stages) stage = 0;
  }
#endif
};

}  // namespace adaptiveload
