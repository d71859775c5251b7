#include "checks.h"

#include <torch/csrc/stable/device.h>

#include <array>
#include <cmath>
#include <limits>
#include <string>

#include "tensors.h"

namespace grouped_linear {
namespace {

// Names cost nothing where a rule holds: the parts of a sentence are made in any case.
const char* name_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Byte: return "uint8";
    case ScalarType::Char: return "int8";
    case ScalarType::Short: return "int16";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::Half: return "float16";
    case ScalarType::Float: return "float32";
    case ScalarType::Double: return "float64";
    case ScalarType::ComplexHalf: return "complex32";
    case ScalarType::ComplexFloat: return "complex64";
    case ScalarType::ComplexDouble: return "complex128";
    case ScalarType::Bool: return "bool";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Float8_e5m2: return "float8_e5m2";
    case ScalarType::Float8_e4m3fn: return "float8_e4m3fn";
    case ScalarType::Float8_e5m2fnuz: return "float8_e5m2fnuz";
    case ScalarType::Float8_e4m3fnuz: return "float8_e4m3fnuz";
    case ScalarType::Float8_e8m0fnu: return "float8_e8m0fnu";
    case ScalarType::Float4_e2m1fn_x2: return "float4_e2m1fn_x2";
    case ScalarType::UInt16: return "uint16";
    case ScalarType::UInt32: return "uint32";
    case ScalarType::UInt64: return "uint64";
    default: return "an unsupported dtype";
  }
}

struct NameOf {
  const torch::stable::Device& device;
};

std::ostream& operator<<(std::ostream& out, const NameOf& name) {
  if (name.device.is_cpu()) return out << "cpu";
  out << (name.device.is_cuda() ? "cuda" : "another device");
  if (name.device.has_index()) out << ":" << static_cast<int>(name.device.index());
  return out;
}

struct Sizes {
  const Shape& sizes;
};

std::ostream& operator<<(std::ostream& out, const Sizes& shape) {
  out << "[";
  const char* between = "";
  for (const int64_t size : shape.sizes) {
    out << between << size;
    between = ", ";
  }
  return out << "]";
}

bool is_activation(ScalarType dtype) {
  return dtype == ScalarType::BFloat16 || dtype == ScalarType::Half || dtype == ScalarType::Float;
}

constexpr const char* kActivations = "bfloat16, float16 or float32";

void check_activation(const char* op, const char* name, ScalarType dtype) {
  check(is_activation(dtype), op, ": ", name, " must be ", kActivations, ", got ", name_of(dtype));
}

void check_dtype(const char* op, const char* name, const Tensor& t, ScalarType expected) {
  const ScalarType dtype = t.scalar_type();
  check(dtype == expected, op, ": ", name, " must be ", name_of(expected), ", got ",
        name_of(dtype));
}

void check_fp8(const char* op, const char* name, ScalarType dtype) {
  check(dtype == ScalarType::Float8_e4m3fn || dtype == ScalarType::Float8_e5m2, op, ": ", name,
        " must be float8_e4m3fn or float8_e5m2, got ", name_of(dtype));
}

void check_dim(const char* op, const char* name, const Tensor& t, int64_t dim) {
  const int64_t own = t.dim();
  check(own == dim, op, ": ", name, " must be ", dim, "-D, got ", own, "-D");
}

void check_same(const char* op, const char* what, const char* a_name, int64_t a, const char* b_name,
                int64_t b) {
  check(a == b, op, ": ", what, " differs: ", a_name, " has ", a, ", ", b_name, " has ", b);
}

void check_features(const char* op, const char* what, int64_t size) {
  check(size > 0 && size % kFeatureMultiple == 0, op, ": ", what,
        " must be a positive multiple of ", kFeatureMultiple, ", got ", size);
}

void check_groups(const char* op, int64_t E) {
  check(E >= 1 && E <= kMaxGroups, op, ": E must be between 1 and ", kMaxGroups, ", got ", E);
}

void check_device(const char* op, const char* name, const Tensor& t, const char* first_name,
                  const Tensor& first) {
  const torch::stable::Device own = t.device(), expected = first.device();
  check(own == expected, op, ": ", name, " is on ", NameOf{own}, ", ", first_name, " is on ",
        NameOf{expected});
}

void check_offs(const char* op, const Tensor& offs, const char* first_name, const Tensor& first) {
  check_dim(op, "offs", offs, 1);
  check_dtype(op, "offs", offs, ScalarType::Int);
  check_device(op, "offs", offs, first_name, first);
  check_groups(op, offs.size(0));
}

void check_integer(const char* op, const char* name, ScalarType dtype) {
  check(dtype == ScalarType::Int || dtype == ScalarType::Long, op, ": ", name,
        " must be int32 or int64, got ", name_of(dtype));
}

// Numbers of rows of a tensor.
void check_rows(const char* op, const Tensor& rows, int64_t dim, const char* first_name,
                const Tensor& first) {
  check_dim(op, "rows", rows, dim);
  check_integer(op, "rows", rows.scalar_type());
  check_device(op, "rows", rows, first_name, first);
}

// y [R, H], of which rows [T, C] are gathered.
void check_gathered(const char* op, const Tensor& y, const Tensor& rows) {
  check_dim(op, "y", y, 2);
  check_activation(op, "y", y.scalar_type());
  check_features(op, "H", y.size(1));
  check_rows(op, rows, 2, "y", y);
}

void check_epsilon(const char* op, double amax_epsilon) {
  check(std::isfinite(amax_epsilon) && amax_epsilon >= 0, op,
        ": amax_epsilon must be finite and not negative, got ", amax_epsilon);
}

// scale [E]: one scale a group.
void check_group_scale(const char* op, const char* name, const Tensor& scale,
                       const char* first_name, const Tensor& first, int64_t E,
                       const char* owner = "offs") {
  check_dim(op, name, scale, 1);
  check_dtype(op, name, scale, ScalarType::Float);
  check_device(op, name, scale, first_name, first);
  check_same(op, "E", name, scale.size(0), owner, E);
}

// amax [E], written in place.
void check_amax(const char* op, const Tensor& amax, const char* first_name, const Tensor& first,
                const char* owner, int64_t E) {
  check_group_scale(op, "amax", amax, first_name, first, E, owner);
  check(amax.is_contiguous(), op, ": amax must be contiguous");
}

void check_layouts(const char* op, bool rowwise, bool columnwise) {
  check(rowwise || columnwise, op, ": rowwise or columnwise must be asked for, got neither");
}

// x [T, K] with offs, and what is asked for of it.
void check_grouped_rows(const char* op, const Tensor& x, const Tensor& offs, bool rowwise,
                        bool columnwise) {
  check_dim(op, "x", x, 2);
  check_activation(op, "x", x.scalar_type());
  check_features(op, "K", x.size(1));
  check_offs(op, offs, "x", x);
  check_layouts(op, rowwise, columnwise);
}

// w [E, N, K].
void check_weight(const char* op, const Tensor& w) {
  check_dim(op, "w", w, 3);
  check_activation(op, "w", w.scalar_type());
  check_groups(op, w.size(0));
  check_features(op, "N", w.size(1));
  check_features(op, "K", w.size(2));
}

// E tensors of two dimensions, all alike.
void check_experts(const char* op, const char* name, const std::vector<Tensor>& experts) {
  const std::string first_name = std::string("the first ") + name;
  check_groups(op, static_cast<int64_t>(experts.size()));
  const Tensor& first = experts[0];
  check_dim(op, name, first, 2);
  for (const Tensor& expert : experts) {
    check_dim(op, name, expert, 2);
    check_dtype(op, name, expert, first.scalar_type());
    check_device(op, name, expert, first_name.c_str(), first);
    check_same(op, "N", name, expert.size(0), first_name.c_str(), first.size(0));
    check_same(op, "K", name, expert.size(1), first_name.c_str(), first.size(1));
  }
}

// w: one tensor [E, N, K] or E tensors [N, K], with the flag that says whether it is read.
// Returns E, N and K.
std::array<int64_t, 3> check_refreshed(const char* op, const std::vector<Tensor>& w,
                                       const std::optional<Tensor>& refresh) {
  std::array<int64_t, 3> shape;
  if (w.size() == 1 && w[0].dim() == 3) {
    check_weight(op, w[0]);
    shape = {w[0].size(0), w[0].size(1), w[0].size(2)};
  } else {
    check_experts(op, "w", w);
    check_activation(op, "w", w[0].scalar_type());
    check_features(op, "N", w[0].size(0));
    check_features(op, "K", w[0].size(1));
    shape = {static_cast<int64_t>(w.size()), w[0].size(0), w[0].size(1)};
  }
  if (refresh) {
    check_dim(op, "refresh", *refresh, 0);
    check_dtype(op, "refresh", *refresh, ScalarType::Bool);
    check_device(op, "refresh", *refresh, "w", w[0]);
  }
  return shape;
}

// What is written in place has this shape and is dense.
void check_written(const char* op, const char* name, const Tensor& t, ScalarType dtype,
                   const Shape& shape, const Tensor& w) {
  check_dim(op, name, t, shape.dim());
  check_dtype(op, name, t, dtype);
  check_device(op, name, t, "w", w);
  const Shape own = Shape::of(t);
  check(own == shape, op, ": ", name, " must be ", Sizes{shape}, ", got ", Sizes{own});
  check(t.is_contiguous(), op, ": ", name, " must be contiguous");
}

void check_overwrite(const char* op, const std::optional<Tensor>& overwrite,
                     const Tensor& main_grad) {
  if (!overwrite) return;
  check_dim(op, "overwrite", *overwrite, 0);
  check_dtype(op, "overwrite", *overwrite, ScalarType::Bool);
  check_device(op, "overwrite", *overwrite, "main_grad", main_grad);
}

void check_grad_dtype(const char* op, ScalarType dtype) {
  check(dtype == ScalarType::Float || dtype == ScalarType::BFloat16, op,
        ": main_grad must be float32 or bfloat16, got ", name_of(dtype));
}

// q_t [blocks, features, 128].
void check_column_blocks(const char* op, const char* name, const Tensor& q_t,
                         const char* features) {
  check_dim(op, name, q_t, 3);
  check(q_t.size(2) == kBlock, op, ": ", name, " must hold blocks of ", kBlock, " rows, got ",
        q_t.size(2));
  check_features(op, features, q_t.size(1));
}

// q_t [blocks, features, 128] with scale_t [blocks, features].
void check_columnwise(const char* op, const char* name, const Tensor& q_t, const char* scale_name,
                      const Tensor& scale_t, const char* features) {
  check_column_blocks(op, name, q_t, features);
  check_dtype(op, name, q_t, ScalarType::Float8_e4m3fn);
  check_dim(op, scale_name, scale_t, 2);
  check_dtype(op, scale_name, scale_t, ScalarType::Float);
  check_device(op, scale_name, scale_t, name, q_t);
  check_same(op, "the number of blocks", name, q_t.size(0), scale_name, scale_t.size(0));
  check_same(op, features, name, q_t.size(1), scale_name, scale_t.size(1));
}

// q [rows, K] with scale [ceil(K / 128), round_up(rows, 4)].
void check_rowwise(const char* op, const char* name, const Tensor& q, const char* scale_name,
                   const Tensor& scale) {
  check_dim(op, name, q, 2);
  check_dtype(op, name, q, ScalarType::Float8_e4m3fn);
  check_features(op, "K", q.size(1));
  check_dim(op, scale_name, scale, 2);
  check_dtype(op, scale_name, scale, ScalarType::Float);
  check_device(op, scale_name, scale, name, q);
  check_same(op, "the number of K blocks", name, ceil_div(q.size(1), kBlock), scale_name,
             scale.size(0));
  check_same(op, "the number of scale rows", name, round_up(q.size(0), kScaleRowMultiple),
             scale_name, scale.size(1));
}

void check_bias(const char* op, const std::optional<Tensor>& bias, const Tensor& a, int64_t E,
                int64_t N, ScalarType out_dtype) {
  if (!bias) return;
  check_dim(op, "bias", *bias, 2);
  check_dtype(op, "bias", *bias, out_dtype);
  check_device(op, "bias", *bias, "a", a);
  check_same(op, "E", "bias", bias->size(0), "offs", E);
  check_same(op, "N", "bias", bias->size(1), "b", N);
}

}  // namespace

void check_splits_to_offsets(const Tensor& m_splits, int64_t num_rows, int64_t alignment,
                             int64_t stride, ScalarType dtype) {
  const char* op = "splits_to_offsets";
  check_dim(op, "m_splits", m_splits, 1);
  check_integer(op, "m_splits", m_splits.scalar_type());
  check_groups(op, m_splits.size(0));
  check_integer(op, "dtype", dtype);
  check(num_rows >= 0, op, ": num_rows must not be negative, got ", num_rows);
  check(alignment >= 1, op, ": alignment must be positive, got ", alignment);
  check(stride >= 1, op, ": stride must be positive, got ", stride);
  const int64_t largest = dtype == ScalarType::Int ? std::numeric_limits<int32_t>::max()
                                                   : std::numeric_limits<int64_t>::max();
  check(num_rows <= largest / stride, op, ": num_rows * stride does not fit in ", name_of(dtype),
        ", got ", num_rows, " * ", stride);
}

void check_group_quantize(const Tensor& x, const Tensor& offs, const std::optional<Tensor>& rows,
                          double amax_epsilon, bool rowwise, bool columnwise,
                          const std::optional<Tensor>& factor) {
  const char* op = "group_quantize";
  check_dim(op, "x", x, 2);
  check_activation(op, "x", x.scalar_type());
  check_features(op, "K", x.size(1));
  check_offs(op, offs, "x", x);
  if (rows) check_rows(op, *rows, 1, "x", x);
  if (factor) {
    check(rows.has_value(), op, ": factor needs rows, got none");
    check_dim(op, "factor", *factor, 1);
    check_dtype(op, "factor", *factor, ScalarType::Float);
    check_device(op, "factor", *factor, "x", x);
    check_same(op, "T", "factor", factor->size(0), "rows", rows->size(0));
  }
  check_epsilon(op, amax_epsilon);
  check_layouts(op, rowwise, columnwise);
}

void check_sort_by_expert(const Tensor& experts, int64_t num_experts) {
  const char* op = "sort_by_expert";
  check_dim(op, "experts", experts, 2);
  check_integer(op, "experts", experts.scalar_type());
  check_groups(op, num_experts);
  const int64_t R = experts.size(0) * experts.size(1);
  check(R <= std::numeric_limits<int32_t>::max(), op, ": at most ",
        std::numeric_limits<int32_t>::max(), " choices are supported, got ", R);
}

void check_gather_sum(const Tensor& y, const Tensor& rows, const std::optional<Tensor>& weight) {
  const char* op = "gather_sum";
  check_gathered(op, y, rows);
  if (!weight) return;
  check_dim(op, "weight", *weight, 2);
  check_dtype(op, "weight", *weight, ScalarType::Float);
  check_device(op, "weight", *weight, "y", y);
  check_same(op, "T", "weight", weight->size(0), "rows", rows.size(0));
  check_same(op, "C", "weight", weight->size(1), "rows", rows.size(1));
}

void check_gather_dot(const Tensor& a, const Tensor& y, const Tensor& rows) {
  const char* op = "gather_dot";
  check_gathered(op, y, rows);
  check_dim(op, "a", a, 2);
  check_dtype(op, "a", a, y.scalar_type());
  check_device(op, "a", a, "y", y);
  check_same(op, "T", "a", a.size(0), "rows", rows.size(0));
  check_same(op, "H", "a", a.size(1), "y", y.size(1));
}

void check_swiglu(const char* op, const Tensor& gate_up, const Tensor& offs) {
  check_dim(op, "gate_up", gate_up, 2);
  check_activation(op, "gate_up", gate_up.scalar_type());
  check(gate_up.size(1) % 2 == 0, op, ": gate_up must have an even number of columns, got ",
        gate_up.size(1));
  check_features(op, "K", gate_up.size(1) / 2);
  check_offs(op, offs, "gate_up", gate_up);
}

void check_swiglu_grad(const char* op, const Tensor& dh, const Tensor& gate_up,
                       const Tensor& offs) {
  check_dim(op, "dh", dh, 2);
  check_dim(op, "gate_up", gate_up, 2);
  check_activation(op, "dh", dh.scalar_type());
  check_dtype(op, "gate_up", gate_up, dh.scalar_type());
  check_device(op, "gate_up", gate_up, "dh", dh);
  check_same(op, "T", "dh", dh.size(0), "gate_up", gate_up.size(0));
  check_features(op, "K", dh.size(1));
  check_same(op, "2 * K", "dh", 2 * dh.size(1), "gate_up", gate_up.size(1));
  check_offs(op, offs, "dh", dh);
}

SwigluForm checked_form(const char* op, double alpha, double beta, std::optional<double> limit,
                        bool interleaved) {
  constexpr double most = std::numeric_limits<float>::max();
  check(std::abs(alpha) <= most, op, ": alpha must be finite, got ", alpha);
  check(std::abs(beta) <= most, op, ": beta must be finite, got ", beta);
  check(!limit || *limit > 0, op, ": limit must be positive, got ", limit.value_or(0));
  SwigluForm form{static_cast<float>(alpha), static_cast<float>(beta)};
  if (limit && *limit <= most) form.limit = static_cast<float>(*limit);
  form.interleaved = interleaved;
  return form;
}

void check_group_quantize_swiglu(const Tensor& gate_up, const Tensor& offs, double amax_epsilon,
                                 bool rowwise, bool columnwise) {
  const char* op = "group_quantize_swiglu";
  check_swiglu(op, gate_up, offs);
  check_epsilon(op, amax_epsilon);
  check_layouts(op, rowwise, columnwise);
}

void check_group_quantize_swiglu_grad(const Tensor& dh, const Tensor& gate_up, const Tensor& offs,
                                      double amax_epsilon, bool rowwise, bool columnwise) {
  const char* op = "group_quantize_swiglu_grad";
  check_swiglu_grad(op, dh, gate_up, offs);
  check_epsilon(op, amax_epsilon);
  check_layouts(op, rowwise, columnwise);
}

void check_group_quantize_current(const Tensor& x, const Tensor& offs, ScalarType dtype,
                                  double amax_epsilon, bool rowwise, bool columnwise) {
  const char* op = "group_quantize_current";
  check_grouped_rows(op, x, offs, rowwise, columnwise);
  check_fp8(op, "dtype", dtype);
  check_epsilon(op, amax_epsilon);
}

void check_group_quantize_delayed(const std::optional<Tensor>& amax, const Tensor& x,
                                  const Tensor& offs, const Tensor& scale, ScalarType dtype,
                                  bool rowwise, bool columnwise) {
  const char* op = "group_quantize_delayed_";
  check_grouped_rows(op, x, offs, rowwise, columnwise);
  check_group_scale(op, "scale", scale, "x", x, offs.size(0));
  if (amax) check_amax(op, *amax, "x", x, "offs", offs.size(0));
  check_fp8(op, "dtype", dtype);
}

void check_quantize_weight_delayed(const std::optional<Tensor>& amax, const Tensor& w,
                                   const Tensor& scale) {
  const char* op = "quantize_weight_delayed_";
  check_weight(op, w);
  check_group_scale(op, "scale", scale, "w", w, w.size(0), "w");
  if (amax) check_amax(op, *amax, "w", w, "w", w.size(0));
}

void check_update_scales(const std::vector<Tensor>& scale, const std::vector<Tensor>& amax,
                         const std::vector<Tensor>& amax_history,
                         const std::vector<double>& fp8_max, int64_t margin) {
  const char* op = "update_scales_";
  const auto count = [op, &scale](const char* name, size_t size) {
    check_same(op, "the number of states", name, static_cast<int64_t>(size), "scale",
               static_cast<int64_t>(scale.size()));
  };
  check(!scale.empty(), op, ": scale must not be empty");
  count("amax", amax.size());
  count("amax_history", amax_history.size());
  count("fp8_max", fp8_max.size());
  check(margin >= 0 && margin <= kMaxMargin, op, ": margin must be between 0 and ", kMaxMargin,
        ", got ", margin);
  for (size_t i = 0; i < scale.size(); ++i) {
    check_dim(op, "scale", scale[i], 1);
    check_dtype(op, "scale", scale[i], ScalarType::Float);
    check_device(op, "scale", scale[i], "the first scale", scale[0]);
    check(scale[i].is_contiguous(), op, ": scale must be contiguous");
    check_amax(op, amax[i], "the first scale", scale[0], "scale", scale[i].size(0));
    check_dim(op, "amax_history", amax_history[i], 2);
    check_dtype(op, "amax_history", amax_history[i], ScalarType::Float);
    check_device(op, "amax_history", amax_history[i], "the first scale", scale[0]);
    check_same(op, "E", "amax_history", amax_history[i].size(1), "scale", scale[i].size(0));
    check(amax_history[i].size(0) > 0, op, ": amax_history must have a row, got none");
    check(amax_history[i].is_contiguous(), op, ": amax_history must be contiguous");
    check(fp8_max[i] > 0 && std::isfinite(fp8_max[i]), op,
          ": fp8_max must be positive and finite, got ", fp8_max[i]);
  }
}

void check_group_quantize_mx(const char* op, const Tensor& x, const Tensor& offs, bool rowwise,
                             bool columnwise) {
  check_grouped_rows(op, x, offs, rowwise, columnwise);
}

void check_group_dequantize(const Tensor& q, const Tensor& scale, const Tensor& offs,
                            ScalarType dtype) {
  const char* op = "group_dequantize";
  check_rowwise(op, "q", q, "scale", scale);
  check_offs(op, offs, "q", q);
  check_activation(op, "dtype", dtype);
}

void check_group_dequantize_t(const Tensor& q_t, const Tensor& scale_t, const Tensor& offs,
                              int64_t num_rows, ScalarType dtype) {
  const char* op = "group_dequantize_t";
  check_columnwise(op, "q_t", q_t, "scale_t", scale_t, "K");
  check_offs(op, offs, "q_t", q_t);
  check(num_rows >= 0, op, ": num_rows must not be negative, got ", num_rows);
  check_same(op, "the number of blocks", "q_t", q_t.size(0), "num_rows",
             padded_rows(num_rows, offs.size(0)) / kBlock);
  check_activation(op, "dtype", dtype);
}

void check_grouped_bias_grad(const Tensor& dy, const Tensor& offs) {
  const char* op = "grouped_bias_grad";
  check_dim(op, "dy", dy, 2);
  check_activation(op, "dy", dy.scalar_type());
  check_features(op, "N", dy.size(1));
  check_offs(op, offs, "dy", dy);
}

void check_quantize_weight(const char* op, const Tensor& w, double amax_epsilon) {
  check_weight(op, w);
  check_epsilon(op, amax_epsilon);
}

void check_quantize_weight_list(const std::vector<Tensor>& w, double amax_epsilon) {
  const char* op = "quantize_weight_list";
  check_experts(op, "w", w);
  check_activation(op, "w", w[0].scalar_type());
  check_features(op, "N", w[0].size(0));
  check_features(op, "K", w[0].size(1));
  check_epsilon(op, amax_epsilon);
}

void check_refresh_weight(const std::vector<Tensor>& w, const std::optional<Tensor>& refresh,
                          const Tensor& q, const Tensor& scale, const std::optional<Tensor>& q_t,
                          double amax_epsilon) {
  const char* op = "refresh_weight_";
  const auto [E, N, K] = check_refreshed(op, w, refresh);
  check_epsilon(op, amax_epsilon);
  check_written(op, "q", q, ScalarType::Float8_e4m3fn, {E, N, K}, w[0]);
  check_written(op, "scale", scale, ScalarType::Float,
                {E, ceil_div(N, kBlock), ceil_div(K, kBlock)}, w[0]);
  if (q_t) check_written(op, "q_t", *q_t, ScalarType::Float8_e4m3fn, {E, K, N}, w[0]);
}

void check_refresh_weight_current(const std::vector<Tensor>& w,
                                  const std::optional<Tensor>& refresh, const Tensor& q,
                                  const Tensor& scale, const std::optional<Tensor>& q_t,
                                  double amax_epsilon) {
  const char* op = "refresh_weight_current_";
  const auto [E, N, K] = check_refreshed(op, w, refresh);
  check_epsilon(op, amax_epsilon);
  check_written(op, "q", q, ScalarType::Float8_e4m3fn, {E, N, K}, w[0]);
  check_written(op, "scale", scale, ScalarType::Float, {E}, w[0]);
  if (q_t) check_written(op, "q_t", *q_t, ScalarType::Float8_e4m3fn, {E, K, N}, w[0]);
}

void check_refresh_weight_delayed(const std::optional<Tensor>& amax, const std::vector<Tensor>& w,
                                  const Tensor& state, const std::optional<Tensor>& refresh,
                                  const Tensor& q, const Tensor& scale,
                                  const std::optional<Tensor>& q_t) {
  const char* op = "refresh_weight_delayed_";
  const auto [E, N, K] = check_refreshed(op, w, refresh);
  check_group_scale(op, "state", state, "w", w[0], E, "w");
  if (amax) check_amax(op, *amax, "w", w[0], "w", E);
  check_written(op, "q", q, ScalarType::Float8_e4m3fn, {E, N, K}, w[0]);
  check_written(op, "scale", scale, ScalarType::Float, {E}, w[0]);
  if (q_t) check_written(op, "q_t", *q_t, ScalarType::Float8_e4m3fn, {E, K, N}, w[0]);
}

void check_refresh_weight_mx(const std::vector<Tensor>& w, const std::optional<Tensor>& refresh,
                             const Tensor& w_rowwise, const std::optional<Tensor>& w_columnwise) {
  const char* op = "refresh_weight_mx_";
  const auto [E, N, K] = check_refreshed(op, w, refresh);
  check_written(op, "w_rowwise", w_rowwise, ScalarType::BFloat16, {E, N, K}, w[0]);
  if (w_columnwise)
    check_written(op, "w_columnwise", *w_columnwise, ScalarType::BFloat16, {E, N, K}, w[0]);
}

void check_grouped_mm(const Tensor& a, const Tensor& b, const Tensor& offs,
                      const std::optional<Tensor>& bias, ScalarType out_dtype) {
  const char* op = "grouped_mm";
  check_dim(op, "a", a, 2);
  check_dim(op, "b", b, 3);
  check_activation(op, "a", a.scalar_type());
  check_dtype(op, "b", b, a.scalar_type());
  check_device(op, "b", b, "a", a);
  check_same(op, "K", "a", a.size(1), "b", b.size(2));
  check_features(op, "K", a.size(1));
  check_features(op, "N", b.size(1));
  check_offs(op, offs, "a", a);
  check_same(op, "E", "b", b.size(0), "offs", offs.size(0));
  check_activation(op, "out_dtype", out_dtype);
  check_bias(op, bias, a, offs.size(0), b.size(1), out_dtype);
}

void check_grouped_mm_list(const Tensor& a, const std::vector<Tensor>& b, const Tensor& offs,
                           const std::optional<Tensor>& bias, ScalarType out_dtype,
                           bool transpose_b) {
  const char* op = "grouped_mm_list";
  check_dim(op, "a", a, 2);
  check_activation(op, "a", a.scalar_type());
  check_experts(op, "b", b);
  check_dtype(op, "b", b[0], a.scalar_type());
  check_device(op, "b", b[0], "a", a);
  const int64_t K = b[0].size(transpose_b ? 0 : 1), N = b[0].size(transpose_b ? 1 : 0);
  check_same(op, "K", "a", a.size(1), "b", K);
  check_features(op, "K", K);
  check_features(op, "N", N);
  check_offs(op, offs, "a", a);
  check_same(op, "E", "b", static_cast<int64_t>(b.size()), "offs", offs.size(0));
  check_activation(op, "out_dtype", out_dtype);
  check_bias(op, bias, a, offs.size(0), N, out_dtype);
}

void check_grouped_scaled_mm(const Tensor& a, const Tensor& b, const Tensor& scale_a,
                             const Tensor& scale_b, const Tensor& offs,
                             const std::optional<Tensor>& bias, ScalarType out_dtype) {
  const char* op = "grouped_scaled_mm";
  const bool per_group = scale_a.dim() == 1;  // else per block
  if (per_group) {
    check_dim(op, "a", a, 2);
    check_fp8(op, "a", a.scalar_type());
    check_features(op, "K", a.size(1));
  } else {
    check_rowwise(op, "a", a, "scale_a", scale_a);
  }
  check_dim(op, "b", b, 3);
  check_dtype(op, "b", b, ScalarType::Float8_e4m3fn);
  check_device(op, "b", b, "a", a);
  check_same(op, "K", "a", a.size(1), "b", b.size(2));
  check_features(op, "N", b.size(1));
  if (!per_group) {
    check_dim(op, "scale_b", scale_b, 3);
    check_dtype(op, "scale_b", scale_b, ScalarType::Float);
    check_device(op, "scale_b", scale_b, "a", a);
    check_same(op, "E", "b", b.size(0), "scale_b", scale_b.size(0));
    check_same(op, "the number of N blocks", "b", ceil_div(b.size(1), kBlock), "scale_b",
               scale_b.size(1));
    check_same(op, "the number of K blocks", "b", ceil_div(b.size(2), kBlock), "scale_b",
               scale_b.size(2));
  }
  check_offs(op, offs, "a", a);
  check_same(op, "E", "b", b.size(0), "offs", offs.size(0));
  if (per_group) {
    check_group_scale(op, "scale_a", scale_a, "a", a, offs.size(0));
    check_group_scale(op, "scale_b", scale_b, "a", a, offs.size(0));
  }
  check_activation(op, "out_dtype", out_dtype);
  check_bias(op, bias, a, offs.size(0), b.size(1), out_dtype);
}

void check_grouped_mm_wgrad(const char* op, const Tensor& dy, const Tensor& x, const Tensor& offs,
                            ScalarType out_dtype) {
  check_dim(op, "dy", dy, 2);
  check_dim(op, "x", x, 2);
  check_activation(op, "dy", dy.scalar_type());
  check_dtype(op, "x", x, dy.scalar_type());
  check_device(op, "x", x, "dy", dy);
  check_same(op, "T", "dy", dy.size(0), "x", x.size(0));
  check_features(op, "N", dy.size(1));
  check_features(op, "K", x.size(1));
  check_offs(op, offs, "dy", dy);
  check_activation(op, "out_dtype", out_dtype);
}

void check_grouped_scaled_mm_wgrad(const char* op, const Tensor& dy_t, const Tensor& x_t,
                                   const Tensor& scale_dy_t, const Tensor& scale_x_t,
                                   const Tensor& offs, ScalarType out_dtype) {
  const bool per_group = scale_dy_t.dim() == 1;  // else per block
  if (per_group) {
    check_column_blocks(op, "dy_t", dy_t, "N");
    check_fp8(op, "dy_t", dy_t.scalar_type());
    check_column_blocks(op, "x_t", x_t, "K");
    check_dtype(op, "x_t", x_t, ScalarType::Float8_e4m3fn);
  } else {
    check_columnwise(op, "dy_t", dy_t, "scale_dy_t", scale_dy_t, "N");
    check_columnwise(op, "x_t", x_t, "scale_x_t", scale_x_t, "K");
  }
  check_device(op, "x_t", x_t, "dy_t", dy_t);
  check_same(op, "the number of blocks", "dy_t", dy_t.size(0), "x_t", x_t.size(0));
  check_offs(op, offs, "dy_t", dy_t);
  if (per_group) {
    check_group_scale(op, "scale_dy_t", scale_dy_t, "dy_t", dy_t, offs.size(0));
    check_group_scale(op, "scale_x_t", scale_x_t, "dy_t", dy_t, offs.size(0));
  }
  check_activation(op, "out_dtype", out_dtype);
}

void check_main_grad(const char* op, const Tensor& main_grad, const Tensor& dy, int64_t E,
                     int64_t N, int64_t K, const std::optional<Tensor>& overwrite) {
  check_dim(op, "main_grad", main_grad, 3);
  check_grad_dtype(op, main_grad.scalar_type());
  check_device(op, "main_grad", main_grad, "dy", dy);
  check_same(op, "E", "main_grad", main_grad.size(0), "offs", E);
  check_same(op, "N", "main_grad", main_grad.size(1), "dy", N);
  check_same(op, "K", "main_grad", main_grad.size(2), "x", K);
  check(main_grad.is_contiguous(), op, ": main_grad must be contiguous, got strides ",
        main_grad.stride(0), ", ", main_grad.stride(1), ", ", main_grad.stride(2));
  check_overwrite(op, overwrite, main_grad);
}

void check_main_grad_list(const char* op, const std::vector<Tensor>& main_grad, const Tensor& dy,
                          int64_t E, int64_t N, int64_t K, const std::optional<Tensor>& overwrite) {
  check_experts(op, "main_grad", main_grad);
  const Tensor& first = main_grad[0];
  check_grad_dtype(op, first.scalar_type());
  check_device(op, "main_grad", first, "dy", dy);
  check_same(op, "E", "main_grad", static_cast<int64_t>(main_grad.size()), "offs", E);
  check_same(op, "N", "main_grad", first.size(0), "dy", N);
  check_same(op, "K", "main_grad", first.size(1), "x", K);
  for (const Tensor& expert : main_grad)
    check(expert.is_contiguous(), op, ": main_grad must be contiguous, got strides ",
          expert.stride(0), ", ", expert.stride(1));
  check_overwrite(op, overwrite, first);
}

// The ops inside check the rest, each in its name: a device's kernels must not meet another's tensors.
void check_block_scaled_linear(const Tensor& x, const Tensor& w, const Tensor& m_splits,
                               const std::optional<Tensor>& bias) {
  const char* op = "block_scaled_linear";
  check_dim(op, "x", x, 2);
  check_device(op, "w", w, "x", x);
  check_device(op, "m_splits", m_splits, "x", x);
  if (bias) check_device(op, "bias", *bias, "x", x);
}

void check_block_scaled_linear_grad(const Tensor& dy, const Tensor& offs,
                                    const std::optional<Tensor>& x_t,
                                    const std::optional<Tensor>& scale_x_t,
                                    const std::optional<Tensor>& w_t,
                                    const std::optional<Tensor>& scale_w) {
  const char* op = "block_scaled_linear_grad";
  check(!x_t || scale_x_t, op, ": x_t needs scale_x_t, got none");
  check(!w_t || scale_w, op, ": w_t needs scale_w, got none");
  check_device(op, "offs", offs, "dy", dy);
  if (x_t) check_device(op, "x_t", *x_t, "dy", dy);
  if (scale_x_t) check_device(op, "scale_x_t", *scale_x_t, "dy", dy);
  if (w_t) check_device(op, "w_t", *w_t, "dy", dy);
  if (scale_w) check_device(op, "scale_w", *scale_w, "dy", dy);
  if (scale_w) check_dim(op, "scale_w", *scale_w, 3);
}

}  // namespace grouped_linear
