// Block-scaled FP8 products: operands are dequantized to float32 a group at a time, so the sum over K
// is in float32 throughout. That is what promoting every 128 of K is for on a GPU.

#include "../checks.h"
#include "../ops.h"
#include "matmul.h"

namespace grouped_linear::cpu {
namespace {

// Rows [begin, end) of q [T, K] with scale [ceil(K / 128), >= T].
Scratch dequantize_rows(const Tensor& q, const Tensor& scale, int64_t begin, int64_t end) {
  Scratch x = to_float(rows_of(q, begin, end));
  const int64_t K = q.size(1);
  torch::stable::parallel_for(0, end - begin, 16, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r)
      for (int64_t k = 0; k < K; k += kBlock) {
        const float s = reinterpret_cast<const float*>(row_of(scale, k / kBlock))[begin + r];
        for (int64_t i = k; i < std::min(k + kBlock, K); ++i) x.row(r)[i] *= s;
      }
  });
  return x;
}

// Expert e of q [E, N, K] with scale [E, ceil(N / 128), ceil(K / 128)] of any strides.
Scratch dequantize_weight(const Tensor& q, const Tensor& scale, int64_t e) {
  Scratch w = to_float(group_of(q, e));
  const int64_t N = q.size(1), K = q.size(2);
  const float* scales = scale.const_data_ptr<float>() + e * scale.stride(0);
  torch::stable::parallel_for(0, N, 16, [&](int64_t first, int64_t last) {
    for (int64_t n = first; n < last; ++n)
      for (int64_t k = 0; k < K; k += kBlock) {
        const float s = scales[n / kBlock * scale.stride(1) + k / kBlock * scale.stride(2)];
        for (int64_t i = k; i < std::min(k + kBlock, K); ++i) w.row(n)[i] *= s;
      }
  });
  return w;
}

// Blocks [begin, end) of q_t [blocks, K, 128] with scale_t [blocks, K] -> [K, 128 * (end - begin)].
Scratch dequantize_columns(const Tensor& q_t, const Tensor& scale_t, int64_t begin, int64_t end) {
  const int64_t K = q_t.size(1);
  Scratch x_t(K, (end - begin) * kBlock);
  torch::stable::parallel_for(0, K, 16, [&](int64_t first, int64_t last) {
    for (int64_t b = begin; b < end; ++b) {
      const auto* scales = reinterpret_cast<const float*>(row_of(scale_t, b));
      for (int64_t k = first; k < last; ++k) {
        float* column = x_t.row(k) + (b - begin) * kBlock;
        load_row(row_of(q_t, b) + k * kBlock, ScalarType::Float8_e4m3fn, kBlock, column);
        for (int64_t i = 0; i < kBlock; ++i) column[i] *= scales[k];
      }
    }
  });
  return x_t;
}

// out = a @ b + bias in float32, rounded once to out's dtype.
void matmul_and_store(const Matrix& out, const Matrix& a, const Matrix& b, const float* bias) {
  if (out.dtype == ScalarType::Float && !bias) return matmul(out, a, b);
  Scratch y(out.rows, out.cols);
  matmul(y.view(), a, b);
  store(y, bias, out);
}

// The first block of every group in the padded layout, and the number of blocks.
std::vector<int64_t> block_starts(const char* op, const Tensor& offs, int64_t blocks) {
  const auto starts = group_starts(op, offs, blocks * kBlock);
  std::vector<int64_t> firsts{0};
  for (size_t e = 0; e + 1 < starts.size(); ++e)
    firsts.push_back(firsts.back() + ceil_div(starts[e + 1] - starts[e], kBlock));
  check(firsts.back() <= blocks, op, ": offs need ", firsts.back(), " blocks of ", kBlock,
        " rows, dy_t has ", blocks);
  return firsts;
}

void wgrad(const Matrix& dw, const Tensor& dy_t, const Tensor& x_t, const Tensor& scale_dy_t,
           const Tensor& scale_x_t, int64_t begin, int64_t end) {
  Scratch dy = dequantize_columns(dy_t, scale_dy_t, begin, end);
  Scratch x = dequantize_columns(x_t, scale_x_t, begin, end);
  matmul_and_store(dw, dy.view(), x.view().transposed(), nullptr);
}

}  // namespace

Tensor grouped_scaled_mm(const Tensor& a_in, const Tensor& b_in, const Tensor& scale_a_in,
                         const Tensor& scale_b, const Tensor& offs,
                         const std::optional<Tensor>& bias_in, ScalarType out_dtype) {
  check_grouped_scaled_mm(a_in, b_in, scale_a_in, scale_b, offs, bias_in, out_dtype);
  const Tensor a = inner_contiguous(a_in), b = inner_contiguous(b_in);
  const Tensor scale_a = inner_contiguous(scale_a_in);
  const std::optional<Tensor> bias = inner_contiguous(bias_in);
  const int64_t T = a.size(0), N = b.size(1);
  const auto starts = group_starts("grouped_scaled_mm", offs, T);
  Tensor y = torch::stable::new_empty(a, std::vector<int64_t>{T, N}, out_dtype);

  std::vector<float> bias_row(bias ? N : 0);
  for (int64_t e = 0; e < offs.size(0); ++e) {
    const int64_t begin = starts[e], end = starts[e + 1];
    if (begin == end) continue;
    Scratch a_e = dequantize_rows(a, scale_a, begin, end);
    Scratch b_e = dequantize_weight(b, scale_b, e);
    if (bias) load_row(row_of(*bias, e), out_dtype, N, bias_row.data());
    matmul_and_store(rows_of(y, begin, end), a_e.view(), b_e.view().transposed(),
                     bias ? bias_row.data() : nullptr);
  }
  zero_rows(y, starts.back());
  return y;
}

Tensor grouped_scaled_mm_wgrad(const Tensor& dy_t_in, const Tensor& x_t_in,
                               const Tensor& scale_dy_t_in, const Tensor& scale_x_t_in,
                               const Tensor& offs, ScalarType out_dtype) {
  const char* op = "grouped_scaled_mm_wgrad";
  check_grouped_scaled_mm_wgrad(op, dy_t_in, x_t_in, scale_dy_t_in, scale_x_t_in, offs, out_dtype);
  const Tensor dy_t = torch::stable::contiguous(dy_t_in), x_t = torch::stable::contiguous(x_t_in);
  const Tensor scale_dy_t = inner_contiguous(scale_dy_t_in);
  const Tensor scale_x_t = inner_contiguous(scale_x_t_in);
  const auto blocks = block_starts(op, offs, x_t.size(0));
  Tensor dw =
      torch::stable::new_empty(x_t, std::vector<int64_t>{offs.size(0), dy_t.size(1), x_t.size(1)}, out_dtype);
  write_groups(dw, blocks, [&](int64_t e, const Matrix& dw_e) {
    wgrad(dw_e, dy_t, x_t, scale_dy_t, scale_x_t, blocks[e], blocks[e + 1]);
  });
  return dw;
}

void grouped_scaled_mm_wgrad_(const Tensor& main_grad, const Tensor& dy_t_in, const Tensor& x_t_in,
                              const Tensor& scale_dy_t_in, const Tensor& scale_x_t_in,
                              const Tensor& offs, const std::optional<Tensor>& overwrite) {
  const char* op = "grouped_scaled_mm_wgrad_";
  check_grouped_scaled_mm_wgrad(op, dy_t_in, x_t_in, scale_dy_t_in, scale_x_t_in, offs,
                                ScalarType::Float);
  check_main_grad(op, main_grad, dy_t_in, offs.size(0), dy_t_in.size(1), x_t_in.size(1), overwrite);
  const Tensor dy_t = torch::stable::contiguous(dy_t_in), x_t = torch::stable::contiguous(x_t_in);
  const Tensor scale_dy_t = inner_contiguous(scale_dy_t_in);
  const Tensor scale_x_t = inner_contiguous(scale_x_t_in);
  const auto blocks = block_starts(op, offs, x_t.size(0));
  accumulate_groups(main_grad, blocks, overwrite, [&](int64_t e, const Matrix& dw_e) {
    wgrad(dw_e, dy_t, x_t, scale_dy_t, scale_x_t, blocks[e], blocks[e + 1]);
  });
}

}  // namespace grouped_linear::cpu
