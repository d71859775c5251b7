// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>
#include <string_view>

#include "cuda/gemm/gemm.h"
#include "cuda/gemm/simt/gemm.h"
#include "cuda/gemm/sm80/gemm.h"
#include "cuda/gemm/sm90/gemm.h"

namespace grouped_linear::cuda {
namespace {

// GROUPED_LINEAR_PORTABLE=1 in the environment at the first call: Hopper runs the portable kernels,
// for tests and comparisons. A library has them that was built with GROUPED_LINEAR_BUILD_PORTABLE=1.
bool portable_is_forced() {
  static const bool forced = [] {
    const char* value = std::getenv("GROUPED_LINEAR_PORTABLE");
    return value != nullptr && std::string_view(value) == "1";
  }();
  return forced;
}

bool runs_on_sm90(const Launch& launch) {
#ifdef GROUPED_LINEAR_SM90
  return launch.compute_capability() == 90 && !portable_is_forced();
#else
  return false;
#endif
}

// Raises where this library has no portable kernels for the device.
void check_portable(const Launch& launch) {
  [[maybe_unused]] const int capability = launch.compute_capability();
#if defined(GROUPED_LINEAR_SM90) && !defined(GROUPED_LINEAR_BUILD_PORTABLE)
  check(
      capability != 90, launch.op(),
      ": GROUPED_LINEAR_PORTABLE is 1, and this library has no portable kernels for Hopper: unset "
      "it, or build with GROUPED_LINEAR_BUILD_PORTABLE=1 in the environment");
#endif
#ifndef GROUPED_LINEAR_SM80
  fail(launch.op(), ": this library was built for compute capability 9.0 alone, the GPU has ",
       capability / 10, ".", capability % 10);
#endif
}

}  // namespace

bool adds_low_rank(const Launch& launch, const LowRank& low) {
  return runs_on_sm90(launch) && low.a->scalar_type() != ScalarType::Float;
}

// Every 256 columns of an output read gathered rows again, by copies of 16 bytes that take some of a
// GEMM's time, and only rows in order have kernels of 192 columns and of swapped operands (H100 and
// H200, docs/notes/gemm_sm90.md, "Rows gathered inside the GEMM"). Kernels for few rows gather.
bool copies_rows(const Launch& launch, const GroupedGemm& gemm) {
  constexpr int most_cols = 512;
  if (!gemm.a_rows || gemm.scale_a || gemm.shape.cols <= most_cols) return false;
#ifdef GROUPED_LINEAR_SM90
  if (runs_on_sm90(launch) && sm90::takes_few_rows(gemm)) return false;
#endif
  return true;
}

void run_grouped_gemm(const Launch& launch, const GroupedGemm& gemm) {
  // Tensor cores would round float32 to tf32 and break its promise.
  if (gemm.a.scalar_type() == ScalarType::Float) return simt::run_grouped_gemm(launch, gemm);
#ifdef GROUPED_LINEAR_SM90
  if (runs_on_sm90(launch)) return sm90::run_grouped_gemm(launch, gemm);
#endif
  check_portable(launch);
#ifdef GROUPED_LINEAR_SM80
  sm80::run_grouped_gemm(launch, gemm);
#endif
}

void run_mxfp4(const Launch& launch, const GroupedGemm& gemm, Major b_major) {
#ifdef GROUPED_LINEAR_SM90
  if (runs_on_sm90(launch)) return sm90::run_mxfp4(launch, gemm, b_major);
#endif
  check_portable(launch);
#ifdef GROUPED_LINEAR_SM80
  sm80::run_mxfp4(launch, gemm, b_major);
#endif
}

#ifdef GROUPED_LINEAR_SM90
bool has_swiglu(const Launch& launch, const GroupedGemm& gemm, const SwigluForm& form) {
  return runs_on_sm90(launch) && sm90::has_swiglu(gemm, form);
}
bool has_swiglu_grad(const Launch& launch, const GroupedGemm& gemm, const SwigluForm& form) {
  return runs_on_sm90(launch) && sm90::has_swiglu_grad(gemm, form);
}
void run_swiglu(const Launch& launch, const GroupedGemm& gemm, const SwigluOutput& swiglu) {
  if (!swiglu.form.interleaved && sm90::takes_few_rows(gemm))
    return sm90::run_few_rows_swiglu(launch, gemm, swiglu);
  sm90::run_swiglu(launch, gemm, swiglu);
}
void run_swiglu_grad(const Launch& launch, const GroupedGemm& gemm, const SwigluGradOutput& grad) {
  sm90::run_swiglu_grad(launch, gemm, grad);
}
#else
bool has_swiglu(const Launch&, const GroupedGemm&, const SwigluForm&) { return false; }
bool has_swiglu_grad(const Launch&, const GroupedGemm&, const SwigluForm&) { return false; }
void run_swiglu(const Launch&, const GroupedGemm&, const SwigluOutput&) {}
void run_swiglu_grad(const Launch&, const GroupedGemm&, const SwigluGradOutput&) {}
#endif

}  // namespace grouped_linear::cuda
