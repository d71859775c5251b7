// BF16 and FP16 GEMMs with SwiGLU in the epilogue (fprop of gate and up), or its gradient (dgrad of
// down). What has no kernel here is computed by a GEMM and a pass of its own.
#include "cuda/gemm/sm90/elementwise_epilogue.cuh"
#include "cuda/gemm/sm90/launch.h"

namespace grouped_linear::cuda::sm90 {
namespace {

constexpr int kLine = kSwizzleBytes / 2;  // elements in a line of 128 bytes

bool is_16bit(const Tensor& t) {
  return t.scalar_type() == ScalarType::BFloat16 || t.scalar_type() == ScalarType::Half;
}

template <Major b_major, typename T>
using Config = GemmConfig<T, T, kTile16Bit.n, kTile16Bit.stages, Scaling::kNone, Grouping::kM,
                          Major::kK, b_major>;

template <typename Run>
void for_16bit(ScalarType dtype, const Run& run) {
  if (dtype == ScalarType::BFloat16)
    run(std::type_identity<__nv_bfloat16>());
  else
    run(std::type_identity<__half>());
}

// A GEMM with an ElementwiseEpilogue of the operands' types, with gathered rows or not.
template <typename Gemm, typename Elementwise>
void launch_elementwise(const Launch& launch, const TensorMaps& maps, const GroupedGemm& gemm,
                        const Tensor& a, const typename Elementwise::Arguments& epilogue) {
  if (gemm.a_rows)
    launch_gemm<Gathering<Gemm, Operand::kA>, GatherProducer<Operand::kA>,
                ElementwiseEpilogue<Elementwise, false>>(
        launch, maps, gemm, {}, epilogue, gathered_rows(launch.op(), gemm.a_rows, a));
  else
    launch_gemm<Gemm, TmaProducer, ElementwiseEpilogue<Elementwise, true>>(launch, maps, gemm, {},
                                                                           epilogue);
}

CUtensorMap map_of_a(const char* op, const Tensor& a) {
  const int64_t K = a.size(1);
  return tensor_map(op, a.data_ptr(), a.scalar_type(), 2, {K, a.size(0)}, {map_stride(a, 0, K)},
                    {kLine, kTileM / 2}, true);
}

}  // namespace

bool run_swiglu(const Launch& launch, const GroupedGemm& gemm, const SwigluOutput& swiglu) {
  const int64_t N = gemm.b.size(1), F = N / 2, K = gemm.b.size(2), E = gemm.b.size(0);
  // Lines of 128 bytes belong to gate or to up, and b's rows lie one below the other.
  if (!is_16bit(gemm.a) || swiglu.form.interleaved || F % kLine != 0 || gemm.b.stride(2) != 1)
    return false;
  const Tensor a = tma_readable(gemm.a, 1), b = tma_readable(gemm.b, 2);
  const CUtensorMap map_a = map_of_a(launch.op(), a);
  const auto map_of_b = [&](uint32_t cols) {
    const int64_t stride = map_stride(b, 1, K);
    return tensor_map(launch.op(), b.data_ptr(), b.scalar_type(), 2, {K, F, 2, E},
                      {stride, F * stride, map_stride(b, 0, N * K)}, {kLine, cols, 1, 1}, true);
  };
  for_16bit(a.scalar_type(), [&]<typename T>(std::type_identity<T>) {
    using Gemm = GateUp<Config<Major::kK, T>>;
    const CUtensorMap map_b = map_of_b(Gemm::kTileN / Gemm::kBPieces);
    const CUtensorMap narrow_b = map_of_b(Gemm::kNarrowCols / Gemm::kNarrowPieces);
    const TensorMaps maps{map_a, map_b, map_a, map_b, map_a, narrow_b};
    const auto run = [&]<typename Form>(const Form& form) {
      EpilogueArguments linear = gemm.epilogue;
      linear.aligned = swiglu.keep_gate_up;  // whether there is an output for a tensor map
      launch_elementwise<Gemm, SwigluOfGateUp<Form>>(
          launch, maps, gemm, a, {linear, swiglu.h.data_ptr(), swiglu.keep_gate_up, form});
    };
    for_form(swiglu.form, run);
  });
  return true;
}

bool run_swiglu_grad(const Launch& launch, const GroupedGemm& gemm, const SwigluGradOutput& grad) {
  const int64_t F = gemm.b.size(1), K = gemm.b.size(2), E = gemm.b.size(0), T = gemm.shape.T;
  // d_weight is summed by 64 columns. b is a view of down_proj, [E, K, F].
  if (!is_16bit(gemm.a) || grad.form.interleaved || F % kLine != 0 || gemm.b.stride(1) != 1)
    return false;
  const Tensor a = tma_readable(gemm.a, 1), b = tma_readable(gemm.b, 1);
  if (b.stride(1) != 1) return false;  // copied
  const CUtensorMap map_a = map_of_a(launch.op(), a);
  const CUtensorMap map_b =
      tensor_map(launch.op(), b.data_ptr(), b.scalar_type(), 2, {F, K, E},
                 {map_stride(b, 2, F), map_stride(b, 0, F * K)}, {kLine, kLine, 1}, true);
  const Tensor gate_up = with_aligned_rows(grad.gate_up);
  const Tensor partial = new_tensor(a, {F / kLine, T}, ScalarType::Float);
  for_16bit(a.scalar_type(), [&]<typename Element>(std::type_identity<Element>) {
    using Gemm = WithElementwise<Config<Major::kMN, Element>>;
    const TensorMaps maps{map_a, map_b, map_a, map_b, map_a, map_b};
    for_form(grad.form, [&]<typename Form>(const Form& form) {
      EpilogueArguments linear = gemm.epilogue;
      linear.aligned = false;  // there is no output for a tensor map
      launch_elementwise<Gemm, SwigluGradOfDh<Form>>(
          launch, maps, gemm, a,
          {linear, gate_up.const_data_ptr(), gate_up.stride(0), data<float>(grad.weight),
           grad.d_gate_up.data_ptr(), grad.h.data_ptr(), mutable_data<float>(partial), form});
    });
  });
  launch.run(sum_partial_d_weight_kernel, ceil_div(T, kSwigluThreads), kSwigluThreads, 0,
             data<float>(partial), static_cast<int>(F / kLine), data<int32_t>(gemm.offs),
             gemm.shape.E, T, mutable_data<float>(grad.d_weight));
  return true;
}

}  // namespace grouped_linear::cuda::sm90
