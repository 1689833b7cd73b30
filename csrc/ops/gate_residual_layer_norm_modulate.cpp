// gate_residual_layer_norm_modulate and its backward op: allocation and registration.
#include "operands.h"

namespace adaptiveload::ops {
namespace {

std::tuple<Tensor, Tensor, Tensor> gate_residual_layer_norm_modulate(
    const Tensor& x, const Tensor& y, const Optional& gate, const Optional& gate_table, const Optional& scale,
    const Optional& shift, const Optional& weight, const Optional& bias, const Optional& scale_table,
    const Optional& shift_table, double eps, ScalarType residual_dtype, ScalarType out_dtype) {
  const Shape shape = shape_of(x, rows_of(gate, scale, rows_of(shift, std::nullopt, 1)));
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  std::vector<Tensor> copies;
  Tensor residual = empty(x, {shape.batch, shape.tokens, shape.width}, residual_dtype);
  Tensor normed = empty(x, {shape.batch, shape.tokens, shape.width}, out_dtype);
  Tensor stats = empty(x, {shape.batch, shape.tokens, 2}, ScalarType::Float);
  GatedNormForward p = {};
  p.shape = shape;
  p.eps = static_cast<float>(eps);
  p.x = array_of(x, shape, shape.tokens, "x", x, copies);
  p.y = array_of(y, shape, shape.tokens, "y", x, copies);
  p.gate = array_of(gate, shape, shape.rows, "gate", x, copies);
  p.gate_table = array_of(gate_table, shape, kColumns, "gate_table", x, copies);
  p.scale = array_of(scale, shape, shape.rows, "scale", x, copies);
  p.shift = array_of(shift, shape, shape.rows, "shift", x, copies);
  p.weight = array_of(weight, shape, kColumns, "weight", x, copies);
  p.bias = array_of(bias, shape, kColumns, "bias", x, copies);
  p.scale_table = array_of(scale_table, shape, kColumns, "scale_table", x, copies);
  p.shift_table = array_of(shift_table, shape, kColumns, "shift_table", x, copies);
  p.residual = array_of(residual, shape, shape.tokens);
  p.normed = array_of(normed, shape, shape.tokens);
  p.stats = static_cast<float2*>(stats.data_ptr());
  check(adaptiveload::gate_residual_layer_norm_modulate_forward(p, current_stream(x)),
        "gate_residual_layer_norm_modulate");
  return {residual, normed, stats};
}

// Bit i of `needs` asks for the gradient of argument i of the forward op, in that order.
std::vector<Tensor> gate_residual_layer_norm_modulate_backward(
    const Optional& grad_residual, const Tensor& grad, const Tensor& residual, const Tensor& stats, const Optional& y,
    const Optional& gate, const Optional& gate_table, const Optional& scale, const Optional& weight,
    const Optional& bias, const Optional& scale_table, ScalarType x_dtype, ScalarType y_dtype, int64_t rows,
    ScalarType shift_dtype, ScalarType shift_table_dtype, int64_t needs) {
  const Shape shape = shape_of(residual, rows_of(gate, scale, rows));
  const torch::stable::accelerator::DeviceGuard guard(residual.get_device_index());
  check_stats(stats, shape, 2);
  std::vector<Tensor> copies;
  GatedNormBackward p = {};
  p.shape = shape;
  p.grad_residual = array_of(grad_residual, shape, shape.tokens, "grad_residual", residual, copies);
  p.grad = array_of(grad, shape, shape.tokens, "grad", residual, copies);
  p.residual = array_of(residual, shape, shape.tokens, "residual", residual, copies);
  p.stats = static_cast<const float2*>(stats.data_ptr());
  p.y = array_of(y, shape, shape.tokens, "y", residual, copies);
  p.gate = array_of(gate, shape, shape.rows, "gate", residual, copies);
  p.gate_table = array_of(gate_table, shape, kColumns, "gate_table", residual, copies);
  p.scale = array_of(scale, shape, shape.rows, "scale", residual, copies);
  p.weight = array_of(weight, shape, kColumns, "weight", residual, copies);
  p.bias = array_of(bias, shape, kColumns, "bias", residual, copies);
  p.scale_table = array_of(scale_table, shape, kColumns, "scale_table", residual, copies);
  Gradients gradients(residual, shape, needs);
  p.dx = gradients.rows(0, shape.tokens, x_dtype);
  p.dy = gradients.rows(1, shape.tokens, y_dtype);
  if ((gradients.wants(2) || gradients.wants(3)) && !y.has_value()) refuse("the gate's gradient needs y");
  p.dgate = gradients.rows(2, gate);
  p.dgate_table = gradients.columns(3, gate_table);
  p.dscale = gradients.rows(4, scale);
  p.dshift = gradients.shift(5, rows, shift_dtype);
  p.dweight = gradients.columns(6, weight);
  p.dbias = gradients.columns(7, bias);
  p.dscale_table = gradients.columns(8, scale_table);
  p.dshift_table = gradients.columns(9, shift_table_dtype);
  p.partials = workspace(residual, needs >> 2 != 0 ? adaptiveload::gated_norm_backward_partials(shape) : 0, copies);
  check(adaptiveload::gate_residual_layer_norm_modulate_backward(p, current_stream(residual)),
        "gate_residual_layer_norm_modulate_backward");
  return gradients.found;
}

}  // namespace
}  // namespace adaptiveload::ops

STABLE_TORCH_LIBRARY_IMPL(adaptiveload, CUDA, m) {
  ADAPTIVELOAD_IMPL(m, gate_residual_layer_norm_modulate);
  ADAPTIVELOAD_IMPL(m, gate_residual_layer_norm_modulate_backward);
}
