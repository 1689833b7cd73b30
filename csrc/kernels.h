// What do the kernels take? Raw pointers, strides and a shape in, cudaError_t out. No torch header in any kernel file.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace adaptiveload {

// A thread owns kPack columns.
constexpr int kPack = 8;
constexpr int64_t kMaxWidth = 8192;  // what is tested

enum class Dtype { float32, float16, bfloat16 };

// Element (batch, row, column) is data[batch * batch_stride + row * row_stride + column]. A [D] operand has strides 0.
// Without data the operand is absent.
struct Array {
  void* data = nullptr;
  Dtype dtype = Dtype::float32;
  int64_t batch_stride = 0;
  int64_t row_stride = 0;
};

// x is [batch, tokens, width]; modulations are [batch, rows, width], token s reads row s * rows / tokens.
struct Shape {
  int64_t batch;
  int64_t tokens;
  int64_t width;
  int64_t rows;
};

// y = (xh * (weight + weight_offset) + bias) * (scale_offset + scale + scale_table) + shift + shift_table
// with xh the normalised row of x: by mean and standard deviation, or, without `mean`, by the root mean square.
struct LayerNormForward {
  Shape shape;
  float eps;
  bool mean = true;
  float scale_offset = 1.f, weight_offset = 0.f;
  Array x, scale, shift, weight, bias, scale_table, shift_table;
  Array y;
  float* stats;  // [batch, tokens, 2]: mean, 1 / standard deviation; without `mean` [batch, tokens]: 1 / root mean square
  unsigned* tickets = nullptr;  // layer_norm_forward_tickets(...), null if that is 0
};

struct LayerNormBackward {
  Shape shape;
  bool mean = true;
  float scale_offset = 1.f, weight_offset = 0.f;
  Array grad, x, scale, weight, bias, scale_table;
  const float* stats;
  // Gradients; without data: not wanted. dshift is never wanted with a row per token: it is grad itself.
  Array dx, dscale, dshift, dweight, dbias, dscale_table, dshift_table;
  float* partials;  // layer_norm_backward_partials(...) floats, null if that is 0
};

struct GateForward {
  Shape shape;
  Array x, y, gate, gate_table;
  Array out;
};

struct GateBackward {
  Shape shape;
  Array grad, y, gate, gate_table;
  Array dy, dgate, dgate_table;  // without data: not wanted
  float* partials;               // gate_backward_partials(...) floats, likewise
};

struct GatedNormForward {
  static constexpr float scale_offset = 1.f, weight_offset = -0.f;  // x + -0 is x: no instruction
  Shape shape;
  float eps;
  Array x, y, gate, gate_table, scale, shift, weight, bias, scale_table, shift_table;
  Array residual, normed;
  float2* stats;  // [batch, tokens], of the rounded residual: mean, 1 / standard deviation
};

struct GatedNormBackward {
  static constexpr float scale_offset = 1.f, weight_offset = -0.f;  // x + -0 is x: no instruction
  Shape shape;
  Array grad_residual, grad, residual, y, gate, gate_table, scale, weight, bias, scale_table;
  const float2* stats;
  Array dx, dy, dgate, dgate_table, dscale, dshift, dweight, dbias, dscale_table, dshift_table;  // as above
  float* partials;  // gated_norm_backward_partials(...) floats
};

struct RopeForward {
  Shape shape;
  int64_t head_width;
  bool by_head;    // each head is normalised by itself, else all columns of a row together
  int64_t turned;  // tokens, the first ones; all of them unless by_head
  float eps;
  Array x, weight;  // weight: [width], or [head_width] by_head
  Array cos, sin;   // [batch or 1, turned, head_width]
  Array y;
  float* rstd;  // [batch, tokens], or [batch, tokens, heads] by_head: 1 / root mean square
};

struct RopeBackward {
  Shape shape;
  int64_t head_width;
  bool by_head;
  int64_t turned;
  int64_t grad_head_stride;  // from a head of grad to the next; head_width unless by_head
  Array grad, x, weight, cos, sin;
  const float* rstd;
  Array dx, dweight;  // without data: not wanted
  float* partials;  // rope_backward_partials(...) floats, for dweight
};

cudaError_t layer_norm_modulate_forward(const LayerNormForward& p, cudaStream_t stream);
cudaError_t layer_norm_modulate_backward(const LayerNormBackward& p, cudaStream_t stream);
cudaError_t gate_residual_forward(const GateForward& p, cudaStream_t stream);
cudaError_t gate_residual_backward(const GateBackward& p, cudaStream_t stream);
cudaError_t rms_norm_rope_forward(const RopeForward& p, cudaStream_t stream);
cudaError_t rms_norm_rope_backward(const RopeBackward& p, cudaStream_t stream);

cudaError_t gate_residual_layer_norm_modulate_forward(const GatedNormForward& p, cudaStream_t stream);
cudaError_t gate_residual_layer_norm_modulate_backward(const GatedNormBackward& p, cudaStream_t stream);

int64_t layer_norm_forward_tickets(const Shape& shape);
int64_t layer_norm_backward_partials(const LayerNormBackward& p);
int64_t gate_backward_partials(const GateBackward& p);
int64_t gated_norm_backward_partials(const Shape& shape);
int64_t rope_backward_partials(const RopeBackward& p);

// The above by_head; false: there is no kernel for these operands, and nothing was launched.
bool rms_norm_heads_forward(const RopeForward& p, cudaStream_t stream, cudaError_t* error);
bool rms_norm_heads_backward(const RopeBackward& p, cudaStream_t stream, cudaError_t* error);
unsigned rms_norm_heads_blocks(const RopeBackward& p);

// cudaSuccess if the current GPU can run this build's kernels.
cudaError_t check_device();

}  // namespace adaptiveload
