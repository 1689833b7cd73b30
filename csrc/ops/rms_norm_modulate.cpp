// rms_norm_modulate and its backward op: allocation and registration. The kernels are those of layer_norm_modulate
// without the mean.
#include "operands.h"

namespace adaptiveload::ops {
namespace {

std::tuple<Tensor, Tensor> rms_norm_modulate(const Tensor& x, const Optional& scale, const Optional& shift,
                                             const Optional& weight, double eps, double scale_offset,
                                             double weight_offset, ScalarType out_dtype) {
  const Shape shape = shape_of(x, rows_of(scale, shift, 1));
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  std::vector<Tensor> copies;
  Tensor y = empty(x, {shape.batch, shape.tokens, shape.width}, out_dtype);
  Tensor rstd = empty(x, {shape.batch, shape.tokens}, ScalarType::Float);
  LayerNormForward p = {};
  p.shape = shape;
  p.eps = static_cast<float>(eps);
  p.mean = false;
  // What is absent drops out, its offset too.
  p.scale_offset = scale.has_value() ? static_cast<float>(scale_offset) : 1.f;
  p.weight_offset = weight.has_value() ? static_cast<float>(weight_offset) : 0.f;
  p.x = array_of(x, shape, shape.tokens, "x", x, copies);
  p.scale = array_of(scale, shape, shape.rows, "scale", x, copies);
  p.shift = array_of(shift, shape, shape.rows, "shift", x, copies);
  p.weight = array_of(weight, shape, kColumns, "weight", x, copies);
  p.y = array_of(y, shape, shape.tokens);
  p.stats = static_cast<float*>(rstd.data_ptr());
  Tensor tickets;
  if (const int64_t count = adaptiveload::layer_norm_forward_tickets(shape); count > 0) {
    tickets = empty(x, {count}, ScalarType::Int);
    p.tickets = static_cast<unsigned*>(tickets.data_ptr());
  }
  check(adaptiveload::layer_norm_modulate_forward(p, current_stream(x)), "rms_norm_modulate");
  return {y, rstd};
}

// Bit i of `needs` asks for the gradient of argument i of the forward op, in that order.
std::vector<Tensor> rms_norm_modulate_backward(const Tensor& grad, const Tensor& x, const Tensor& rstd,
                                               const Optional& scale, const Optional& weight, double scale_offset,
                                               double weight_offset, int64_t rows, ScalarType shift_dtype,
                                               int64_t needs) {
  const Shape shape = shape_of(x, rows_of(scale, std::nullopt, rows));
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  check_stats(rstd, shape, 1);
  std::vector<Tensor> copies;
  LayerNormBackward p = {};
  p.shape = shape;
  p.mean = false;
  p.scale_offset = scale.has_value() ? static_cast<float>(scale_offset) : 1.f;
  p.weight_offset = weight.has_value() ? static_cast<float>(weight_offset) : 0.f;
  p.grad = array_of(grad, shape, shape.tokens, "grad", x, copies);
  p.x = array_of(x, shape, shape.tokens, "x", x, copies);
  p.stats = static_cast<const float*>(rstd.data_ptr());
  p.scale = array_of(scale, shape, shape.rows, "scale", x, copies);
  p.weight = array_of(weight, shape, kColumns, "weight", x, copies);
  Gradients gradients(x, shape, needs);
  p.dx = gradients.rows(0, shape.tokens, x.scalar_type());
  p.dscale = gradients.rows(1, scale);
  p.dshift = gradients.shift(2, rows, shift_dtype);
  p.dweight = gradients.columns(3, weight);
  p.partials = workspace(x, adaptiveload::layer_norm_backward_partials(p), copies);
  check(adaptiveload::layer_norm_modulate_backward(p, current_stream(x)), "rms_norm_modulate_backward");
  return gradients.found;
}

}  // namespace
}  // namespace adaptiveload::ops

STABLE_TORCH_LIBRARY_IMPL(adaptiveload, CUDA, m) {
  ADAPTIVELOAD_IMPL(m, rms_norm_modulate);
  ADAPTIVELOAD_IMPL(m, rms_norm_modulate_backward);
}
