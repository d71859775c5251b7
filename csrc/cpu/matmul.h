// SPDX-License-Identifier: Apache-2.0
// GEMMs of one group, with torch's CPU kernels. Their bits depend on the number of threads.
#pragma once

#include <cstring>
#include <memory>
#include <optional>

#include "cpu/rows.h"

namespace grouped_linear::cpu {

// A 2-D view of a dense buffer.
struct Matrix {
  void* first;
  ScalarType dtype;
  int64_t rows, cols, row_stride, col_stride;

  Matrix transposed() const { return {first, dtype, cols, rows, col_stride, row_stride}; }
};

Matrix rows_of(const Tensor& t, int64_t begin, int64_t end);  // of a 2-D tensor
Matrix group_of(const Tensor& t, int64_t group);              // of a 3-D tensor

// out = a @ b + bias, all of one dtype. Sums are float32 and rounded once.
void matmul(const Matrix& out, const Matrix& a, const Matrix& b,
            const std::optional<Matrix>& bias = std::nullopt);

// A scratch matrix of float32.
class Scratch {
 public:
  Scratch(int64_t rows, int64_t cols) : rows_(rows), cols_(cols), values_(new float[rows * cols]) {}
  Matrix view() { return {values_.get(), ScalarType::Float, rows_, cols_, cols_, 1}; }
  float* row(int64_t r) { return values_.get() + r * cols_; }

 private:
  int64_t rows_, cols_;
  std::unique_ptr<float[]> values_;
};

Scratch to_float(const Matrix& m);

// out = values + bias, rounded once. bias: one float32 row or null.
void store(Scratch& values, const float* bias, const Matrix& out);

// out = out + values, rounded once.
void accumulate(Scratch& values, const Matrix& out);

// Weight gradients dw [E, N, K]: wgrad(e, m) writes group e's into m. Where starts[e] equals
// starts[e + 1], group e is empty.
template <typename Wgrad>
void write_groups(const Tensor& dw, const std::vector<int64_t>& starts, const Wgrad& wgrad) {
  for (int64_t e = 0; e < dw.size(0); ++e) {
    if (starts[e] == starts[e + 1])
      std::memset(row_of(dw, e), 0, row_of(dw, 1) - row_of(dw, 0));
    else
      wgrad(e, group_of(dw, e));
  }
}

// main_grad += dw, or main_grad = dw if `overwrite` is given and true. Adding does not touch the
// gradients of empty groups.
template <typename Wgrad>
void accumulate_groups(const Tensor& main_grad, const std::vector<int64_t>& starts,
                       const std::optional<Tensor>& overwrite, const Wgrad& wgrad) {
  if (overwrite && *overwrite->const_data_ptr<bool>())
    return write_groups(main_grad, starts, wgrad);
  for (int64_t e = 0; e < main_grad.size(0); ++e) {
    if (starts[e] == starts[e + 1]) continue;
    Scratch dw(main_grad.size(1), main_grad.size(2));
    wgrad(e, dw.view());
    accumulate(dw, group_of(main_grad, e));
  }
}

}  // namespace grouped_linear::cpu
