// What every launcher needs: the tensor's device made current, its stream, and errors as sentences.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "../checks.h"

// Weak: libtorch without CUDA does not have it, and this library must load there all the same.
extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace grouped_linear::cuda {

class Launch {
 public:
  Launch(const char* op, const torch::stable::Tensor& tensor)
      : op_(op), guard_(tensor.get_device_index()) {
    int major = 0, minor = 0;
    const int device = tensor.get_device_index();
    // The guard does nothing where the device is current already. A thread of its own, autograd's
    // for one, may have no context yet all the same, and the driver's entry points need one.
    cudaSetDevice(device);
    cudaDeviceGetAttribute(&multiprocessors_, cudaDevAttrMultiProcessorCount, device);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    check(major == 9 && minor == 0, op,
          ": CUDA devices of compute capability 9.0 (Hopper) are supported, got ", major, ".",
          minor);
    void* stream = nullptr;
    check(aoti_torch_get_current_cuda_stream(device, &stream) == AOTI_TORCH_SUCCESS, op,
          ": no current CUDA stream on device ", device);
    stream_ = static_cast<cudaStream_t>(stream);
  }

  const char* op() const { return op_; }
  int multiprocessors() const { return multiprocessors_; }

  // Launches a kernel that calls start_after_previous(), see kernels/overlap.cuh.
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
    check(error == cudaSuccess, op_, ": the launch failed: ", cudaGetErrorString(error));
  }

 private:
  const char* op_;
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
  int multiprocessors_ = 0;
};

}  // namespace grouped_linear::cuda
