// SPDX-License-Identifier: Apache-2.0
// Rows of tensors: conversion between float32 and the tensors' dtypes, and the rows of each group.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "layout.h"
#include "tensors.h"

// Compiles a loop once for each vector width; the loader picks one. All do the same arithmetic in
// the same order (the build forbids FMA contraction), so they agree bit for bit.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define GROUPED_LINEAR_EVERY_WIDTH \
  __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define GROUPED_LINEAR_EVERY_WIDTH
#endif

// Inlines into each of these copies.
#define GROUPED_LINEAR_INLINE inline __attribute__((always_inline))

namespace grouped_linear::cpu {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// n elements of a dtype to float32, and back (nearest even).
void load_row(const void* row, ScalarType dtype, int64_t n, float* values);
void store_row(const float* values, int64_t n, ScalarType dtype, void* row);

// values[i] = q[i] * scales[i / 128 * scale_stride] for n elements of e4m3.
void dequantize_row(const void* q, int64_t n, const float* scales, int64_t scale_stride,
                    float* values);

int64_t element_size(ScalarType dtype);

inline char* row_of(const Tensor& t, int64_t row) {
  return static_cast<char*>(t.data_ptr()) +
         row * t.stride(0) * static_cast<int64_t>(t.element_size());
}

// At most kBlock rows of one group: the rows [begin, end), block `index` of the padded layout.
struct RowBlock {
  int64_t group, begin, end, index;
};

// The rows [starts[e], starts[e + 1]) of every group e, checked against the tensor's rows.
std::vector<int64_t> group_starts(const char* op, const Tensor& offs, int64_t rows);
std::vector<RowBlock> row_blocks(const std::vector<int64_t>& starts);

// An output for an op to fill, with the device of `like`.
//
// New memory takes five times as long to fault in, 4 KiB a page fault, as to fill. So the output
// asks for huge pages if at least one fits. The C library maps new memory in every call for more
// than 32 MiB (header and alignment included), and for less in the first calls and while earlier
// outputs are kept.
Tensor new_output(const Tensor& like, const Shape& shape, ScalarType dtype);

void zero_rows(const Tensor& t, int64_t begin);

// The elements of an int32 or int64 tensor.
std::vector<int64_t> row_numbers(const Tensor& rows);

// The first `count` of them, checked against the `limit` rows of the tensor `owner`.
std::vector<int64_t> checked_rows(const char* op, const Tensor& rows, int64_t count,
                                  const char* owner, int64_t limit, const char* name = "rows");

// The numbered rows of t, whose rows are dense, one after another.
Tensor gathered_rows(const Tensor& t, const std::vector<int64_t>& numbers);

}  // namespace grouped_linear::cpu
