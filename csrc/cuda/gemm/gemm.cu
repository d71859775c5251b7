#include "cuda/gemm/gemm.h"
#include "cuda/gemm/simt/gemm.h"
#include "cuda/gemm/sm90/gemm.h"

namespace grouped_linear::cuda {

void run_grouped_gemm(const Launch& launch, const GroupedGemm& gemm) {
  // Tensor cores would round float32 to tf32 and break its promise.
  if (gemm.a.scalar_type() == ScalarType::Float) return simt::run_grouped_gemm(launch, gemm);
  const int capability = launch.compute_capability();
  switch (capability) {
    case 90: return sm90::run_grouped_gemm(launch, gemm);
    default:
      fail(launch.op(), ": CUDA devices of compute capability 9.0 (Hopper) are supported, got ",
           capability / 10, ".", capability % 10);
  }
}

}  // namespace grouped_linear::cuda
