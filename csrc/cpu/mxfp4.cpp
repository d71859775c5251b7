// SPDX-License-Identifier: Apache-2.0
// MXFP4 weights: quantized, dequantized, and multiplied.
//
// A GEMM decodes one expert after the other into scratch memory and multiplies it there: 2 bytes an
// element, or 1 in FP8, written and read once, beside the packed half byte. That is most of the
// time of an expert with a few rows, and little of one with a hundred.

#include <algorithm>
#include <array>

#include "checks.h"
#include "cpu/fp8.h"
#include "cpu/gemm_operands.h"
#include "cpu/tiles.h"
#include "gemm_ops.h"
#include "mxfp4_math.h"
#include "ops.h"

namespace grouped_linear::cpu {
namespace {

// One expert's codes and scales, whose rows are dense.
struct Codes {
  const uint8_t *codes, *scales;
  int64_t N, K, code_stride, scale_stride;  // from row to row

  Codes(const Tensor& q, const Tensor& scale, int64_t e)
      : codes(reinterpret_cast<const uint8_t*>(row_of(q, e))),
        scales(reinterpret_cast<const uint8_t*>(row_of(scale, e))),
        N(q.size(1)),
        K(2 * q.size(2)),
        code_stride(q.stride(1)),
        scale_stride(scale.stride(1)) {}

  uint32_t scale_of(int64_t n, int64_t block) const { return scales[n * scale_stride + block]; }

  bool has_numbers(int64_t n, int64_t block) const {
    bool any = false;
    for_each(n, block, [&](int64_t, uint32_t code) { any |= mxfp4::has_numbers(code); });
    return any;
  }

  // put(i, code) of element i of a block of 32 of row n.
  template <typename Put>
  void for_each(int64_t n, int64_t block, const Put& put) const {
    const uint8_t* pairs = codes + n * code_stride + block * kMxBlock / 2;
    for (int64_t i = 0; i < kMxBlock / 2; ++i) {
      put(2 * i, pairs[i] & 15);
      put(2 * i + 1, pairs[i] >> 4);
    }
  }

  // Row n in float32.
  void decode_row(int64_t n, float* values) const {
    for (int64_t block = 0; block < K / kMxBlock; ++block, values += kMxBlock) {
      float numbers[16];
      for (uint32_t code = 0; code < 16; ++code)
        numbers[code] = mxfp4::decode(code, scale_of(n, block));
      for_each(n, block, [&](int64_t i, uint32_t code) { values[i] = numbers[code]; });
    }
  }
};

// One expert in a dtype, dense.
void decode_rows(const Codes& w, ScalarType dtype, char* out) {
  const int64_t row_bytes = w.K * element_size(dtype);
  torch::stable::parallel_for(0, w.N, 16, [&](int64_t begin, int64_t end) {
    std::vector<float> values(w.K);
    for (int64_t n = begin; n < end; ++n) {
      w.decode_row(n, values.data());
      store_row(values.data(), w.K, dtype, out + n * row_bytes);
    }
  });
}

// The largest scale of a block of 128 x 128, which its e4m3 numbers share. The scale of 32 zeros
// does not count.
uint32_t largest_scale(const Codes& w, int64_t n_begin, int64_t k_begin) {
  const int64_t n_end = std::min(n_begin + kBlock, w.N), k_end = std::min(k_begin + kBlock, w.K);
  uint32_t largest = 0;
  for (int64_t n = n_begin; n < n_end; ++n)
    for (int64_t block = k_begin / kMxBlock; block < k_end / kMxBlock; ++block)
      if (const uint32_t scale = w.scale_of(n, block);
          scale > largest && scale != mxfp4::kNanScale && w.has_numbers(n, block))
        largest = scale;
  return largest;
}

// One expert in e4m3, [N, K] or transposed, with a scale for each 128 x 128 block.
struct E4m3Expert {
  std::vector<uint8_t> q;
  std::vector<float> scales;
  int64_t rows, cols;

  E4m3Expert(const Codes& w, bool transpose)
      : q(w.N * w.K), rows(transpose ? w.K : w.N), cols(transpose ? w.N : w.K) {
    const int64_t n_blocks = ceil_div(w.N, kBlock), k_blocks = ceil_div(w.K, kBlock);
    scales.resize(n_blocks * k_blocks);
    torch::stable::parallel_for(0, n_blocks * k_blocks, 1, [&](int64_t from, int64_t to) {
      for (int64_t i = from; i < to; ++i) {
        const int64_t n_begin = i / k_blocks * kBlock, k_begin = i % k_blocks * kBlock;
        const int64_t n_end = std::min(n_begin + kBlock, w.N);
        const int64_t k_end = std::min(k_begin + kBlock, w.K);
        const uint32_t largest = largest_scale(w, n_begin, k_begin);
        const int64_t place = transpose ? i % k_blocks * n_blocks + i / k_blocks : i;
        scales[place] = mxfp4::e4m3_scale(largest);
        for (int64_t n = n_begin; n < n_end; ++n)
          for (int64_t k = k_begin; k < k_end; k += kMxBlock)
            decode(w, n, k, largest, transpose ? &q[k * w.N + n] : &q[n * w.K + k],
                   transpose ? w.N : 1);
      }
    });
  }

  static void decode(const Codes& w, int64_t n, int64_t k, uint32_t largest, uint8_t* out,
                     int64_t stride) {
    const uint32_t scale = w.scale_of(n, k / kMxBlock);
    uint8_t numbers[16];
    // The scale of 32 zeros may be above the largest: the difference wraps, and zeros stay zeros.
    for (uint32_t code = 0; code < 16; ++code)
      numbers[code] = static_cast<uint8_t>(mxfp4::to_e4m3(code, largest - scale, scale));
    w.for_each(n, k / kMxBlock, [&](int64_t i, uint32_t code) { out[i * stride] = numbers[code]; });
  }

  ScaledOperand operand() const {
    return {q.data(), ScalarType::Float8_e4m3fn, cols, kBlock, scales.data(),
            kBlock,   ceil_div(cols, kBlock),    1};
  }
};

// The largest magnitude of n numbers as bits, of which NaN's are the largest; raise_amax does so
// column by column.
GROUPED_LINEAR_EVERY_WIDTH uint32_t amax_of(const float* w, int64_t n) {
  uint32_t amax = 0;
  for (int64_t c = 0; c < n; ++c) amax = std::max(amax, exact::bits_of(w[c]) & kMagnitude);
  return amax;
}
GROUPED_LINEAR_EVERY_WIDTH void raise_amax(const float* w, int64_t n, uint32_t* amax) {
  for (int64_t c = 0; c < n; ++c) amax[c] = std::max(amax[c], exact::bits_of(w[c]) & kMagnitude);
}
GROUPED_LINEAR_EVERY_WIDTH void encode_row(const float* w, int64_t n, float factor,
                                           const uint32_t* one_fields, uint8_t* codes) {
  for (int64_t c = 0; c < n; ++c)
    codes[c] = static_cast<uint8_t>(quantize<E4m3>(mxfp4::round(w[c] * factor, one_fields[c]), 1));
}

}  // namespace

float encode_mxfp4(const float* w, int64_t rows, int64_t cols, int64_t dim, ByteTile& bytes) {
  // Of blocks [128][4], or [4][128] where they run along columns.
  std::array<uint32_t, kBlock * kBlock / kMxBlock> scales{};
  for (int64_t r = 0; r < rows; ++r) {
    const float* row = w + r * kBlock;
    if (dim == -2) raise_amax(row, cols, &scales[r / kMxBlock * kBlock]);
    for (int64_t c = 0; dim == -1 && c < cols; c += kMxBlock)
      scales[(r * kBlock + c) / kMxBlock] = amax_of(row + c, kMxBlock);
  }
  uint32_t largest = 0;
  for (uint32_t& scale : scales) {
    scale = mxfp4::scale_of(exact::from_bits(scale));
    if (scale != mxfp4::kNanScale) largest = std::max(largest, scale);
  }
  const uint32_t field = mxfp4::factor_field(largest);
  uint32_t of_row[kBlock], one_fields[kBlock];
  for (int64_t r = 0; r < rows; ++r) {
    if (dim == -1 || r % kMxBlock == 0)
      for (int64_t c = 0; c < cols; ++c) {
        of_row[c] = scales[dim == -1 ? (r * kBlock + c) / kMxBlock : r / kMxBlock * kBlock + c];
        one_fields[c] = mxfp4::one_field(of_row[c], field);
      }
    encode_row(w + r * kBlock, cols, exact::from_bits(field << 23), one_fields, bytes.bytes[r]);
    for (int64_t c = 0; c < cols; ++c)
      if (of_row[c] == mxfp4::kNanScale) bytes.bytes[r][c] = kE4m3Nan;
  }
  return exact::from_bits((254 - field) << 23);
}

std::tuple<Tensor, Tensor> quantize_mxfp4(const Tensor& w_in) {
  check_quantize_mxfp4(w_in);
  const Tensor w = as_dense(w_in);
  const int64_t E = w.size(0), N = w.size(1), K = w.size(2), blocks = K / kMxBlock;
  const Tensor q = new_output(w, {E, N, K / 2}, ScalarType::Byte);
  const Tensor scale = new_output(w, {E, N, blocks}, ScalarType::Byte);
  auto* codes = static_cast<uint8_t*>(q.data_ptr());
  auto* scales = static_cast<uint8_t*>(scale.data_ptr());
  const auto* first = static_cast<const char*>(w.const_data_ptr());
  const int64_t row_bytes = K * element_size(w.scalar_type());
  torch::stable::parallel_for(0, E * N, 16, [&](int64_t begin, int64_t end) {
    std::vector<float> values(K);
    for (int64_t n = begin; n < end; ++n) {
      load_row(first + n * row_bytes, w.scalar_type(), K, values.data());
      for (int64_t block = 0; block < blocks; ++block) {
        const float* x = values.data() + block * kMxBlock;
        uint32_t amax = 0;  // magnitudes as integers: a NaN is the largest
        for (int64_t i = 0; i < kMxBlock; ++i)
          amax = std::max(amax, exact::bits_of(x[i]) & 0x7fffffffu);
        const uint32_t of_block = mxfp4::scale_of(exact::from_bits(amax));
        scales[n * blocks + block] = static_cast<uint8_t>(of_block);
        uint8_t* pairs = codes + (n * K + block * kMxBlock) / 2;
        for (int64_t i = 0; i < kMxBlock / 2; ++i)
          pairs[i] = static_cast<uint8_t>(mxfp4::encode_pair(x[2 * i], x[2 * i + 1], of_block));
      }
    }
  });
  return {q, scale};
}

Tensor dequantize_mxfp4(const Tensor& q_in, const Tensor& scale_in, ScalarType dtype) {
  check_dequantize_mxfp4(q_in, scale_in, dtype);
  const Tensor q = with_dense_rows(q_in), scale = with_dense_rows(scale_in);
  const int64_t E = q.size(0), N = q.size(1), K = 2 * q.size(2);
  const Tensor w = new_output(q, {E, N, K}, dtype);
  for (int64_t e = 0; e < E; ++e) decode_rows(Codes(q, scale, e), dtype, row_of(w, e));
  return w;
}

Tensor grouped_mm_mxfp4(const Tensor& a_in, const Tensor& b_in, const Tensor& scale_b_in,
                        const Tensor& offs, const std::optional<Tensor>& bias_in,
                        const std::optional<Tensor>& scale_a_in,
                        std::optional<ScalarType> out_dtype, bool transpose_b,
                        const std::optional<Tensor>& rows, const std::optional<Tensor>& a_low,
                        const std::optional<Tensor>& b_low) {
  const char* op = "grouped_mm_mxfp4";
  const LowRank low = low_rank(a_low, b_low);
  const ScalarType dtype = mxfp4_out_dtype(a_in, out_dtype);
  check_grouped_mm_mxfp4(a_in, b_in, scale_b_in, offs, bias_in, scale_a_in, dtype, transpose_b,
                         rows, low);
  const Tensor b = with_dense_rows(b_in), scale_b = with_dense_rows(scale_b_in);
  const std::optional<Tensor> bias = with_dense_rows(bias_in);
  const int64_t T = (rows ? *rows : a_in).size(0), N = b.size(1), K = 2 * b.size(2);
  const int64_t cols = transpose_b ? N : K, reduced = transpose_b ? K : N;
  const auto starts = group_starts(op, offs, T);
  Tensor a = with_dense_rows(a_in);
  std::optional<Tensor> scale_a = scale_a_in;
  if (rows) {
    const auto numbers = checked_rows(op, *rows, starts.back(), "a", a.size(0));
    a = gathered_rows(a, numbers);
    if (scale_a) scale_a = gathered_columns(*scale_a, numbers);
  }
  const Tensor y = new_output(a, {T, cols}, dtype);
  const auto for_each_group = [&](const auto& compute) {
    for (int64_t e = 0; e < offs.size(0); ++e)
      if (starts[e] < starts[e + 1])
        compute(e, Codes(b, scale_b, e), rows_of(y, starts[e], starts[e + 1]),
                bias ? row_of(*bias, e) : nullptr);
    zero_rows(y, starts.back());
  };

  if (scale_a) {
    const FloatLowRank of_low(low, starts.back());
    for_each_group([&](int64_t e, const Codes& w, const Matrix& y_e, const void* bias_e) {
      const E4m3Expert expert(w, !transpose_b);
      multiply({{rowwise_operand(a, *scale_a, e, starts[e]), expert.operand(), reduced, y_e, bias_e,
                 of_low.of(e, starts[e])}});
    });
    return y;
  }
  Tensor a_beside = low.a.value_or(a), b_beside = low.b.value_or(b);
  if (low.a)
    a = beside(a, torch::stable::narrow(a_beside, 0, 0, a.size(0)));  // as many as gathered
  a = separate_rows(a);
  for_each_group([&](int64_t e, const Codes& w, const Matrix& y_e, const void* bias_e) {
    Tensor expert = new_tensor(a, {1, N, K}, a.scalar_type());
    decode_rows(w, a.scalar_type(), static_cast<char*>(expert.data_ptr()));
    if (!transpose_b) expert = transposed(expert);
    if (low.b) expert = beside(expert, torch::stable::narrow(b_beside, 0, e, 1));
    Matrix a_e = rows_of(a, starts[e], starts[e + 1]);
    a_e.cols = expert.size(2);
    multiply_group(y_e, a_e, group_of(expert, 0).transposed(), bias_e);
  });
  return y;
}

}  // namespace grouped_linear::cpu
