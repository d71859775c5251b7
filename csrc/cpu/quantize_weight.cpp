#include <algorithm>

#include "../checks.h"
#include "../ops.h"
#include "tile.h"

namespace grouped_linear::cpu {

std::tuple<Tensor, Tensor, Tensor> quantize_weight(const Tensor& w_in, double amax_epsilon,
                                                   bool power_of_two_scales, bool columnwise) {
  check_quantize_weight(w_in, amax_epsilon);
  const Tensor w = torch::stable::contiguous(w_in);
  const int64_t E = w.size(0), N = w.size(1), K = w.size(2);
  const int64_t row_blocks = ceil_div(N, kBlock), col_blocks = ceil_div(K, kBlock);

  using Shape = std::vector<int64_t>;
  Tensor q = torch::stable::new_empty(w, Shape{E, N, K}, ScalarType::Float8_e4m3fn);
  Tensor scale = torch::stable::new_empty(w, Shape{E, row_blocks, col_blocks}, ScalarType::Float);
  Tensor q_t = torch::stable::new_empty(w, columnwise ? Shape{E, K, N} : Shape{0},
                                        ScalarType::Float8_e4m3fn);

  const auto* values = static_cast<const char*>(w.data_ptr());
  auto* q_bytes = static_cast<uint8_t*>(q.data_ptr());
  auto* q_t_bytes = static_cast<uint8_t*>(q_t.data_ptr());
  auto* scales = static_cast<float*>(scale.data_ptr());
  const ScaleRule rule{static_cast<float>(amax_epsilon), power_of_two_scales};
  torch::stable::parallel_for(0, E * row_blocks * col_blocks, 1, [&](int64_t begin, int64_t end) {
    Tile tile;
    for (int64_t t = begin; t < end; ++t) {
      const int64_t e = t / (row_blocks * col_blocks);
      const int64_t row = t / col_blocks % row_blocks * kBlock, col = t % col_blocks * kBlock;
      const int64_t rows = std::min(kBlock, N - row), cols = std::min(kBlock, K - col);
      const int64_t first = (e * N + row) * K + col;
      tile.load(values + first * element_size(w.scalar_type()), w.scalar_type(), K, rows, cols);

      uint32_t amax[kBlock];
      tile.row_amax(amax);
      const BlockScale block = block_scale(*std::max_element(amax, amax + rows), rule);
      float factor[kBlock];
      std::fill_n(factor, kBlock, block.factor);
      scales[t] = block.scale;
      tile.quantize_rows(factor, q_bytes + first, K);
      if (columnwise) tile.quantize_cols(factor, q_t_bytes + (e * K + col) * N + row, N, rows);
    }
  });
  return {q, scale, q_t};
}

}  // namespace grouped_linear::cpu
