// M-grouped GEMMs whose b is a weight in MXFP4: BF16, FP16, and e4m3 with block scales.
#include "cuda/gemm/sm80/launch.h"

namespace grouped_linear::cuda::sm80 {
namespace {

constexpr int kLargestThreads = 256;

// The largest scale of each 128 x 128 block of w, NaN left out, and the scale of its e4m3 numbers.
// scales [E, N, K / 32]; a block of threads for each.
__global__ void __launch_bounds__(kLargestThreads)
    largest_scales_kernel(const uint8_t* scales, int N, int row_scales, uint8_t* largest,
                          float* e4m3_scales) {
  constexpr int kRowScales = kScaleBlock / kMxBlock;
  __shared__ uint32_t of_warps[kLargestThreads / 32];
  grid_dependency_wait();
  const int k_block = blockIdx.x, n_block = blockIdx.y;
  const int64_t e = blockIdx.z;
  uint32_t found = 0;
  for (int i = threadIdx.x; i < kScaleBlock * kRowScales; i += kLargestThreads) {
    const int n = n_block * kScaleBlock + i / kRowScales;
    const int at = k_block * kRowScales + i % kRowScales;
    if (n >= N || at >= row_scales) continue;
    const uint32_t scale = scales[(e * N + n) * row_scales + at];
    if (scale != mxfp4::kNanScale) found = max(found, scale);
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2)
    found = max(found, __shfl_xor_sync(0xffffffff, found, offset));
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = found;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (const uint32_t of_warp : of_warps) found = max(found, of_warp);
  const int64_t at = (e * gridDim.y + n_block) * gridDim.x + k_block;
  largest[at] = static_cast<uint8_t>(found);
  e4m3_scales[at] = mxfp4::e4m3_scale(found);
}

template <typename T, GroupRows rows, Major major>
using Config = GemmConfig<T, T, sizeof(T) == 1 ? Scaling::kScale128x128 : Scaling::kNone,
                          Grouping::kM, rows, Major::kK, sizeof(T) == 1 ? Major::kK : major,
                          major == Major::kK ? StoredB::kMxfp4 : StoredB::kMxfp4Transposed>;

// A 4-byte word of codes is read at once, in FP8 two.
Tensor with_aligned_codes(const Tensor& b) {
  const bool aligned = b.stride(2) == 1 && b.stride(1) % 8 == 0 && b.stride(0) % 8 == 0 &&
                       reinterpret_cast<uintptr_t>(b.const_data_ptr()) % 8 == 0;
  return aligned ? b : dense_copy(b);
}

template <typename T, Major major>
void run(const Launch& launch, const GroupedGemm& gemm) {
  constexpr bool k_major = major == Major::kK;
  const Tensor a = vector_readable(gemm.a, 1), codes = with_aligned_codes(gemm.b);
  const Tensor scales = as_dense(*gemm.scale_b);
  Mxfp4Operands operands{{view_of(a, -1, 0)}, {}};
  operands.w.codes = codes.const_data_ptr<uint8_t>();
  operands.w.code_group_stride = codes.stride(0);
  operands.w.code_stride = codes.stride(1);
  operands.w.scales = scales.const_data_ptr<uint8_t>();
  operands.w.scale_group_stride = scales.stride(0);
  operands.w.scale_stride = scales.stride(1);
  std::optional<Tensor> scale_a, largest, scale_b;
  if constexpr (sizeof(T) == 1) {
    const int64_t E = codes.size(0), N = codes.size(1),
                  k_blocks = ceil_div(2 * codes.size(2), kBlock);
    const Shape shape{E, ceil_div(N, kBlock), k_blocks};
    largest = new_tensor(codes, shape, ScalarType::Byte);
    scale_b = new_tensor(codes, shape, ScalarType::Float);
    const dim3 grid(static_cast<unsigned>(k_blocks), static_cast<unsigned>(ceil_div(N, kBlock)),
                    static_cast<unsigned>(E));
    launch.run(largest_scales_kernel, grid, kLargestThreads, 0, operands.w.scales,
               static_cast<int>(N), static_cast<int>(scales.size(2)),
               largest->mutable_data_ptr<uint8_t>(), scale_b->mutable_data_ptr<float>());
    scale_a = with_dense_rows(*gemm.scale_a);
    operands.scale_a = scale_a->const_data_ptr<float>();
    operands.scale_a_stride = scale_a->stride(0);
    operands.scale_b = scale_b->const_data_ptr<float>();
    operands.scale_b_group_stride = scale_b->stride(0);
    operands.scale_b_row_stride = scale_b->stride(k_major ? 1 : 2);
    operands.scale_b_k_stride = scale_b->stride(k_major ? 2 : 1);
    operands.w.largest = largest->const_data_ptr<uint8_t>();
    operands.w.largest_group_stride = operands.scale_b_group_stride;
    operands.w.largest_col_stride = operands.scale_b_row_stride;
    operands.w.largest_k_stride = operands.scale_b_k_stride;
  }
  if (has_few_rows(gemm))
    return launch_gemm<Config<T, GroupRows::kFew, major>>(launch, operands, gemm, gemm.epilogue);
  launch_gemm<Config<T, GroupRows::kMany, major>>(launch, operands, gemm, gemm.epilogue);
}

template <typename T>
void run(const Launch& launch, const GroupedGemm& gemm, Major b_major) {
  if (b_major == Major::kK) return run<T, Major::kK>(launch, gemm);
  run<T, Major::kMN>(launch, gemm);
}

}  // namespace

void run_mxfp4(const Launch& launch, const GroupedGemm& in, Major b_major) {
  const GroupedGemm gemm = in.a_rows ? gather_before(launch, in) : in;
  switch (gemm.a.scalar_type()) {
    case ScalarType::BFloat16: return run<__nv_bfloat16>(launch, gemm, b_major);
    case ScalarType::Half: return run<__half>(launch, gemm, b_major);
    default: return run<__nv_fp8_e4m3>(launch, gemm, b_major);
  }
}

}  // namespace grouped_linear::cuda::sm80
