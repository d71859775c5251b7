// SPDX-License-Identifier: Apache-2.0
// grouped_linear._host: facts of the build and of the layouts, without a tensor.
#include <pybind11/pybind11.h>

#include "cpu/features.h"
#include "cuda/gemm/sm90/config.h"
#include "layout.h"

namespace py = pybind11;

namespace {

py::dict gemm_tile(bool fp8) {
  const auto tile =
      fp8 ? grouped_linear::cuda::sm90::kTileFp8 : grouped_linear::cuda::sm90::kTile16Bit;
  py::dict answer;
  answer["rows"] = tile.m;
  answer["cols"] = tile.n;
  answer["depth"] = tile.k;
  answer["stages"] = tile.stages;
  answer["cluster"] = tile.cluster;
  answer["narrow_cols"] = grouped_linear::cuda::sm90::kNarrowTileN;
  return answer;
}

}  // namespace

PYBIND11_MODULE(_host, m) {
  m.doc() = "Host-side facts of the build: constants and sizes shared with the C++ kernels.";
  m.attr("BLOCK") = grouped_linear::kBlock;
  m.attr("FEATURE_MULTIPLE") = grouped_linear::kFeatureMultiple;
  m.attr("MAX_GROUPS") = grouped_linear::kMaxGroups;
#ifdef GROUPED_LINEAR_CUDA
  m.attr("CUDA_VERSION") = GROUPED_LINEAR_CUDA;
  m.attr("CUDA_ARCHITECTURES") = GROUPED_LINEAR_CUDA_ARCHS;  // as CMAKE_CUDA_ARCHITECTURES has them
#else
  m.attr("CUDA_VERSION") = py::none();
  m.attr("CUDA_ARCHITECTURES") = "";
#endif
  m.def("has_bf16_units", &grouped_linear::cpu::has_bf16_units,
        "Whether FP8 GEMMs run on this CPU's AVX-512 BF16.");
  m.def("has_byte_permutes", &grouped_linear::cpu::has_byte_permutes,
        "Whether quantizers use this CPU's AVX-512 VBMI.");
  m.def("padded_rows", &grouped_linear::padded_rows, py::arg("num_rows"), py::arg("num_groups"),
        "Rows of columnwise data for num_rows tokens in num_groups groups: the static bound\n"
        "128 * floor((T + 127 * min(E, T)) / 128).");
  m.def(
      "gemm_tile", &gemm_tile, py::arg("fp8"),
      "The tile of a grouped GEMM on Hopper with FP8 or 16-bit operands: rows and columns of the\n"
      "output, K elements a stage, pipeline stages, CTAs a cluster, and the columns of the narrow\n"
      "tiles that M-grouped GEMMs use if the GPU has room for all of them at once.");
}
