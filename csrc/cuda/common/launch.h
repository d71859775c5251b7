// SPDX-License-Identifier: Apache-2.0
// What every launcher needs: the tensor's device made current, its stream, and errors as sentences.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <atomic>

#include "checks.h"
#include "cuda/common/device.h"

// Weak: libtorch without CUDA does not have it, and this library must load there all the same.
extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace grouped_linear::cuda {

class Launch {
 public:
  // The guard sets the device only where another one is current. The calling thread may still have
  // no CUDA context, as autograd's threads have none at first: a launch makes one, and tensor_map
  // does so where it needs one.
  Launch(const char* op, const torch::stable::Tensor& tensor)
      : op_(op), index_(tensor.get_device_index()), device_(device_at(op, index_)), guard_(index_) {
    check(device_.major >= 8, op,
          ": CUDA devices of compute capability 8.0 and up are supported, got ", device_.major, ".",
          device_.minor);
    void* stream = nullptr;
    check(aoti_torch_get_current_cuda_stream(index_, &stream) == AOTI_TORCH_SUCCESS, op,
          ": no current CUDA stream on device ", index_);
    stream_ = static_cast<cudaStream_t>(stream);
  }

  const char* op() const { return op_; }
  int multiprocessors() const { return device_.multiprocessors; }
  int sm_shared_bytes() const { return device_.sm_shared_bytes; }
  int block_shared_bytes() const { return device_.block_shared_bytes; }
  int compute_capability() const { return 10 * device_.major + device_.minor; }

  // Allows thread blocks of a kernel so many bytes of dynamic shared memory, on one device always
  // the same number. several: of which a multiprocessor is to hold more than one.
  template <auto kernel, bool several = false>
  void allow_shared_bytes(int bytes) const {
    static std::atomic<uint64_t> allowed{0};  // a bit for each of the first 64 devices
    const uint64_t bit = index_ < 64 ? uint64_t{1} << index_ : 0;
    if ((allowed & bit) != 0) return;
    check_cuda(op_, "cannot allow a kernel its shared memory",
               cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    // For several blocks of it, all that can be shared memory is.
    if (several)
      check_cuda(op_, "cannot prefer shared memory",
                 cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                      cudaSharedmemCarveoutMaxShared));
    allowed |= bit;
  }

  // Launches a kernel that calls grid_dependency_wait(), see pdl.cuh. Programmatic dependent launch
  // needs compute capability 9.0.
  template <typename... Parameters, typename... Arguments>
  void run(void (*kernel)(Parameters...), dim3 grid, int threads, int shared_bytes,
           const Arguments&... arguments) const {
    cudaLaunchAttribute overlap{};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config.stream = stream_;
    config.attrs = &overlap;
    config.numAttrs = device_.major >= 9 ? 1 : 0;
    check_cuda(op_, "the launch failed", cudaLaunchKernelEx(&config, kernel, arguments...));
  }

 private:
  const char* op_;
  int index_;
  const Device& device_;
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace grouped_linear::cuda
