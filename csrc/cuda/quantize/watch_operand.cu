// SPDX-License-Identifier: Apache-2.0
// What quantization does to some rows of each group.
#include "checks.h"
#include "cuda/common/launch.h"
#include "cuda/common/operands.h"
#include "cuda/quantize/watch_operand.cuh"
#include "ops.h"

namespace grouped_linear::cuda {
namespace {

// Read as it lies in memory: a copy would take its time where the flag is off, too.
WatchedRows watched(const std::optional<Tensor>& t) {
  if (!t) return {};
  const int64_t rows = t->dim() - 2, column = t->stride(t->dim() - 1);
  return {t->const_data_ptr(), rows == 1 ? t->stride(0) : 0, t->stride(rows), column,
          is_vector_readable(*t, t->dim() - 1)};
}

WatchedFormat format_of(const std::optional<Tensor>& q) {
  if (!q) return WatchedFormat::kNone;
  switch (q->scalar_type()) {
    case ScalarType::Float8_e4m3fn: return WatchedFormat::kE4m3;
    case ScalarType::Float8_e5m2: return WatchedFormat::kE5m2;
    case ScalarType::BFloat16: return WatchedFormat::kBf16;
    case ScalarType::Half: return WatchedFormat::kHalf;
    default: return WatchedFormat::kFloat;
  }
}

RowNumbers numbers_of(const std::optional<Tensor>& rows, const std::optional<Tensor>& of) {
  if (!rows) return {};
  return {rows->const_data_ptr(), of ? static_cast<int>(of->size(0)) : 0,
          rows->scalar_type() == ScalarType::Long};
}

}  // namespace

void watch_operand_(const Tensor& stats, const Tensor& turn, int64_t operand,
                    const std::optional<Tensor>& x, const std::optional<Tensor>& q,
                    const std::optional<Tensor>& scale, const std::optional<Tensor>& offs_in,
                    const std::optional<Tensor>& rows_in, const std::optional<Tensor>& q_rows_in,
                    const std::optional<Tensor>& gate_up, const std::optional<Tensor>& weight,
                    const std::optional<Tensor>& scale_t_in, const std::optional<Tensor>& routed_in,
                    int64_t most, double alpha, double beta, std::optional<double> limit,
                    bool interleaved, double cubic) {
  const char* op = "watch_operand_";
  const WatchedSize size =
      check_watch_operand(stats, turn, operand, x, q, scale, offs_in, rows_in, q_rows_in, gate_up,
                          weight, scale_t_in, routed_in, most);
  const SwigluForm form = checked_form(op, alpha, beta, limit, interleaved, cubic);

  const Launch launch(op, stats);
  const std::optional<Tensor> offs = as_dense(offs_in), routed = as_dense(routed_in);
  const std::optional<Tensor> rows = as_dense(rows_in), q_rows = as_dense(q_rows_in);
  const std::optional<Tensor> scale_t = as_dense(scale_t_in);
  const int64_t parts = stats.size(1), E = stats.size(2);
  WatchedOperand a{};
  a.stats = mutable_data<double>(stats) + operand * parts * E * kWatchColumns;
  a.turn = data<int32_t>(turn);
  a.most = most;
  a.offs = data_or_null<int32_t>(offs);
  a.routed = data_or_null<int32_t>(routed);
  a.E = static_cast<int>(E);
  const bool none = (rows && x->size(0) == 0) || (q_rows && q->size(0) == 0);  // numbers of no rows
  a.T = none ? 0 : static_cast<int>(std::min<int64_t>(size.T, INT32_MAX));
  a.N = static_cast<int>(size.N);
  a.K = static_cast<int>(size.K);
  a.x = watched(x);
  a.gate_up = watched(gate_up);
  a.q = watched(q);
  a.x_rows = numbers_of(rows, x);
  a.q_rows = numbers_of(q_rows, q);
  a.weight = data_or_null<float>(weight);
  a.weight_stride = weight ? weight->stride(0) : 0;
  a.format = format_of(q);
  a.scale = data_or_null<float>(scale);
  a.scale_dim = scale ? static_cast<int>(scale->dim()) : 0;
  for (int d = 0; d < a.scale_dim; ++d) a.scale_strides[d] = scale->stride(d);
  a.scale_t = data_or_null<float>(scale_t);
  a.K_t = scale_t ? static_cast<int>(scale_t->size(1)) : 0;
  a.blocks = scale_t ? static_cast<int>(scale_t->size(0)) : INT32_MAX;
  a.form = form;

  using enum WatchedSource;
  const dim3 grid(static_cast<unsigned>(E), static_cast<unsigned>(parts));
  if (!x && !gate_up) {
    const auto kernel = q ? watch_operand_kernel<float, kQuantized, true>
                          : watch_operand_kernel<float, kQuantized, false>;
    return launch.run(kernel, grid, kWatchThreads, 0, a);
  }
  for_element((x ? x : gate_up)->scalar_type(), [&]<typename Element>(std::type_identity<Element>) {
    const auto kernel = !gate_up ? watch_operand_kernel<Element, kRows, true>
                        : !x     ? watch_operand_kernel<Element, kSwiglu, true>
                                 : watch_operand_kernel<Element, kSwigluGrad, true>;
    launch.run(kernel, grid, kWatchThreads, 0, a);
  });
}

}  // namespace grouped_linear::cuda
