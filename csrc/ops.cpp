// How do torch tensors reach the kernels? Checks, allocation and registration, in the LibTorch stable ABI.
//
// The schemas and everything around them (autograd, shapes without data, the CPU) are Python's: adaln/schemas.py. The
// public functions in adaln/ops.py check what a user passes; the checks here guard the raw ops against bad pointers.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "kernels.h"

namespace {

using adaptiveload::Array;
using adaptiveload::Dtype;
using adaptiveload::Shape;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Optional = std::optional<Tensor>;

[[noreturn]] void refuse(const std::string& reason) { throw std::runtime_error("adaptiveload: " + reason); }

Dtype dtype_of(ScalarType type) {
  if (type != ScalarType::Float && type != ScalarType::Half && type != ScalarType::BFloat16) {
    refuse("the CUDA kernels take float32, float16 and bfloat16, but found dtype " +
           std::to_string(static_cast<int>(type)) + ". Convert the tensor, or call adaptiveload_hf.adaln.reference.");
  }
  if (type == ScalarType::Float) return Dtype::float32;
  return type == ScalarType::Half ? Dtype::float16 : Dtype::bfloat16;
}

constexpr int64_t kColumns = -1;  // for `rows` of an operand that is [D]

// [B, rows, D] or [D] as the kernels see it. A tensor whose last stride is not 1 is copied; `copies` keeps it alive.
Array array_of(const Optional& tensor, const Shape& shape, int64_t rows, const char* name, const Tensor& like,
               std::vector<Tensor>& copies) {
  if (!tensor.has_value()) return {};
  Tensor t = *tensor;
  if (!t.is_cuda() || t.get_device_index() != like.get_device_index()) {
    refuse(std::string(name) + " must be on the device of x");
  }
  const bool column = rows == kColumns;
  const bool fits = column ? t.dim() == 1 && t.size(0) == shape.width
                           : t.dim() == 3 && t.size(0) == shape.batch && t.size(1) == rows && t.size(2) == shape.width;
  if (!fits) refuse(std::string(name) + " has another shape than x, [B, S, D], asks for");
  if (t.stride(t.dim() - 1) != 1 && shape.width > 1) {
    t = torch::stable::contiguous(t);
    copies.push_back(t);
  }
  Array array;
  array.data = t.data_ptr();
  array.dtype = dtype_of(t.scalar_type());
  array.batch_stride = column ? 0 : t.stride(0);
  array.row_stride = column ? 0 : t.stride(1);
  return array;
}

Array array_of(const Tensor& contiguous, const Shape& shape, int64_t rows) {
  Array array;
  array.data = contiguous.data_ptr();
  array.dtype = dtype_of(contiguous.scalar_type());
  array.batch_stride = rows * shape.width;
  array.row_stride = shape.width;
  return array;
}

Shape shape_of(const Tensor& x, int64_t rows) {
  if (!x.is_cuda() || x.dim() != 3) refuse("x must be a CUDA tensor [B, S, D]");
  const Shape shape = {x.size(0), x.size(1), x.size(2), rows};
  if (shape.width > adaptiveload::kMaxWidth) {
    refuse("the CUDA kernels take rows of up to " + std::to_string(adaptiveload::kMaxWidth) +
           " columns, but x has D = " + std::to_string(shape.width) + ". Use adaptiveload_hf.adaln.reference for it.");
  }
  if (shape.tokens >= (int64_t{1} << 30)) refuse("x has 2^30 tokens or more in a batch item");
  if (rows > 0 ? shape.tokens % rows != 0 : shape.tokens != 0) {
    refuse("the rows of the modulation must divide the tokens");
  }
  return shape;
}

int64_t rows_of(const Optional& first, const Optional& second, int64_t otherwise) {
  if (first.has_value()) return first->size(1);
  return second.has_value() ? second->size(1) : otherwise;
}

Tensor empty(const Tensor& like, std::vector<int64_t> sizes, ScalarType type) {
  return torch::stable::new_empty(like, sizes, type);
}

cudaStream_t current_stream(const Tensor& x) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

void check(cudaError_t error, const char* op) {
  if (error != cudaSuccess) refuse(std::string(op) + ": " + cudaGetErrorString(error));
}

std::tuple<Tensor, Tensor> layer_norm_modulate(const Tensor& x, const Optional& scale, const Optional& shift,
                                               const Optional& weight, const Optional& bias,
                                               const Optional& scale_table, const Optional& shift_table, double eps,
                                               ScalarType out_dtype) {
  const Shape shape = shape_of(x, rows_of(scale, shift, 1));
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  std::vector<Tensor> copies;
  Tensor y = empty(x, {shape.batch, shape.tokens, shape.width}, out_dtype);
  Tensor stats = empty(x, {shape.batch, shape.tokens, 2}, ScalarType::Float);
  adaptiveload::LayerNormForward p = {};
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
  adaptiveload::LayerNormBackward p = {};
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

Tensor gate_residual(const Tensor& x, const Tensor& y, const Optional& gate, const Optional& gate_table,
                     ScalarType out_dtype) {
  const Shape shape = shape_of(x, rows_of(gate, std::nullopt, 1));
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  std::vector<Tensor> copies;
  Tensor out = empty(x, {shape.batch, shape.tokens, shape.width}, out_dtype);
  adaptiveload::GateForward p = {};
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
  std::vector<Tensor> copies, found;
  found.reserve(3);
  adaptiveload::GateBackward p = {};
  p.shape = shape;
  p.grad = array_of(grad, shape, shape.tokens, "grad", grad, copies);
  p.y = array_of(y, shape, shape.tokens, "y", grad, copies);
  p.gate = array_of(gate, shape, shape.rows, "gate", grad, copies);
  p.gate_table = array_of(gate_table, shape, kColumns, "gate_table", grad, copies);
  if ((needs & 2) != 0) {
    found.push_back(empty(grad, {shape.batch, shape.tokens, shape.width}, y_dtype));
    p.dy = array_of(found.back(), shape, shape.tokens);
  }
  Tensor partials;
  if ((needs & 12) != 0) {
    if (!y.has_value()) refuse("the gate's gradient needs y");
    partials = empty(grad, {adaptiveload::gate_backward_partials(shape)}, ScalarType::Float);
    p.partials = static_cast<float*>(partials.data_ptr());
  }
  if ((needs & 4) != 0) {
    if (!gate.has_value()) refuse("there is no gate to have a gradient");
    found.push_back(empty(grad, {shape.batch, shape.rows, shape.width}, gate->scalar_type()));
    p.dgate = array_of(found.back(), shape, shape.rows);
  }
  if ((needs & 8) != 0) {
    found.push_back(empty(grad, {shape.width}, ScalarType::Float));
    p.dgate_table = static_cast<float*>(found.back().data_ptr());
  }
  check(adaptiveload::gate_residual_backward(p, current_stream(grad)), "gate_residual_backward");
  return found;
}

// The CUDA error that this build's kernels would meet on a GPU; 0: none.
int64_t device_error(int64_t device) {
  const torch::stable::accelerator::DeviceGuard guard(static_cast<int32_t>(device));
  return static_cast<int64_t>(adaptiveload::check_device());
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(adaptiveload, m) { m.def("device_error(int device) -> int"); }

STABLE_TORCH_LIBRARY_IMPL(adaptiveload, CompositeExplicitAutograd, m) {
  m.impl("device_error", TORCH_BOX(&device_error));
}

STABLE_TORCH_LIBRARY_IMPL(adaptiveload, CUDA, m) {
  m.impl("layer_norm_modulate", TORCH_BOX(&layer_norm_modulate));
  m.impl("layer_norm_modulate_backward", TORCH_BOX(&layer_norm_modulate_backward));
  m.impl("gate_residual", TORCH_BOX(&gate_residual));
  m.impl("gate_residual_backward", TORCH_BOX(&gate_residual_backward));
}
