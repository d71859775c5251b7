// What every launcher needs: the tensor's device made current, its stream, and errors as sentences.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <atomic>
#include <vector>

#include "checks.h"

// Weak: libtorch without CUDA does not have it, and this library must load there all the same.
extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace grouped_linear::cuda {

struct DeviceFacts {
  int multiprocessors = 0, major = 0, minor = 0;
};

inline const DeviceFacts& facts_of(int device) {
  static const std::vector<DeviceFacts> facts = [] {
    int count = 0;
    cudaGetDeviceCount(&count);
    std::vector<DeviceFacts> all(static_cast<size_t>(count));
    for (int d = 0; d < count; ++d) {
      cudaDeviceGetAttribute(&all[d].multiprocessors, cudaDevAttrMultiProcessorCount, d);
      cudaDeviceGetAttribute(&all[d].major, cudaDevAttrComputeCapabilityMajor, d);
      cudaDeviceGetAttribute(&all[d].minor, cudaDevAttrComputeCapabilityMinor, d);
    }
    return all;
  }();
  return facts.at(static_cast<size_t>(device));
}

class Launch {
 public:
  Launch(const char* op, const torch::stable::Tensor& tensor)
      : op_(op), device_(tensor.get_device_index()), guard_(device_), facts_(facts_of(device_)) {
    // The guard does nothing where the device is current already. A thread of its own, autograd's
    // for one, may have no context yet all the same, and the driver's entry points need one.
    cudaSetDevice(device_);
    check(facts_.major == 9 && facts_.minor == 0, op,
          ": CUDA devices of compute capability 9.0 (Hopper) are supported, got ", facts_.major,
          ".", facts_.minor);
    void* stream = nullptr;
    check(aoti_torch_get_current_cuda_stream(device_, &stream) == AOTI_TORCH_SUCCESS, op,
          ": no current CUDA stream on device ", device_);
    stream_ = static_cast<cudaStream_t>(stream);
  }

  const char* op() const { return op_; }
  int multiprocessors() const { return facts_.multiprocessors; }

  // Lets blocks of a kernel have so many bytes of dynamic shared memory, always the same number.
  template <auto kernel>
  void allow_shared_bytes(int bytes) const {
    static std::atomic<uint64_t> allowed{0};  // a bit a device
    const uint64_t bit = uint64_t{1} << (device_ % 64);
    if ((allowed & bit) != 0) return;
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) ==
        cudaSuccess)
      allowed |= bit;
  }

  // Launches a kernel that calls grid_dependency_wait(), see pdl.cuh.
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
    config.numAttrs = 1;
    const cudaError_t error = cudaLaunchKernelEx(&config, kernel, arguments...);
    if (error != cudaSuccess) fail(op_, ": the launch failed: ", cudaGetErrorString(error));
  }

 private:
  const char* op_;
  int device_;
  torch::stable::accelerator::DeviceGuard guard_;
  const DeviceFacts& facts_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace grouped_linear::cuda
