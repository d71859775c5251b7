// SPDX-License-Identifier: Apache-2.0
#include "checks.h"
#include "cpu/rows.h"
#include "ops.h"

namespace grouped_linear::cpu {
namespace {

template <typename Split, typename Offset>
void write_offsets(const Tensor& m_splits, int64_t num_rows, int64_t alignment, int64_t stride,
                   const Tensor& offs) {
  const Split* splits = m_splits.const_data_ptr<Split>();
  int64_t end = 0, sum = 0;
  for (int64_t e = 0; e < m_splits.size(0); ++e) {
    const int64_t size = splits[e];
    check(size >= 0, "splits_to_offsets: m_splits must not be negative, got ", size, " at group ",
          e);
    // num_rows - sum cannot overflow, sum + size can
    check(size <= num_rows - sum,
          "splits_to_offsets: m_splits, the rows of each group, must sum to at most num_rows ",
          num_rows, ", got ", sum, " + ", size, " at group ", e);
    sum += size;
    // Neither rounding up to a huge alignment nor the sum may overflow.
    const int64_t short_by = size % alignment == 0 ? 0 : alignment - size % alignment;
    const int64_t aligned = short_by > num_rows - size ? num_rows : size + short_by;
    end = aligned > num_rows - end ? num_rows : end + aligned;
    offs.mutable_data_ptr<Offset>()[e] = static_cast<Offset>(end * stride);
  }
}

}  // namespace

Tensor splits_to_offsets(const Tensor& m_splits, int64_t num_rows, int64_t alignment,
                         int64_t stride, std::optional<ScalarType> requested_dtype) {
  const ScalarType dtype = requested_dtype.value_or(ScalarType::Int);
  check_splits_to_offsets(m_splits, num_rows, alignment, stride, dtype);
  const Tensor splits = as_dense(m_splits);
  Tensor offs = new_tensor(splits, {splits.size(0)}, dtype);
  const bool wide_in = splits.scalar_type() == ScalarType::Long;
  const bool wide_out = dtype == ScalarType::Long;
  (wide_in ? (wide_out ? write_offsets<int64_t, int64_t> : write_offsets<int64_t, int32_t>)
           : (wide_out ? write_offsets<int32_t, int64_t> : write_offsets<int32_t, int32_t>))(
      splits, num_rows, alignment, stride, offs);
  return offs;
}

}  // namespace grouped_linear::cpu
