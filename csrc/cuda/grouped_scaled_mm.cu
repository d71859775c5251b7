#include "../ops.h"
#include "grouped_gemm.h"

namespace grouped_linear::cuda {
namespace {

using ByRows = GemmConfig<__nv_fp8_e4m3, 192, 4, 2, false, 0, 0>;
using ByDepth = GemmConfig<__nv_fp8_e4m3, 192, 4, 2, true, 0, 0>;

constexpr ScalarType kE4m3 = ScalarType::Float8_e4m3fn;

// One scale a group: the kernel does not have it yet.
void check_blocks(const char* op, const Tensor& scale) {
  check(scale.dim() != 1, op, ": scales of groups have no CUDA kernel yet, only CPU");
}

// A scale [rows, cols], read `width` columns at a time.
CUtensorMap scale_map(const char* op, const Tensor& scale, uint32_t width) {
  return tensor_map(op, scale.data_ptr(), ScalarType::Float, 4, {scale.size(1), scale.size(0)},
                    {map_stride(scale, 0, scale.size(1))}, {width, 1}, false);
}

void wgrad(const Launch& launch, const Tensor& dy_t_in, const Tensor& x_t_in,
           const Tensor& scale_dy_t_in, const Tensor& scale_x_t_in, const Tensor& offs_in,
           const Epilogue& epilogue) {
  const Tensor dy_t = tma_operand(dy_t_in, 2), x_t = tma_operand(x_t_in, 2);
  const Tensor scale_dy_t = tma_operand(scale_dy_t_in, 1), scale_x_t = tma_operand(scale_x_t_in, 1);
  const Tensor offs = torch::stable::contiguous(offs_in);
  const int64_t blocks = x_t.size(0), N = dy_t.size(1), K = x_t.size(1);
  const GemmShape shape{row_count(launch.op(), blocks * kBlock), static_cast<int>(offs.size(0)),
                        static_cast<int>(N), static_cast<int>(K), 0};

  // Without blocks nothing is read: any address will do, but a map must have one.
  const auto data_map = [&](const Tensor& t, int64_t features, uint32_t rows) {
    return tensor_map(launch.op(), map_address(t, epilogue.out), kE4m3, 1,
                      {kBlock, features, std::max<int64_t>(blocks, 1)},
                      {map_stride(t, 1, kBlock), map_stride(t, 0, features * kBlock)},
                      {kLineBytes, rows, 1}, true);
  };
  const CUtensorMap map_dy = data_map(dy_t, N, ByDepth::kShareM);
  const CUtensorMap map_x = data_map(x_t, K, ByDepth::kTileN);
  launch_gemm<ByDepth>(launch, map_dy, map_x,
                       blocks == 0 ? map_dy : scale_map(launch.op(), scale_dy_t, kTileM),
                       blocks == 0 ? map_x : scale_map(launch.op(), scale_x_t, ByDepth::kTileN),
                       offs, {}, epilogue, shape);
}

}  // namespace

Tensor grouped_scaled_mm(const Tensor& a_in, const Tensor& b_in, const Tensor& scale_a_in,
                         const Tensor& scale_b, const Tensor& offs_in,
                         const std::optional<Tensor>& bias_in, ScalarType out_dtype) {
  check_grouped_scaled_mm(a_in, b_in, scale_a_in, scale_b, offs_in, bias_in, out_dtype);
  check_blocks("grouped_scaled_mm", scale_a_in);

  const Launch launch("grouped_scaled_mm", a_in);
  const int64_t T = a_in.size(0), K = a_in.size(1), N = b_in.size(1), E = b_in.size(0);
  Tensor y = torch::stable::new_empty(a_in, std::vector<int64_t>{T, N}, out_dtype);
  if (T == 0) return y;

  const Tensor a = tma_operand(a_in, 1), b = tma_operand(b_in, 2);
  const Tensor scale_a = tma_operand(scale_a_in, 1), offs = torch::stable::contiguous(offs_in);
  std::optional<Tensor> bias;
  if (bias_in) bias = bias_in->stride(1) == 1 ? *bias_in : torch::stable::contiguous(*bias_in);
  const CUtensorMap map_a = tensor_map(launch.op(), a.data_ptr(), kE4m3, 1, {K, T},
                                       {map_stride(a, 0, K)}, {kLineBytes, ByRows::kShareM}, true);
  const CUtensorMap map_b = tensor_map(launch.op(), b.data_ptr(), kE4m3, 1, {K, N, E},
                                       {map_stride(b, 1, K), map_stride(b, 0, N * K)},
                                       {kLineBytes, ByRows::kTileN, 1}, true);
  const WeightScale weight_scale{scale_b.const_data_ptr<float>(), scale_b.stride(0),
                                 scale_b.stride(1), scale_b.stride(2)};
  const int rows = row_count(launch.op(), T);
  const GemmShape shape{rows, static_cast<int>(E), rows, static_cast<int>(N), static_cast<int>(K)};
  launch_gemm<ByRows>(launch, map_a, map_b, scale_map(launch.op(), scale_a, kScaleRows), map_b,
                      offs, weight_scale, epilogue_of(y, bias, false, std::nullopt), shape);
  return y;
}

Tensor grouped_scaled_mm_wgrad(const Tensor& dy_t, const Tensor& x_t, const Tensor& scale_dy_t,
                               const Tensor& scale_x_t, const Tensor& offs, ScalarType out_dtype) {
  const char* op = "grouped_scaled_mm_wgrad";
  check_grouped_scaled_mm_wgrad(op, dy_t, x_t, scale_dy_t, scale_x_t, offs, out_dtype);
  check_blocks(op, scale_dy_t);

  const Launch launch(op, x_t);
  Tensor dw = torch::stable::new_empty(
      x_t, std::vector<int64_t>{offs.size(0), dy_t.size(1), x_t.size(1)}, out_dtype);
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
  check_blocks(op, scale_dy_t);

  const Launch launch(op, x_t);
  wgrad(launch, dy_t, x_t, scale_dy_t, scale_x_t, offs,
        epilogue_of(main_grad, std::nullopt, true, overwrite));
}

}  // namespace grouped_linear::cuda
