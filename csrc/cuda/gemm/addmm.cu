// SPDX-License-Identifier: Apache-2.0
#include <limits>

#include "checks.h"
#include "cuda/common/launch.h"
#include "cuda/common/operands.h"
#include "cuda/gemm/addmm.cuh"
#include "ops.h"

namespace grouped_linear::cuda {

Tensor addmm(const Tensor& c_in, const Tensor& a_in, const Tensor& b_in) {
  check_addmm(c_in, a_in, b_in);

  const Launch launch("addmm", c_in);
  const Tensor a = with_dense_rows(a_in), b = with_aligned_rows(b_in), c = with_aligned_rows(c_in);
  const int64_t M = c.size(0), N = c.size(1), K = a.size(1);
  const Tensor out = new_tensor(c, {M, N}, c.scalar_type());
  if (M == 0) return out;

  constexpr int64_t most = std::numeric_limits<int32_t>::max();
  const int64_t blocks = ceil_div(M, kAddmmTileM) * ceil_div(N, kAddmmTileN);
  check(blocks <= most, launch.op(),
        ": too many elements for one launch on CUDA, which has at most ", most,
        " thread blocks, got ", blocks);
  const AddmmShape shape{M,
                         static_cast<int>(N),
                         static_cast<int>(K),
                         a.stride(0),
                         b.stride(0),
                         c.stride(0),
                         has_aligned_rows(a) && K % 8 == 0};
  const auto run = [&]<typename T>(T) {
    launch.allow_shared_bytes<addmm_kernel<T>>(sizeof(AddmmStorage));
    launch.run(addmm_kernel<T>, static_cast<unsigned>(blocks), kAddmmThreads, sizeof(AddmmStorage),
               data<T>(a), data<T>(b), data<T>(c), shape, mutable_data<T>(out));
  };
  c.scalar_type() == ScalarType::Half ? run(__half()) : run(__nv_bfloat16());
  return out;
}

}  // namespace grouped_linear::cuda
