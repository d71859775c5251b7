// Rows of tensors: conversion between float32 and the tensors' dtypes, and the rows of each group.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "layout.h"
#include "tensors.h"

// One copy of a loop for each vector width, chosen when the library is loaded. All do the same
// arithmetic in the same order (the build forbids FMA contraction), so they agree bit for bit.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define GROUPED_LINEAR_EVERY_WIDTH \
  __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define GROUPED_LINEAR_EVERY_WIDTH
#endif

#define GROUPED_LINEAR_INLINE inline __attribute__((always_inline))  // into every width

namespace grouped_linear::cpu {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Deals vectors 0 .. 7 and 8 .. 15 like a pack of cards, element by element.
template <typename Vector>
GROUPED_LINEAR_INLINE void deal(const Vector (&from)[16], Vector (&to)[16]) {
  for (int i = 0; i < 8; ++i) {
    const Vector a = from[i], b = from[i + 8];
    to[2 * i] =
        __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    to[2 * i + 1] =
        __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  }
}

// Turns 16 vectors of 16 elements over: dealt four times, the elements of a column are in one.
template <typename Vector>
GROUPED_LINEAR_INLINE void turn_over(Vector (&rows)[16]) {
  Vector dealt[16];
  deal(rows, dealt);
  deal(dealt, rows);
  deal(rows, dealt);
  deal(dealt, rows);
}

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
// Memory that is new takes five times as long to touch, 4 KiB a page fault, as to fill; so huge pages
// are asked for where at least one fits. The C library maps anew what is past 32 MiB with its header
// and alignment in every call, and less at first and while earlier outputs are kept.
Tensor new_output(const Tensor& like, const Shape& shape, ScalarType dtype);

void zero_rows(const Tensor& t, int64_t begin);

// The elements of an int32 or int64 tensor.
std::vector<int64_t> row_numbers(const Tensor& rows);

}  // namespace grouped_linear::cpu
