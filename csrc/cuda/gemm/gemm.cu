#include <cstdlib>
#include <string_view>

#include "cuda/gemm/gemm.h"
#include "cuda/gemm/simt/gemm.h"
#include "cuda/gemm/sm80/gemm.h"
#include "cuda/gemm/sm90/gemm.h"

namespace grouped_linear::cuda {
namespace {

// GROUPED_LINEAR_PORTABLE=1 in the environment at the first call: Hopper runs the portable kernels,
// for tests and comparisons.
bool portable_is_forced() {
  static const bool forced = [] {
    const char* value = std::getenv("GROUPED_LINEAR_PORTABLE");
    return value != nullptr && std::string_view(value) == "1";
  }();
  return forced;
}

}  // namespace

void run_grouped_gemm(const Launch& launch, const GroupedGemm& gemm) {
  // Tensor cores would round float32 to tf32 and break its promise.
  if (gemm.a.scalar_type() == ScalarType::Float) return simt::run_grouped_gemm(launch, gemm);
#ifdef GROUPED_LINEAR_SM90
  if (launch.compute_capability() == 90 && !portable_is_forced())
    return sm90::run_grouped_gemm(launch, gemm);
#endif
  return sm80::run_grouped_gemm(launch, gemm);
}

}  // namespace grouped_linear::cuda
