// SPDX-License-Identifier: Apache-2.0
// The rules of watch_operand_, which takes an operand in any form that a layer has it in.

#include "watch.h"

#include "checks.h"
#include "checks/rules.h"

namespace grouped_linear {
namespace {

constexpr const char* kOp = "watch_operand_";
using MaybeTensor = std::optional<Tensor>;

void check_quantized(const Tensor& q, const Tensor& stats) {
  const ScalarType dtype = q.scalar_type();
  if (dtype != ScalarType::Float8_e4m3fn && dtype != ScalarType::Float8_e5m2)
    check_activation(kOp, "q", dtype);
  check_device(kOp, "q", q, "stats", stats);
}

void check_scale(const Tensor& scale, const MaybeTensor& q, const Tensor& stats) {
  check(q.has_value(), kOp, ": scale needs q");
  check_dtype(kOp, "scale", scale, ScalarType::Float);
  check_device(kOp, "scale", scale, "stats", stats);
  if (scale.dim() == 1) return check_same(kOp, "E", "scale", scale.size(0), "stats", stats.size(2));
  const int64_t dim = q->dim();
  check_dim(kOp, "scale", scale, dim);
  check_same(kOp, "the number of K blocks", "scale", scale.size(dim == 3 ? 2 : 0), "q",
             ceil_div(q->size(dim - 1), kBlock));
  if (dim == 2) {
    check_same(kOp, "the number of scale rows", "scale", scale.size(1), "q",
               round_up(q->size(0), kScaleRowMultiple));
  } else {
    check_same(kOp, "E", "scale", scale.size(0), "stats", stats.size(2));
    check_same(kOp, "the number of N blocks", "scale", scale.size(1), "q",
               ceil_div(q->size(1), kBlock));
  }
}

// Checks a weight [E, N, K].
WatchedSize check_weight_of(const Tensor& stats, const MaybeTensor& x, const MaybeTensor& q) {
  const Tensor& first = x ? *x : *q;
  const char* name = x ? "x" : "q";
  const int64_t E = stats.size(2);
  check_dim(kOp, name, first, 3);
  check_same(kOp, "E", name, first.size(0), "stats", E);
  check_features(kOp, "N", first.size(1));
  check_features(kOp, "K", first.size(2));
  check_count(kOp, name, "rows in all", E * first.size(1));
  if (q) {
    check_dim(kOp, "q", *q, 3);
    for (int64_t d = 0; d < 3; ++d)
      check_same(kOp, d == 0 ? "E" : d == 1 ? "N" : "K", "q", q->size(d), name, first.size(d));
  }
  return {E * first.size(1), first.size(1), first.size(2)};
}

}  // namespace

WatchedSize check_watch_operand(const Tensor& stats, const Tensor& turn, int64_t operand,
                                const MaybeTensor& x, const MaybeTensor& q,
                                const MaybeTensor& scale, const MaybeTensor& offs,
                                const MaybeTensor& rows, const MaybeTensor& q_rows,
                                const MaybeTensor& gate_up, const MaybeTensor& weight,
                                const MaybeTensor& scale_t, const MaybeTensor& routed,
                                int64_t most) {
  check_dim(kOp, "stats", stats, 4);
  check_dtype(kOp, "stats", stats, ScalarType::Double);
  check(stats.size(1) >= 1 && stats.size(1) <= kMaxParts, kOp, ": stats must have between 1 and ",
        kMaxParts, " parts, got ", stats.size(1));
  check_groups(kOp, stats.size(2));
  check(stats.size(3) == kWatchColumns, kOp, ": stats must have ", static_cast<int>(kWatchColumns),
        " numbers of a group, got ", stats.size(3));
  check(stats.is_contiguous(), kOp, ": stats must be contiguous");
  check_dim(kOp, "turn", turn, 0);
  check_dtype(kOp, "turn", turn, ScalarType::Int);
  check_device(kOp, "turn", turn, "stats", stats);
  check(operand >= 0 && operand < stats.size(0), kOp, ": operand must be not negative and below ",
        stats.size(0), ", got ", operand);
  check(most >= 1 && most <= INT32_MAX, kOp, ": most must be between 1 and 2147483647, got ", most);
  check(x || q || gate_up || scale_t, kOp, ": give x, q, gate_up or scale_t, got none of them");
  if (x) {
    check_activation(kOp, "x", x->scalar_type());
    check_device(kOp, "x", *x, "stats", stats);
  }
  if (q) check_quantized(*q, stats);
  if (scale) check_scale(*scale, q, stats);
  if (!offs) {
    check(!rows && !q_rows && !gate_up && !weight && !scale_t && !routed, kOp,
          ": rows need offs, only a weight has none");
    return check_weight_of(stats, x, q);
  }

  const int64_t E = stats.size(2);
  const auto check_ends = [&](const char* name, const Tensor& t) {
    check_dim(kOp, name, t, 1);
    check_dtype(kOp, name, t, ScalarType::Int);
    check_device(kOp, name, t, "stats", stats);
    check_same(kOp, "E", name, t.size(0), "stats", E);
  };
  check_ends("offs", *offs);
  if (routed) check_ends("routed", *routed);
  if (scale_t) {
    check_dim(kOp, "scale_t", *scale_t, 2);
    check_dtype(kOp, "scale_t", *scale_t, ScalarType::Float);
    check_device(kOp, "scale_t", *scale_t, "stats", stats);
    check_features(kOp, "K", scale_t->size(1));
  }
  if (!x && !q && !gate_up) {
    check(!weight, kOp, ": weight needs gate_up");
    check(!rows, kOp, ": rows need x");
    check(!q_rows, kOp, ": q_rows need q");
    // Columnwise data pads rows, so there are at most as many.
    return {scale_t->size(0) * kBlock, 0, 0};
  }

  WatchedSize size{0, 0, 0};
  const char* name = gate_up ? "gate_up" : x ? "x" : "q";
  if (gate_up) {
    check_dim(kOp, "gate_up", *gate_up, 2);
    check_activation(kOp, "gate_up", gate_up->scalar_type());
    check_device(kOp, "gate_up", *gate_up, "stats", stats);
    check(gate_up->size(1) % 2 == 0, kOp, ": gate_up must have an even number of columns, got ",
          gate_up->size(1));
    check_features(kOp, "F", gate_up->size(1) / 2);
    check(!rows, kOp, ": rows are of x, and gate_up has them already");
    check(x.has_value() == weight.has_value(), kOp, ": a gradient of gate_up needs x and weight");
    size = {gate_up->size(0), 0, gate_up->size(1) / (x ? 1 : 2)};
  } else {
    check(!weight, kOp, ": weight needs gate_up");
  }
  if (x) {
    check_dim(kOp, "x", *x, 2);
    check_features(kOp, "K", x->size(1));
  }
  if (x && gate_up) {
    check_dtype(kOp, "gate_up", *gate_up, x->scalar_type());
    check_same(kOp, "T", "x", x->size(0), "gate_up", size.T);
    check_same(kOp, "2 * F", "x", 2 * x->size(1), "gate_up", size.K);
    check_dim(kOp, "weight", *weight, 1);
    check_dtype(kOp, "weight", *weight, ScalarType::Float);
    check_device(kOp, "weight", *weight, "stats", stats);
    check_same(kOp, "T", "weight", weight->size(0), "gate_up", size.T);
  } else if (x) {
    if (rows) check_rows(kOp, *rows, 1, "stats", stats);
    size = {rows ? rows->size(0) : x->size(0), 0, x->size(1)};
  } else {
    check(!rows, kOp, ": rows need x");
  }
  if (!q) {
    check(!q_rows, kOp, ": q_rows need q");
  } else {
    check_dim(kOp, "q", *q, 2);
    check_features(kOp, "K", q->size(1));
    if (q_rows) check_rows(kOp, *q_rows, 1, "stats", stats, "q_rows");
    const int64_t T = q_rows ? q_rows->size(0) : q->size(0);
    if (!x && !gate_up) size = {T, 0, q->size(1)};
    check_same(kOp, "T", q_rows ? "q_rows" : "q", T, name, size.T);
    check_same(kOp, "K", "q", q->size(1), name, size.K);
  }
  check_count(kOp, name, "rows", size.T);
  return size;
}

}  // namespace grouped_linear
