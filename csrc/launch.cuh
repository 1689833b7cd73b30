// How does a kernel start while the one before it on the stream still ends?
#pragma once

#include <cuda_runtime.h>

#include <map>
#include <utility>

namespace adaptiveload {

inline int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&value, attribute, device);
  return value;
}

// Brings memory to the L2 cache that will be read after wait_for_previous_kernel(): what that kernel writes arrives
// there, too, so nothing old is seen. `address` and `bytes` are multiples of 16.
__device__ __forceinline__ void bring_to_cache(const void* address, int bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes) : "memory");
#endif
}

// Makes a kernel ready for the current GPU, once: as much shared memory as a launch asks for, and whether its code is
// for Hopper or later. CUDA takes longer over these two questions than over half a launch.
inline cudaError_t prepare(const void* kernel, bool* hopper) {
  thread_local std::map<std::pair<const void*, int>, bool> known;
  int device = 0;
  cudaGetDevice(&device);
  const auto found = known.find({kernel, device});
  if (found != known.end()) {
    *hopper = found->second;
    return cudaSuccess;
  }
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
  if (error != cudaSuccess) return error;
  const int bytes = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               bytes - static_cast<int>(attributes.sharedSizeBytes));
  if (error != cudaSuccess) return error;
  *hopper = known[{kernel, device}] = attributes.ptxVersion >= 90;
  return cudaSuccess;
}

// What the previous kernel wrote may be read after this only.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Blocks of a kernel launched with launch_early may come to a multiprocessor once every block here has said this.
__device__ __forceinline__ void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// What blocks of a cluster do together, on Hopper and later; elsewhere a block is alone. Each is for all its threads.
// Memory of another block may be used once that has begun, and a block may end when no other uses its memory any more.
__device__ __forceinline__ void cluster_begins() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_has_begun() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}
// To where `place`, of my shared memory, lies in that of the first block of my cluster.
__device__ __forceinline__ void store_in_first_block(float* place, float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(place));
  asm volatile("mapa.shared::cluster.u32 %0, %0, 0;" : "+r"(address));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
#else
  *place = value;
#endif
}

// Launches a kernel that begins with wait_for_previous_kernel(): on Hopper and later before the previous one has ended,
// if `early`, and with `feeders` more threads a block (feed.cuh). Code built for older GPUs neither waits nor has
// feeders, also where it runs on a newer one. Not early: behind a memset, which is no kernel.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_fed(void (*kernel)(Parameters...), unsigned blocks, dim3 threads, unsigned feeders, bool early,
                       int shared_bytes, cudaStream_t stream, Arguments&&... arguments) {
  bool hopper = false;
  const cudaError_t error = prepare(reinterpret_cast<const void*>(kernel), &hopper);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute overlap = {};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks;
  config.blockDim = threads;
  if (hopper) config.blockDim.x += feeders;
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = hopper && early ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}

// Launches a kernel that begins as above, its blocks in clusters of `cluster`.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_clusters(void (*kernel)(Parameters...), unsigned blocks, unsigned threads, unsigned cluster,
                            cudaStream_t stream, Arguments&&... arguments) {
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = cluster;
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}

template <typename... Parameters, typename... Arguments>
cudaError_t launch_early(void (*kernel)(Parameters...), unsigned blocks, dim3 threads, int shared_bytes,
                         cudaStream_t stream, Arguments&&... arguments) {
  return launch_fed(kernel, blocks, threads, 0, true, shared_bytes, stream, std::forward<Arguments>(arguments)...);
}

}  // namespace adaptiveload
