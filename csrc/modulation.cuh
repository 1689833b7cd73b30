// What do gates, modulations, tables, weight and bias make of a column? One factor, gain or offset.
#pragma once

#include "pack.cuh"

namespace adaptiveload {

// Everything is loaded before anything is used, so that the loads wait together.

// gate + gate_table of my columns, 1 without both.
template <Access A, typename P>
__device__ __forceinline__ void load_factor(const P& p, int64_t batch, int64_t row, int first,
                                            float (&factor)[kPack]) {
  const int width = static_cast<int>(p.shape.width);
  const float absent = p.gate.data == nullptr && p.gate_table.data == nullptr ? 1.f : 0.f;
  float table[kPack];
  load_columns<A>(factor, p.gate, batch, row, first, width, absent);
  load_columns<A>(table, p.gate_table, 0, 0, first, width, 0.f);
#pragma unroll
  for (int i = 0; i < kPack; ++i) factor[i] += table[i];
}

// gain and offset of my columns: xh * weight + bias, then * m + shift, is xh * (weight * m) + (bias * m + shift), both
// weight and m with their offsets.
template <Access A, typename P>
__device__ __forceinline__ void load_affine(const P& p, int64_t batch, int64_t row, int first, float (&gain)[kPack],
                                            float (&offset)[kPack]) {
  const int width = static_cast<int>(p.shape.width);
  float scale_table[kPack], shift_table[kPack], weight[kPack], bias[kPack];
  load_columns<A>(gain, p.scale, batch, row, first, width, 0.f);
  load_columns<A>(offset, p.shift, batch, row, first, width, 0.f);
  load_columns<A>(scale_table, p.scale_table, 0, 0, first, width, 0.f);
  load_columns<A>(shift_table, p.shift_table, 0, 0, first, width, 0.f);
  load_columns<A>(weight, p.weight, 0, 0, first, width, 1.f);
  load_columns<A>(bias, p.bias, 0, 0, first, width, 0.f);
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    gain[i] += p.scale_offset + scale_table[i];
    offset[i] += shift_table[i] + bias[i] * gain[i];
    gain[i] *= weight[i] + p.weight_offset;
  }
}

// The same where few registers matter more: tables, weight and bias are loaded after the rest, which takes time only where
// they are there.
template <Access A, typename P>
__device__ __forceinline__ void load_affine_apart(const P& p, int64_t batch, int64_t row, int first,
                                                  float (&gain)[kPack], float (&offset)[kPack]) {
  const int width = static_cast<int>(p.shape.width);
  float factor[kPack], term[kPack];
  load_columns<A>(gain, p.scale, batch, row, first, width, 0.f);
  load_columns<A>(offset, p.shift, batch, row, first, width, 0.f);
#pragma unroll
  for (int i = 0; i < kPack; ++i) gain[i] += p.scale_offset;
  if (p.scale_table.data != nullptr || p.shift_table.data != nullptr) {
    load_columns<A>(factor, p.scale_table, 0, 0, first, width, 0.f);
    load_columns<A>(term, p.shift_table, 0, 0, first, width, 0.f);
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      gain[i] += factor[i];
      offset[i] += term[i];
    }
  }
  if (p.weight.data == nullptr && p.bias.data == nullptr) return;
  load_columns<A>(factor, p.weight, 0, 0, first, width, 1.f);
  load_columns<A>(term, p.bias, 0, 0, first, width, 0.f);
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    offset[i] += term[i] * gain[i];
    gain[i] *= factor[i] + p.weight_offset;
  }
}

// m * weight of my columns, what grad is multiplied by on its way to g; m alone without `weighted`.
template <Access A, typename P>
__device__ __forceinline__ void load_gain(const P& p, int64_t batch, int64_t row, int first, bool weighted,
                                          float (&gain)[kPack]) {
  const int width = static_cast<int>(p.shape.width);
  float term[kPack];
  load_columns<A>(gain, p.scale, batch, row, first, width, 0.f);
  load_columns<A>(term, p.scale_table, 0, 0, first, width, 0.f);
#pragma unroll
  for (int i = 0; i < kPack; ++i) gain[i] += p.scale_offset + term[i];
  if (!weighted) return;
  load_columns<A>(term, p.weight, 0, 0, first, width, 1.f);
#pragma unroll
  for (int i = 0; i < kPack; ++i) gain[i] *= term[i] + p.weight_offset;
}

}  // namespace adaptiveload
