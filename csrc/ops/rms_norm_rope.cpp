// rms_norm_rope and its backward op: allocation and registration.
#include "operands.h"

namespace adaptiveload::ops {
namespace {

// [batch, tokens, heads, head_width] as rows; a table has one head, its batch may be 1, and it may end before the
// tokens do. Heads that do not lie side by side, as some attention kernels leave their gradients, are copied unless
// `head_stride` takes them as they are.
Array heads_of(const Tensor& tensor, const Shape& shape, int64_t heads, int64_t head_width, const char* name,
               const Tensor& x, std::vector<Tensor>& copies, int64_t* head_stride = nullptr) {
  Tensor t = tensor;
  const bool table = heads == 1;
  const bool fits = t.dim() == 4 && (t.size(0) == shape.batch || (table && t.size(0) == 1)) &&
                    (t.size(1) == shape.tokens || (table && t.size(1) < shape.tokens)) && t.size(2) == heads &&
                    t.size(3) == head_width;
  if (!fits) refuse(std::string(name) + " has another shape than x, [B, S, D], and its heads ask for");
  if (!t.is_cuda() || t.get_device_index() != x.get_device_index()) {
    refuse(std::string(name) + " must be on the device of x");
  }
  if (t.stride(3) != 1 || (heads > 1 && head_stride == nullptr && t.stride(2) != head_width)) {
    t = contiguous_copy(t);
    copies.push_back(t);
  }
  if (head_stride != nullptr) *head_stride = heads > 1 ? t.stride(2) : head_width;
  Array array;
  array.data = t.data_ptr();
  array.dtype = dtype_of(t.scalar_type());
  array.batch_stride = t.size(0) == 1 ? 0 : t.stride(0);
  array.row_stride = t.stride(1);
  return array;
}

int64_t head_width_of(const Shape& shape, int64_t heads) {
  if (heads < 1 || shape.width % (2 * heads) != 0) refuse("heads must divide x into heads of even width");
  return shape.width / heads;
}

// What both directions take alike: weight [D], or [D / heads] where each head is normalised by itself, and the tables.
template <typename Operands>
void take_norm_and_tables(Operands& p, const Tensor& x, const Tensor& weight, const Optional& cos, const Optional& sin,
                          std::vector<Tensor>& copies) {
  p.by_head = !cos.has_value() || weight.numel() != p.shape.width;
  if (cos.has_value() != sin.has_value()) refuse("cos and sin come together");
  const Shape normed = {p.shape.batch, p.shape.tokens, p.by_head ? p.head_width : p.shape.width, p.shape.rows};
  p.weight = array_of(weight, normed, kColumns, "weight", x, copies);
  if (!cos.has_value()) return;
  p.cos = heads_of(*cos, p.shape, 1, p.head_width, "cos", x, copies);
  p.sin = heads_of(*sin, p.shape, 1, p.head_width, "sin", x, copies);
  p.turned = cos->size(1);
  if (sin->size(1) != p.turned || (!p.by_head && p.turned != p.shape.tokens)) {
    refuse("cos and sin must have a row for every token");
  }
}

std::tuple<Tensor, Tensor> rms_norm_rope(const Tensor& x, const Tensor& weight, const Optional& cos,
                                         const Optional& sin, int64_t heads, double eps) {
  const Shape shape = shape_of(x, 1);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  std::vector<Tensor> copies;
  RopeForward p = {};
  p.shape = shape;
  p.head_width = head_width_of(shape, heads);
  p.eps = static_cast<float>(eps);
  take_norm_and_tables(p, x, weight, cos, sin, copies);
  Tensor y = empty(x, {shape.batch, shape.tokens, heads, p.head_width}, x.scalar_type());
  Tensor rstd = p.by_head ? empty(x, {shape.batch, shape.tokens, heads}, ScalarType::Float)
                          : empty(x, {shape.batch, shape.tokens}, ScalarType::Float);
  p.x = array_of(x, shape, shape.tokens, "x", x, copies);
  p.y = array_of(y, shape, shape.tokens);
  p.rstd = static_cast<float*>(rstd.data_ptr());
  check(adaptiveload::rms_norm_rope_forward(p, current_stream(x)), "rms_norm_rope");
  return {y, rstd};
}

// Bits 0 and 1 of `needs`: x, weight.
std::vector<Tensor> rms_norm_rope_backward(const Tensor& grad, const Tensor& x, const Tensor& rstd,
                                           const Tensor& weight, const Optional& cos, const Optional& sin,
                                           int64_t needs) {
  const Shape shape = shape_of(x, 1);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  if (grad.dim() != 4 || grad.size(0) != shape.batch) refuse("grad must be [B, S, heads, D / heads]");
  std::vector<Tensor> copies;
  RopeBackward p = {};
  p.shape = shape;
  p.head_width = head_width_of(shape, grad.size(2));
  take_norm_and_tables(p, x, weight, cos, sin, copies);
  check_stats(rstd, shape, p.by_head ? grad.size(2) : 1);
  p.grad_head_stride = p.head_width;
  p.grad = heads_of(grad, shape, grad.size(2), p.head_width, "grad", x, copies,
                    p.by_head ? &p.grad_head_stride : nullptr);
  p.x = array_of(x, shape, shape.tokens, "x", x, copies);
  p.rstd = static_cast<const float*>(rstd.data_ptr());
  const Shape normed = {shape.batch, shape.tokens, weight.numel(), shape.rows};
  Gradients gradients(x, shape, needs), columns(x, normed, needs);
  p.dx = gradients.rows(0, shape.tokens, x.scalar_type());
  p.dweight = columns.columns(1, weight.scalar_type());
  if (columns.wants(1)) gradients.found.push_back(columns.found.back());
  p.partials = workspace(x, adaptiveload::rope_backward_partials(p), copies);
  check(adaptiveload::rms_norm_rope_backward(p, current_stream(x)), "rms_norm_rope_backward");
  return gradients.found;
}

}  // namespace
}  // namespace adaptiveload::ops

STABLE_TORCH_LIBRARY_IMPL(adaptiveload, CUDA, m) {
  ADAPTIVELOAD_IMPL(m, rms_norm_rope);
  ADAPTIVELOAD_IMPL(m, rms_norm_rope_backward);
}
