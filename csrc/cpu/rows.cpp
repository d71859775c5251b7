// SPDX-License-Identifier: Apache-2.0
#include "cpu/rows.h"

#include <cstring>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "checks.h"
#include "cpu/numerics.h"

namespace grouped_linear::cpu {
namespace {

GROUPED_LINEAR_EVERY_WIDTH void load_bf16(const uint16_t* row, int64_t n, float* values) {
  for (int64_t i = 0; i < n; ++i) values[i] = from_bf16(row[i]);
}
GROUPED_LINEAR_EVERY_WIDTH void load_half(const uint16_t* row, int64_t n, float* values) {
  for (int64_t i = 0; i < n; ++i) values[i] = from_half(row[i]);
}
// e5m2 is the upper byte of a half.
GROUPED_LINEAR_EVERY_WIDTH void load_e5m2(const uint8_t* row, int64_t n, float* values) {
  for (int64_t i = 0; i < n; ++i) values[i] = from_half(static_cast<uint16_t>(row[i] << 8));
}
GROUPED_LINEAR_EVERY_WIDTH void load_e4m3(const uint8_t* row, int64_t n, float* values) {
  for (int64_t i = 0; i < n; ++i) values[i] = from_e4m3(row[i]);
}
GROUPED_LINEAR_EVERY_WIDTH void load_e4m3_scaled(const uint8_t* row, int64_t n, float scale,
                                                 float* values) {
  for (int64_t i = 0; i < n; ++i) values[i] = from_e4m3(row[i]) * scale;
}
GROUPED_LINEAR_EVERY_WIDTH void store_bf16(const float* values, int64_t n, uint16_t* row) {
  for (int64_t i = 0; i < n; ++i) row[i] = to_bf16(values[i]);
}
GROUPED_LINEAR_EVERY_WIDTH void store_half(const float* values, int64_t n, uint16_t* row) {
  for (int64_t i = 0; i < n; ++i) row[i] = to_half(values[i]);
}

}  // namespace

void load_row(const void* row, ScalarType dtype, int64_t n, float* values) {
  switch (dtype) {
    case ScalarType::Float: std::memcpy(values, row, n * sizeof(float)); return;
    case ScalarType::BFloat16: load_bf16(static_cast<const uint16_t*>(row), n, values); return;
    case ScalarType::Half: load_half(static_cast<const uint16_t*>(row), n, values); return;
    case ScalarType::Float8_e4m3fn: load_e4m3(static_cast<const uint8_t*>(row), n, values); return;
    case ScalarType::Float8_e5m2: load_e5m2(static_cast<const uint8_t*>(row), n, values); return;
    default: fail("load_row: no conversion from this dtype");
  }
}

void store_row(const float* values, int64_t n, ScalarType dtype, void* row) {
  switch (dtype) {
    case ScalarType::Float: std::memcpy(row, values, n * sizeof(float)); return;
    case ScalarType::BFloat16: store_bf16(values, n, static_cast<uint16_t*>(row)); return;
    case ScalarType::Half: store_half(values, n, static_cast<uint16_t*>(row)); return;
    default: fail("store_row: no conversion to this dtype");
  }
}

void dequantize_row(const void* q, int64_t n, const float* scales, int64_t scale_stride,
                    float* values) {
  const auto* row = static_cast<const uint8_t*>(q);
  for (int64_t i = 0; i < n; i += kBlock, scales += scale_stride)
    load_e4m3_scaled(row + i, std::min(kBlock, n - i), *scales, values + i);
}

int64_t element_size(ScalarType dtype) {
  if (dtype == ScalarType::Float8_e5m2) return 1;
  return dtype == ScalarType::Float ? 4 : dtype == ScalarType::Float8_e4m3fn ? 1 : 2;
}

std::vector<int64_t> group_starts(const char* op, const Tensor& offs, int64_t rows) {
  const Tensor dense = as_dense(offs);
  const int32_t* ends = dense.const_data_ptr<int32_t>();
  std::vector<int64_t> starts{0};
  for (int64_t e = 0; e < offs.size(0); ++e) {
    check(ends[e] >= starts[e], op, ": offs must not decrease, got ", ends[e], " after ", starts[e],
          " at group ", e);
    check(ends[e] <= rows, op, ": offs must not exceed the number of rows ", rows, ", got ",
          ends[e], " at group ", e);
    starts.push_back(ends[e]);
  }
  return starts;
}

std::vector<RowBlock> row_blocks(const std::vector<int64_t>& starts) {
  std::vector<RowBlock> blocks;
  for (size_t e = 0; e + 1 < starts.size(); ++e)
    for (int64_t begin = starts[e]; begin < starts[e + 1]; begin += kBlock)
      blocks.push_back({static_cast<int64_t>(e), begin, std::min(begin + kBlock, starts[e + 1]),
                        static_cast<int64_t>(blocks.size())});
  return blocks;
}

Tensor new_output(const Tensor& like, const Shape& shape, ScalarType dtype) {
  Tensor t = new_tensor(like, shape, dtype);
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t kPage = 4096, kHugePage = 2 << 20;
  const uintptr_t bytes = t.numel() * t.element_size();
  if (bytes >= 2 * kHugePage) {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(t.data_ptr());
    const uintptr_t first = (begin + kPage - 1) / kPage * kPage;
    // A hint: where it is refused, pages stay small.
    madvise(reinterpret_cast<void*>(first), (begin + bytes - first) / kPage * kPage, MADV_HUGEPAGE);
  }
#endif
  return t;
}

void zero_rows(const Tensor& t, int64_t begin) {
  if (begin < t.size(0)) std::memset(row_of(t, begin), 0, row_of(t, t.size(0)) - row_of(t, begin));
}

std::vector<int64_t> row_numbers(const Tensor& rows) {
  const Tensor dense = as_dense(rows);
  const auto copy = [&](auto index) {
    const auto* first = dense.const_data_ptr<decltype(index)>();
    return std::vector<int64_t>(first, first + dense.numel());
  };
  return dense.scalar_type() == ScalarType::Int ? copy(int32_t{}) : copy(int64_t{});
}

std::vector<int64_t> checked_rows(const char* op, const Tensor& rows, int64_t count,
                                  const char* owner, int64_t limit, const char* name) {
  std::vector<int64_t> numbers = row_numbers(rows);
  numbers.resize(count);
  for (int64_t t = 0; t < count; ++t)
    check(numbers[t] >= 0 && numbers[t] < limit, op, ": ", name, " must index the ", limit,
          " rows of ", owner, ", got ", numbers[t], " at row ", t);
  return numbers;
}

Tensor gathered_rows(const Tensor& t, const std::vector<int64_t>& numbers) {
  const auto count = static_cast<int64_t>(numbers.size());
  const int64_t bytes = t.size(1) * static_cast<int64_t>(t.element_size());
  const Tensor gathered = new_tensor(t, {count, t.size(1)}, t.scalar_type());
  torch::stable::parallel_for(0, count, 64, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      std::memcpy(row_of(gathered, i), row_of(t, numbers[i]), bytes);
  });
  return gathered;
}

}  // namespace grouped_linear::cpu
