// What every launcher needs: the tensor's device made current, its stream, and errors as sentences.
#pragma once

#include <cuda_runtime_api.h>
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
  cudaStream_t stream() const { return stream_; }
  int multiprocessors() const { return multiprocessors_; }

  void check_launched() const {
    const cudaError_t error = cudaGetLastError();
    check(error == cudaSuccess, op_, ": the launch failed: ", cudaGetErrorString(error));
  }

 private:
  const char* op_;
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
  int multiprocessors_ = 0;
};

}  // namespace grouped_linear::cuda
