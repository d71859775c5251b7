// SPDX-License-Identifier: Apache-2.0
#include "cpu/matmul.h"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include "checks.h"

namespace grouped_linear::cpu {
namespace {

// A view without autograd history, so that a GEMM records nothing in any mode of the caller.
Tensor as_tensor(const Matrix& m) {
  return torch::stable::from_blob(m.first, std::vector<int64_t>{m.rows, m.cols},
                                  std::vector<int64_t>{m.row_stride, m.col_stride},
                                  torch::stable::Device(torch::headeronly::DeviceType::CPU),
                                  m.dtype);
}

char* row_pointer(const Matrix& m, int64_t row) {
  return static_cast<char*>(m.first) + row * m.row_stride * element_size(m.dtype);
}

}  // namespace

Matrix rows_of(const Tensor& t, int64_t begin, int64_t end) {
  return {row_of(t, begin), t.scalar_type(), end - begin, t.size(1), t.stride(0), t.stride(1)};
}

Matrix group_of(const Tensor& t, int64_t group) {
  return {row_of(t, group), t.scalar_type(), t.size(1), t.size(2), t.stride(1), t.stride(2)};
}

void matmul(const Matrix& out, const Matrix& a, const Matrix& b,
            const std::optional<Matrix>& bias) {
  const Tensor out_t = as_tensor(out), a_t = as_tensor(a), b_t = as_tensor(b);
  // Calls the CPU entry points, because the dispatcher would let autocast or a mode intervene.
  const AOTITorchError error = bias ? aoti_torch_cpu_addmm_out(out_t.get(), as_tensor(*bias).get(),
                                                               a_t.get(), b_t.get(), 1, 1)
                                    : aoti_torch_cpu_mm_out(out_t.get(), a_t.get(), b_t.get());
  if (error != AOTI_TORCH_SUCCESS)
    fail("matmul: torch's CPU kernel failed for ", a.rows, " x ", a.cols, " @ ", b.rows, " x ",
         b.cols, ": ", torch_reason());
}

Scratch to_float(const Matrix& m) {
  Scratch values(m.rows, m.cols);
  torch::stable::parallel_for(0, m.rows, 16, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      load_row(row_pointer(m, r), m.dtype, m.cols, values.row(r));
  });
  return values;
}

void store(Scratch& values, const float* bias, const Matrix& out) {
  torch::stable::parallel_for(0, out.rows, 16, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      float* row = values.row(r);
      if (bias)
        for (int64_t c = 0; c < out.cols; ++c) row[c] += bias[c];
      store_row(row, out.cols, out.dtype, row_pointer(out, r));
    }
  });
}

void accumulate(Scratch& values, const Matrix& out) {
  torch::stable::parallel_for(0, out.rows, 16, [&](int64_t begin, int64_t end) {
    std::vector<float> old(out.cols);
    for (int64_t r = begin; r < end; ++r) {
      load_row(row_pointer(out, r), out.dtype, out.cols, old.data());
      float* row = values.row(r);
      for (int64_t c = 0; c < out.cols; ++c) row[c] += old[c];
      store_row(row, out.cols, out.dtype, row_pointer(out, r));
    }
  });
}

}  // namespace grouped_linear::cpu
