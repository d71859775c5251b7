// SPDX-License-Identifier: Apache-2.0
// A step of Adam over a master weight and its FP8 numbers, tile by tile: 128 x 128 numbers share a
// scale, which follows from all of them.

#include <algorithm>

#include "adam_math.h"
#include "checks.h"
#include "cpu/fp8.h"
#include "cpu/tiles.h"
#include "ops.h"

namespace grouped_linear::cpu {
namespace {

struct Row {
  alignas(kCacheLine) float w[kBlock], grad[kBlock], exp_avg[kBlock], exp_avg_sq[kBlock];
  alignas(kCacheLine) float max_exp_avg_sq[kBlock];
};

void update_row(const AdamStep& step, bool amsgrad, int64_t n, Row& row, float* w) {
  for (int64_t c = 0; c < n; ++c)
    w[c] = step.update(row.w[c], row.grad[c], row.exp_avg[c], row.exp_avg_sq[c],
                       amsgrad ? row.max_exp_avg_sq + c : nullptr);
}

GROUPED_LINEAR_EVERY_WIDTH void encode(const float* w, int64_t n, float factor, uint8_t* codes) {
  for (int64_t c = 0; c < n; ++c) codes[c] = static_cast<uint8_t>(quantize<E4m3>(w[c], factor));
}

float value_of(const Tensor& t) { return *t.const_data_ptr<float>(); }

}  // namespace

void adam_weight_(const Tensor& q, const Tensor& scale, const std::optional<Tensor>& q_t,
                  const Tensor& master, const Tensor& grad, const Tensor& exp_avg,
                  const Tensor& exp_avg_sq, const std::optional<Tensor>& max_exp_avg_sq,
                  const Tensor& step_in, const std::optional<Tensor>& lr_tensor,
                  const std::optional<Tensor>& grad_scale, const std::optional<Tensor>& found_inf,
                  double lr, double beta1, double beta2, double weight_decay, double eps,
                  bool decoupled_weight_decay, bool maximize, double amax_epsilon,
                  bool power_of_two_scales, std::optional<int64_t> mxfp4_dim) {
  check_adam_weight(q, scale, q_t, master, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, step_in,
                    lr_tensor, grad_scale, found_inf, lr, beta1, beta2, weight_decay, eps,
                    amax_epsilon, mxfp4_dim);
  if (found_inf && value_of(*found_inf) != 0) return;

  const AdamOptions options{lr, beta1, beta2, weight_decay, eps, decoupled_weight_decay, maximize};
  const AdamStep step(options, lr_tensor ? value_of(*lr_tensor) : lr, value_of(step_in));
  const ScaleRule rule{static_cast<float>(amax_epsilon), power_of_two_scales};
  const int64_t E = q.size(0), N = q.size(1), K = q.size(2);
  const int64_t row_blocks = ceil_div(N, kBlock), col_blocks = ceil_div(K, kBlock);
  const ScalarType dtype = grad.scalar_type();
  const int64_t element = element_size(dtype);
  const auto at = [element](const Tensor& t, int64_t i) {
    return static_cast<char*>(t.data_ptr()) + i * element;
  };
  auto* codes = static_cast<uint8_t*>(q.data_ptr());
  auto* codes_t = pointer_if<uint8_t>(q_t);
  auto* scales = static_cast<float*>(scale.data_ptr());

  torch::stable::parallel_for(0, E * row_blocks * col_blocks, 1, [&](int64_t begin, int64_t end) {
    Row row;
    std::vector<float> w(kBlock * kBlock);
    ByteTile bytes;
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t e = tile / (row_blocks * col_blocks);
      const int64_t n = tile / col_blocks % row_blocks * kBlock, k = tile % col_blocks * kBlock;
      const int64_t rows = std::min(kBlock, N - n), cols = std::min(kBlock, K - k);
      const int64_t first = (e * N + n) * K + k;
      float amax = 0;
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t i = first + r * K;
        float* w_row = &w[r * kBlock];
        load_row(at(master, i), dtype, cols, row.w);
        load_row(at(grad, i), dtype, cols, row.grad);
        load_row(at(exp_avg, i), dtype, cols, row.exp_avg);
        load_row(at(exp_avg_sq, i), dtype, cols, row.exp_avg_sq);
        if (max_exp_avg_sq) load_row(at(*max_exp_avg_sq, i), dtype, cols, row.max_exp_avg_sq);
        if (grad_scale) {
          const float divisor = value_of(*grad_scale);
          for (int64_t c = 0; c < cols; ++c) row.grad[c] = step.unscaled(row.grad[c], divisor);
          store_row(row.grad, cols, dtype, at(grad, i));
        }
        update_row(step, max_exp_avg_sq.has_value(), cols, row, w_row);
        store_row(w_row, cols, dtype, at(master, i));
        load_row(at(master, i), dtype, cols, w_row);
        store_row(row.exp_avg, cols, dtype, at(exp_avg, i));
        store_row(row.exp_avg_sq, cols, dtype, at(exp_avg_sq, i));
        if (max_exp_avg_sq) store_row(row.max_exp_avg_sq, cols, dtype, at(*max_exp_avg_sq, i));
        amax = std::max(amax, finite_amax(w_row, ScalarType::Float, cols));
      }

      if (mxfp4_dim) {
        scales[tile] = encode_mxfp4(w.data(), rows, cols, *mxfp4_dim, bytes);
      } else {
        const BlockScale block = block_scale(amax, rule);
        scales[tile] = block.scale;
        for (int64_t r = 0; r < rows; ++r)
          encode(&w[r * kBlock], cols, block.factor, bytes.bytes[r]);
      }
      bytes.store({codes + first, K}, rows, cols);
      if (codes_t) bytes.store_transposed({codes_t + (e * K + k) * N + n, N}, rows, rows, cols);
    }
  });
}

}  // namespace grouped_linear::cpu
