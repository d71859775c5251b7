// SPDX-License-Identifier: Apache-2.0
// A grouped GEMM as the ops describe it, and the seam behind which an architecture computes it.
//
// To add an architecture: a folder with a run_grouped_gemm of its own, and a case in gemm.cu.
#pragma once

#include <limits>
#include <optional>

#include "cuda/common/launch.h"
#include "cuda/common/operands.h"
#include "cuda/common/row_numbers.cuh"
#include "cuda/gemm/kernel_arguments.h"
#include "swiglu_math.h"

namespace grouped_linear::cuda {

// SwiGLU of gate_up [T, 2 F], the result of an M-grouped GEMM.
struct SwigluOutput {
  Tensor h;           // [T, F]
  bool keep_gate_up;  // else the epilogue's out is not written
  SwigluForm form;
};

// The gradient of SwiGLU, of dh [T, F], the result of an M-grouped GEMM, which does not write it.
struct SwigluGradOutput {
  Tensor gate_up, weight;         // [T, 2 F]; [T] float32, dense
  Tensor d_gate_up, h, d_weight;  // [T, 2 F], [T, F], [T] float32
  SwigluForm form;
};

// Operands have any strides: an implementation copies what it cannot read.
struct GroupedGemm {
  Grouping grouping;
  // M-grouped: a [T, K], b [E, N, K].
  // K-grouped: a [T, N], b [T, K]; in FP8 the padded columnwise layout, [blocks, N or K, 128].
  Tensor a, b;
  Tensor offs;                                       // [E] int32, dense
  std::optional<Tensor> scale_a = {}, scale_b = {};  // FP8: [E] a group, or of blocks
  EpilogueArguments epilogue = {};
  GemmShape shape;
  // The rows that an operand gathers from a source, which then stands in its place: [T] int32 or
  // int64. a with scales per block, or 16 bits or more; b K-grouped alone. At most one of the two.
  std::optional<Tensor> a_rows = {}, b_rows = {};
  // M-grouped: a second product, whose operands have 16 bits. Where adds_low_rank says so.
  LowRank low = {};
};

// Kernels count rows in 32 bits, as offs does, and round them up to whole tiles.
inline int row_count(const char* op, int64_t rows) {
  constexpr int64_t most = std::numeric_limits<int32_t>::max() - kBlock;
  check(rows <= most, op, ": at most ", most, " rows are supported on CUDA, got ", rows);
  return static_cast<int>(rows);
}

// out [T, cols] = a @ b[e].T, where rows of a may be gathered. The caller adds scales, a second
// product and the epilogue.
inline GroupedGemm m_grouped(const Launch& launch, const Tensor& a, const Tensor& b,
                             const Tensor& offs, int64_t cols,
                             const std::optional<Tensor>& a_rows) {
  const int T = row_count(launch.op(), (a_rows ? *a_rows : a).size(0));
  return {.grouping = Grouping::kM,
          .a = a,
          .b = b,
          .offs = as_dense(offs),
          .shape = {T, static_cast<int>(offs.size(0)), T, static_cast<int>(cols),
                    static_cast<int>(a.size(1))},
          .a_rows = as_dense(a_rows)};
}

// out[e] [N, K] = a.T @ b over each group's rows of T. The same.
inline GroupedGemm k_grouped(const Launch& launch, const Tensor& a, const Tensor& b,
                             const Tensor& offs, int64_t T) {
  return {.grouping = Grouping::kK,
          .a = a,
          .b = b,
          .offs = as_dense(offs),
          .shape = {row_count(launch.op(), T), static_cast<int>(offs.size(0)),
                    static_cast<int>(a.size(1)), static_cast<int>(b.size(1)), 0}};
}

// The same GEMM of rows that are copied now, by passes of their own: for kernels that do not gather.
GroupedGemm gather_before(const Launch& launch, GroupedGemm gemm);

// Whether an M-grouped GEMM in 16 bits or more takes less time if its rows are copied before it, in
// place of a kernel that gathers them.
bool copies_rows(const Launch& launch, const GroupedGemm& gemm);

// Computes it on the launch's stream, by the operands' type and the device's compute capability.
void run_grouped_gemm(const Launch& launch, const GroupedGemm& gemm);

// The same M-grouped in BF16, of a b that is a weight w [E, N, K] in MXFP4: codes and, in scale_b,
// scales as they are stored. The output's columns are w's rows (kK, fprop) or its columns (kMN, dgrad).
void run_mxfp4(const Launch& launch, const GroupedGemm& gemm, Major b_major);

// Whether a kernel on this device adds such a product to the first one's accumulators.
bool adds_low_rank(const Launch& launch, const LowRank& low);

// Else: first [T, N] in float32 and the second product, added and rounded once. low_rank_sum.cu
Tensor low_rank_sum(const Launch& launch, const Tensor& first, const LowRank& low,
                    const Tensor& offs, ScalarType dtype);

// The same with SwiGLU or its gradient in the epilogue, where the device has a kernel for these
// operands.
bool has_swiglu(const Launch& launch, const GroupedGemm& gemm, const SwigluForm& form);
bool has_swiglu_grad(const Launch& launch, const GroupedGemm& gemm, const SwigluForm& form);
void run_swiglu(const Launch& launch, const GroupedGemm& gemm, const SwigluOutput& swiglu);
void run_swiglu_grad(const Launch& launch, const GroupedGemm& gemm, const SwigluGradOutput& grad);

inline OutputType output_type(ScalarType dtype) {
  return dtype == ScalarType::BFloat16 ? OutputType::kBFloat16
         : dtype == ScalarType::Half   ? OutputType::kHalf
                                       : OutputType::kFloat;
}

inline EpilogueArguments epilogue_arguments(const Tensor& out, const std::optional<Tensor>& bias,
                                            bool accumulate,
                                            const std::optional<Tensor>& overwrite) {
  return {out.data_ptr(),
          output_type(out.scalar_type()),
          is_aligned(out),
          bias ? bias->data_ptr() : nullptr,
          bias ? bias->stride(0) : 0,
          nullptr,
          nullptr,
          accumulate,
          overwrite ? overwrite->const_data_ptr<bool>() : nullptr};
}

// y [T, cols] that run(gemm) writes: an M-grouped GEMM without scales, which run may add.
template <typename Run>
Tensor m_grouped_result(const Launch& launch, const Tensor& a, const Tensor& b, const Tensor& offs,
                        const std::optional<Tensor>& bias_in, int64_t cols, ScalarType dtype,
                        const std::optional<Tensor>& a_rows, const LowRank& low, const Run& run) {
  const int64_t T = (a_rows ? *a_rows : a).size(0);
  Tensor y = new_tensor(a, {T, cols}, dtype);
  if (T == 0) return y;
  if (a.size(0) == 0) return torch::stable::zero_(y);  // no row to gather

  const std::optional<Tensor> bias = with_dense_rows(bias_in);
  GroupedGemm gemm = m_grouped(launch, a, b, offs, cols, a_rows);
  gemm.epilogue = epilogue_arguments(y, bias, false, std::nullopt);
  gemm.low = low;
  run(gemm);
  return y;
}

// rows: dense.
inline RowNumbers row_numbers(const std::optional<Tensor>& rows, const Tensor& source) {
  if (!rows) return {nullptr, static_cast<int>(source.size(0)), false};
  return {rows->const_data_ptr(), static_cast<int>(source.size(0)),
          rows->scalar_type() == ScalarType::Long};
}

}  // namespace grouped_linear::cuda
