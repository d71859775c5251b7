#include "cuda/gemm/simt/grouped_mm_float.cuh"
#include "cuda/gemm/sm90/launch.h"
#include "ops.h"

namespace grouped_linear::cuda {
namespace {

template <typename T, int b_major>
using ByRows =
    GemmConfig<T, T, kTile16Bit.cols, kTile16Bit.stages, Scaling::kNone, false, 0, b_major>;
template <typename T>
using ByDepth = GemmConfig<T, T, kTile16Bit.cols, kTile16Bit.stages, Scaling::kNone, true, 1, 1>;

template <bool by_depth>
void multiply_float(const Launch& launch, const FloatOperand& a, const FloatOperand& b,
                    const Tensor& offs, const Epilogue& epilogue, const GemmShape& shape) {
  const int blocks = 4 * launch.multiprocessors();
  launch.run(grouped_mm_float_kernel<by_depth>, blocks, kFloatThreads, 0, a, b,
             offs.const_data_ptr<int32_t>(), epilogue, shape);
}

// y = a @ b[e].T, operands of two bytes. b's dense dimension is K (fprop) or N (dgrad's view of w).
template <typename T>
void multiply_rows(const Launch& launch, const Tensor& a_in, const Tensor& b_in, const Tensor& offs,
                   const Epilogue& epilogue, const GemmShape& shape) {
  const bool n_dense = b_in.stride(1) == 1 && b_in.stride(2) != 1;
  const Tensor a = tma_operand(a_in, 1), b = tma_operand(b_in, n_dense ? 1 : 2);
  const int64_t K = a.size(1), N = b.size(1), E = b.size(0);
  const ScalarType dtype = a.scalar_type();
  const CUtensorMap map_a = tensor_map(launch.op(), a.data_ptr(), dtype, 2, {K, a.size(0)},
                                       {map_stride(a, 0, K)}, {64, kTileM / 2}, true);
  const int64_t group_stride = map_stride(b, 0, N * K);
  const void* first = b.data_ptr();
  // tma_operand makes K the dense dimension where it copies
  if (b.stride(2) == 1) {
    using Config = ByRows<T, 0>;
    const CUtensorMap map_b =
        tensor_map(launch.op(), first, dtype, 2, {K, N, E}, {map_stride(b, 1, K), group_stride},
                   {64, Config::kTileN / 2, 1}, true);
    const CUtensorMap narrow_b =
        tensor_map(launch.op(), first, dtype, 2, {K, N, E}, {map_stride(b, 1, K), group_stride},
                   {64, kNarrowCols, 1}, true);
    launch_gemm<Config>(launch, {map_a, map_b, map_a, map_b, map_a, narrow_b}, offs, {}, epilogue,
                        shape);
  } else {
    const CUtensorMap map_b = tensor_map(launch.op(), first, dtype, 2, {N, K, E},
                                         {map_stride(b, 2, N), group_stride}, {64, 64, 1}, true);
    launch_gemm<ByRows<T, 1>>(launch, {map_a, map_b, map_a, map_b, map_a, map_b}, offs, {},
                              epilogue, shape);
  }
}

// dw = dy.T @ x a group, operands of two bytes.
template <typename T>
void multiply_depth(const Launch& launch, const Tensor& dy_in, const Tensor& x_in,
                    const Tensor& offs, const Epilogue& epilogue, const GemmShape& shape) {
  const Tensor dy = tma_operand(dy_in, 1), x = tma_operand(x_in, 1);
  const auto map_of = [&](const Tensor& t) {
    // Without rows nothing is read: any address will do, but a map must have one.
    return ragged_map(launch.op(), map_address(t, epilogue.out), t.scalar_type(), 2, t.size(1),
                      map_stride(t, 0, t.size(1)), 64);
  };
  const CUtensorMap map_dy = map_of(dy), map_x = map_of(x);
  launch_gemm<ByDepth<T>>(launch, {map_dy, map_x, map_dy, map_x, map_dy, map_x}, offs, {}, epilogue,
                          shape);
}

void wgrad(const Launch& launch, const Tensor& dy, const Tensor& x, const Tensor& offs_in,
           const Epilogue& epilogue) {
  const Tensor offs = as_dense(offs_in);
  const int T = row_count(launch.op(), x.size(0)), E = static_cast<int>(offs.size(0));
  const GemmShape shape{T, E, static_cast<int>(dy.size(1)), static_cast<int>(x.size(1)), 0};
  if (x.scalar_type() == ScalarType::Float)
    multiply_float<true>(launch, {dy.const_data_ptr<float>(), 0, dy.stride(1), dy.stride(0)},
                         {x.const_data_ptr<float>(), 0, x.stride(1), x.stride(0)}, offs, epilogue,
                         shape);
  else if (x.scalar_type() == ScalarType::BFloat16)
    multiply_depth<__nv_bfloat16>(launch, dy, x, offs, epilogue, shape);
  else
    multiply_depth<__half>(launch, dy, x, offs, epilogue, shape);
}

}  // namespace

Tensor grouped_mm(const Tensor& a, const Tensor& b, const Tensor& offs_in,
                  const std::optional<Tensor>& bias_in, std::optional<ScalarType> out_dtype) {
  const ScalarType dtype = out_dtype.value_or(a.scalar_type());
  check_grouped_mm(a, b, offs_in, bias_in, dtype);

  const Launch launch("grouped_mm", a);
  const int64_t T = a.size(0), N = b.size(1);
  Tensor y = new_tensor(a, {T, N}, dtype);
  if (T == 0) return y;

  const Tensor offs = as_dense(offs_in);
  const std::optional<Tensor> bias = with_dense_rows(bias_in);
  const Epilogue epilogue = epilogue_of(y, bias, false, std::nullopt);
  const int rows = row_count(launch.op(), T);
  const GemmShape shape{rows, static_cast<int>(offs.size(0)), rows, static_cast<int>(N),
                        static_cast<int>(a.size(1))};
  if (a.scalar_type() == ScalarType::Float)
    multiply_float<false>(launch, {a.const_data_ptr<float>(), 0, a.stride(0), a.stride(1)},
                          {b.const_data_ptr<float>(), b.stride(0), b.stride(1), b.stride(2)}, offs,
                          epilogue, shape);
  else if (a.scalar_type() == ScalarType::BFloat16)
    multiply_rows<__nv_bfloat16>(launch, a, b, offs, epilogue, shape);
  else
    multiply_rows<__half>(launch, a, b, offs, epilogue, shape);
  return y;
}

Tensor grouped_mm_wgrad(const Tensor& dy, const Tensor& x, const Tensor& offs,
                        std::optional<ScalarType> out_dtype) {
  const ScalarType dtype = out_dtype.value_or(dy.scalar_type());
  check_grouped_mm_wgrad("grouped_mm_wgrad", dy, x, offs, dtype);

  const Launch launch("grouped_mm_wgrad", x);
  Tensor dw = new_tensor(x, {offs.size(0), dy.size(1), x.size(1)}, dtype);
  wgrad(launch, dy, x, offs, epilogue_of(dw, std::nullopt, false, std::nullopt));
  return dw;
}

void grouped_mm_wgrad_(const Tensor& main_grad, const Tensor& dy, const Tensor& x,
                       const Tensor& offs, const std::optional<Tensor>& overwrite) {
  const char* op = "grouped_mm_wgrad_";
  check_grouped_mm_wgrad(op, dy, x, offs, ScalarType::Float);
  check_main_grad(op, main_grad, dy, offs.size(0), dy.size(1), x.size(1), overwrite);

  const Launch launch(op, x);
  wgrad(launch, dy, x, offs, epilogue_of(main_grad, std::nullopt, true, overwrite));
}

}  // namespace grouped_linear::cuda
