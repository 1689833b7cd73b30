// layer_norm_modulate and its backward op: allocation and registration.
#include "operands.h"

namespace adaptiveload::ops {
namespace {

std::tuple<Tensor, Tensor> layer_norm_modulate(const Tensor& x, const Optional& scale, const Optional& shift,
                                               const Optional& weight, const Optional& bias,
                                               const Optional& scale_table, const Optional& shift_table, double eps,
                                               ScalarType out_dtype) {
  const Shape shape = shape_of(x, rows_of(scale, shift, 1));
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  std::vector<Tensor> copies;
  Tensor y = empty(x, {shape.batch, shape.tokens, shape.width}, out_dtype);
  Tensor stats = empty(x, {shape.batch, shape.tokens, 2}, ScalarType::Float);
  LayerNormForward p = {};
  p.shape = shape;
  p.eps = static_cast<float>(eps);
  p.x = array_of(x, shape, shape.tokens, "x", x, copies);
  p.scale = array_of(scale, shape, shape.rows, "scale", x, copies);
  p.shift = array_of(shift, shape, shape.rows, "shift", x, copies);
  p.weight = array_of(weight, shape, kColumns, "weight", x, copies);
  p.bias = array_of(bias, shape, kColumns, "bias", x, copies);
  p.scale_table = array_of(scale_table, shape, kColumns, "scale_table", x, copies);
  p.shift_table = array_of(shift_table, shape, kColumns, "shift_table", x, copies);
  p.y = array_of(y, shape, shape.tokens);
  p.stats = static_cast<float2*>(stats.data_ptr());
  check(adaptiveload::layer_norm_modulate_forward(p, current_stream(x)), "layer_norm_modulate");
  return {y, stats};
}

// Bit i of `needs` asks for the gradient of argument i of the forward op, in that order.
std::vector<Tensor> layer_norm_modulate_backward(const Tensor& grad, const Tensor& x, const Tensor& stats,
                                                 const Optional& scale, const Optional& weight, const Optional& bias,
                                                 const Optional& scale_table, int64_t rows, ScalarType shift_dtype,
                                                 int64_t needs) {
  const Shape shape = shape_of(x, rows_of(scale, std::nullopt, rows));
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  if (stats.scalar_type() != ScalarType::Float || !stats.is_contiguous() ||
      stats.numel() != shape.batch * shape.tokens * 2) {
    refuse("stats must be what the forward op returned");
  }
  std::vector<Tensor> copies, found;
  const auto wants = [&](int bit) { return (needs >> bit & 1) != 0; };
  const auto rows_gradient = [&](int64_t of_rows, ScalarType type) {
    found.push_back(empty(x, {shape.batch, of_rows, shape.width}, type));
    return array_of(found.back(), shape, of_rows);
  };
  const auto column_gradient = [&](int bit) -> float* {
    if (!wants(bit)) return nullptr;
    found.push_back(empty(x, {shape.width}, ScalarType::Float));
    return static_cast<float*>(found.back().data_ptr());
  };
  LayerNormBackward p = {};
  p.shape = shape;
  p.grad = array_of(grad, shape, shape.tokens, "grad", x, copies);
  p.x = array_of(x, shape, shape.tokens, "x", x, copies);
  p.stats = static_cast<const float2*>(stats.data_ptr());
  p.scale = array_of(scale, shape, shape.rows, "scale", x, copies);
  p.weight = array_of(weight, shape, kColumns, "weight", x, copies);
  p.bias = array_of(bias, shape, kColumns, "bias", x, copies);
  p.scale_table = array_of(scale_table, shape, kColumns, "scale_table", x, copies);
  found.reserve(7);
  if (wants(0)) p.dx = rows_gradient(shape.tokens, x.scalar_type());
  if (wants(1)) {
    if (!scale.has_value()) refuse("there is no scale to have a gradient");
    p.dscale = rows_gradient(shape.rows, scale->scalar_type());
  }
  if (wants(2)) {
    if (rows != shape.rows || (rows > 1 && rows == shape.tokens)) refuse("a shift per token has grad as its gradient");
    p.dshift = rows_gradient(rows, shift_dtype);
  }
  p.dweight = column_gradient(3);
  p.dbias = column_gradient(4);
  p.dscale_table = column_gradient(5);
  p.dshift_table = column_gradient(6);
  Tensor partials;
  if (needs >> 1 != 0) {
    partials = empty(x, {adaptiveload::layer_norm_backward_partials(shape)}, ScalarType::Float);
    p.partials = static_cast<float*>(partials.data_ptr());
  }
  check(adaptiveload::layer_norm_modulate_backward(p, current_stream(x)), "layer_norm_modulate_backward");
  return found;
}

}  // namespace
}  // namespace adaptiveload::ops

STABLE_TORCH_LIBRARY_IMPL(adaptiveload, CUDA, m) {
  m.impl("layer_norm_modulate", TORCH_BOX(&adaptiveload::ops::layer_norm_modulate));
  m.impl("layer_norm_modulate_backward", TORCH_BOX(&adaptiveload::ops::layer_norm_modulate_backward));
}
