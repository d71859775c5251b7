#include <vector>

#include "checks.h"
#include "cuda/quantize/mx.cuh"
#include "cuda/quantize/tile_passes.h"
#include "experts.h"
#include "ops.h"

namespace grouped_linear::cuda {
namespace {

// One pass over the rows of x, dense in its last dimension, for whatever `out` asks for. offs: null
// for a weight of E times T rows; `blocks` bounds the tiles in rows of tiles.
template <bool rounded>
void launch_kernel(const Launch& launch, const Tensor& x, int64_t row_stride, int64_t blocks,
                   const int32_t* offs, int E, int T, int K, const bool* refresh, MxOutputs out) {
  for_element(x.scalar_type(), [&](auto element) {
    using Element = typename decltype(element)::type;
    const bool vectorised = is_aligned(x) && row_stride * item_size(x) % 16 == 0;
    const int shared = out.q_t ? static_cast<int>(sizeof(TurnedTile)) : 0;
    run_over_tiles<group_mx_kernel<Element, rounded>>(
        launch,
        tile_grid(launch, blocks * ceil_div(K, kBlock), kMxOccupancy<Element>, kGenerations),
        shared, kMxOccupancy<Element>, static_cast<const Element*>(x.const_data_ptr()), row_stride,
        vectorised, offs, E, T, K, refresh, out);
  });
}

// One pass over x for whatever `out` asks for, and the sums of the blocks' sums into bias_grad.
template <bool rounded>
void quantize(const Launch& launch, const Tensor& x_in, const Tensor& offs_in, MxOutputs out,
              Tensor& bias_grad) {
  const Tensor x = with_dense_rows(x_in);
  const Tensor offs = as_dense(offs_in);
  const int64_t T = x.size(0), K = x.size(1), E = offs.size(0);
  const int64_t blocks = padded_rows(T, E) / kBlock;
  const int rows = countable_rows(T);
  const bool sums = bias_grad.numel() > 0;
  Tensor block_sums = new_tensor(x, sums ? Shape{blocks, K} : Shape{0}, ScalarType::Float);
  if (sums) out.block_sums = block_sums.mutable_data_ptr<float>();

  launch_kernel<rounded>(launch, x, x.stride(0), blocks, offs.const_data_ptr<int32_t>(),
                         static_cast<int>(E), rows, static_cast<int>(K), nullptr, out);
  if (sums) add_block_sums(launch, out.block_sums, offs.const_data_ptr<int32_t>(), rows, bias_grad);
}

template <typename Element>
Element* if_wanted(bool wanted, Tensor& t) {
  return wanted ? static_cast<Element*>(t.mutable_data_ptr()) : nullptr;
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> group_quantize_mx(const Tensor& x,
                                                                     const Tensor& offs,
                                                                     bool rowwise, bool columnwise,
                                                                     bool bias_grad) {
  check_group_quantize_mx("group_quantize_mx", x, offs, rowwise, columnwise);

  const Launch launch("group_quantize_mx", x);
  const int64_t T = x.size(0), K = x.size(1), E = offs.size(0);
  const auto output = [&x](bool wanted, const Shape& shape, ScalarType dtype) {
    return new_tensor(x, wanted ? shape : Shape{0}, dtype);
  };
  constexpr ScalarType e4m3 = ScalarType::Float8_e4m3fn, e8m0 = ScalarType::Float8_e8m0fnu;
  const int64_t blocks = padded_rows(T, E) / kBlock;
  Tensor q = output(rowwise, {T, K}, e4m3);
  Tensor scale = output(rowwise, {T, ceil_div(K, kMxBlock)}, e8m0);
  Tensor q_t = output(columnwise, {blocks, K, kBlock}, e4m3);
  Tensor scale_t = output(columnwise, {blocks, K, kBlock / kMxBlock}, e8m0);
  Tensor grad = output(bias_grad, {E, K}, ScalarType::Float);

  quantize<false>(launch, x, offs,
                  {if_wanted<uint8_t>(rowwise, q), if_wanted<uint8_t>(rowwise, scale),
                   if_wanted<uint8_t>(columnwise, q_t), if_wanted<uint8_t>(columnwise, scale_t),
                   nullptr, nullptr, nullptr},
                  grad);
  return {q, scale, q_t, scale_t, grad};
}

std::tuple<Tensor, Tensor, Tensor> group_round_mx(const Tensor& x, const Tensor& offs, bool rowwise,
                                                  bool columnwise, bool bias_grad) {
  check_group_quantize_mx("group_round_mx", x, offs, rowwise, columnwise);

  const Launch launch("group_round_mx", x);
  const int64_t T = x.size(0), K = x.size(1), E = offs.size(0);
  const auto output = [&x](bool wanted, const Shape& shape, ScalarType dtype) {
    return new_tensor(x, wanted ? shape : Shape{0}, dtype);
  };
  Tensor x_rowwise = output(rowwise, {T, K}, ScalarType::BFloat16);
  Tensor x_columnwise = output(columnwise, {T, K}, ScalarType::BFloat16);
  Tensor grad = output(bias_grad, {E, K}, ScalarType::Float);

  quantize<true>(launch, x, offs,
                 {nullptr, nullptr, nullptr, nullptr, if_wanted<uint16_t>(rowwise, x_rowwise),
                  if_wanted<uint16_t>(columnwise, x_columnwise), nullptr},
                 grad);
  return {x_rowwise, x_columnwise, grad};
}

void refresh_weight_mx_(const std::vector<Tensor>& w_in, const std::optional<Tensor>& refresh,
                        const Tensor& w_rowwise, const std::optional<Tensor>& w_columnwise) {
  check_refresh_weight_mx(w_in, refresh, w_rowwise, w_columnwise);

  const Launch launch("refresh_weight_mx_", w_in[0]);
  const Tensor w = as_dense(packed(w_in));
  const int64_t E = w.size(0), N = w.size(1), K = w.size(2);

  launch_kernel<true>(
      launch, w, K, E * ceil_div(N, kBlock), nullptr, static_cast<int>(E), static_cast<int>(N),
      static_cast<int>(K), refresh ? refresh->const_data_ptr<bool>() : nullptr,
      {nullptr, nullptr, nullptr, nullptr, static_cast<uint16_t*>(w_rowwise.mutable_data_ptr()),
       w_columnwise ? static_cast<uint16_t*>(w_columnwise->mutable_data_ptr()) : nullptr, nullptr});
}

}  // namespace grouped_linear::cuda
