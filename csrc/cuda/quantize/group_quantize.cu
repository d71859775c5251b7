#include <limits>

#include "checks.h"
#include "cuda/quantize/rows_and_weight.cuh"
#include "cuda/quantize/tile_passes.h"
#include "ops.h"

namespace grouped_linear::cuda {
namespace {

// What is asked for of [T, K] in E groups.
struct Results : Quantized {
  int64_t T, K, E;
  GroupQuantized out{};

  Results(const Quantized& given, int64_t T, int64_t K, int64_t E)
      : Quantized(given), T(T), K(K), E(E) {
    if (q.numel() > 0) {
      out.q = static_cast<uint8_t*>(q.mutable_data_ptr());
      out.scale = scale.mutable_data_ptr<float>();
      out.scale_stride = scale.size(1);
    }
    if (q_t.numel() > 0) {
      out.q_t = static_cast<uint8_t*>(q_t.mutable_data_ptr());
      out.scale_t = scale_t.mutable_data_ptr<float>();
      out.share_scales = share_scales;
    }
  }

  Results(const Tensor& like, int64_t T, int64_t K, int64_t E, bool rowwise, bool columnwise,
          bool sums, bool share_scales = false)
      : Results({new_tensor, like, {T, K, E, rowwise, columnwise, sums}, share_scales}, T, K, E) {}
};

// Tiles that x has at most, of 128 rows and as many columns.
int64_t most_tiles(const Results& results, int64_t col_blocks) {
  const bool by_group = results.bias_grad.numel() > 0 || results.out.q_t;
  return (by_group ? padded_rows(results.T, results.E) / kBlock : ceil_div(results.T, kBlock)) *
         col_blocks;
}

template <typename Source>
unsigned grid_of(const Launch& launch, int64_t tiles, int64_t E) {
  constexpr Generations generations = Source::kGenerations;
  return tile_grid(launch, tiles, Source::kOccupancy,
                   E <= 32 ? generations.few_groups : generations.many_groups);
}

template <typename Element>
Rows<Element> rows_of(const Tensor& x) {
  return {static_cast<const Element*>(x.const_data_ptr()), x.stride(0), has_aligned_rows(x)};
}

// One pass over what `source` gives, and the sums of the blocks' sums into bias_grad.
template <typename Element, typename Source>
void quantize_tiles(const Launch& launch, const Source& source, const Tensor& offs, ScaleRule rule,
                    Results& results) {
  const int64_t T = results.T, K = results.K, E = results.E;
  const int rows = countable_rows(T);
  const bool sums = results.bias_grad.numel() > 0;

  Tensor block_sums;
  if (sums) {
    block_sums = new_tensor(offs, {padded_rows(T, E) / kBlock, K}, ScalarType::Float);
    results.out.block_sums = block_sums.mutable_data_ptr<float>();
  }

  const int64_t tiles = most_tiles(results, ceil_div(K / Source::kParts, kBlock));
  constexpr auto kernel = group_quantize_kernel<Element, Source>;
  constexpr int ahead = static_cast<int>(sizeof(typename Source::Ahead));
  static_assert(ahead <= kRoomForOne);
  const unsigned grid = grid_of<Source>(launch, tiles, E);
  run_over_tiles<kernel>(launch, grid, ahead, Source::kOccupancy, source,
                         offs.const_data_ptr<int32_t>(), static_cast<int>(E), rows,
                         static_cast<int>(K), rule, results.out);
  if (sums)
    add_block_sums(launch, results.out.block_sums, offs.const_data_ptr<int32_t>(), rows,
                   results.bias_grad);
}

// Calls action(form), plain where it is: that one is faster.
template <typename Action>
void for_form(const SwigluForm& form, const Action& action) {
  if (form.is_plain())
    action(PlainSwiglu());
  else
    action(form);
}

void zero_bias_grad(Results& results) {
  if (results.bias_grad.numel() > 0) torch::stable::zero_(results.bias_grad);
}

}  // namespace

void quantize_rows(const Tensor& x_in, const Tensor& offs_in, double amax_epsilon,
                   bool power_of_two_scales, const Quantized& given) {
  const Launch launch("group_quantize", x_in);
  const Tensor x = with_dense_rows(x_in), offs = as_dense(offs_in);
  Results results(given, x.size(0), x.size(1), offs.size(0));
  if (results.T == 0) return zero_bias_grad(results);

  for_element(x.scalar_type(), [&](auto element) {
    using Element = typename decltype(element)::type;
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

  for_element(x.scalar_type(), [&](auto element) {
    using Element = typename decltype(element)::type;
    const int64_t tiles = most_tiles(results, ceil_div(results.K, kBlock));
    const unsigned row_blocks = grid_of<Rows<Element>>(launch, tiles, results.E);
    const PackedExperts<Element> experts{static_cast<const Element*>(w.const_data_ptr()),
                                         w.size(1) * w.size(2)};
    launch.run(quantize_rows_and_weight_kernel<Element>,
               row_blocks + static_cast<unsigned>(of_w.scale.numel()), kTileThreads, 0,
               rows_of<Element>(x), offs.const_data_ptr<int32_t>(), static_cast<int>(results.E),
               countable_rows(results.T), static_cast<int>(results.K), results.out, row_blocks,
               experts, is_aligned(w), pointers_of(of_w), rule);
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
  if (T == 0 || x.size(0) == 0) {
    zero_bias_grad(results);
    return results.all();
  }

  const ScaleRule rule{static_cast<float>(amax_epsilon), power_of_two_scales};
  for_element(x.scalar_type(), [&](auto element) {
    using Element = typename decltype(element)::type;
    const auto* values = static_cast<const Element*>(x.const_data_ptr());
    constexpr int64_t most = std::numeric_limits<uint32_t>::max();
    const int64_t row_bytes = x.stride(0) * int64_t{sizeof(Element)};
    const bool vectorised = has_aligned_rows(x) && x.size(0) <= most && row_bytes <= most;
    const auto run = [&](const auto& source) {
      quantize_tiles<Element>(launch, source, offs, rule, results);
    };
    for_index(rows.scalar_type(), [&](auto index) {
      using Index = typename decltype(index)::type;
      const GatheredRows<Element, Index> gathered{values, x.stride(0), vectorised,
                                                  rows.const_data_ptr<Index>(), x.size(0)};
      if (!factor_in) return run(gathered);
      const Tensor factor = as_dense(*factor_in);
      run(ScaledRows<Element, Index>{gathered, factor.const_data_ptr<float>()});
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
  Results results(gate_up, T, K, offs.size(0), rowwise, columnwise, false, share_scales);
  Tensor h = new_tensor(gate_up, keep_h ? Shape{T, K} : Shape{0}, gate_up.scalar_type());

  if (T > 0) {
    const ScaleRule rule{static_cast<float>(amax_epsilon), power_of_two_scales};
    for_element(gate_up.scalar_type(), [&](auto element) {
      using Element = typename decltype(element)::type;
      auto* kept = keep_h ? static_cast<Element*>(h.mutable_data_ptr()) : nullptr;
      for_form(given, [&](auto form) {
        const Swiglu<Element, decltype(form)> source{
            static_cast<const Element*>(gate_up.const_data_ptr()),
            gate_up.stride(0),
            has_aligned_rows(gate_up),
            static_cast<int>(K),
            kept,
            form};
        quantize_tiles<Element>(launch, source, offs, rule, results);
      });
      if (!keep_h) return;
      launch.run(zero_tail_kernel<Element>, launch.multiprocessors(), kSwigluThreads, 0,
                 offs.const_data_ptr<int32_t>(), static_cast<int>(offs.size(0)), T,
                 static_cast<int>(K), kept);
    });
  }
  return {results.q, results.scale, results.q_t, results.scale_t, h};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> group_quantize_swiglu_grad(
    const Tensor& dh_in, const Tensor& gate_up_in, const Tensor& offs_in, double amax_epsilon,
    bool power_of_two_scales, bool rowwise, bool columnwise, bool bias_grad, double alpha,
    double beta, std::optional<double> limit, bool interleaved) {
  check_group_quantize_swiglu_grad(dh_in, gate_up_in, offs_in, amax_epsilon, rowwise, columnwise);
  const SwigluForm given =
      checked_form("group_quantize_swiglu_grad", alpha, beta, limit, interleaved);

  const Launch launch("group_quantize_swiglu_grad", dh_in);
  const Tensor dh = with_dense_rows(dh_in), gate_up = with_dense_rows(gate_up_in);
  const Tensor offs = as_dense(offs_in);
  const int64_t T = dh.size(0), K = dh.size(1);
  Results results(dh, T, 2 * K, offs.size(0), rowwise, columnwise, bias_grad);

  if (T == 0) {
    zero_bias_grad(results);
    return results.all();
  }

  const ScaleRule rule{static_cast<float>(amax_epsilon), power_of_two_scales};
  for_element(dh.scalar_type(), [&](auto element) {
    using Element = typename decltype(element)::type;
    const bool aligned = has_aligned_rows(dh) && has_aligned_rows(gate_up);
    const auto run = [&](auto parts) {
      for_form(given, [&](auto form) {
        const SwigluGrad<Element, decltype(parts)::value, decltype(form)> source{
            static_cast<const Element*>(dh.const_data_ptr()),
            dh.stride(0),
            static_cast<const Element*>(gate_up.const_data_ptr()),
            gate_up.stride(0),
            aligned,
            static_cast<int>(K),
            form};
        quantize_tiles<Element>(launch, source, offs, rule, results);
      });
    };
    if constexpr (sizeof(Element) == 2)
      if (aligned && K % kBlock == 0 && !interleaved) return run(std::integral_constant<int, 2>());
    run(std::integral_constant<int, 1>());
  });
  return results.all();
}

Tensor grouped_bias_grad(const Tensor& dy_in, const Tensor& offs_in) {
  check_grouped_bias_grad(dy_in, offs_in);

  const Launch launch("grouped_bias_grad", dy_in);
  const Tensor dy = with_dense_rows(dy_in), offs = as_dense(offs_in);
  Results results(dy, dy.size(0), dy.size(1), offs.size(0), false, false, true);

  if (dy.size(0) == 0)
    zero_bias_grad(results);
  else
    for_element(dy.scalar_type(), [&](auto element) {
      using Element = typename decltype(element)::type;
      quantize_tiles<Element>(launch, rows_of<Element>(dy), offs, ScaleRule{}, results);
    });
  return results.bias_grad;
}

// --- unfused --------------------------------------------------------------------------------------

namespace {

unsigned swiglu_grid(const Launch& launch, int64_t elements) {
  constexpr int kResident = 2048 / kSwigluThreads;
  return static_cast<unsigned>(std::min<int64_t>(ceil_div(elements / kPatch, kSwigluThreads),
                                                 kResident * launch.multiprocessors()));
}

}  // namespace

Tensor swiglu(const Tensor& gate_up_in, const Tensor& offs_in, double alpha, double beta,
              std::optional<double> limit, bool interleaved) {
  check_swiglu("swiglu", gate_up_in, offs_in);
  const SwigluForm given = checked_form("swiglu", alpha, beta, limit, interleaved);

  const Launch launch("swiglu", gate_up_in);
  const Tensor gate_up = with_dense_rows(gate_up_in), offs = as_dense(offs_in);
  const int64_t T = gate_up.size(0), K = gate_up.size(1) / 2;
  Tensor h = new_tensor(gate_up, {T, K}, gate_up.scalar_type());

  if (T == 0) return h;

  for_element(gate_up.scalar_type(), [&](auto element) {
    using Element = typename decltype(element)::type;
    for_form(given, [&](auto form) {
      launch.run(swiglu_kernel<Element, decltype(form)>, swiglu_grid(launch, T * K), kSwigluThreads,
                 0, static_cast<const Element*>(gate_up.const_data_ptr()), gate_up.stride(0),
                 has_aligned_rows(gate_up), form, offs.const_data_ptr<int32_t>(),
                 static_cast<int>(offs.size(0)), T, static_cast<int>(K),
                 static_cast<Element*>(h.mutable_data_ptr()));
    });
  });
  return h;
}

Tensor swiglu_grad(const Tensor& dh_in, const Tensor& gate_up_in, const Tensor& offs_in,
                   double alpha, double beta, std::optional<double> limit, bool interleaved) {
  check_swiglu_grad("swiglu_grad", dh_in, gate_up_in, offs_in);
  const SwigluForm given = checked_form("swiglu_grad", alpha, beta, limit, interleaved);

  const Launch launch("swiglu_grad", dh_in);
  const Tensor dh = with_dense_rows(dh_in), gate_up = with_dense_rows(gate_up_in);
  const Tensor offs = as_dense(offs_in);
  const int64_t T = dh.size(0), K = dh.size(1);
  Tensor d_gate_up = new_tensor(dh, {T, 2 * K}, dh.scalar_type());

  if (T == 0) return d_gate_up;

  for_element(dh.scalar_type(), [&](auto element) {
    using Element = typename decltype(element)::type;
    for_form(given, [&](auto form) {
      launch.run(swiglu_grad_kernel<Element, decltype(form)>, swiglu_grid(launch, T * K),
                 kSwigluThreads, 0, static_cast<const Element*>(dh.const_data_ptr()), dh.stride(0),
                 static_cast<const Element*>(gate_up.const_data_ptr()), gate_up.stride(0),
                 has_aligned_rows(dh) && has_aligned_rows(gate_up), form,
                 offs.const_data_ptr<int32_t>(), static_cast<int>(offs.size(0)), T,
                 static_cast<int>(K), static_cast<Element*>(d_gate_up.mutable_data_ptr()));
    });
  });
  return d_gate_up;
}

}  // namespace grouped_linear::cuda
