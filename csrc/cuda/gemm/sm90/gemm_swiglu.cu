// SPDX-License-Identifier: Apache-2.0
// BF16 GEMMs with SwiGLU in the epilogue (fprop of gate and up), or its gradient (dgrad of down).
// A GEMM and a pass of its own compute what has no kernel here: FP16 too, which would double the
// kernels of this file.
#include "cuda/gemm/sm90/elementwise_epilogue.cuh"
#include "cuda/gemm/sm90/operands_16bit.h"

namespace grouped_linear::cuda::sm90 {
namespace {

using Element = __nv_bfloat16;

bool has_kernels(const Tensor& t) { return t.scalar_type() == ScalarType::BFloat16; }

// A GEMM with an ElementwiseEpilogue, of rows in order or gathered.
template <typename T, Major b_major, StoreWork store_work, typename Elementwise,
          bool gathers = true>
void launch_elementwise(const Launch& launch, const TensorMaps& maps, const GroupedGemm& gemm,
                        const Tensor& a, const typename Elementwise::Arguments& epilogue) {
  if constexpr (gathers) {
    if (gemm.a_rows)
      return launch_gemm<MGrouped16Bit<T, b_major, true, store_work>,
                         ElementwiseEpilogue<Elementwise>>(
          launch, maps, gemm, {}, epilogue, gathered_rows(launch.op(), gemm.a_rows, a));
  }
  launch_gemm<MGrouped16Bit<T, b_major, false, store_work>, ElementwiseEpilogue<Elementwise>>(
      launch, maps, gemm, {}, epilogue);
}

// Whether b is dense along `inner`, and TMA can read such strides. Where its memory begins does not
// matter: a result's bits must not depend on that, and the sigmoid of two ops is another one.
bool is_dense_along(const Tensor& b, int64_t inner) {
  return b.stride(inner) == 1 && (inner == 2 || b.stride(2) != 1) && has_vector_strides(b, inner);
}

// With a b that is dense along `inner` in aligned memory.
GroupedGemm with_aligned_b(const GroupedGemm& gemm, int64_t inner) {
  GroupedGemm aligned = gemm;
  if (!is_aligned(gemm.b))
    aligned.b = inner == 2 ? dense_copy(gemm.b) : transposed(dense_copy(transposed(gemm.b)));
  return aligned;
}

}  // namespace

// Lines of 128 bytes belong to gate or to up, or to both. Weights are stored as models with each
// form store them: [E, 2 F, K], interleaved [E, K, 2 F].
bool has_swiglu(const GroupedGemm& gemm, const SwigluForm& form) {
  if (!has_kernels(gemm.a) || (form.interleaved && gemm.a_rows)) return false;
  return gemm.b.size(1) % (form.interleaved ? kLine : 2 * kLine) == 0 &&
         is_dense_along(gemm.b, form.interleaved ? 1 : 2);
}

// d_weight is summed by 64 columns. b is the transposed view of a weight [E, K, F], interleaved of
// one [E, F, K]. Rows are gathered for the plain form alone.
bool has_swiglu_grad(const GroupedGemm& gemm, const SwigluForm& form) {
  if (!has_kernels(gemm.a) || (gemm.a_rows && !form.is_plain())) return false;
  return gemm.b.size(1) % kLine == 0 && is_dense_along(gemm.b, form.interleaved ? 2 : 1);
}

void run_swiglu(const Launch& launch, const GroupedGemm& gemm, const SwigluOutput& swiglu) {
  const bool interleaved = swiglu.form.interleaved;
  const int64_t inner = interleaved ? 1 : 2;
  const MGroupedMaps maps(launch, with_aligned_b(gemm, inner), inner);
  EpilogueArguments linear = gemm.epilogue;
  linear.aligned = swiglu.keep_gate_up;  // whether there is an output for a tensor map
  if (interleaved) {
    const CUtensorMap b = maps.mn_major();
    return launch_elementwise<Element, Major::kMN, StoreWork::kElementwise,
                              SwigluForward<SwigluForm, true>, false>(
        launch, maps.with(b, b), gemm, maps.a,
        {linear, swiglu.h.data_ptr(), swiglu.keep_gate_up, swiglu.form});
  }
  constexpr StoreWork work = StoreWork::kGatedElementwise;
  using Gemm = MGrouped16Bit<Element, Major::kK, false, work>;
  const TensorMaps all = maps.with(maps.gated(Gemm::kTileN / Gemm::kBBoxes),
                                   maps.gated(Gemm::kNarrowCols / Gemm::kNarrowBBoxes));
  for_form(swiglu.form, [&]<typename Form>(const Form& form) {
    using Elementwise = SwigluForward<Form, false>;
    const typename Elementwise::Arguments epilogue{linear, swiglu.h.data_ptr(), swiglu.keep_gate_up,
                                                   form};
    if constexpr (std::is_same_v<Form, PlainSwiglu>)
      if (takes_swapped(launch, gemm)) {
        const CUtensorMap b = maps.gated(kTile16BitSwapped.n / 2);
        return launch_gemm<Swapped16Bit<Element, Major::kK, work>,
                           ElementwiseEpilogue<Elementwise>>(launch, maps.with(b, b), gemm, {},
                                                             epilogue, maps.row_boxes());
      }
    launch_elementwise<Element, Major::kK, work, Elementwise>(launch, all, gemm, maps.a, epilogue);
  });
}

void run_swiglu_grad(const Launch& launch, const GroupedGemm& gemm, const SwigluGradOutput& grad) {
  const bool interleaved = grad.form.interleaved;
  const int64_t F = gemm.b.size(1), T = gemm.shape.T, inner = interleaved ? 2 : 1;
  const MGroupedMaps maps(launch, with_aligned_b(gemm, inner), inner);
  const Tensor gate_up = with_aligned_rows(grad.gate_up);
  const Tensor partial = new_tensor(maps.a, {F / kLine, T}, ScalarType::Float);
  EpilogueArguments linear = gemm.epilogue;
  linear.aligned = false;  // there is no output for a tensor map
  const auto run = [&]<Major b_major, bool in_pairs, typename Form>(
                       std::integral_constant<Major, b_major>, std::bool_constant<in_pairs>,
                       const Form& form, const TensorMaps& all) {
    constexpr bool plain = std::is_same_v<Form, PlainSwiglu>;
    using Elementwise = SwigluBackward<Form, in_pairs>;
    const typename Elementwise::Arguments epilogue{linear,
                                                   gate_up.const_data_ptr(),
                                                   gate_up.stride(0),
                                                   data<float>(grad.weight),
                                                   grad.d_gate_up.data_ptr(),
                                                   grad.h.data_ptr(),
                                                   mutable_data<float>(partial),
                                                   form};
    if constexpr (plain && b_major == Major::kMN)
      if (takes_swapped(launch, gemm))
        return launch_gemm<Swapped16Bit<Element, b_major, StoreWork::kElementwise>,
                           ElementwiseEpilogue<Elementwise>>(launch, all, gemm, {}, epilogue,
                                                             maps.row_boxes());
    launch_elementwise<Element, b_major, StoreWork::kElementwise, Elementwise, plain>(
        launch, all, gemm, maps.a, epilogue);
  };
  if (interleaved) {
    using Gemm = MGrouped16Bit<Element, Major::kK>;
    run(std::integral_constant<Major, Major::kK>(), std::true_type(), grad.form,
        maps.with(maps.k_major(Gemm::kTileN / Gemm::kBBoxes), maps.k_major(kNarrowTileN)));
  } else {
    const CUtensorMap b = maps.mn_major();
    for_form(grad.form, [&]<typename Form>(const Form& form) {
      run(std::integral_constant<Major, Major::kMN>(), std::false_type(), form, maps.with(b, b));
    });
  }
  launch.run(sum_partial_d_weight_kernel, ceil_div(T, kSwigluThreads), kSwigluThreads, 0,
             data<float>(partial), static_cast<int>(F / kLine), data<int32_t>(gemm.offs),
             gemm.shape.E, T, mutable_data<float>(grad.d_weight));
}

}  // namespace grouped_linear::cuda::sm90
