// device_error: can the current build run on a GPU? And which op schemas was it built for?
#include "operands.h"

#ifndef ADAPTIVELOAD_SCHEMAS
#define ADAPTIVELOAD_SCHEMAS unknown
#endif
#define ADAPTIVELOAD_WORD(word) #word
#define ADAPTIVELOAD_MARK(word) "adaptiveload ops " ADAPTIVELOAD_WORD(word)

// adaln/extension.py looks for it in the file, before anything is loaded (adaln/schema_digest.py).
extern "C" const char adaptiveload_schemas[];
__attribute__((used)) const char adaptiveload_schemas[] = ADAPTIVELOAD_MARK(ADAPTIVELOAD_SCHEMAS);

namespace adaptiveload::ops {
namespace {

// The CUDA error that this build's kernels would meet on a GPU; 0: none.
int64_t device_error(int64_t device) {
  const torch::stable::accelerator::DeviceGuard guard(static_cast<int32_t>(device));
  return static_cast<int64_t>(check_device());
}

}  // namespace
}  // namespace adaptiveload::ops

STABLE_TORCH_LIBRARY_FRAGMENT(adaptiveload, m) { m.def("device_error(int device) -> int"); }

STABLE_TORCH_LIBRARY_IMPL(adaptiveload, CompositeExplicitAutograd, m) {
  m.impl("device_error", TORCH_BOX(&adaptiveload::ops::device_error));
}
