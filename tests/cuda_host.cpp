// SPDX-License-Identifier: Apache-2.0
// The host side of the CUDA ops against a CUDA runtime of its own, which fails where a case says
// so. Prints a line for each case; test_cuda_host.py holds them.
#include <iostream>
#include <string>

#include "cuda/common/device.h"
#include "cuda/common/tensor_map.h"

namespace {

cudaError_t count_error = cudaSuccess, attribute_error = cudaSuccess, lookup_error = cudaSuccess;
int driver_version = 13000, device_count = 70;
bool knows_function = true, has_context = false, cleared = false;
CUresult encode_error = CUDA_SUCCESS;

CUresult encode(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  return has_context ? encode_error : CUDA_ERROR_INVALID_CONTEXT;
}

template <typename Run>
void print(const char* name, const Run& run) {
  std::string line = "ok";
  try {
    run();
  } catch (const std::runtime_error& error) {
    line = error.what();
  }
  std::cout << name << " | " << line << '\n';
}

}  // namespace

extern "C" {
cudaError_t cudaGetLastError() {
  cleared = true;
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t) { return "the runtime's words"; }
cudaError_t cudaDriverGetVersion(int* version) {
  *version = driver_version;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = device_count;
  return count_error;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int device) {
  *value = device;
  return attribute_error;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) {
  has_context = true;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = knows_function ? reinterpret_cast<void*>(encode) : nullptr;
  *result = knows_function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointVersionNotSufficent;
  return lookup_error;
}
// libtorch's, which is not linked; the headers of torch 2.14 ask for it.
uint64_t aoti_torch_abi_version() { return TORCH_TARGET_VERSION; }
}

int main() {
  using namespace grouped_linear;
  using namespace grouped_linear::cuda;
  const auto device = [](int index) { return [=] { device_at("op", index); }; };
  const auto map = [] {
    tensor_map("op", nullptr, ScalarType::Half, 2, {8, 8}, {8}, {8, 8}, true);
  };

  count_error = cudaErrorInsufficientDriver, driver_version = 12040;
  print("old driver", device(0));
  driver_version = 0;
  print("no driver", device(0));
  count_error = cudaErrorNoDevice;
  print("no device", device(0));
  count_error = cudaSuccess, attribute_error = cudaErrorUnknown;
  print("no attribute", device(0));
  attribute_error = cudaSuccess;
  print("after a failure", device(0));
  print("device 69", device(69));
  print("device 70", device(70));
  print("device -1", device(-1));
  std::cout << "attributes of device 69 | " << device_at("op", 69).multiprocessors << '\n';
  std::cout << "error cleared | " << cleared << '\n';

  knows_function = false;
  print("no function", map);
  lookup_error = cudaErrorInvalidValue;
  print("no lookup", map);
  lookup_error = cudaSuccess, knows_function = true;
  print("no context", map);
  encode_error = CUDA_ERROR_INVALID_VALUE;
  print("no map", map);
}
