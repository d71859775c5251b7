#include <limits>
#include <type_traits>
#include <vector>

#include "../checks.h"
#include "../ops.h"
#include "kernels/group_quantize.cuh"
#include "launch.h"

namespace grouped_linear::cuda {
namespace {

using Shape = std::vector<int64_t>;

Tensor inner_contiguous(const Tensor& x) {
  return x.stride(1) == 1 ? x : torch::stable::contiguous(x);
}

bool is_aligned(const Tensor& x) {
  return reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0 &&
         x.stride(0) * x.element_size() % 16 == 0;
}

template <typename Run>
void for_element(ScalarType dtype, const Run& run) {
  switch (dtype) {
    case ScalarType::BFloat16: run(std::type_identity<__nv_bfloat16>()); break;
    case ScalarType::Half: run(std::type_identity<__half>()); break;
    default: run(std::type_identity<float>());
  }
}

// What is asked for of [T, K] in E groups; what is not has no elements.
struct Results {
  int64_t T, K, E;
  Tensor q, scale, q_t, scale_t, bias_grad;
  GroupQuantized out{};

  Results(const Tensor& like, int64_t T, int64_t K, int64_t E, bool rowwise, bool columnwise,
          bool sums)
      : T(T), K(K), E(E) {
    const auto output = [&like](bool wanted, const Shape& shape, ScalarType dtype) {
      return torch::stable::new_empty(like, wanted ? shape : Shape{0}, dtype);
    };
    const int64_t scale_stride = round_up(T, kScaleRowMultiple);
    const int64_t blocks = padded_rows(T, E) / kBlock;
    q = output(rowwise, {T, K}, ScalarType::Float8_e4m3fn);
    scale = output(rowwise, {ceil_div(K, kBlock), scale_stride}, ScalarType::Float);
    q_t = output(columnwise, {blocks, K, kBlock}, ScalarType::Float8_e4m3fn);
    scale_t = output(columnwise, {blocks, K}, ScalarType::Float);
    bias_grad = output(sums, {E, K}, ScalarType::Float);
    if (rowwise) {
      out.q = static_cast<uint8_t*>(q.mutable_data_ptr());
      out.scale = scale.mutable_data_ptr<float>();
      out.scale_stride = scale_stride;
    }
    if (columnwise) {
      out.q_t = static_cast<uint8_t*>(q_t.mutable_data_ptr());
      out.scale_t = scale_t.mutable_data_ptr<float>();
    }
  }

  std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> all() const {
    return {q, scale, q_t, scale_t, bias_grad};
  }
};

// One pass over what `source` gives, and the sums of the blocks' sums into bias_grad.
template <typename Element, typename Source>
void quantize_tiles(const Launch& launch, const Source& source, const Tensor& offs, ScaleRule rule,
                    Results& results) {
  const int64_t T = results.T, K = results.K, E = results.E;
  const int64_t blocks = padded_rows(T, E) / kBlock, col_blocks = ceil_div(K, kBlock);
  // offs are int32, so no group reaches rows past these; a block past the end must be countable.
  const int rows =
      static_cast<int>(std::min<int64_t>(T, std::numeric_limits<int32_t>::max() - kBlock));
  const int groups = static_cast<int>(E), features = static_cast<int>(K);
  const bool sums = results.bias_grad.numel() > 0;

  Tensor block_sums;
  if (sums) {
    block_sums = torch::stable::new_empty(offs, Shape{blocks, K}, ScalarType::Float);
    results.out.block_sums = block_sums.mutable_data_ptr<float>();
  }

  const bool by_group = sums || results.out.q_t;
  const int64_t tiles = (by_group ? blocks : ceil_div(T, kBlock)) * col_blocks;
  const int64_t grid =
      std::min<int64_t>(tiles, int64_t{launch.multiprocessors()} * Source::kOccupancy);
  group_quantize_kernel<Element, Source>
      <<<static_cast<unsigned>(grid), kTileThreads, 0, launch.stream()>>>(
          source, offs.const_data_ptr<int32_t>(), groups, rows, features, rule, results.out);
  launch.check_launched();
  if (!sums) return;

  const int64_t chunks = ceil_div(K, kSumThreads);
  const int64_t blocks_y =
      std::min(E, std::max<int64_t>(1, int64_t{8} * launch.multiprocessors() / chunks));
  add_block_sums_kernel<<<dim3(static_cast<unsigned>(chunks), static_cast<unsigned>(blocks_y)),
                          kSumThreads, 0, launch.stream()>>>(
      results.out.block_sums, offs.const_data_ptr<int32_t>(), groups, rows, features,
      results.bias_grad.mutable_data_ptr<float>());
  launch.check_launched();
}

void zero_bias_grad(Results& results) {
  if (results.bias_grad.numel() > 0) torch::stable::zero_(results.bias_grad);
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> group_quantize(
    const Tensor& x_in, const Tensor& offs_in, const std::optional<Tensor>& rows_in,
    double amax_epsilon, bool power_of_two_scales, bool rowwise, bool columnwise, bool bias_grad) {
  check_group_quantize(x_in, offs_in, rows_in, amax_epsilon, rowwise, columnwise);

  const Launch launch("group_quantize", x_in);
  const Tensor x = inner_contiguous(x_in), offs = torch::stable::contiguous(offs_in);
  const int64_t T = rows_in ? rows_in->size(0) : x.size(0);
  Results results(x, T, x.size(1), offs.size(0), rowwise, columnwise, bias_grad);

  if (T == 0 || x.size(0) == 0) {
    zero_bias_grad(results);
    return results.all();
  }

  const ScaleRule rule{static_cast<float>(amax_epsilon), power_of_two_scales};
  for_element(x.scalar_type(), [&](auto element) {
    using Element = typename decltype(element)::type;
    const auto* values = static_cast<const Element*>(x.const_data_ptr());
    const auto run = [&](const auto& source) {
      quantize_tiles<Element>(launch, source, offs, rule, results);
    };
    if (!rows_in) return run(Rows<Element>{values, x.stride(0), is_aligned(x)});
    const Tensor rows = torch::stable::contiguous(*rows_in);
    if (rows.scalar_type() == ScalarType::Int)
      run(GatheredRows<Element, int32_t>{values, x.stride(0), is_aligned(x),
                                         rows.const_data_ptr<int32_t>(), x.size(0)});
    else
      run(GatheredRows<Element, int64_t>{values, x.stride(0), is_aligned(x),
                                         rows.const_data_ptr<int64_t>(), x.size(0)});
  });
  return results.all();
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> group_quantize_swiglu(
    const Tensor& gate_up_in, const Tensor& offs_in, double amax_epsilon, bool power_of_two_scales,
    bool rowwise, bool columnwise, bool keep_h) {
  check_group_quantize_swiglu(gate_up_in, offs_in, amax_epsilon, rowwise, columnwise);

  const Launch launch("group_quantize_swiglu", gate_up_in);
  const Tensor gate_up = inner_contiguous(gate_up_in), offs = torch::stable::contiguous(offs_in);
  const int64_t T = gate_up.size(0), K = gate_up.size(1) / 2;
  Results results(gate_up, T, K, offs.size(0), rowwise, columnwise, false);
  Tensor h =
      torch::stable::new_empty(gate_up, keep_h ? Shape{T, K} : Shape{0}, gate_up.scalar_type());

  if (T > 0) {
    const ScaleRule rule{static_cast<float>(amax_epsilon), power_of_two_scales};
    for_element(gate_up.scalar_type(), [&](auto element) {
      using Element = typename decltype(element)::type;
      auto* kept = keep_h ? static_cast<Element*>(h.mutable_data_ptr()) : nullptr;
      const Swiglu<Element> source{static_cast<const Element*>(gate_up.const_data_ptr()),
                                   gate_up.stride(0), is_aligned(gate_up), static_cast<int>(K),
                                   kept};
      quantize_tiles<Element>(launch, source, offs, rule, results);
      if (!keep_h) return;
      zero_tail_kernel<Element><<<launch.multiprocessors(), kSwigluThreads, 0, launch.stream()>>>(
          offs.const_data_ptr<int32_t>(), static_cast<int>(offs.size(0)), T, static_cast<int>(K),
          kept);
      launch.check_launched();
    });
  }
  return {results.q, results.scale, results.q_t, results.scale_t, h};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> group_quantize_swiglu_grad(
    const Tensor& dh_in, const Tensor& gate_up_in, const Tensor& offs_in, double amax_epsilon,
    bool power_of_two_scales, bool rowwise, bool columnwise, bool bias_grad) {
  check_group_quantize_swiglu_grad(dh_in, gate_up_in, offs_in, amax_epsilon, rowwise, columnwise);

  const Launch launch("group_quantize_swiglu_grad", dh_in);
  const Tensor dh = inner_contiguous(dh_in), gate_up = inner_contiguous(gate_up_in);
  const Tensor offs = torch::stable::contiguous(offs_in);
  const int64_t T = dh.size(0), K = dh.size(1);
  Results results(dh, T, 2 * K, offs.size(0), rowwise, columnwise, bias_grad);

  if (T == 0) {
    zero_bias_grad(results);
    return results.all();
  }

  const ScaleRule rule{static_cast<float>(amax_epsilon), power_of_two_scales};
  for_element(dh.scalar_type(), [&](auto element) {
    using Element = typename decltype(element)::type;
    const SwigluGrad<Element> source{static_cast<const Element*>(dh.const_data_ptr()),
                                     dh.stride(0),
                                     static_cast<const Element*>(gate_up.const_data_ptr()),
                                     gate_up.stride(0),
                                     is_aligned(dh) && is_aligned(gate_up),
                                     static_cast<int>(K)};
    quantize_tiles<Element>(launch, source, offs, rule, results);
  });
  return results.all();
}

Tensor grouped_bias_grad(const Tensor& dy_in, const Tensor& offs_in) {
  check_grouped_bias_grad(dy_in, offs_in);

  const Launch launch("grouped_bias_grad", dy_in);
  const Tensor dy = inner_contiguous(dy_in), offs = torch::stable::contiguous(offs_in);
  Results results(dy, dy.size(0), dy.size(1), offs.size(0), false, false, true);

  if (dy.size(0) == 0)
    zero_bias_grad(results);
  else
    for_element(dy.scalar_type(), [&](auto element) {
      using Element = typename decltype(element)::type;
      const Rows<Element> source{static_cast<const Element*>(dy.const_data_ptr()), dy.stride(0),
                                 is_aligned(dy)};
      quantize_tiles<Element>(launch, source, offs, ScaleRule{}, results);
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

Tensor swiglu(const Tensor& gate_up_in, const Tensor& offs_in) {
  check_swiglu("swiglu", gate_up_in, offs_in);

  const Launch launch("swiglu", gate_up_in);
  const Tensor gate_up = inner_contiguous(gate_up_in), offs = torch::stable::contiguous(offs_in);
  const int64_t T = gate_up.size(0), K = gate_up.size(1) / 2;
  Tensor h = torch::stable::new_empty(gate_up, Shape{T, K}, gate_up.scalar_type());

  if (T == 0) return h;

  for_element(gate_up.scalar_type(), [&](auto element) {
    using Element = typename decltype(element)::type;
    swiglu_kernel<Element><<<swiglu_grid(launch, T * K), kSwigluThreads, 0, launch.stream()>>>(
        static_cast<const Element*>(gate_up.const_data_ptr()), gate_up.stride(0),
        is_aligned(gate_up), offs.const_data_ptr<int32_t>(), static_cast<int>(offs.size(0)), T,
        static_cast<int>(K), static_cast<Element*>(h.mutable_data_ptr()));
  });
  launch.check_launched();
  return h;
}

Tensor swiglu_grad(const Tensor& dh_in, const Tensor& gate_up_in, const Tensor& offs_in) {
  check_swiglu_grad("swiglu_grad", dh_in, gate_up_in, offs_in);

  const Launch launch("swiglu_grad", dh_in);
  const Tensor dh = inner_contiguous(dh_in), gate_up = inner_contiguous(gate_up_in);
  const Tensor offs = torch::stable::contiguous(offs_in);
  const int64_t T = dh.size(0), K = dh.size(1);
  Tensor d_gate_up = torch::stable::new_empty(dh, Shape{T, 2 * K}, dh.scalar_type());

  if (T == 0) return d_gate_up;

  for_element(dh.scalar_type(), [&](auto element) {
    using Element = typename decltype(element)::type;
    swiglu_grad_kernel<Element>
        <<<swiglu_grid(launch, 2 * T * K), kSwigluThreads, 0, launch.stream()>>>(
            static_cast<const Element*>(dh.const_data_ptr()), dh.stride(0),
            static_cast<const Element*>(gate_up.const_data_ptr()), gate_up.stride(0),
            is_aligned(dh) && is_aligned(gate_up), offs.const_data_ptr<int32_t>(),
            static_cast<int>(offs.size(0)), T, static_cast<int>(K),
            static_cast<Element*>(d_gate_up.mutable_data_ptr()));
  });
  launch.check_launched();
  return d_gate_up;
}

}  // namespace grouped_linear::cuda
