// SPDX-License-Identifier: Apache-2.0
// Sums and dot products of gathered rows, and rows scattered. A row is read each time that it is
// gathered.

#include <algorithm>
#include <cstring>
#include <vector>

#include "checks.h"
#include "cpu/rows.h"
#include "ops.h"

namespace grouped_linear::cpu {
namespace {

// sum[i] += factor * row[i], each operation rounded.
GROUPED_LINEAR_EVERY_WIDTH
void add_row(const float* row, float factor, int64_t n, float* sum) {
  for (int64_t i = 0; i < n; ++i) sum[i] += factor * row[i];
}

// Sixteen partial sums for every vector width; n is a multiple of 16.
GROUPED_LINEAR_EVERY_WIDTH
float dot(const float* a, const float* b, int64_t n) {
  constexpr int64_t lanes = 16;
  float sums[lanes] = {};
  for (int64_t i = 0; i < n; i += lanes)
    for (int64_t l = 0; l < lanes; ++l) sums[l] += a[i + l] * b[i + l];
  for (int64_t half = lanes / 2; half > 0; half /= 2)
    for (int64_t l = 0; l < half; ++l) sums[l] += sums[l + half];
  return sums[0];
}

// Rows of y by number, as float32.
class Gathered {
 public:
  Gathered(const char* op, const Tensor& y, const Tensor& rows)
      : y_(with_dense_rows(y)), dtype_(y.scalar_type()) {
    const int64_t limit = y.size(0);
    rows_.reserve(rows.numel());
    numbers_ = row_numbers(rows);
    for (const int64_t row : numbers_) {
      check(row >= 0 && row < limit, op, ": rows must index the ", limit, " rows of y, got ", row);
      rows_.push_back(row_of(y_, row));
    }
  }
  int64_t number(int64_t i) const { return numbers_[i]; }
  void load(int64_t i, float* values) const { load_row(rows_[i], dtype_, y_.size(1), values); }

 private:
  Tensor y_;
  ScalarType dtype_;
  std::vector<int64_t> numbers_;
  std::vector<const char*> rows_;
};

}  // namespace

Tensor gather_sum(const Tensor& y, const Tensor& rows, const std::optional<Tensor>& weight_in,
                  const std::optional<Tensor>& offs) {
  const char* op = "gather_sum";
  check_gather_sum(y, rows, weight_in, offs);
  const Gathered gathered(op, y, rows);
  const int64_t rows_end = offs ? as_dense(*offs).const_data_ptr<int32_t>()[offs->size(0) - 1] : 0;
  const int64_t T = rows.size(0), C = rows.size(1), H = y.size(1);
  const std::optional<Tensor> weight = as_dense(weight_in);
  const float* weights = weight ? weight->const_data_ptr<float>() : nullptr;
  const Tensor out = new_output(y, {T, H}, y.scalar_type());
  torch::stable::parallel_for(0, T, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> row(H), sum(H);
    for (int64_t t = begin; t < end; ++t) {
      std::fill(sum.begin(), sum.end(), 0.0f);
      for (int64_t i = t * C; i < (t + 1) * C; ++i) {
        if (offs && gathered.number(i) >= rows_end) continue;
        gathered.load(i, row.data());
        add_row(row.data(), weights ? weights[i] : 1.0f, H, sum.data());
      }
      store_row(sum.data(), H, y.scalar_type(), row_of(out, t));
    }
  });
  return out;
}

Tensor gather_dot(const Tensor& a_in, const Tensor& y, const Tensor& rows) {
  const char* op = "gather_dot";
  check_gather_dot(a_in, y, rows);
  const Tensor a = with_dense_rows(a_in);
  const Gathered gathered(op, y, rows);
  const int64_t T = rows.size(0), C = rows.size(1), H = y.size(1);
  const Tensor out = new_output(y, {T, C}, ScalarType::Float);
  auto* products = static_cast<float*>(out.data_ptr());
  torch::stable::parallel_for(0, T, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> a_row(H), row(H);
    for (int64_t t = begin; t < end; ++t) {
      load_row(row_of(a, t), a.scalar_type(), H, a_row.data());
      for (int64_t i = t * C; i < (t + 1) * C; ++i) {
        gathered.load(i, row.data());
        products[i] = dot(a_row.data(), row.data(), H);
      }
    }
  });
  return out;
}

Tensor scatter_rows(const Tensor& x_in, const Tensor& rows_in, int64_t num_rows) {
  const char* op = "scatter_rows";
  check_scatter_rows(x_in, rows_in, num_rows);
  const Tensor x = with_dense_rows(x_in);
  const int64_t T = rows_in.size(0), C = rows_in.size(1);
  const std::vector<int64_t> rows = row_numbers(rows_in);
  for (const int64_t row : rows)
    check(row >= 0 && row < num_rows, op, ": rows must index the ", num_rows, " rows of out, got ",
          row);
  const size_t bytes = x.size(1) * x.element_size();
  const Tensor out = new_output(x, {num_rows, x.size(1)}, x.scalar_type());
  torch::stable::parallel_for(0, T, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * C; i < end * C; ++i)
      std::memcpy(row_of(out, rows[i]), row_of(x, i / C), bytes);
  });
  return out;
}

}  // namespace grouped_linear::cpu
