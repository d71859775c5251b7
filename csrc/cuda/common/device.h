// SPDX-License-Identifier: Apache-2.0
// What the host asks the CUDA runtime and the driver. A failure is one sentence that begins with
// the op.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "checks.h"

namespace grouped_linear::cuda {

// Throws if a call failed. `what` is the rest of the sentence, before the runtime's own words. The
// error is cleared: torch would report it as that of its next kernel.
inline void check_cuda(const char* op, const char* what, cudaError_t error) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  if (error == cudaErrorInsufficientDriver) {
    int driver = 0;
    cudaDriverGetVersion(&driver);
    check(driver > 0, op, ": there is no NVIDIA driver");
    fail(op, ": the NVIDIA driver supports CUDA ", driver / 1000, ".", driver % 1000 / 10,
         ", this library needs ", CUDART_VERSION / 1000, ".", CUDART_VERSION % 1000 / 10,
         ": update the driver");
  }
  check(error != cudaErrorNoDevice, op, ": the CUDA runtime sees no device");
  fail(op, ": ", what, ": ", cudaGetErrorString(error));
}

constexpr int kReservedSharedBytes = 1024;  // that the GPU reserves for each thread block

struct Device {
  int multiprocessors = 0, major = 0, minor = 0;
  int sm_shared_bytes = 0, block_shared_bytes = 0;  // the most: of an SM, and of a thread block
};

inline std::vector<Device> query_devices(const char* op) {
  int count = 0;
  check_cuda(op, "cannot count the CUDA devices", cudaGetDeviceCount(&count));
  std::vector<Device> devices(static_cast<size_t>(count));
  for (int d = 0; d < count; ++d) {
    const auto query = [&](int& value, cudaDeviceAttr attribute) {
      check_cuda(op, "cannot query a CUDA device", cudaDeviceGetAttribute(&value, attribute, d));
    };
    query(devices[d].multiprocessors, cudaDevAttrMultiProcessorCount);
    query(devices[d].major, cudaDevAttrComputeCapabilityMajor);
    query(devices[d].minor, cudaDevAttrComputeCapabilityMinor);
    query(devices[d].sm_shared_bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    query(devices[d].block_shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  }
  return devices;
}

inline const Device& device_at(const char* op, int index) {
  // Where a query throws, the variable stays uninitialised and the next call asks again.
  static const std::vector<Device> devices = query_devices(op);
  check(index >= 0 && static_cast<size_t>(index) < devices.size(), op, ": no CUDA device ", index,
        ", the CUDA runtime sees ", devices.size());
  return devices[static_cast<size_t>(index)];
}

// A function of the driver, looked up at run time: the library does not link to libcuda, so it also
// loads where there is no driver. version: of CUDA, the first that has it.
template <typename Function>
Function* driver_function(const char* op, const char* name, unsigned version) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result{};
  check_cuda(
      op, "cannot look up a function of the driver",
      cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &result));
  check(result == cudaDriverEntryPointSuccess && function != nullptr, op,
        ": the NVIDIA driver has no ", name, ": update the driver");
  return reinterpret_cast<Function*>(function);
}

}  // namespace grouped_linear::cuda
