// SPDX-License-Identifier: Apache-2.0
// SwiGLU and its gradient, unfused. Fused with block scaling: block_swiglu.cu,
// block_swiglu_grad.cu.
#include <algorithm>

#include "checks.h"
#include "cuda/common/launch.h"
#include "cuda/common/operands.h"
#include "cuda/swiglu/swiglu.cuh"
#include "ops.h"

namespace grouped_linear::cuda {
namespace {

unsigned grid_of(const Launch& launch, int64_t elements) {
  constexpr int kResident = 2048 / kSwigluThreads;
  return static_cast<unsigned>(std::min<int64_t>(ceil_div(elements / kFragmentSize, kSwigluThreads),
                                                 kResident * launch.multiprocessors()));
}

}  // namespace

Tensor swiglu(const Tensor& gate_up_in, const Tensor& offs_in, double alpha, double beta,
              std::optional<double> limit, bool interleaved, double cubic) {
  check_swiglu("swiglu", gate_up_in, offs_in);
  const SwigluForm given = checked_form("swiglu", alpha, beta, limit, interleaved, cubic);

  const Launch launch("swiglu", gate_up_in);
  const Tensor gate_up = with_dense_rows(gate_up_in), offs = as_dense(offs_in);
  const int64_t T = gate_up.size(0), K = gate_up.size(1) / 2;
  const Tensor h = new_tensor(gate_up, {T, K}, gate_up.scalar_type());

  if (T == 0) return h;

  for_element(gate_up.scalar_type(), [&]<typename Element>(std::type_identity<Element>) {
    for_form(given, [&]<typename Form>(const Form& form) {
      launch.run(swiglu_kernel<Element, Form>, grid_of(launch, T * K), kSwigluThreads, 0,
                 data<Element>(gate_up), gate_up.stride(0), has_aligned_rows(gate_up), form,
                 data<int32_t>(offs), static_cast<int>(offs.size(0)), T, static_cast<int>(K),
                 mutable_data<Element>(h));
    });
  });
  return h;
}

std::tuple<Tensor, Tensor, Tensor> swiglu_grad(const Tensor& dh_in, const Tensor& gate_up_in,
                                               const Tensor& weight_in, const Tensor& offs_in,
                                               double alpha, double beta,
                                               std::optional<double> limit, bool interleaved,
                                               double cubic) {
  check_swiglu_grad("swiglu_grad", dh_in, gate_up_in, weight_in, offs_in);
  const SwigluForm given = checked_form("swiglu_grad", alpha, beta, limit, interleaved, cubic);

  const Launch launch("swiglu_grad", dh_in);
  const Tensor dh = with_dense_rows(dh_in), gate_up = with_dense_rows(gate_up_in);
  const Tensor weight = as_dense(weight_in), offs = as_dense(offs_in);
  const int64_t T = dh.size(0), K = dh.size(1);
  const Tensor d_gate_up = new_tensor(dh, {T, 2 * K}, dh.scalar_type());
  const Tensor h = new_tensor(dh, {T, K}, dh.scalar_type());
  const Tensor d_weight = new_tensor(dh, {T}, ScalarType::Float);

  if (T == 0) return {d_gate_up, h, d_weight};

  const bool vectorised = has_aligned_rows(dh) && has_aligned_rows(gate_up);
  for_element(dh.scalar_type(), [&]<typename Element>(std::type_identity<Element>) {
    for_form(given, [&]<typename Form>(const Form& form) {
      launch.run(swiglu_grad_kernel<Element, Form>, grid_of(launch, 32 * kFragmentSize * T),
                 kSwigluThreads, 0, data<Element>(dh), dh.stride(0), data<Element>(gate_up),
                 gate_up.stride(0), vectorised, data<float>(weight), form, data<int32_t>(offs),
                 static_cast<int>(offs.size(0)), T, static_cast<int>(K),
                 mutable_data<Element>(d_gate_up), mutable_data<Element>(h),
                 mutable_data<float>(d_weight));
    });
  });
  return {d_gate_up, h, d_weight};
}

}  // namespace grouped_linear::cuda
