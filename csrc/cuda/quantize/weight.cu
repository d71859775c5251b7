// SPDX-License-Identifier: Apache-2.0
// Block scaling of weights.
#include <vector>

#include "checks.h"
#include "cuda/quantize/launch_tiles.h"
#include "cuda/quantize/weight.cuh"
#include "ops.h"

namespace grouped_linear::cuda {
namespace {

QuantizedWeight new_outputs(const Tensor& like, int64_t E, int64_t N, int64_t K, bool columnwise,
                            bool rowwise = true) {
  constexpr ScalarType e4m3 = ScalarType::Float8_e4m3fn;
  return {new_tensor(like, rowwise ? Shape{E, N, K} : Shape{0}, e4m3),
          new_tensor(like, {E, ceil_div(N, kBlock), ceil_div(K, kBlock)}, ScalarType::Float),
          new_tensor(like, columnwise ? Shape{E, K, N} : Shape{0}, e4m3)};
}

// w: one tensor [E, N, K] or E of [N, K], which are in blocks of MXFP4 only if they are one tensor.
void quantize(const Launch& launch, const std::vector<Tensor>& w_in, ScaleRule rule,
              std::optional<int64_t> mxfp4_dim, const std::optional<Tensor>& refresh,
              const QuantizedWeight& out) {
  std::vector<Tensor> w;
  bool vectorised = true;
  for (const Tensor& w_e : w_in) {
    w.push_back(as_dense(w_e));
    vectorised = vectorised && is_aligned(w.back());  // then every row is: K is a multiple of 16
  }
  const int64_t of_n = w[0].dim() - 2;  // the dimension of out_features
  const WeightOutputs outputs = outputs_of(out, w[0].size(of_n), w[0].size(of_n + 1));
  for_element(w[0].scalar_type(), [&]<typename Element>(std::type_identity<Element>) {
    const auto run = [&](const auto kernel, const auto& experts) {
      launch.run(kernel, static_cast<unsigned>(out.scale.numel()), kTileThreads, 0, experts,
                 vectorised, rule, data_or_null<bool>(refresh), outputs);
    };
    if (w[0].dim() == 3) {
      using Experts = PackedExperts<Element>;
      for_mxfp4_blocks(mxfp4_dim, [&](const auto blocks) {
        run(quantize_weight_kernel<Element, decltype(blocks)::value, Experts>,
            Experts{data<Element>(w[0]), w[0].size(1) * w[0].size(2)});
      });
    } else {
      ListedExperts<Element> experts{};
      for (size_t e = 0; e < w.size(); ++e) experts.first[e] = data<Element>(w[e]);
      run(quantize_weight_kernel<Element, Mxfp4::kNone, ListedExperts<Element>>, experts);
    }
  });
}

// q [E, N, K], aligned to 16 bytes -> q_t [E, K, N]. 2 bytes an element: 8 x 4096 x 7168 at the
// 4.27 TB/s of a copy: 110 us. One thread block a tile.
__global__ void __launch_bounds__(kTileThreads, kTileOccupancy<__nv_bfloat16>)
    transpose_weight_kernel(const uint8_t* q, uint8_t* q_t, int N, int K) {
  grid_dependency_wait();
  __shared__ TransposedTile transposed;
  const TileOfWeight at(blockIdx.x, N, K);
  const uint8_t* from = q + at.first;
  QuantizedFragment fragment;
#pragma unroll
  for (int i = 0; i < kFragmentSize; ++i)
    fragment.set_row(i, i < at.valid_rows()
                            ? *reinterpret_cast<const uint2*>(from + static_cast<int64_t>(i) * K)
                            : uint2{});
  at.store_transposed(fragment, transposed, q_t);
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> quantize_weight(const Tensor& w, double amax_epsilon,
                                                   bool power_of_two_scales, bool columnwise,
                                                   bool rowwise, std::optional<int64_t> mxfp4_dim) {
  check_quantize_weight("quantize_weight", w, amax_epsilon, mxfp4_dim);
  check_layouts("quantize_weight", rowwise, columnwise);

  const Launch launch("quantize_weight", w);
  const QuantizedWeight out = new_outputs(w, w.size(0), w.size(1), w.size(2), columnwise, rowwise);
  quantize(launch, {w}, {static_cast<float>(amax_epsilon), power_of_two_scales}, mxfp4_dim,
           std::nullopt, out);
  return {out.q, out.scale, *out.q_t};
}

std::tuple<Tensor, Tensor, Tensor> quantize_weight_list(const std::vector<Tensor>& w,
                                                        double amax_epsilon,
                                                        bool power_of_two_scales, bool columnwise) {
  check_quantize_weight_list(w, amax_epsilon);

  const Launch launch("quantize_weight_list", w[0]);
  const auto E = static_cast<int64_t>(w.size());
  const QuantizedWeight out = new_outputs(w[0], E, w[0].size(0), w[0].size(1), columnwise);
  quantize(launch, w, {static_cast<float>(amax_epsilon), power_of_two_scales}, std::nullopt,
           std::nullopt, out);
  return {out.q, out.scale, *out.q_t};
}

void refresh_weight_(const Tensor& q, const Tensor& scale, const std::optional<Tensor>& q_t,
                     const std::vector<Tensor>& w, const std::optional<Tensor>& refresh,
                     double amax_epsilon, bool power_of_two_scales,
                     std::optional<int64_t> mxfp4_dim) {
  check_refresh_weight(w, refresh, q, scale, q_t, amax_epsilon, mxfp4_dim);

  const Launch launch("refresh_weight_", w[0]);
  AlignedOutput rowwise(q), columnwise(q_t);
  quantize(launch, w, {static_cast<float>(amax_epsilon), power_of_two_scales}, mxfp4_dim, refresh,
           {*rowwise.used(), scale, columnwise.used()});
  rowwise.copy_back(), columnwise.copy_back();
}

Tensor transpose_weight(const Tensor& q_in) {
  check_transpose_weight(q_in);

  const Launch launch("transpose_weight", q_in);
  const int64_t E = q_in.size(0), N = q_in.size(1), K = q_in.size(2);
  const Tensor q = q_in.is_contiguous() && is_aligned(q_in) ? q_in : dense_copy(q_in);
  const Tensor q_t = new_tensor(q, {E, K, N}, q.scalar_type());
  launch.run(transpose_weight_kernel,
             static_cast<unsigned>(E * ceil_div(N, kBlock) * ceil_div(K, kBlock)), kTileThreads, 0,
             data<uint8_t>(q), mutable_data<uint8_t>(q_t), static_cast<int>(N),
             static_cast<int>(K));
  return q_t;
}

}  // namespace grouped_linear::cuda
