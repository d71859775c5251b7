// SPDX-License-Identifier: Apache-2.0
#include "checks/rules.h"

#include <limits>
#include <string>

namespace grouped_linear {
namespace {

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

}  // namespace

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
  const int64_t actual = t.dim();
  // An undefined tensor, which None becomes, has one dimension, and no dtype that could be asked.
  check(actual != 1 || t.defined(), op, ": ", name, " must be ", dim, "-D, got None");
  check(actual == dim, op, ": ", name, " must be ", dim, "-D, got ", actual, "-D");
}

void check_same(const char* op, const char* what, const char* a_name, int64_t a, const char* b_name,
                int64_t b) {
  check(a == b, op, ": ", what, " differs: ", a_name, " has ", a, ", ", b_name, " has ", b);
}

void check_features(const char* op, const char* what, int64_t size) {
  check(size > 0 && size % kFeatureMultiple == 0, op, ": ", what,
        " must be a positive multiple of ", kFeatureMultiple, ", got ", size);
  check(size <= kMaxFeatures, op, ": ", what, " must be at most ", kMaxFeatures, ", got ", size);
}

void check_count(const char* op, const char* name, const char* what, int64_t count) {
  check(count <= kMaxCount, op, ": ", name, " must have at most ", kMaxCount, " ", what, ", got ",
        count);
}

void check_groups(const char* op, int64_t E) {
  check(E >= 1 && E <= kMaxGroups, op, ": E must be between 1 and ", kMaxGroups, ", got ", E);
}

void check_device(const char* op, const char* name, const Tensor& t, const char* first_name,
                  const Tensor& first) {
  const torch::stable::Device actual = t.device(), expected = first.device();
  check(actual == expected, op, ": ", name, " is on ", NameOf{actual}, ", ", first_name, " is on ",
        NameOf{expected});
}

void check_tensor(const char* op, const char* name, const Tensor& t, int64_t dim, ScalarType dtype,
                  const char* first_name, const Tensor& first) {
  check_dim(op, name, t, dim);
  check_dtype(op, name, t, dtype);
  check_device(op, name, t, first_name, first);
}

void check_offs(const char* op, const Tensor& offs, const char* first_name, const Tensor& first) {
  check_tensor(op, "offs", offs, 1, ScalarType::Int, first_name, first);
  check_groups(op, offs.size(0));
  check_count(op, first_name, "rows", first.size(0));
}

void check_integer(const char* op, const char* name, ScalarType dtype) {
  check(dtype == ScalarType::Int || dtype == ScalarType::Long, op, ": ", name,
        " must be int32 or int64, got ", name_of(dtype));
}

void check_rows(const char* op, const Tensor& rows, int64_t dim, const char* first_name,
                const Tensor& first, const char* name) {
  check_dim(op, name, rows, dim);
  check_integer(op, name, rows.scalar_type());
  check_device(op, name, rows, first_name, first);
  check_count(op, name, "rows", rows.size(0));
  if (dim == 2) check_count(op, name, "columns", rows.size(1));
}

void check_epsilon(const char* op, double amax_epsilon) {
  check(amax_epsilon >= 0 && amax_epsilon <= std::numeric_limits<float>::max(), op,
        ": amax_epsilon must be finite and not negative, got ", amax_epsilon);
}

void check_group_scale(const char* op, const char* name, const Tensor& scale,
                       const char* first_name, const Tensor& first, int64_t E, const char* owner) {
  check_tensor(op, name, scale, 1, ScalarType::Float, first_name, first);
  check_same(op, "E", name, scale.size(0), owner, E);
}

void check_amax(const char* op, const Tensor& amax, const char* first_name, const Tensor& first,
                const char* owner, int64_t E) {
  check_group_scale(op, "amax", amax, first_name, first, E, owner);
  check(amax.is_contiguous(), op, ": amax must be contiguous");
}

void check_weight_shape(const char* op, const char* name, const Tensor& w) {
  check_groups(op, w.size(0));
  check_features(op, "N", w.size(1));
  check_features(op, "K", w.size(2));
  check_count(op, name, "rows in all", w.size(0) * w.size(1));
}

void check_weight(const char* op, const Tensor& w) {
  check_dim(op, "w", w, 3);
  check_activation(op, "w", w.scalar_type());
  check_weight_shape(op, "w", w);
}

void check_experts(const char* op, const char* name, const std::vector<Tensor>& experts) {
  const std::string first_name = std::string("the first ") + name;
  check_groups(op, static_cast<int64_t>(experts.size()));
  const Tensor& first = experts[0];
  check_dim(op, name, first, 2);
  for (const Tensor& expert : experts) {
    check_tensor(op, name, expert, 2, first.scalar_type(), first_name.c_str(), first);
    check_same(op, "N", name, expert.size(0), first_name.c_str(), first.size(0));
    check_same(op, "K", name, expert.size(1), first_name.c_str(), first.size(1));
  }
}

void check_weight_list(const char* op, const std::vector<Tensor>& w) {
  check_experts(op, "w", w);
  check_activation(op, "w", w[0].scalar_type());
  check_features(op, "N", w[0].size(0));
  check_features(op, "K", w[0].size(1));
  check_count(op, "w", "rows in all", static_cast<int64_t>(w.size()) * w[0].size(0));
}

void check_written(const char* op, const char* name, const Tensor& t, ScalarType dtype,
                   const Shape& shape, const Tensor& first, const char* first_name) {
  check_tensor(op, name, t, shape.dim(), dtype, first_name, first);
  const Shape actual = Shape::of(t);
  check(actual == shape, op, ": ", name, " must be ", Sizes{shape}, ", got ", Sizes{actual});
  check(t.is_contiguous(), op, ": ", name, " must be contiguous");
}

void check_column_blocks(const char* op, const char* name, const Tensor& q_t,
                         const char* features) {
  check_dim(op, name, q_t, 3);
  check(q_t.size(2) == kBlock, op, ": ", name, " must hold blocks of ", kBlock, " rows, got ",
        q_t.size(2));
  check_features(op, features, q_t.size(1));
  check_count(op, name, "rows in blocks", q_t.size(0) * kBlock);
}

void check_columnwise(const char* op, const char* name, const Tensor& q_t, const char* scale_name,
                      const Tensor& scale_t, const char* features) {
  check_column_blocks(op, name, q_t, features);
  check_dtype(op, name, q_t, ScalarType::Float8_e4m3fn);
  check_tensor(op, scale_name, scale_t, 2, ScalarType::Float, name, q_t);
  check_same(op, "the number of blocks", name, q_t.size(0), scale_name, scale_t.size(0));
  check_same(op, features, name, q_t.size(1), scale_name, scale_t.size(1));
}

void check_rowwise(const char* op, const char* name, const Tensor& q, const char* scale_name,
                   const Tensor& scale) {
  check_dim(op, name, q, 2);
  check_dtype(op, name, q, ScalarType::Float8_e4m3fn);
  check_features(op, "K", q.size(1));
  check_tensor(op, scale_name, scale, 2, ScalarType::Float, name, q);
  check_same(op, "the number of K blocks", name, ceil_div(q.size(1), kBlock), scale_name,
             scale.size(0));
  check_same(op, "the number of scale rows", name, round_up(q.size(0), kScaleRowMultiple),
             scale_name, scale.size(1));
}

}  // namespace grouped_linear
