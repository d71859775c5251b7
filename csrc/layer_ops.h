// SPDX-License-Identifier: Apache-2.0
// A block-scaled layer's forward and its backward, each as one op that runs the ops it is made of.
//
// One op costs less host time than several. An op costs the host 4 us of an eager step besides its
// launch. A new tensor costs 1 us, and 1.7 us if it is returned; a tensor over existing memory
// costs 0.3 us (host of an H200). So everything that is not returned shares one allocation per
// call.
#pragma once

#include "checks.h"
#include "ops.h"
#include "tensors.h"

namespace grouped_linear {

// One allocation from which dense tensors are cut, each as aligned as the allocator aligns one.
class Arena {
 public:
  Arena(Tensor (*allocate)(const Tensor& like, const Shape& shape, ScalarType dtype),
        const Tensor& like, std::initializer_list<Shape> e4m3, std::initializer_list<Shape> float32)
      : memory_(allocate(like, {bytes_of(e4m3, 1) + bytes_of(float32, 4)}, ScalarType::Byte)),
        next_(static_cast<char*>(memory_.data_ptr())) {}

  Tensor e4m3(const Shape& shape) { return cut(shape, ScalarType::Float8_e4m3fn, 1); }
  Tensor float32(const Shape& shape) { return cut(shape, ScalarType::Float, 4); }

 private:
  Tensor cut(const Shape& shape, ScalarType dtype, int64_t element_size) {
    const int64_t bytes = bytes_of({shape}, element_size);
    // An empty tensor points to the start: torch may refuse an address past the end.
    void* first = bytes > 0 ? next_ : memory_.data_ptr();
    next_ += bytes;
    return tensor_over(first, memory_, shape, dtype);
  }
  static int64_t bytes_of(std::initializer_list<Shape> shapes, int64_t element_size) {
    constexpr int64_t kAlignment = 512;
    int64_t bytes = 0;
    for (const Shape& shape : shapes) {
      int64_t tensor_bytes = element_size;
      for (const int64_t size : shape) tensor_bytes *= size;
      bytes += round_up(tensor_bytes, kAlignment);
    }
    return bytes;
  }

  Tensor memory_;
  char* next_;
};

// splits_to_offsets, group_quantize, quantize_weight and grouped_scaled_mm.
template <typename Backend>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> block_scaled_linear(
    const Tensor& x, const Tensor& w, const Tensor& m_splits, const std::optional<Tensor>& bias,
    double amax_epsilon, bool power_of_two_scales, bool share_scales, bool columnwise_x,
    bool columnwise_w) {
  check_block_scaled_linear(x, w, m_splits, bias);
  const Tensor offs = Backend::splits_to_offsets(m_splits, x.size(0), 1, 1, std::nullopt);
  check_group_quantize(x, offs, std::nullopt, amax_epsilon, true, columnwise_x);
  check_quantize_weight("quantize_weight", w, amax_epsilon);

  constexpr ScalarType kE4m3 = ScalarType::Float8_e4m3fn, kFloat = ScalarType::Float;
  const int64_t E = w.size(0), N = w.size(1), K = w.size(2);
  const QuantizedShapes x_shapes(x.size(0), x.size(1), offs.size(0), true, columnwise_x, false);
  const Tensor x_t = Backend::new_output(x, x_shapes.q_t, kE4m3);
  const Tensor scale_x_t = Backend::new_output(x, x_shapes.scale_t, kFloat);
  const Tensor w_t = Backend::new_output(w, columnwise_w ? Shape{E, K, N} : Shape{0}, kE4m3);
  const Tensor scale_w =
      Backend::new_output(w, {E, ceil_div(N, kBlock), ceil_div(K, kBlock)}, kFloat);
  Arena arena(Backend::new_output, x, {x_shapes.q, {E, N, K}}, {x_shapes.scale});
  const Tensor q = arena.e4m3(x_shapes.q), scale = arena.float32(x_shapes.scale);
  const Tensor w_q = arena.e4m3({E, N, K}), no_bias_grad = arena.float32({0});

  Backend::quantize_rows_and_weight(
      x, offs, w, amax_epsilon, power_of_two_scales,
      {q, scale, x_t, scale_x_t, no_bias_grad, share_scales},
      {w_q, scale_w, columnwise_w ? std::optional(w_t) : std::nullopt});
  const Tensor y =
      Backend::grouped_scaled_mm_nt(q, w_q, scale, scale_w, offs, bias, x.scalar_type(), {}, {});
  return {y, offs, x_t, scale_x_t, w_t, scale_w};
}

// group_quantize, grouped_scaled_mm with w_t for dx, and grouped_scaled_mm_wgrad with x_t for dw.
template <typename Backend>
std::tuple<Tensor, Tensor, Tensor> block_scaled_linear_grad(
    const Tensor& dy, const Tensor& offs, const std::optional<Tensor>& x_t,
    const std::optional<Tensor>& scale_x_t, const std::optional<Tensor>& w_t,
    const std::optional<Tensor>& scale_w, double amax_epsilon, bool power_of_two_scales,
    bool bias_grad, std::optional<ScalarType> out_dtype) {
  const bool rowwise = w_t.has_value(), columnwise = x_t.has_value();
  check_block_scaled_linear_grad(dy, offs, x_t, scale_x_t, w_t, scale_w);
  check_group_quantize(dy, offs, std::nullopt, amax_epsilon, rowwise, columnwise);

  const QuantizedShapes shapes(dy.size(0), dy.size(1), offs.size(0), rowwise, columnwise,
                               bias_grad);
  const Tensor db = Backend::new_output(dy, shapes.bias_grad, ScalarType::Float);
  Arena arena(Backend::new_output, dy, {shapes.q, shapes.q_t}, {shapes.scale, shapes.scale_t});
  const Tensor q = arena.e4m3(shapes.q), scale = arena.float32(shapes.scale);
  const Tensor dy_t = arena.e4m3(shapes.q_t), scale_dy_t = arena.float32(shapes.scale_t);

  Backend::quantize_rows(dy, offs, amax_epsilon, power_of_two_scales,
                         {q, scale, dy_t, scale_dy_t, db, false});
  const ScalarType dtype = dy.scalar_type(), dw_dtype = out_dtype.value_or(dtype);
  const Tensor dx = w_t ? Backend::grouped_scaled_mm_nt(q, *w_t, scale, transposed(*scale_w), offs,
                                                        std::nullopt, dtype, std::nullopt, {})
                        : new_tensor(dy, {0}, dtype);
  const Tensor dw =
      x_t ? Backend::grouped_scaled_mm_wgrad(dy_t, *x_t, scale_dy_t, *scale_x_t, offs, dw_dtype)
          : new_tensor(dy, {0}, dw_dtype);
  return {dx, dw, db};
}

}  // namespace grouped_linear
