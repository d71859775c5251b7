// A layer's forward under block scaling, and its backward, each as one op: the ops that they are made
// of, one after the other. An op costs the host 4 us of an eager step besides its launch, and a tensor
// 1 us, or 1.7 where it is returned; over memory that is there 0.3 (H200's host). So what nobody sees
// lies in one tensor a call.

#include "checks.h"
#include "cpu/rows.h"
#include "ops.h"
#include "tensors.h"

namespace grouped_linear {
namespace {

// [E, rows, cols] seen as [E, cols, rows].
Tensor turned(const Tensor& t) {
  const int64_t sizes[] = {t.size(0), t.size(2), t.size(1)};
  const int64_t strides[] = {t.stride(0), t.stride(2), t.stride(1)};
  AtenTensorHandle view = nullptr;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch__reinterpret_tensor(t.get(), 3, sizes, strides, t.storage_offset(), &view));
  return Tensor(view);
}

constexpr ScalarType kE4m3 = ScalarType::Float8_e4m3fn, kFloat = ScalarType::Float;

// Tensors in one piece of memory, each as aligned as the allocator aligns one.
class Scratch {
 public:
  Scratch(Tensor (*allocate)(const Tensor& like, const Shape& shape, ScalarType dtype),
          const Tensor& like, std::initializer_list<Shape> e4m3,
          std::initializer_list<Shape> floats)
      : memory_(allocate(like, {bytes_of(e4m3, 1) + bytes_of(floats, 4)}, ScalarType::Byte)),
        next_(static_cast<char*>(memory_.data_ptr())) {}

  Tensor cut(const Shape& shape, ScalarType dtype) {
    const int64_t bytes = bytes_of({shape}, dtype == kFloat ? 4 : 1);
    // Without elements it is at the start: past the end may be an address that torch refuses.
    void* first = bytes > 0 ? next_ : memory_.data_ptr();
    next_ += bytes;
    return tensor_over(first, memory_, shape, dtype);
  }

 private:
  static int64_t bytes_of(std::initializer_list<Shape> shapes, int64_t item) {
    constexpr int64_t kAlignment = 512;
    int64_t bytes = 0;
    for (const Shape& shape : shapes) {
      int64_t own = item;
      for (const int64_t size : shape) own *= size;
      bytes += round_up(own, kAlignment);
    }
    return bytes;
  }

  Tensor memory_;
  char* next_;
};

}  // namespace

#define GROUPED_LINEAR_LAYER_OPS(allocate)                                                         \
  std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> block_scaled_linear(                  \
      const Tensor& x, const Tensor& w, const Tensor& m_splits, const std::optional<Tensor>& bias, \
      double amax_epsilon, bool power_of_two_scales, bool share_scales, bool columnwise_x,         \
      bool columnwise_w) {                                                                         \
    check_block_scaled_linear(x, w, m_splits, bias);                                               \
    const Tensor offs = splits_to_offsets(m_splits, x.size(0), 1, 1, std::nullopt);                \
    check_group_quantize(x, offs, std::nullopt, amax_epsilon, true, columnwise_x, std::nullopt);   \
    check_quantize_weight("quantize_weight", w, amax_epsilon);                                     \
    const int64_t E = w.size(0), N = w.size(1), K = w.size(2);                                     \
    const QuantizedShapes of_x(x.size(0), x.size(1), offs.size(0), true, columnwise_x, false);     \
    const Shape of_w{E, N, K}, none{0};                                                            \
    const Tensor x_t = allocate(x, of_x.q_t, kE4m3),                                               \
                 scale_x_t = allocate(x, of_x.scale_t, kFloat);                                    \
    const Tensor w_t = allocate(w, columnwise_w ? Shape{E, K, N} : none, kE4m3);                   \
    const Tensor scale_w = allocate(w, {E, ceil_div(N, kBlock), ceil_div(K, kBlock)}, kFloat);     \
    Scratch scratch(allocate, x, {of_x.q, of_w}, {of_x.scale});                                    \
    const Tensor q = scratch.cut(of_x.q, kE4m3), scale = scratch.cut(of_x.scale, kFloat);          \
    const Tensor w_q = scratch.cut(of_w, kE4m3), no_sums = scratch.cut(none, kFloat);              \
                                                                                                   \
    quantize_rows_and_weight(x, offs, w, amax_epsilon, power_of_two_scales,                        \
                             {q, scale, x_t, scale_x_t, no_sums, share_scales},                    \
                             {w_q, scale_w, columnwise_w ? std::optional(w_t) : std::nullopt});    \
    const Tensor y = grouped_scaled_mm(q, w_q, scale, scale_w, offs, bias, x.scalar_type());       \
    return {y, offs, x_t, scale_x_t, w_t, scale_w};                                                \
  }                                                                                                \
  std::tuple<Tensor, Tensor, Tensor> block_scaled_linear_grad(                                     \
      const Tensor& dy, const Tensor& offs, const std::optional<Tensor>& x_t,                      \
      const std::optional<Tensor>& scale_x_t, const std::optional<Tensor>& w_t,                    \
      const std::optional<Tensor>& scale_w, double amax_epsilon, bool power_of_two_scales,         \
      bool bias_grad, std::optional<ScalarType> out_dtype) {                                       \
    check_block_scaled_linear_grad(dy, offs, x_t, scale_x_t, w_t, scale_w);                        \
    check_group_quantize(dy, offs, std::nullopt, amax_epsilon, w_t.has_value(), x_t.has_value(),   \
                         std::nullopt);                                                            \
    const QuantizedShapes of_dy(dy.size(0), dy.size(1), offs.size(0), w_t.has_value(),             \
                                x_t.has_value(), bias_grad);                                       \
    const Tensor db = allocate(dy, of_dy.bias_grad, kFloat);                                       \
    Scratch scratch(allocate, dy, {of_dy.q, of_dy.q_t}, {of_dy.scale, of_dy.scale_t});             \
    const Tensor q = scratch.cut(of_dy.q, kE4m3), scale = scratch.cut(of_dy.scale, kFloat);        \
    const Tensor dy_t = scratch.cut(of_dy.q_t, kE4m3);                                             \
    const Tensor scale_dy_t = scratch.cut(of_dy.scale_t, kFloat);                                  \
                                                                                                   \
    quantize_rows(dy, offs, amax_epsilon, power_of_two_scales,                                     \
                  {q, scale, dy_t, scale_dy_t, db, false});                                        \
    const ScalarType dtype = dy.scalar_type(), dw_dtype = out_dtype.value_or(dtype);               \
    const Tensor dx =                                                                              \
        w_t ? grouped_scaled_mm(q, *w_t, scale, turned(*scale_w), offs, std::nullopt, dtype)       \
            : new_tensor(dy, {0}, dtype);                                                          \
    const Tensor dw =                                                                              \
        x_t ? grouped_scaled_mm_wgrad(dy_t, *x_t, scale_dy_t, *scale_x_t, offs, dw_dtype)          \
            : new_tensor(dy, {0}, dw_dtype);                                                       \
    return {dx, dw, db};                                                                           \
  }

namespace cpu {

void quantize_rows_and_weight(const Tensor& x, const Tensor& offs, const Tensor& w,
                              double amax_epsilon, bool power_of_two_scales, const Quantized& of_x,
                              const QuantizedWeight& of_w) {
  quantize_rows(x, offs, amax_epsilon, power_of_two_scales, of_x);
  refresh_weight_({w}, std::nullopt, of_w.q, of_w.scale, of_w.q_t, amax_epsilon,
                  power_of_two_scales);
}

GROUPED_LINEAR_LAYER_OPS(new_output)
}  // namespace cpu

#ifdef GROUPED_LINEAR_CUDA
namespace cuda {
GROUPED_LINEAR_LAYER_OPS(new_tensor)
}  // namespace cuda
#endif

}  // namespace grouped_linear
