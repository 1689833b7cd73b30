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
  p.stats = static_cast<float*>(stats.data_ptr());
  Tensor tickets;
  if (const int64_t count = adaptiveload::layer_norm_forward_tickets(shape); count > 0) {
    tickets = empty(x, {count}, ScalarType::Int);
    p.tickets = static_cast<unsigned*>(tickets.data_ptr());
  }
  check(adaptiveload::layer_norm_modulate_forward(p, current_stream(x)), "layer_norm_modulate");
  return {y, stats};
}

// Bit i of `needs` asks for the gradient of argument i of the forward op, in that order.
std::vector<Tensor> layer_norm_modulate_backward(const Tensor& grad, const Tensor& x, const Tensor& stats,
                                                 const Optional& scale, const Optional& weight, const Optional& bias,
                                                 const Optional& scale_table, int64_t rows, ScalarType shift_dtype,
                                                 ScalarType shift_table_dtype, int64_t needs) {
  const Shape shape = shape_of(x, rows_of(scale, std::nullopt, rows));
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  check_stats(stats, shape, 2);
  std::vector<Tensor> copies;
  LayerNormBackward p = {};
  p.shape = shape;
  p.grad = array_of(grad, shape, shape.tokens, "grad", x, copies);
  p.x = array_of(x, shape, shape.tokens, "x", x, copies);
  p.stats = static_cast<const float*>(stats.data_ptr());
  p.scale = array_of(scale, shape, shape.rows, "scale", x, copies);
  p.weight = array_of(weight, shape, kColumns, "weight", x, copies);
  p.bias = array_of(bias, shape, kColumns, "bias", x, copies);
  p.scale_table = array_of(scale_table, shape, kColumns, "scale_table", x, copies);
  Gradients gradients(x, shape, needs);
  p.dx = gradients.rows(0, shape.tokens, x.scalar_type());
  p.dscale = gradients.rows(1, scale);
  p.dshift = gradients.shift(2, rows, shift_dtype);
  p.dweight = gradients.columns(3, weight);
  p.dbias = gradients.columns(4, bias);
  p.dscale_table = gradients.columns(5, scale_table);
  p.dshift_table = gradients.columns(6, shift_table_dtype);
  p.partials = workspace(x, adaptiveload::layer_norm_backward_partials(p), copies);
  check(adaptiveload::layer_norm_modulate_backward(p, current_stream(x)), "layer_norm_modulate_backward");
  return gradients.found;
}

}  // namespace
}  // namespace adaptiveload::ops

STABLE_TORCH_LIBRARY_IMPL(adaptiveload, CUDA, m) {
  ADAPTIVELOAD_IMPL(m, layer_norm_modulate);
  ADAPTIVELOAD_IMPL(m, layer_norm_modulate_backward);
}
