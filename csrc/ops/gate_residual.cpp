// gate_residual and its backward op: allocation and registration.
#include "operands.h"

namespace adaptiveload::ops {
namespace {

Tensor gate_residual(const Tensor& x, const Tensor& y, const Optional& gate, const Optional& gate_table,
                     ScalarType out_dtype) {
  const Shape shape = shape_of(x, rows_of(gate, std::nullopt, 1));
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  std::vector<Tensor> copies;
  Tensor out = empty(x, {shape.batch, shape.tokens, shape.width}, out_dtype);
  GateForward p = {};
  p.shape = shape;
  p.x = array_of(x, shape, shape.tokens, "x", x, copies);
  p.y = array_of(y, shape, shape.tokens, "y", x, copies);
  p.gate = array_of(gate, shape, shape.rows, "gate", x, copies);
  p.gate_table = array_of(gate_table, shape, kColumns, "gate_table", x, copies);
  p.out = array_of(out, shape, shape.tokens);
  check(adaptiveload::gate_residual_forward(p, current_stream(x)), "gate_residual");
  return out;
}

// Bits 1 to 3 of `needs`: y, gate, gate_table.
std::vector<Tensor> gate_residual_backward(const Tensor& grad, const Optional& y, const Optional& gate,
                                           const Optional& gate_table, ScalarType y_dtype, int64_t needs) {
  const Shape shape = shape_of(grad, rows_of(gate, std::nullopt, 1));
  const torch::stable::accelerator::DeviceGuard guard(grad.get_device_index());
  std::vector<Tensor> copies;
  GateBackward p = {};
  p.shape = shape;
  p.grad = array_of(grad, shape, shape.tokens, "grad", grad, copies);
  p.y = array_of(y, shape, shape.tokens, "y", grad, copies);
  p.gate = array_of(gate, shape, shape.rows, "gate", grad, copies);
  p.gate_table = array_of(gate_table, shape, kColumns, "gate_table", grad, copies);
  Gradients gradients(grad, shape, needs);
  p.dy = gradients.rows(1, shape.tokens, y_dtype);
  p.dgate = gradients.rows(2, gate);
  p.dgate_table = gradients.columns(3, gate_table);
  if ((gradients.wants(2) || gradients.wants(3)) && !y.has_value()) refuse("the gate's gradient needs y");
  p.partials = workspace(grad, adaptiveload::gate_backward_partials(p), copies);
  check(adaptiveload::gate_residual_backward(p, current_stream(grad)), "gate_residual_backward");
  return gradients.found;
}

}  // namespace
}  // namespace adaptiveload::ops

STABLE_TORCH_LIBRARY_IMPL(adaptiveload, CUDA, m) {
  ADAPTIVELOAD_IMPL(m, gate_residual);
  ADAPTIVELOAD_IMPL(m, gate_residual_backward);
}
