// SPDX-License-Identifier: Apache-2.0
// Runs what export.py compiled, in a process without Python:
//
//   expert_layer LIBRARY FOLDER
//
// LIBRARY is grouped_linear's _C.so, FOLDER has expert_layer.pt2 and examples.pt.

#include <ATen/ops/equal.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

// A list that Python's torch.save wrote.
std::vector<at::Tensor> read_tensors(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  const c10::IValue list = torch::jit::pickle_load(bytes);
  std::vector<at::Tensor> tensors;
  for (const c10::IValue& value : list.toListRef()) tensors.push_back(value.toTensor());
  return tensors;
}

int run(const std::string& library, const std::string& folder) {
  // Loading it registers the ops with torch. It stays loaded: torch keeps pointers into it.
  if (dlopen(library.c_str(), RTLD_NOW) == nullptr) throw std::runtime_error(dlerror());

  torch::inductor::AOTIModelPackageLoader layer(folder + "/expert_layer.pt2");
  const at::Device device(layer.get_metadata().at("AOTI_DEVICE_KEY"));

  const auto examples = read_tensors(folder + "/examples.pt");
  for (size_t i = 0; i + 1 < examples.size(); i += 2) {
    const at::Tensor& x_TD = examples[i];
    const at::Tensor y_TD = layer.run({x_TD.to(device)}).at(0).cpu();
    const bool same = at::equal(y_TD, examples[i + 1]);
    std::cout << x_TD.size(0) << " tokens: " << (same ? "the bits" : "not the bits")
              << " that Python got\n";
    if (!same) return 1;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "usage: expert_layer LIBRARY FOLDER\n";
    return 2;
  }
  try {
    return run(argv[1], argv[2]);
  } catch (const c10::Error& error) {
    std::cerr << "expert_layer: " << error.what_without_backtrace() << "\n";
    return 1;
  } catch (const std::exception& error) {
    std::cerr << "expert_layer: " << error.what() << "\n";
    return 1;
  }
}
