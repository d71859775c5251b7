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

// One pass over x for whatever `out` asks for, and the sums of the blocks' sums into bias_grad.
void quantize_tiles(const Launch& launch, const Tensor& x, const Tensor& offs, ScaleRule rule,
                    GroupQuantized out, Tensor& bias_grad) {
  const int64_t T = x.size(0), K = x.size(1), E = offs.size(0);
  const int64_t blocks = padded_rows(T, E) / kBlock, col_blocks = ceil_div(K, kBlock);
  // offs are int32, so no group reaches rows past these; a block past the end must be countable.
  const int rows =
      static_cast<int>(std::min<int64_t>(T, std::numeric_limits<int32_t>::max() - kBlock));
  const int groups = static_cast<int>(E), features = static_cast<int>(K);
  const bool sums = bias_grad.numel() > 0;

  Tensor block_sums =
      torch::stable::new_empty(x, sums ? Shape{blocks, K} : Shape{0}, ScalarType::Float);
  if (sums) out.block_sums = block_sums.mutable_data_ptr<float>();

  const auto run = [&](auto element) {
    using Element = typename decltype(element)::type;
    const auto kernel = group_quantize_kernel<Element>;
    const auto* values = static_cast<const Element*>(x.const_data_ptr());
    const bool vectorised =
        reinterpret_cast<uintptr_t>(values) % 16 == 0 && x.stride(0) * sizeof(Element) % 16 == 0;
    const int shared = group_quantize_shared_bytes<Element>(out.q_t != nullptr, sums);
    int resident = 0;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, kTileThreads, shared);
    const int64_t grid =
        std::min<int64_t>(blocks * col_blocks, launch.multiprocessors() * std::max(resident, 1));
    kernel<<<static_cast<unsigned>(grid), kTileThreads, shared, launch.stream()>>>(
        values, x.stride(0), vectorised, offs.const_data_ptr<int32_t>(), groups, rows, features,
        rule, out);
    launch.check_launched();
  };
  switch (x.scalar_type()) {
    case ScalarType::BFloat16: run(std::type_identity<__nv_bfloat16>()); break;
    case ScalarType::Half: run(std::type_identity<__half>()); break;
    default: run(std::type_identity<float>());
  }
  if (!sums) return;

  const int64_t chunks = ceil_div(K, kSumThreads);
  const int64_t blocks_y =
      std::min(E, std::max<int64_t>(1, int64_t{8} * launch.multiprocessors() / chunks));
  add_block_sums_kernel<<<dim3(static_cast<unsigned>(chunks), static_cast<unsigned>(blocks_y)),
                          kSumThreads, 0, launch.stream()>>>(
      out.block_sums, offs.const_data_ptr<int32_t>(), groups, rows, features,
      bias_grad.mutable_data_ptr<float>());
  launch.check_launched();
}

Tensor inner_contiguous(const Tensor& x) {
  return x.stride(1) == 1 ? x : torch::stable::contiguous(x);
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> group_quantize(
    const Tensor& x_in, const Tensor& offs_in, double amax_epsilon, bool power_of_two_scales,
    bool rowwise, bool columnwise, bool bias_grad) {
  check_group_quantize(x_in, offs_in, amax_epsilon, rowwise, columnwise);

  const Launch launch("group_quantize", x_in);
  const Tensor x = inner_contiguous(x_in), offs = torch::stable::contiguous(offs_in);
  const int64_t T = x.size(0), K = x.size(1), E = offs.size(0);
  const auto output = [&x](bool wanted, const Shape& shape, ScalarType dtype) {
    return torch::stable::new_empty(x, wanted ? shape : Shape{0}, dtype);
  };
  const int64_t scale_stride = round_up(T, kScaleRowMultiple), blocks = padded_rows(T, E) / kBlock;
  Tensor q = output(rowwise, {T, K}, ScalarType::Float8_e4m3fn);
  Tensor scale = output(rowwise, {ceil_div(K, kBlock), scale_stride}, ScalarType::Float);
  Tensor q_t = output(columnwise, {blocks, K, kBlock}, ScalarType::Float8_e4m3fn);
  Tensor scale_t = output(columnwise, {blocks, K}, ScalarType::Float);
  Tensor grad = output(bias_grad, {E, K}, ScalarType::Float);

  if (T == 0) {
    if (bias_grad) torch::stable::zero_(grad);
    return {q, scale, q_t, scale_t, grad};
  }

  GroupQuantized out{};
  if (rowwise) {
    out.q = static_cast<uint8_t*>(q.mutable_data_ptr());
    out.scale = scale.mutable_data_ptr<float>();
    out.scale_stride = scale_stride;
  }
  if (columnwise) {
    out.q_t = static_cast<uint8_t*>(q_t.mutable_data_ptr());
    out.scale_t = scale_t.mutable_data_ptr<float>();
  }
  const ScaleRule rule{static_cast<float>(amax_epsilon), power_of_two_scales};
  quantize_tiles(launch, x, offs, rule, out, grad);
  return {q, scale, q_t, scale_t, grad};
}

Tensor grouped_bias_grad(const Tensor& dy_in, const Tensor& offs_in) {
  check_grouped_bias_grad(dy_in, offs_in);

  const Launch launch("grouped_bias_grad", dy_in);
  const Tensor dy = inner_contiguous(dy_in), offs = torch::stable::contiguous(offs_in);
  Tensor grad = torch::stable::new_empty(dy, Shape{offs.size(0), dy.size(1)}, ScalarType::Float);

  if (dy.size(0) == 0)
    torch::stable::zero_(grad);
  else
    quantize_tiles(launch, dy, offs, ScaleRule{}, GroupQuantized{}, grad);
  return grad;
}

}  // namespace grouped_linear::cuda
