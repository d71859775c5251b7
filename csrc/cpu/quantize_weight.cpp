#include <algorithm>

#include "../checks.h"
#include "../ops.h"
#include "tile.h"

namespace grouped_linear::cpu {
namespace {

constexpr ScalarType kE4m3 = ScalarType::Float8_e4m3fn;
using Shape = std::vector<int64_t>;

// Where each expert's dense [N, K] matrix starts.
struct Experts {
  std::vector<const char*> first;
  ScalarType dtype;
  int64_t N, K;

  int64_t count() const { return static_cast<int64_t>(first.size()); }
};

// Dense copies of those that are not dense.
std::vector<Tensor> dense(const std::vector<Tensor>& w_in) {
  std::vector<Tensor> w;
  for (const Tensor& w_e : w_in) w.push_back(torch::stable::contiguous(w_e));
  return w;
}

// w: one dense tensor [E, N, K] or E of [N, K].
Experts experts_of(const std::vector<Tensor>& w_in) {
  const Tensor& w = w_in[0];
  if (w.dim() == 2) {
    Experts experts{{}, w.scalar_type(), w.size(0), w.size(1)};
    for (const Tensor& w_e : w_in)
      experts.first.push_back(static_cast<const char*>(w_e.const_data_ptr()));
    return experts;
  }
  const int64_t E = w.size(0), N = w.size(1), K = w.size(2);
  Experts experts{std::vector<const char*>(E), w.scalar_type(), N, K};
  for (int64_t e = 0; e < E; ++e)
    experts.first[e] =
        static_cast<const char*>(w.const_data_ptr()) + e * N * K * element_size(w.scalar_type());
  return experts;
}

// q_t: null where it is not asked for.
void quantize(const Experts& experts, ScaleRule rule, const Tensor& q, const Tensor& scale,
              const Tensor* q_t) {
  const int64_t E = experts.count(), N = experts.N, K = experts.K;
  const int64_t row_blocks = ceil_div(N, kBlock), col_blocks = ceil_div(K, kBlock);
  const int64_t element = element_size(experts.dtype);
  auto* q_bytes = static_cast<uint8_t*>(q.data_ptr());
  auto* q_t_bytes = q_t ? static_cast<uint8_t*>(q_t->data_ptr()) : nullptr;
  auto* scales = static_cast<float*>(scale.data_ptr());
  torch::stable::parallel_for(0, E * row_blocks * col_blocks, 1, [&](int64_t begin, int64_t end) {
    Tile tile(experts.dtype);
    for (int64_t t = begin; t < end; ++t) {
      const int64_t e = t / (row_blocks * col_blocks);
      const int64_t row = t / col_blocks % row_blocks * kBlock, col = t % col_blocks * kBlock;
      const int64_t rows = std::min(kBlock, N - row), cols = std::min(kBlock, K - col);
      const int64_t first = (e * N + row) * K + col;
      const char* values = experts.first[e] + (row * K + col) * element;
      for (int64_t r = 0; r < rows; ++r) prefetch_row(q_bytes + first + r * K, cols);
      if (q_t_bytes)
        for (int64_t c = 0; c < cols; ++c)
          prefetch_row(q_t_bytes + (e * K + col + c) * N + row, rows);
      tile.fill(rows, cols, [&](int64_t r, void* tile_row) {
        const char* row_first = values + r * K * element;
        if (experts.dtype == ScalarType::BFloat16)
          std::memcpy(tile_row, row_first, cols * element);
        else
          load_row(row_first, experts.dtype, cols, static_cast<float*>(tile_row));
        prefetch_row(row_first + kBlock * element, kBlock * element);  // the next tile's
      });

      float row_amax[kBlock], col_amax[kBlock];
      tile.find_amax(row_amax, col_amax);
      const BlockScale block = block_scale(*std::max_element(row_amax, row_amax + rows), rule);
      float factor[kBlock];
      std::fill_n(factor, kBlock, block.factor);
      scales[t] = block.scale;

      ByteTile bytes;
      tile.quantize_by_rows(factor, bytes);
      bytes.store(q_bytes + first, K, rows, cols);
      if (q_t_bytes) bytes.store_turned(q_t_bytes + (e * K + col) * N + row, N, rows, rows, cols);
    }
  });
}

std::tuple<Tensor, Tensor, Tensor> quantize_new(const Experts& experts, const Tensor& like,
                                                double amax_epsilon, bool power_of_two_scales,
                                                bool columnwise) {
  const int64_t E = experts.count(), N = experts.N, K = experts.K;
  Tensor q = new_output(like, Shape{E, N, K}, kE4m3);
  Tensor scale =
      new_output(like, Shape{E, ceil_div(N, kBlock), ceil_div(K, kBlock)}, ScalarType::Float);
  Tensor q_t = new_output(like, columnwise ? Shape{E, K, N} : Shape{0}, kE4m3);
  quantize(experts, {static_cast<float>(amax_epsilon), power_of_two_scales}, q, scale,
           columnwise ? &q_t : nullptr);
  return {q, scale, q_t};
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> quantize_weight(const Tensor& w_in, double amax_epsilon,
                                                   bool power_of_two_scales, bool columnwise) {
  check_quantize_weight("quantize_weight", w_in, amax_epsilon);
  const auto w = dense({w_in});
  return quantize_new(experts_of(w), w[0], amax_epsilon, power_of_two_scales, columnwise);
}

std::tuple<Tensor, Tensor, Tensor> quantize_weight_list(const std::vector<Tensor>& w_in,
                                                        double amax_epsilon,
                                                        bool power_of_two_scales, bool columnwise) {
  check_quantize_weight_list(w_in, amax_epsilon);
  const auto w = dense(w_in);
  return quantize_new(experts_of(w), w[0], amax_epsilon, power_of_two_scales, columnwise);
}

void refresh_weight_(const std::vector<Tensor>& w_in, const std::optional<Tensor>& refresh,
                     const Tensor& q, const Tensor& scale, const std::optional<Tensor>& q_t,
                     double amax_epsilon, bool power_of_two_scales) {
  check_refresh_weight(w_in, refresh, q, scale, q_t, amax_epsilon);
  if (refresh && !*refresh->const_data_ptr<bool>()) return;
  const auto w = dense(w_in);
  quantize(experts_of(w), {static_cast<float>(amax_epsilon), power_of_two_scales}, q, scale,
           q_t ? &*q_t : nullptr);
}

}  // namespace grouped_linear::cpu
