// SPDX-License-Identifier: Apache-2.0
// A matrix and a product, rounded once.

#include "checks.h"
#include "cpu/matmul.h"
#include "ops.h"

namespace grouped_linear::cpu {

Tensor addmm(const Tensor& c_in, const Tensor& a_in, const Tensor& b_in) {
  check_addmm(c_in, a_in, b_in);
  const Tensor a = with_dense_rows(a_in), b = with_dense_rows(b_in);
  const int64_t M = c_in.size(0), N = c_in.size(1), K = a.size(1);
  const Tensor out = dense_copy(c_in);
  if (M == 0) return out;
  Scratch product(M, N), a_float = to_float(rows_of(a, 0, M)), b_float = to_float(rows_of(b, 0, K));
  matmul(product.view(), a_float.view(), b_float.view());
  accumulate(product, rows_of(out, 0, M));
  return out;
}

}  // namespace grouped_linear::cpu
