// Block scaling of activations: rows, gathered rows, SwiGLU and its gradient.
#include <limits>

#include "checks.h"
#include "cuda/quantize/block_and_weight.cuh"
#include "cuda/quantize/launch_tiles.h"
#include "ops.h"

namespace grouped_linear::cuda {
namespace {

// What is asked for of [T, K] in E groups.
struct Results : Quantized {
  int64_t T, K, E;

  Results(const Quantized& given, int64_t T, int64_t K, int64_t E)
      : Quantized(given), T(T), K(K), E(E) {}
  Results(const Tensor& like, int64_t T, int64_t K, int64_t E, bool rowwise, bool columnwise,
          bool bias_grad, bool share_scales = false)
      : Results({new_tensor, like, {T, K, E, rowwise, columnwise, bias_grad}, share_scales}, T, K,
                E) {}

  BlockOutputs outputs() const {
    BlockOutputs out{};
    if (q.numel() > 0) {
      out.q = mutable_data<uint8_t>(q);
      out.scale = mutable_data<float>(scale);
      out.scale_stride = scale.size(1);
    }
    if (q_t.numel() > 0) {
      out.q_t = mutable_data<uint8_t>(q_t);
      out.scale_t = mutable_data<float>(scale_t);
      out.share_scales = share_scales;
    }
    return out;
  }
  // The most tiles that there can be, with so many in a row of tiles.
  int64_t most_tiles(int64_t col_blocks) const {
    const bool by_group = bias_grad.numel() > 0 || q_t.numel() > 0;
    return (by_group ? padded_rows(T, E) / kBlock : ceil_div(T, kBlock)) * col_blocks;
  }
  void zero_bias_grad() {
    if (bias_grad.numel() > 0) torch::stable::zero_(bias_grad);
  }
};

template <typename Source>
unsigned grid_of(const Launch& launch, int64_t tiles, int64_t E) {
  constexpr Waves waves = Source::kWaves;
  return tile_grid(launch, tiles, Source::kOccupancy,
                   E <= 32 ? waves.few_groups : waves.many_groups);
}

template <typename Element>
Rows<Element> rows_of(const Tensor& x) {
  return {data<Element>(x), x.stride(0), has_aligned_rows(x)};
}

// One pass over a source, and the sum of the partial bias gradients.
template <typename Element, typename Source>
void quantize_tiles(const Launch& launch, Source source, const Tensor& offs, ScaleRule rule,
                    const Results& results) {
  const PartialBiasGrad sums(results.bias_grad, padded_rows(results.T, results.E) / kBlock);
  BlockOutputs out = results.outputs();
  out.partial_bias_grad = sums.partial();

  const int64_t tiles = results.most_tiles(ceil_div(results.K / Source::kParts, kBlock));
  const int rows = int32_rows(results.T);
  int buffer = static_cast<int>(sizeof(typename Source::Buffer));
  static_assert(sizeof(typename Source::Buffer) <= kSmemForOneBlock,
                "launch_over_tiles allows no more shared memory");
  if (buffer > smem_for_one_block(launch)) {  // float32 where blocks have 99 KiB
    static_assert(sizeof(Element) == 4 || sizeof(typename Source::Buffer) <= 61 * 1024,
                  "16-bit elements are prefetched on every GPU");
    source.vectorised = false;  // without prefetching
    buffer = 0;
  }
  launch_over_tiles<group_quantize_kernel<Element, Source>>(
      launch, grid_of<Source>(launch, tiles, results.E), buffer, Source::kOccupancy, source,
      data<int32_t>(offs), static_cast<int>(results.E), rows, static_cast<int>(results.K), rule,
      out);
  sums.sum(launch, data<int32_t>(offs), rows);
}

}  // namespace

void quantize_rows(const Tensor& x_in, const Tensor& offs_in, double amax_epsilon,
                   bool power_of_two_scales, const Quantized& given) {
  const Launch launch("group_quantize", x_in);
  const Tensor x = with_dense_rows(x_in), offs = as_dense(offs_in);
  Results results(given, x.size(0), x.size(1), offs.size(0));
  if (results.T == 0) return results.zero_bias_grad();

  for_element(x.scalar_type(), [&]<typename Element>(std::type_identity<Element>) {
    quantize_tiles<Element>(launch, rows_of<Element>(x), offs,
                            {static_cast<float>(amax_epsilon), power_of_two_scales}, results);
  });
}

void quantize_rows_and_weight(const Tensor& x_in, const Tensor& offs_in, const Tensor& w_in,
                              double amax_epsilon, bool power_of_two_scales, const Quantized& of_x,
                              const QuantizedWeight& of_w) {
  if (x_in.size(0) == 0 || x_in.scalar_type() != w_in.scalar_type()) {
    quantize_rows(x_in, offs_in, amax_epsilon, power_of_two_scales, of_x);
    return refresh_weight_({w_in}, std::nullopt, of_w.q, of_w.scale, of_w.q_t, amax_epsilon,
                           power_of_two_scales);
  }
  const Launch launch("block_scaled_linear", x_in);
  const Tensor x = with_dense_rows(x_in), offs = as_dense(offs_in), w = as_dense(w_in);
  const Results results(of_x, x.size(0), x.size(1), offs.size(0));
  const ScaleRule rule{static_cast<float>(amax_epsilon), power_of_two_scales};

  for_element(x.scalar_type(), [&]<typename Element>(std::type_identity<Element>) {
    const int64_t tiles = results.most_tiles(ceil_div(results.K, kBlock));
    const unsigned row_blocks = grid_of<Rows<Element>>(launch, tiles, results.E);
    const PackedExperts<Element> experts{data<Element>(w), w.size(1) * w.size(2)};
    launch.run(quantize_rows_and_weight_kernel<Element>,
               row_blocks + static_cast<unsigned>(of_w.scale.numel()), kTileThreads, 0,
               rows_of<Element>(x), data<int32_t>(offs), static_cast<int>(results.E),
               int32_rows(results.T), static_cast<int>(results.K), results.outputs(), row_blocks,
               experts, is_aligned(w), outputs_of(of_w), rule);
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> group_quantize(
    const Tensor& x_in, const Tensor& offs_in, const std::optional<Tensor>& rows_in,
    double amax_epsilon, bool power_of_two_scales, bool rowwise, bool columnwise, bool bias_grad,
    bool share_scales, const std::optional<Tensor>& factor_in) {
  check_group_quantize(x_in, offs_in, rows_in, amax_epsilon, rowwise, columnwise, factor_in);

  const int64_t T = (rows_in ? *rows_in : x_in).size(0);
  Results results(x_in, T, x_in.size(1), offs_in.size(0), rowwise, columnwise, bias_grad,
                  share_scales);
  if (!rows_in) {
    quantize_rows(x_in, offs_in, amax_epsilon, power_of_two_scales, results);
    return results.all();
  }

  const Launch launch("group_quantize", x_in);
  const Tensor x = with_dense_rows(x_in), offs = as_dense(offs_in), rows = as_dense(*rows_in);
  const std::optional<Tensor> factor = as_dense(factor_in);
  if (T == 0 || x.size(0) == 0) {
    results.zero_bias_grad();
    return results.all();
  }

  const ScaleRule rule{static_cast<float>(amax_epsilon), power_of_two_scales};
  constexpr int64_t most = std::numeric_limits<uint32_t>::max();
  const int64_t row_bytes = x.stride(0) * item_size(x);
  const bool vectorised = has_aligned_rows(x) && x.size(0) <= most && row_bytes <= most;
  for_element(x.scalar_type(), [&]<typename Element>(std::type_identity<Element>) {
    for_index(rows.scalar_type(), [&]<typename Index>(std::type_identity<Index>) {
      const GatheredRows<Element, Index> gathered{data<Element>(x), x.stride(0), vectorised,
                                                  data<Index>(rows), x.size(0)};
      if (factor)
        quantize_tiles<Element>(launch, ScaledRows<Element, Index>{gathered, data<float>(*factor)},
                                offs, rule, results);
      else
        quantize_tiles<Element>(launch, gathered, offs, rule, results);
    });
  });
  return results.all();
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> group_quantize_swiglu(
    const Tensor& gate_up_in, const Tensor& offs_in, double amax_epsilon, bool power_of_two_scales,
    bool rowwise, bool columnwise, bool keep_h, bool share_scales, double alpha, double beta,
    std::optional<double> limit, bool interleaved) {
  check_group_quantize_swiglu(gate_up_in, offs_in, amax_epsilon, rowwise, columnwise);
  const SwigluForm given = checked_form("group_quantize_swiglu", alpha, beta, limit, interleaved);

  const Launch launch("group_quantize_swiglu", gate_up_in);
  const Tensor gate_up = with_dense_rows(gate_up_in), offs = as_dense(offs_in);
  const int64_t T = gate_up.size(0), K = gate_up.size(1) / 2;
  const Results results(gate_up, T, K, offs.size(0), rowwise, columnwise, false, share_scales);
  const Tensor h = new_tensor(gate_up, keep_h ? Shape{T, K} : Shape{0}, gate_up.scalar_type());

  if (T > 0) {
    const ScaleRule rule{static_cast<float>(amax_epsilon), power_of_two_scales};
    for_element(gate_up.scalar_type(), [&]<typename Element>(std::type_identity<Element>) {
      auto* kept = mutable_data_or_null<Element>(h);
      for_form(given, [&]<typename Form>(const Form& form) {
        const SwigluRows<Element, Form> source{data<Element>(gate_up),
                                               gate_up.stride(0),
                                               has_aligned_rows(gate_up),
                                               static_cast<int>(K),
                                               kept,
                                               form};
        quantize_tiles<Element>(launch, source, offs, rule, results);
      });
      if (!kept) return;
      launch.run(zero_tail_kernel<Element>, launch.multiprocessors(), kSwigluThreads, 0,
                 data<int32_t>(offs), static_cast<int>(offs.size(0)), T, static_cast<int>(K), kept);
    });
  }
  return {results.q, results.scale, results.q_t, results.scale_t, h};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>
group_quantize_swiglu_grad(const Tensor& dh_in, const Tensor& gate_up_in, const Tensor& weight_in,
                           const Tensor& offs_in, double amax_epsilon, bool power_of_two_scales,
                           bool rowwise, bool columnwise, bool bias_grad, bool h_columnwise,
                           bool share_h_scales, double alpha, double beta,
                           std::optional<double> limit, bool interleaved) {
  check_group_quantize_swiglu_grad(dh_in, gate_up_in, weight_in, offs_in, amax_epsilon, rowwise,
                                   columnwise);
  const SwigluForm given =
      checked_form("group_quantize_swiglu_grad", alpha, beta, limit, interleaved);

  const Launch launch("group_quantize_swiglu_grad", dh_in);
  const Tensor dh = with_dense_rows(dh_in), gate_up = with_dense_rows(gate_up_in);
  const Tensor weight = as_dense(weight_in), offs = as_dense(offs_in);
  const int64_t T = dh.size(0), K = dh.size(1), E = offs.size(0);
  Results results(dh, T, 2 * K, E, rowwise, columnwise, bias_grad);
  const Results of_h(dh, T, K, E, false, h_columnwise, false, share_h_scales);
  const Tensor d_weight = new_tensor(dh, {T}, ScalarType::Float);
  const auto all = [&] {
    return std::tuple_cat(results.all(), std::make_tuple(of_h.q_t, of_h.scale_t, d_weight));
  };

  if (T == 0) {
    results.zero_bias_grad();
    return all();
  }

  const ScaleRule rule{static_cast<float>(amax_epsilon), power_of_two_scales};
  const bool aligned = has_aligned_rows(dh) && has_aligned_rows(gate_up);
  const int64_t col_blocks = ceil_div(interleaved ? 2 * K : K, kBlock);
  const Tensor partial = new_tensor(dh, {ceil_div(2 * K, kBlock), T}, ScalarType::Float);
  const auto quantize_h = [&]<typename Element, typename Form>(const Form& form) {
    if (!h_columnwise) return;
    const SwigluRows<Element, Form, true> source{
        data<Element>(gate_up), gate_up.stride(0), has_aligned_rows(gate_up),
        static_cast<int>(K),    nullptr,           form,
        data<float>(weight)};
    quantize_tiles<Element>(launch, source, offs, rule, of_h);
  };
  for_element(dh.scalar_type(), [&]<typename Element>(std::type_identity<Element>) {
    for_form(given, [&]<typename Form>(const Form& form) {
      // h is quantized in the same pass where registers suffice, else in one of its own.
      const auto run = [&]<int parts, bool with_h>() {
        const SwigluGradRows<Element, parts, Form, with_h> source{data<Element>(dh),
                                                                  dh.stride(0),
                                                                  data<Element>(gate_up),
                                                                  gate_up.stride(0),
                                                                  aligned,
                                                                  static_cast<int>(K),
                                                                  form,
                                                                  data<float>(weight),
                                                                  mutable_data<float>(partial),
                                                                  T,
                                                                  of_h.outputs()};
        quantize_tiles<Element>(launch, source, offs, rule, results);
      };
      if constexpr (sizeof(Element) == 2)
        if (aligned && K % kBlock == 0 && !interleaved) {
          constexpr bool plain = std::is_same_v<Form, PlainSwiglu>;
          if (plain && h_columnwise) return run.template operator()<2, plain>();
          run.template operator()<2, false>();
          return quantize_h.template operator()<Element>(form);
        }
      run.template operator()<1, false>();
      quantize_h.template operator()<Element>(form);
    });
  });
  const auto blocks = static_cast<unsigned>(
      std::min<int64_t>(ceil_div(T, kSwigluThreads), 8 * launch.multiprocessors()));
  launch.run(sum_partial_d_weight_kernel, blocks, kSwigluThreads, 0, data<float>(partial),
             static_cast<int>(col_blocks), data<int32_t>(offs), static_cast<int>(E), T,
             mutable_data<float>(d_weight));
  return all();
}

Tensor grouped_bias_grad(const Tensor& dy_in, const Tensor& offs_in) {
  check_grouped_bias_grad(dy_in, offs_in);

  const Launch launch("grouped_bias_grad", dy_in);
  const Tensor dy = with_dense_rows(dy_in), offs = as_dense(offs_in);
  Results results(dy, dy.size(0), dy.size(1), offs.size(0), false, false, true);

  if (results.T == 0)
    results.zero_bias_grad();
  else
    for_element(dy.scalar_type(), [&]<typename Element>(std::type_identity<Element>) {
      quantize_tiles<Element>(launch, rows_of<Element>(dy), offs, ScaleRule{}, results);
    });
  return results.bias_grad;
}

}  // namespace grouped_linear::cuda
