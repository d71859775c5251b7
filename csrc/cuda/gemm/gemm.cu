#include "cuda/gemm/gemm.h"
#include "cuda/gemm/simt/gemm.h"
#include "cuda/gemm/sm90/gemm.h"

namespace grouped_linear::cuda {

void run_grouped_gemm(const Launch& launch, const GroupedGemm& gemm) {
  // Tensor cores would round float32 to tf32 and break its promise.
  if (gemm.a.scalar_type() == ScalarType::Float) return simt::run_grouped_gemm(launch, gemm);
  const DeviceFacts& device = facts_of(gemm.a.get_device_index());
  switch (10 * device.major + device.minor) {
    case 90: return sm90::run_grouped_gemm(launch, gemm);
    default:
      fail(launch.op(), ": CUDA devices of compute capability 9.0 (Hopper) are supported, got ",
           device.major, ".", device.minor);
  }
}

}  // namespace grouped_linear::cuda
