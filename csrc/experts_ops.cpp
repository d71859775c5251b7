// Products with experts that are E tensors [N, K]: checked here, then computed as one packed weight
// by the kernels of the device. Nothing is copied where the experts lie one after the other.

#include "checks.h"
#include "experts.h"
#include "ops.h"

namespace grouped_linear {
namespace {

void check_grouped_mm_wgrad_list(const std::vector<Tensor>& main_grad, const Tensor& dy,
                                 const Tensor& x, const Tensor& offs,
                                 const std::optional<Tensor>& overwrite) {
  const char* op = "grouped_mm_wgrad_list_";
  check_grouped_mm_wgrad(op, dy, x, offs, ScalarType::Float);
  check_main_grad_list(op, main_grad, dy, offs.size(0), dy.size(1), x.size(1), overwrite);
}

void check_grouped_scaled_mm_wgrad_list(const std::vector<Tensor>& main_grad, const Tensor& dy_t,
                                        const Tensor& x_t, const Tensor& scale_dy_t,
                                        const Tensor& scale_x_t, const Tensor& offs,
                                        const std::optional<Tensor>& overwrite) {
  const char* op = "grouped_scaled_mm_wgrad_list_";
  check_grouped_scaled_mm_wgrad(op, dy_t, x_t, scale_dy_t, scale_x_t, offs, ScalarType::Float);
  check_main_grad_list(op, main_grad, dy_t, offs.size(0), dy_t.size(1), x_t.size(1), overwrite);
}

Tensor packed_operand(const std::vector<Tensor>& b, bool transpose_b) {
  const Tensor all = packed(b);
  return transpose_b ? torch::stable::transpose(all, 1, 2) : all;
}

}  // namespace

#define GROUPED_LINEAR_LIST_OPS                                                                  \
  Tensor grouped_mm_list(const Tensor& a, const std::vector<Tensor>& b, const Tensor& offs,      \
                         const std::optional<Tensor>& bias, std::optional<ScalarType> out_dtype, \
                         bool transpose_b) {                                                     \
    check_grouped_mm_list(a, b, offs, bias, out_dtype.value_or(a.scalar_type()), transpose_b);   \
    return grouped_mm(a, packed_operand(b, transpose_b), offs, bias, out_dtype);                 \
  }                                                                                              \
  void grouped_mm_wgrad_list_(const std::vector<Tensor>& main_grad, const Tensor& dy,            \
                              const Tensor& x, const Tensor& offs,                               \
                              const std::optional<Tensor>& overwrite) {                          \
    check_grouped_mm_wgrad_list(main_grad, dy, x, offs, overwrite);                              \
    write_packed(main_grad,                                                                      \
                 [&](const Tensor& all) { grouped_mm_wgrad_(all, dy, x, offs, overwrite); });    \
  }                                                                                              \
  void grouped_scaled_mm_wgrad_list_(const std::vector<Tensor>& main_grad, const Tensor& dy_t,   \
                                     const Tensor& x_t, const Tensor& scale_dy_t,                \
                                     const Tensor& scale_x_t, const Tensor& offs,                \
                                     const std::optional<Tensor>& overwrite) {                   \
    check_grouped_scaled_mm_wgrad_list(main_grad, dy_t, x_t, scale_dy_t, scale_x_t, offs,        \
                                       overwrite);                                               \
    write_packed(main_grad, [&](const Tensor& all) {                                             \
      grouped_scaled_mm_wgrad_(all, dy_t, x_t, scale_dy_t, scale_x_t, offs, overwrite);          \
    });                                                                                          \
  }

namespace cpu {
GROUPED_LINEAR_LIST_OPS
}  // namespace cpu

#ifdef GROUPED_LINEAR_CUDA
namespace cuda {
GROUPED_LINEAR_LIST_OPS
}  // namespace cuda
#endif

}  // namespace grouped_linear
