// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "checks.h"
#include "cuda/common/launch.h"
#include "cuda/common/operands.h"
#include "cuda/quantize/update_scales.cuh"
#include "ops.h"

namespace grouped_linear::cuda {

void update_scales_(const std::vector<Tensor>& scale, const std::vector<Tensor>& amax,
                    const std::vector<Tensor>& amax_history, const std::vector<double>& fp8_max,
                    int64_t margin, bool most_recent) {
  check_update_scales(scale, amax, amax_history, fp8_max, margin);

  const Launch launch("update_scales_", scale[0]);
  const float inverse_margin = std::ldexp(1.0f, static_cast<int>(-margin));
  for (size_t begin = 0; begin < scale.size(); begin += kOperandsPerLaunch) {
    const size_t count = std::min<size_t>(kOperandsPerLaunch, scale.size() - begin);
    OperandTable table{};
    int64_t most_groups = 1;
    for (size_t i = 0; i < count; ++i) {
      const size_t s = begin + i;
      table.operands[i] = {mutable_data<float>(scale[s]),
                           mutable_data<float>(amax[s]),
                           mutable_data<float>(amax_history[s]),
                           static_cast<int>(scale[s].size(0)),
                           static_cast<int>(amax_history[s].size(0)),
                           static_cast<float>(fp8_max[s])};
      most_groups = std::max<int64_t>(most_groups, scale[s].size(0));
    }
    const dim3 grid(static_cast<unsigned>(ceil_div(most_groups, 32)), static_cast<unsigned>(count));
    launch.run(update_scales_kernel, grid, kUpdateThreads, 0, table, inverse_margin, most_recent);
  }
}

}  // namespace grouped_linear::cuda
