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
  Tensor q = new_output(w, Shape{E, N, K}, ScalarType::Float8_e4m3fn);
  Tensor scale = new_output(w, Shape{E, row_blocks, col_blocks}, ScalarType::Float);
  Tensor q_t = new_output(w, columnwise ? Shape{E, K, N} : Shape{0}, ScalarType::Float8_e4m3fn);

  const ScalarType dtype = w.scalar_type();
  const int64_t element = element_size(dtype);
  const auto* values = static_cast<const char*>(w.data_ptr());
  auto* q_bytes = static_cast<uint8_t*>(q.data_ptr());
  auto* q_t_bytes = static_cast<uint8_t*>(q_t.data_ptr());
  auto* scales = static_cast<float*>(scale.data_ptr());
  const ScaleRule rule{static_cast<float>(amax_epsilon), power_of_two_scales};
  torch::stable::parallel_for(0, E * row_blocks * col_blocks, 1, [&](int64_t begin, int64_t end) {
    Tile tile(dtype);
    for (int64_t t = begin; t < end; ++t) {
      const int64_t e = t / (row_blocks * col_blocks);
      const int64_t row = t / col_blocks % row_blocks * kBlock, col = t % col_blocks * kBlock;
      const int64_t rows = std::min(kBlock, N - row), cols = std::min(kBlock, K - col);
      const int64_t first = (e * N + row) * K + col;
      for (int64_t r = 0; r < rows; ++r) prefetch_row(q_bytes + first + r * K, cols);
      if (columnwise)
        for (int64_t c = 0; c < cols; ++c)
          prefetch_row(q_t_bytes + (e * K + col + c) * N + row, rows);
      tile.fill(rows, cols, [&](int64_t r, void* tile_row) {
        const char* row_first = values + (first + r * K) * element;
        if (dtype == ScalarType::BFloat16)
          std::memcpy(tile_row, row_first, cols * element);
        else
          load_row(row_first, dtype, cols, static_cast<float*>(tile_row));
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
      if (columnwise) bytes.store_turned(q_t_bytes + (e * K + col) * N + row, N, rows, rows, cols);
    }
  });
  return {q, scale, q_t};
}

}  // namespace grouped_linear::cpu
