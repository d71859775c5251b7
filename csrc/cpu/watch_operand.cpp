// SPDX-License-Identifier: Apache-2.0
// What quantization does to some rows of each group: see watch.h for what is counted.

#include <cmath>

#include "checks.h"
#include "cpu/fp8.h"
#include "cpu/swiglu.h"
#include "ops.h"
#include "watch.h"

namespace grouped_linear::cpu {
namespace {

// n elements of any dtype that an operand may have.
void load_numbers(const char* row, ScalarType dtype, int64_t n, float* values) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(row);
  switch (dtype) {
    case E4m3::kType:
      for (int64_t c = 0; c < n; ++c) values[c] = from_e4m3(bytes[c]);
      return;
    case E5m2::kType:  // the upper half of a float16
      for (int64_t c = 0; c < n; ++c) values[c] = from_half(static_cast<uint16_t>(bytes[c] << 8));
      return;
    default: return load_row(row, dtype, n, values);
  }
}

// A tensor of rows, which may be chosen by their numbers.
struct Rows {
  explicit Rows(const std::optional<Tensor>& given) {
    if (!given) return;
    t = with_dense_rows(*given);
    dtype = t->scalar_type();
  }
  explicit operator bool() const { return t.has_value(); }
  // Row r of a matrix, or row r % N of expert r / N.
  const char* at(int64_t r) const {
    const int64_t item = static_cast<int64_t>(t->element_size());
    const auto* first = static_cast<const char*>(t->data_ptr());
    if (t->dim() == 2) return first + r * t->stride(0) * item;
    const int64_t N = t->size(1);
    return first + (r / N * t->stride(0) + r % N * t->stride(1)) * item;
  }

  std::optional<Tensor> t;
  ScalarType dtype = ScalarType::Float;
};

// The gradient by a row of gate_up, rounded to its dtype.
struct SwigluGradRow {
  const SwigluForm& form;
  ScalarType dtype;
  int64_t F;

  void operator()(const char* dh, const char* gate_up, float weight, float* values) const {
    std::vector<float> d(F), both(2 * F);
    load_row(dh, dtype, F, d.data());
    load_row(gate_up, dtype, 2 * F, both.data());
    for (int64_t c = 0; c < F; ++c) {
      const int64_t g = form.interleaved ? 2 * c : c, u = form.interleaved ? g + 1 : F + c;
      const float gate = both[g], up = both[u], gradient = weight * d[c];
      values[g] = swiglu_grad_gate(form, gate, up, gradient);
      values[u] = swiglu_grad_up(form, gate, up, gradient);
    }
    std::vector<char> rounded(2 * F * element_size(dtype));
    store_row(values, 2 * F, dtype, rounded.data());
    load_row(rounded.data(), dtype, 2 * F, values);
  }
};

struct Counts {
  double of[kWatchColumns] = {};

  // n numbers before and after quantization; null for what there is not. scales[c / 128] as in
  // dequantize_row, of which q / scale was saturated.
  void add(const float* x, const float* q, const float* scales, int64_t scale_stride,
           const Fp8Range* range, int64_t n) {
    of[kNumbers] += static_cast<double>(n);
    for (int64_t c = 0; c < n; ++c) {
      const float scale = scales ? scales[c / kBlock * scale_stride] : 1.0f;
      const float after = q ? q[c] * scale : x[c], before = x ? x[c] : after;
      if (!std::isfinite(before) || !std::isfinite(after)) {
        of[kNonFinite] += 1;
        continue;
      }
      const double size = std::abs(static_cast<double>(before));
      of[kAmax] = std::max(of[kAmax], size);
      if (!x || !q) continue;
      of[kCompared] += 1;
      of[kUnderflow] += before != 0 && after == 0;
      of[kSaturated] += range && std::abs(before) > range->beyond * scale;
      const double off = static_cast<double>(after) - before;
      of[kError] += off * off;
      of[kSquare] += size * size;
    }
  }
  void add_to(double* stats) const {
    for (int i = 0; i < kWatchColumns; ++i) {
      const bool is_max = i == kAmax || i == kScaledAmax;
      stats[i] = is_max ? std::max(stats[i], of[i]) : stats[i] + of[i];
    }
  }
};

}  // namespace

void watch_operand_(const Tensor& stats, const Tensor& turn, int64_t operand,
                    const std::optional<Tensor>& x_in, const std::optional<Tensor>& q_in,
                    const std::optional<Tensor>& scale, const std::optional<Tensor>& offs,
                    const std::optional<Tensor>& rows, const std::optional<Tensor>& q_rows,
                    const std::optional<Tensor>& gate_up_in, const std::optional<Tensor>& weight_in,
                    const std::optional<Tensor>& scale_t_in, const std::optional<Tensor>& routed_in,
                    int64_t most, double alpha, double beta, std::optional<double> limit,
                    bool interleaved, double cubic) {
  const char* op = "watch_operand_";
  const auto [T, N, K] =
      check_watch_operand(stats, turn, operand, x_in, q_in, scale, offs, rows, q_rows, gate_up_in,
                          weight_in, scale_t_in, routed_in, most);
  const SwigluForm form = checked_form(op, alpha, beta, limit, interleaved, cubic);
  const int64_t parts = stats.size(1), E = stats.size(2);
  const bool of_weight = !offs;
  std::vector<int64_t> starts;
  if (of_weight)
    for (int64_t e = 0; e <= E; ++e) starts.push_back(e * N);
  else
    starts = group_starts(op, *offs, T);
  const int now = *turn.const_data_ptr<int32_t>();
  if (now == 0) return;

  const Rows x(x_in), q(q_in), gate_up(gate_up_in);
  std::vector<int64_t> x_numbers, q_numbers;
  if (rows) x_numbers = checked_rows(op, *rows, starts.back(), "x", x.t->size(0));
  if (q_rows) q_numbers = checked_rows(op, *q_rows, starts.back(), "q", q.t->size(0), "q_rows");
  const auto numbered = [](const std::vector<int64_t>& numbers, int64_t r) {
    return numbers.empty() ? r : numbers[r];
  };
  std::optional<Tensor> scales, weight, scale_t, routed;
  if (scale) scales = as_dense(*scale);
  if (weight_in) weight = as_dense(*weight_in);
  if (scale_t_in) scale_t = as_dense(*scale_t_in);
  if (routed_in) routed = as_dense(*routed_in);
  const float* scale_data = scales ? scales->const_data_ptr<float>() : nullptr;
  const Fp8Range* range = q && q.dtype == E4m3::kType   ? &kE4m3Range
                          : q && q.dtype == E5m2::kType ? &kE5m2Range
                                                        : nullptr;
  const int64_t scale_dim = scale ? scale->dim() : 0;
  std::vector<int64_t> first_block(E + 1);
  for (int64_t e = 0; e < E; ++e)
    first_block[e + 1] = first_block[e] + ceil_div(starts[e + 1] - starts[e], kBlock);
  // The scale of row r of group e in k-block 0, and the step to the next k-block.
  const auto scales_of = [&](int64_t e, int64_t r) -> std::pair<const float*, int64_t> {
    if (!scale_data) return {nullptr, 0};
    if (scale_dim == 1) return {scale_data + e, 0};
    if (scale_dim == 2) return {scale_data + numbered(q_numbers, r), scales->size(1)};
    const int64_t block = e * scales->size(1) + (r - starts[e]) / kBlock;
    return {scale_data + block * scales->size(2), 1};
  };

  // Whether these rows of q have a number other than 0 in columns from .. to - 1. Zeros have scale 1.
  const auto has_number = [&](int64_t r, int64_t row_end, int64_t from, int64_t to) {
    for (; r < row_end; ++r) {
      const char* row = q.at(numbered(q_numbers, r));
      if (std::any_of(row + from, row + to, [](char byte) { return byte & 0x7f; })) return true;
    }
    return false;
  };
  const auto stats_of = [&](int64_t of, int64_t part, int64_t e) {
    return static_cast<double*>(stats.data_ptr()) +
           ((of * parts + part) * E + e) * int64_t{kWatchColumns};
  };

  torch::stable::parallel_for(0, E, 1, [&](int64_t from, int64_t to) {
    std::vector<float> before(K), after(K);
    std::vector<char> h(K * sizeof(float));
    for (int64_t e = from; e < to; ++e) {
      const int64_t begin = starts[e], n = starts[e + 1] - begin;
      std::vector<Counts> of_parts(parts);
      of_parts[0].of[kCalls] = x || q || gate_up;
      of_parts[0].of[kRows] = x || q || gate_up ? static_cast<double>(n) : 0;
      const int count = x || q || gate_up ? watched_of(static_cast<int>(n), most) : 0;
      for (int i = 0; i < count; ++i) {
        const int64_t r = begin + nth_of(i, count, static_cast<int>(n), now);
        if (gate_up && x) {
          const float weight_r = weight->const_data_ptr<float>()[r];
          SwigluGradRow{form, x.dtype, K / 2}(x.at(r), gate_up.at(r), weight_r, before.data());
        } else if (gate_up) {
          swiglu_row(form, gate_up.at(r), gate_up.dtype, K, 0, K, h.data());
          load_row(h.data(), gate_up.dtype, K, before.data());
        } else if (x) {
          load_row(x.at(numbered(x_numbers, r)), x.dtype, K, before.data());
        }
        if (q) load_numbers(q.at(numbered(q_numbers, r)), q.dtype, K, after.data());
        const auto [row_scales, step] = scales_of(e, r);
        Counts& counts = of_parts[i % parts];
        counts.add(x || gate_up ? before.data() : nullptr, q ? after.data() : nullptr, row_scales,
                   step, range, K);
      }
      const int rows_now = static_cast<int>(n);
      const int row_step = of_weight ? static_cast<int>(kBlock) : 1;  // blocks share their scale
      const int all = (rows_now + row_step - 1) / row_step;
      const int scale_rows = watched_of(all, kBlock * most);
      if (scale_data && range)
        for (int i = 0; i < scale_rows; ++i) {
          const int64_t r = begin + nth_of(i, scale_rows, all, now) * row_step;
          const auto [row_scales, step] = scales_of(e, r);
          double& largest = of_parts[i / kScaleRowsAtOnce % parts].of[kScaledAmax];
          const int64_t row_end = std::min(r + row_step, begin + n);
          const int64_t width = scale_dim == 1 ? K : kBlock;
          for (int64_t b = 0; b < ceil_div(K, width); ++b) {
            const float one = row_scales[b * step];
            if (one == 1.0f && !has_number(r, row_end, b * width, std::min((b + 1) * width, K)))
              continue;
            largest = std::max(largest, double{one} * range->largest);
          }
        }
      if (scale_t) {
        const int64_t all_blocks = scale_t->size(0), K_t = scale_t->size(1);
        const int64_t end = std::min(first_block[e + 1], all_blocks);
        const int blocks = static_cast<int>(end - std::min(first_block[e], all_blocks));
        const int read = watched_of(blocks, most);
        for (int i = 0; i < read; ++i) {
          const int64_t block = first_block[e] + nth_of(i, read, blocks, now);
          const float* of_block = scale_t->const_data_ptr<float>() + block * K_t;
          double* sums = stats_of(operand, i % parts, e);
          for (int64_t k = 0; k < K_t; k += kBlock) {
            const float* first = of_block + k;
            const auto same = [first](float s) { return s == *first; };
            sums[kBlocks] += 1;
            sums[kShared] += std::all_of(first, first + std::min(kBlock, K_t - k), same);
          }
        }
      }
      if (routed) {
        const auto* ends = routed->const_data_ptr<int32_t>();
        const int64_t chosen = int64_t{ends[e]} - (e == 0 ? 0 : ends[e - 1]);
        of_parts[0].of[kDropped] = static_cast<double>(std::max<int64_t>(chosen - n, 0));
      }
      for (int64_t part = 0; part < parts; ++part)
        of_parts[part].add_to(stats_of(operand, part, e));
    }
  });
}

}  // namespace grouped_linear::cpu
