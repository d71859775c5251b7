// SPDX-License-Identifier: Apache-2.0
#include "checks.h"
#include "cuda/common/launch.h"
#include "cuda/common/operands.h"
#include "cuda/routing/splits_to_offsets.cuh"
#include "ops.h"

namespace grouped_linear::cuda {

Tensor splits_to_offsets(const Tensor& m_splits_in, int64_t num_rows, int64_t alignment,
                         int64_t stride, std::optional<ScalarType> asked_dtype) {
  const ScalarType dtype = asked_dtype.value_or(ScalarType::Int);
  check_splits_to_offsets(m_splits_in, num_rows, alignment, stride, dtype);

  const Launch launch("splits_to_offsets", m_splits_in);
  const Tensor m_splits = as_dense(m_splits_in);
  Tensor offs = new_tensor(m_splits, {m_splits.size(0)}, dtype);

  const auto threads = static_cast<unsigned>(round_up(m_splits.size(0), 32));
  const auto run = [&]<typename Split, typename Offset>(Split, Offset) {
    launch.run(splits_to_offsets_kernel<Split, Offset>, 1, threads, 0, data<Split>(m_splits),
               static_cast<int>(m_splits.size(0)), num_rows, alignment, stride,
               mutable_data<Offset>(offs));
  };
  const bool wide_in = m_splits.scalar_type() == ScalarType::Long;
  const bool wide_out = dtype == ScalarType::Long;
  if (wide_in)
    wide_out ? run(int64_t{}, int64_t{}) : run(int64_t{}, int32_t{});
  else
    wide_out ? run(int32_t{}, int64_t{}) : run(int32_t{}, int32_t{});
  return offs;
}

}  // namespace grouped_linear::cuda
