// How does a thread read and write its eight columns of a row, whatever their dtype?
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels.h"

namespace adaptiveload {

// Which eight columns from `first` on are mine, and how are they read? Neighbours in 16-byte pieces, neighbours one by
// one, whichever of these their address allows (a modulation beside vectors of x may lie anywhere), or every
// blockDim-th one (any width, and still coalesced).
enum class Access { pieces, neighbours, either, strided };

template <Access A>
__device__ __forceinline__ int column_of(int first, int i) {
  return first + static_cast<int>(A == Access::strided ? threadIdx.x + i * blockDim.x : threadIdx.x * kPack + i);
}

// PyTorch compiles extensions with __CUDA_NO_BFLOAT16_CONVERSIONS__, so conversions are spelled out. The two bfloat16
// of a word are its halves; a bfloat16 is the upper half of the float.
template <typename T>
struct Pair;
template <>
struct Pair<__nv_bfloat16> {
  static __device__ __forceinline__ float2 read(unsigned word) {
    return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
  }
  static __device__ __forceinline__ unsigned write(float low, float high) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<unsigned*>(&pair);
  }
};
template <>
struct Pair<__half> {
  static __device__ __forceinline__ float2 read(unsigned word) {
    return __half22float2(*reinterpret_cast<__half2*>(&word));
  }
  static __device__ __forceinline__ unsigned write(float low, float high) {
    __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<unsigned*>(&pair);
  }
};

// Eight columns as they lie in memory.
template <typename T>
struct Pack {
  static constexpr int kPieces = 1;
  uint4 piece[kPieces];

  __device__ __forceinline__ void read(float (&values)[kPack]) const {
    const unsigned words[4] = {piece[0].x, piece[0].y, piece[0].z, piece[0].w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = Pair<T>::read(words[i]);
      values[2 * i] = pair.x;
      values[2 * i + 1] = pair.y;
    }
  }
  __device__ __forceinline__ void write(const float (&values)[kPack]) {
    piece[0] = make_uint4(Pair<T>::write(values[0], values[1]), Pair<T>::write(values[2], values[3]),
                          Pair<T>::write(values[4], values[5]), Pair<T>::write(values[6], values[7]));
  }
};
template <>
struct Pack<float> {
  static constexpr int kPieces = 2;
  uint4 piece[kPieces];

  __device__ __forceinline__ void read(float (&values)[kPack]) const {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      values[4 * i] = __uint_as_float(piece[i].x);
      values[4 * i + 1] = __uint_as_float(piece[i].y);
      values[4 * i + 2] = __uint_as_float(piece[i].z);
      values[4 * i + 3] = __uint_as_float(piece[i].w);
    }
  }
  __device__ __forceinline__ void write(const float (&values)[kPack]) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      piece[i] = make_uint4(__float_as_uint(values[4 * i]), __float_as_uint(values[4 * i + 1]),
                            __float_as_uint(values[4 * i + 2]), __float_as_uint(values[4 * i + 3]));
    }
  }
};

// Left alone, the compiler unpacks early and keeps floats across barriers: twice the registers, and spills.
template <typename T>
__device__ __forceinline__ void keep_packed(Pack<T>& pack) {
#pragma unroll
  for (int i = 0; i < Pack<T>::kPieces; ++i) {
    asm volatile("" : "+r"(pack.piece[i].x), "+r"(pack.piece[i].y), "+r"(pack.piece[i].z), "+r"(pack.piece[i].w));
  }
}

template <typename T>
__device__ __forceinline__ Pack<T> load_pack(const T* address) {
  Pack<T> pack;
#pragma unroll
  for (int i = 0; i < Pack<T>::kPieces; ++i) pack.piece[i] = reinterpret_cast<const uint4*>(address)[i];
  return pack;
}

template <typename T>
__device__ __forceinline__ void store_pack(T* address, const float (&values)[kPack]) {
  Pack<T> pack;
  pack.write(values);
#pragma unroll
  for (int i = 0; i < Pack<T>::kPieces; ++i) reinterpret_cast<uint4*>(address)[i] = pack.piece[i];
}

// For memory that is read or written once: it should not push anything out of the caches.
template <typename T>
__device__ __forceinline__ Pack<T> load_pack_once(const T* address) {
  Pack<T> pack;
#pragma unroll
  for (int i = 0; i < Pack<T>::kPieces; ++i) pack.piece[i] = __ldcs(reinterpret_cast<const uint4*>(address) + i);
  return pack;
}
template <typename T>
__device__ __forceinline__ void store_pack_once(T* address, const Pack<T>& pack) {
#pragma unroll
  for (int i = 0; i < Pack<T>::kPieces; ++i) __stcs(reinterpret_cast<uint4*>(address) + i, pack.piece[i]);
}
template <typename T>
__device__ __forceinline__ void store_pack_once(T* address, const float (&values)[kPack]) {
  Pack<T> pack;
  pack.write(values);
  store_pack_once(address, pack);
}

template <typename T>
__device__ __forceinline__ void store_pack(T* address, const Pack<T>& pack) {
#pragma unroll
  for (int i = 0; i < Pack<T>::kPieces; ++i) reinterpret_cast<uint4*>(address)[i] = pack.piece[i];
}

template <typename T>
__device__ __forceinline__ T* row_of(const Array& a, int64_t batch, int64_t row) {
  return static_cast<T*>(a.data) + batch * a.batch_stride + row * a.row_stride;
}

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ void set_value(float* at, float value) { *at = value; }
__device__ __forceinline__ void set_value(__half* at, float value) { *at = __float2half_rn(value); }
__device__ __forceinline__ void set_value(__nv_bfloat16* at, float value) { *at = __float2bfloat16_rn(value); }

template <Access A, typename T>
__device__ __forceinline__ void load_row(float (&values)[kPack], const T* row, int first, int width) {
  if constexpr (A == Access::pieces) {
    const int column = column_of<A>(first, 0);
    if (column < width) load_pack(row + column).read(values);
  } else if constexpr (A == Access::either) {
    // Columns in front of `first` and up to mine are a multiple of eight.
    if (reinterpret_cast<uintptr_t>(row + first) % 16 == 0) {
      load_row<Access::pieces>(values, row, first, width);
    } else {
      load_row<Access::neighbours>(values, row, first, width);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      const int column = column_of<A>(first, i);
      if (column < width) values[i] = to_float(row[column]);
    }
  }
}
template <Access A, typename T>
__device__ __forceinline__ void store_row(const float (&values)[kPack], T* row, int first, int width) {
  if constexpr (A == Access::pieces) {
    const int column = column_of<A>(first, 0);
    if (column < width) store_pack_once(row + column, values);
  } else {
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      const int column = column_of<A>(first, i);
      if (column < width) set_value(row + column, values[i]);
    }
  }
}

// My eight columns of a row of an array whose dtype is only known when it runs. Columns beyond the width and those of
// an absent operand read as `absent`; the former are not written.
template <Access A>
__device__ __forceinline__ void load_columns(float (&values)[kPack], const Array& a, int64_t batch, int64_t row,
                                             int first, int width, float absent) {
#pragma unroll
  for (int i = 0; i < kPack; ++i) values[i] = absent;
  if (a.data == nullptr) return;
  switch (a.dtype) {
    case Dtype::float32: load_row<A>(values, row_of<const float>(a, batch, row), first, width); break;
    case Dtype::float16: load_row<A>(values, row_of<const __half>(a, batch, row), first, width); break;
    default: load_row<A>(values, row_of<const __nv_bfloat16>(a, batch, row), first, width);
  }
}
template <Access A>
__device__ __forceinline__ void store_columns(const Array& a, int64_t batch, int64_t row, int first, int width,
                                              const float (&values)[kPack]) {
  switch (a.dtype) {
    case Dtype::float32: store_row<A>(values, row_of<float>(a, batch, row), first, width); break;
    case Dtype::float16: store_row<A>(values, row_of<__half>(a, batch, row), first, width); break;
    default: store_row<A>(values, row_of<__nv_bfloat16>(a, batch, row), first, width);
  }
}

// One element, likewise.
__device__ __forceinline__ float element(const Array& a, int64_t batch, int64_t row, int column, float absent) {
  if (a.data == nullptr) return absent;
  switch (a.dtype) {
    case Dtype::float32: return row_of<const float>(a, batch, row)[column];
    case Dtype::float16: return to_float(row_of<const __half>(a, batch, row)[column]);
    default: return to_float(row_of<const __nv_bfloat16>(a, batch, row)[column]);
  }
}
__device__ __forceinline__ void set_element(const Array& a, int64_t batch, int64_t row, int column, float value) {
  switch (a.dtype) {
    case Dtype::float32: set_value(row_of<float>(a, batch, row) + column, value); break;
    case Dtype::float16: set_value(row_of<__half>(a, batch, row) + column, value); break;
    default: set_value(row_of<__nv_bfloat16>(a, batch, row) + column, value);
  }
}

// One of a [D] array, if there is one.
__device__ __forceinline__ void set_column(const Array& a, int column, float value) {
  if (a.data == nullptr) return;
  switch (a.dtype) {
    case Dtype::float32: set_value(static_cast<float*>(a.data) + column, value); break;
    case Dtype::float16: set_value(static_cast<__half*>(a.data) + column, value); break;
    default: set_value(static_cast<__nv_bfloat16*>(a.data) + column, value);
  }
}

// Brings the line of an address, or of a column, to the L2 cache: see launch.cuh.
__device__ __forceinline__ void bring_to_cache(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory");
}
__device__ __forceinline__ void bring_to_cache(const Array& a, int64_t batch, int64_t row, int column) {
  if (a.data == nullptr) return;
  const int64_t at = batch * a.batch_stride + row * a.row_stride + column;
  bring_to_cache(static_cast<const char*>(a.data) + at * (a.dtype == Dtype::float32 ? 4 : 2));
}

// What all blocks read comes to the cache line by line, each asked for by one of `blocks` blocks: they would wait for one
// another at a line that all ask for.
__device__ __forceinline__ void bring_columns(const Array& a, int64_t batch, int64_t row, unsigned block,
                                              unsigned blocks, int width) {
  constexpr unsigned kLine = 32;  // of float32
  const unsigned column = (block + threadIdx.x * blocks) * kLine;
  if (a.data != nullptr && column < static_cast<unsigned>(width)) bring_to_cache(a, batch, row, column);
}

// Can rows of this array be read in 16-byte pieces?
inline bool aligned(const Array& a) {
  return reinterpret_cast<uintptr_t>(a.data) % 16 == 0 && a.batch_stride % kPack == 0 && a.row_stride % kPack == 0;
}

}  // namespace adaptiveload
