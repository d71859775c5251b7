// SPDX-License-Identifier: Apache-2.0
// MXFP4 weights: quantize and dequantize.
#include "checks.h"
#include "cuda/common/launch.h"
#include "cuda/common/operands.h"
#include "cuda/quantize/mxfp4.cuh"
#include "ops.h"

namespace grouped_linear::cuda {
namespace {

// Dense, and readable 16 bytes at a time.
Tensor aligned(const Tensor& t) { return t.is_contiguous() && is_aligned(t) ? t : dense_copy(t); }

unsigned mxfp4_grid(const Launch& launch, int64_t threads) {
  constexpr int64_t kBlocksPerMultiprocessor = 2048 / kMxfp4Threads;
  return static_cast<unsigned>(std::min(ceil_div(threads, kMxfp4Threads),
                                        kBlocksPerMultiprocessor * launch.multiprocessors()));
}

}  // namespace

std::tuple<Tensor, Tensor> quantize_mxfp4(const Tensor& w_in) {
  check_quantize_mxfp4(w_in);

  const Launch launch("quantize_mxfp4", w_in);
  const Tensor w = aligned(w_in);
  const int64_t E = w.size(0), N = w.size(1), K = w.size(2);
  const Tensor q = new_tensor(w, {E, N, K / 2}, ScalarType::Byte);
  const Tensor scale = new_tensor(w, {E, N, K / kMxBlock}, ScalarType::Byte);

  const int64_t threads = w.numel() / kMxfp4Elements;
  for_element(w.scalar_type(), [&]<typename Element>(std::type_identity<Element>) {
    launch.run(quantize_mxfp4_kernel<Element>, mxfp4_grid(launch, threads), kMxfp4Threads, 0,
               data<Element>(w), threads, mutable_data<uint32_t>(q), mutable_data<uint8_t>(scale));
  });
  return {q, scale};
}

Tensor dequantize_mxfp4(const Tensor& q_in, const Tensor& scale_in, ScalarType dtype) {
  check_dequantize_mxfp4(q_in, scale_in, dtype);

  const Launch launch("dequantize_mxfp4", q_in);
  const Tensor q = aligned(q_in), scale = as_dense(scale_in);
  const Tensor w = new_tensor(q, {q.size(0), q.size(1), 2 * q.size(2)}, dtype);

  const int64_t threads = w.numel() / kMxfp4Elements;
  for_element(dtype, [&]<typename Output>(std::type_identity<Output>) {
    launch.run(dequantize_mxfp4_kernel<Output>, mxfp4_grid(launch, threads), kMxfp4Threads, 0,
               data<uint32_t>(q), data<uint8_t>(scale), threads, mutable_data<Output>(w));
  });
  return w;
}

}  // namespace grouped_linear::cuda
