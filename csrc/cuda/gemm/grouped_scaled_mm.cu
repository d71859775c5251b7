#include "cuda/gemm/sm90/launch.h"
#include "ops.h"

namespace grouped_linear::cuda {
namespace {

// a (dy by depth) may be e5m2, b (x by depth) is e4m3.
template <typename A, Scaling scaling, bool by_depth>
using Config = GemmConfig<A, __nv_fp8_e4m3, kTileFp8.cols, kTileFp8.stages, scaling, by_depth>;
constexpr int kTileN = kTileFp8.cols;

bool of_groups(const Tensor& scale) { return scale.dim() == 1; }

Tensor readable_scale(const Tensor& scale) {
  return of_groups(scale) ? as_dense(scale) : tma_operand(scale, 1);
}

// A scale [rows, cols], read `width` columns at a time.
CUtensorMap scale_map(const char* op, const Tensor& scale, uint32_t width) {
  return tensor_map(op, scale.data_ptr(), ScalarType::Float, 4, {scale.size(1), scale.size(0)},
                    {map_stride(scale, 0, scale.size(1))}, {width, 1}, false);
}

// Scales of groups are in the epilogue, of lines in the maps, and of squares in square_scale.
template <bool by_depth>
void launch_scaled(const Launch& launch, const TensorMaps& maps, ScalarType dtype_a,
                   const Tensor& scale_a, const Tensor& scale_b, const Tensor& offs,
                   const SquareScale& square_scale, Epilogue epilogue, const GemmShape& shape) {
  const auto run = [&](auto config) {
    launch_gemm<decltype(config)>(launch, maps, offs, square_scale, epilogue, shape);
  };
  if (!of_groups(scale_a)) {
    constexpr Scaling blocks = by_depth ? Scaling::kLines : Scaling::kSquares;
    return run(Config<__nv_fp8_e4m3, blocks, by_depth>());
  }
  epilogue.scale_a = scale_a.const_data_ptr<float>();
  epilogue.scale_b = scale_b.const_data_ptr<float>();
  if (dtype_a == ScalarType::Float8_e5m2)
    run(Config<__nv_fp8_e5m2, Scaling::kGroups, by_depth>());
  else
    run(Config<__nv_fp8_e4m3, Scaling::kGroups, by_depth>());
}

void wgrad(const Launch& launch, const Tensor& dy_t_in, const Tensor& x_t_in,
           const Tensor& scale_dy_t_in, const Tensor& scale_x_t_in, const Tensor& offs_in,
           const Epilogue& epilogue) {
  const Tensor dy_t = tma_operand(dy_t_in, 2), x_t = tma_operand(x_t_in, 2);
  const Tensor scale_dy_t = readable_scale(scale_dy_t_in);
  const Tensor scale_x_t = readable_scale(scale_x_t_in);
  const Tensor offs = as_dense(offs_in);
  const int64_t blocks = x_t.size(0), N = dy_t.size(1), K = x_t.size(1);
  const GemmShape shape{row_count(launch.op(), blocks * kBlock), static_cast<int>(offs.size(0)),
                        static_cast<int>(N), static_cast<int>(K), 0};

  // Without blocks nothing is read: any address will do, but a map must have one.
  const int64_t some = std::max<int64_t>(blocks, 1);
  const auto data_map = [&](const Tensor& t, int64_t features, uint32_t rows) {
    return tensor_map(launch.op(), map_address(t, epilogue.out), ScalarType::Float8_e4m3fn, 1,
                      {kBlock, features, some},
                      {map_stride(t, 1, kBlock), map_stride(t, 0, features * kBlock)},
                      {kLineBytes, rows, 1}, true);
  };
  const CUtensorMap map_dy = data_map(dy_t, N, kTileM / 2);
  const CUtensorMap map_x = data_map(x_t, K, kTileN / 2);
  TensorMaps maps{map_dy, map_x, map_dy, map_x, map_dy, map_x};
  if (blocks > 0 && !of_groups(scale_dy_t)) {
    maps.scale_a = scale_map(launch.op(), scale_dy_t, kTileM);
    maps.scale_b = scale_map(launch.op(), scale_x_t, kTileN);
  }
  launch_scaled<true>(launch, maps, dy_t.scalar_type(), scale_dy_t, scale_x_t, offs, SquareScale{},
                      epilogue, shape);
}

}  // namespace

Tensor grouped_scaled_mm(const Tensor& a_in, const Tensor& b_in, const Tensor& scale_a_in,
                         const Tensor& scale_b_in, const Tensor& offs_in,
                         const std::optional<Tensor>& bias_in,
                         std::optional<ScalarType> asked_dtype) {
  const ScalarType out_dtype = asked_dtype.value_or(ScalarType::BFloat16);
  check_grouped_scaled_mm(a_in, b_in, scale_a_in, scale_b_in, offs_in, bias_in, out_dtype);

  const Launch launch("grouped_scaled_mm", a_in);
  const int64_t T = a_in.size(0), K = a_in.size(1), N = b_in.size(1), E = b_in.size(0);
  Tensor y = new_tensor(a_in, {T, N}, out_dtype);
  if (T == 0) return y;

  const Tensor a = tma_operand(a_in, 1), b = tma_operand(b_in, 2);
  const Tensor scale_a = readable_scale(scale_a_in), offs = as_dense(offs_in);
  const std::optional<Tensor> bias = with_dense_rows(bias_in);
  const CUtensorMap map_a =
      tensor_map(launch.op(), a.data_ptr(), ScalarType::Float8_e4m3fn, 1, {K, T},
                 {map_stride(a, 0, K)}, {kLineBytes, kTileM / 2}, true);
  const auto map_of_b = [&](uint32_t cols) {
    return tensor_map(launch.op(), b.data_ptr(), ScalarType::Float8_e4m3fn, 1, {K, N, E},
                      {map_stride(b, 1, K), map_stride(b, 0, N * K)}, {kLineBytes, cols, 1}, true);
  };
  const CUtensorMap map_b = map_of_b(kTileN / 2);
  const int rows = row_count(launch.op(), T);
  const GemmShape shape{rows, static_cast<int>(E), rows, static_cast<int>(N), static_cast<int>(K)};
  TensorMaps maps{map_a, map_b, map_a, map_b, map_a, map_of_b(kNarrowCols)};
  Tensor scale_b = scale_b_in;  // of blocks: read by its strides
  SquareScale square_scale{};
  if (of_groups(scale_a)) {
    scale_b = readable_scale(scale_b);
  } else {
    maps.scale_a = scale_map(launch.op(), scale_a, kScaleRows);
    square_scale = {scale_b.const_data_ptr<float>(), scale_b.stride(0), scale_b.stride(1),
                    scale_b.stride(2)};
  }
  launch_scaled<false>(launch, maps, a.scalar_type(), scale_a, scale_b, offs, square_scale,
                       epilogue_of(y, bias, false, std::nullopt), shape);
  return y;
}

Tensor grouped_scaled_mm_wgrad(const Tensor& dy_t, const Tensor& x_t, const Tensor& scale_dy_t,
                               const Tensor& scale_x_t, const Tensor& offs,
                               std::optional<ScalarType> asked_dtype) {
  const ScalarType out_dtype = asked_dtype.value_or(ScalarType::BFloat16);
  const char* op = "grouped_scaled_mm_wgrad";
  check_grouped_scaled_mm_wgrad(op, dy_t, x_t, scale_dy_t, scale_x_t, offs, out_dtype);

  const Launch launch(op, x_t);
  Tensor dw = new_tensor(x_t, {offs.size(0), dy_t.size(1), x_t.size(1)}, out_dtype);
  wgrad(launch, dy_t, x_t, scale_dy_t, scale_x_t, offs,
        epilogue_of(dw, std::nullopt, false, std::nullopt));
  return dw;
}

void grouped_scaled_mm_wgrad_(const Tensor& main_grad, const Tensor& dy_t, const Tensor& x_t,
                              const Tensor& scale_dy_t, const Tensor& scale_x_t, const Tensor& offs,
                              const std::optional<Tensor>& overwrite) {
  const char* op = "grouped_scaled_mm_wgrad_";
  check_grouped_scaled_mm_wgrad(op, dy_t, x_t, scale_dy_t, scale_x_t, offs, ScalarType::Float);
  check_main_grad(op, main_grad, dy_t, offs.size(0), dy_t.size(1), x_t.size(1), overwrite);

  const Launch launch(op, x_t);
  wgrad(launch, dy_t, x_t, scale_dy_t, scale_x_t, offs,
        epilogue_of(main_grad, std::nullopt, true, overwrite));
}

}  // namespace grouped_linear::cuda
