// How do torch tensors reach the kernels? Checks and conversions that every op needs, in the LibTorch stable ABI.
//
// The schemas and everything around them (autograd, shapes without data, the CPU) are Python's: adaln/schemas.py. The
// public functions in adaln/ops.py check what a user passes; the checks here guard the raw ops against bad pointers.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "../kernels.h"

namespace adaptiveload::ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Optional = std::optional<Tensor>;

[[noreturn]] inline void refuse(const std::string& reason) { throw std::runtime_error("adaptiveload: " + reason); }

inline Dtype dtype_of(ScalarType type) {
  if (type != ScalarType::Float && type != ScalarType::Half && type != ScalarType::BFloat16) {
    refuse("the CUDA kernels take float32, float16 and bfloat16, but found dtype " +
           std::to_string(static_cast<int>(type)) + ". Convert the tensor, or call adaptiveload_hf.adaln.reference.");
  }
  if (type == ScalarType::Float) return Dtype::float32;
  return type == ScalarType::Half ? Dtype::float16 : Dtype::bfloat16;
}

constexpr int64_t kColumns = -1;  // for `rows` of an operand that is [D]

// A call of torch that is given sound tensors fails for want of memory, or because an earlier kernel did. Not
// TORCH_ERROR_CODE_CHECK: it words its error in a std::stringstream, which crashed the process instead where a g++ of
// its own had linked libstdc++ in as an archive, mixed with that of torch (setup.py hides its symbols since).
inline void check_memory(AOTITorchError error, int64_t elements) {
  if (error == TORCH_SUCCESS) return;
  const cudaError_t earlier = cudaPeekAtLastError();
  if (earlier != cudaSuccess && earlier != cudaErrorMemoryAllocation) refuse(cudaGetErrorString(earlier));
  throw std::runtime_error("CUDA out of memory. adaptiveload could not allocate " + std::to_string(elements) +
                           " elements.");
}

// torch::stable::contiguous, but for its check.
inline Tensor contiguous_copy(const Tensor& tensor) {
  using torch::stable::detail::from, torch::stable::detail::to;
  StableIValue stack[] = {from(tensor), from(torch::headeronly::MemoryFormat::Contiguous)};
  check_memory(torch_call_dispatcher("aten::contiguous", "", stack, TORCH_ABI_VERSION), tensor.numel());
  return to<Tensor>(stack[0]);
}

// [B, rows, D] or [D] as the kernels see it. A tensor whose last stride is not 1 is copied; `copies` keeps it alive.
inline Array array_of(const Optional& tensor, const Shape& shape, int64_t rows, const char* name, const Tensor& like,
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
    t = contiguous_copy(t);
    copies.push_back(t);
  }
  Array array;
  array.data = t.data_ptr();
  array.dtype = dtype_of(t.scalar_type());
  array.batch_stride = column ? 0 : t.stride(0);
  array.row_stride = column ? 0 : t.stride(1);
  return array;
}

inline Array array_of(const Tensor& contiguous, const Shape& shape, int64_t rows) {
  Array array;
  array.data = contiguous.data_ptr();
  array.dtype = dtype_of(contiguous.scalar_type());
  array.batch_stride = rows * shape.width;
  array.row_stride = shape.width;
  return array;
}

inline Shape shape_of(const Tensor& x, int64_t rows) {
  if (!x.is_cuda() || x.dim() != 3) refuse("x must be a CUDA tensor [B, S, D]");
  const Shape shape = {x.size(0), x.size(1), x.size(2), rows};
  if (shape.width > kMaxWidth) {
    refuse("the CUDA kernels take rows of up to " + std::to_string(kMaxWidth) +
           " columns, but x has D = " + std::to_string(shape.width) + ". Use adaptiveload_hf.adaln.reference for it.");
  }
  if (shape.tokens >= (int64_t{1} << 30)) refuse("x has 2^30 tokens or more in a batch item");
  if (rows > 0 ? shape.tokens % rows != 0 : shape.tokens != 0) {
    refuse("the rows of the modulation must divide the tokens");
  }
  return shape;
}

inline int64_t rows_of(const Optional& first, const Optional& second, int64_t otherwise) {
  if (first.has_value()) return first->size(1);
  return second.has_value() ? second->size(1) : otherwise;
}

// An empty contiguous tensor on the device of `like`. torch::stable::new_empty looks its op up by name: twice the time.
inline Tensor empty(const Tensor& like, std::initializer_list<int64_t> sizes, ScalarType type) {
  int64_t strides[4] = {1, 1, 1, 1};
  const int64_t* size = sizes.begin();
  for (int i = static_cast<int>(sizes.size()) - 2; i >= 0; --i) strides[i] = strides[i + 1] * std::max<int64_t>(size[i + 1], 1);
  int32_t device_type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  const auto dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  AtenTensorHandle made = nullptr;
  int64_t elements = 1;
  for (const int64_t n : sizes) elements *= n;
  check_memory(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), size, strides, dtype, device_type,
                                        like.get_device_index(), &made),
               elements);
  return Tensor(made);
}

// `floats` to work with, which live as long as `kept`; none for 0.
inline float* workspace(const Tensor& like, int64_t floats, std::vector<Tensor>& kept) {
  if (floats == 0) return nullptr;
  kept.push_back(empty(like, {floats}, ScalarType::Float));
  return static_cast<float*>(kept.back().data_ptr());
}

inline cudaStream_t current_stream(const Tensor& x) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

inline void check(cudaError_t error, const char* op) {
  if (error != cudaSuccess) refuse(std::string(op) + ": " + cudaGetErrorString(error));
}

inline void check_stats(const Tensor& stats, const Shape& shape, int64_t of_row) {
  if (stats.scalar_type() != ScalarType::Float || !stats.is_contiguous() ||
      stats.numel() != shape.batch * shape.tokens * of_row) {
    refuse("the statistics must be what the forward op returned");
  }
}

namespace {  // Tensor is a hidden symbol, and so must be what holds one

// The results of a backward op: bit i of `needs` asks for the gradient of argument i of the forward op. The functions
// are called in the order of the arguments, and give the kernels no data where nothing is wanted.
class Gradients {
 public:
  std::vector<Tensor> found;

  Gradients(const Tensor& like, const Shape& shape, int64_t needs) : like_(like), shape_(shape), needs_(needs) {
    found.reserve(10);
  }

  bool wants(int bit) const { return (needs_ >> bit & 1) != 0; }

  // [B, rows, D]
  Array rows(int bit, int64_t rows, ScalarType type) {
    if (!wants(bit)) return {};
    found.push_back(empty(like_, {shape_.batch, rows, shape_.width}, type));
    return array_of(found.back(), shape_, rows);
  }
  // Like a modulation.
  Array rows(int bit, const Optional& modulation) {
    if (!wants(bit)) return {};
    if (!modulation.has_value()) refuse("an absent operand has no gradient");
    return rows(bit, shape_.rows, modulation->scalar_type());
  }
  Array shift(int bit, int64_t rows_of_shift, ScalarType type) {
    if (wants(bit) && (rows_of_shift != shape_.rows || (shape_.rows > 1 && shape_.rows == shape_.tokens))) {
      refuse("a shift per token has grad as its gradient");
    }
    return rows(bit, rows_of_shift, type);
  }
  // [D]
  Array columns(int bit, ScalarType type) {
    if (!wants(bit)) return {};
    found.push_back(empty(like_, {shape_.width}, type));
    Array array;
    array.data = found.back().data_ptr();
    array.dtype = dtype_of(type);
    return array;
  }
  Array columns(int bit, const Optional& operand) {
    if (!wants(bit)) return {};
    if (!operand.has_value()) refuse("an absent operand has no gradient");
    return columns(bit, operand->scalar_type());
  }

 private:
  const Tensor& like_;
  const Shape& shape_;
  const int64_t needs_;
};

}  // namespace

}  // namespace adaptiveload::ops

// An op, and its form without autograd (adaln/registry.py).
#define ADAPTIVELOAD_IMPL(library, op)                    \
  library.impl(#op, TORCH_BOX(&adaptiveload::ops::op));   \
  library.impl(#op "_bare", TORCH_BOX(&adaptiveload::ops::op))
