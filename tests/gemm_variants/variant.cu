// SPDX-License-Identifier: Apache-2.0
// Runs the grouped GEMM kernel with STAGES stages and tiles of TILE_N columns, M-grouped and
// K-grouped, on random data with uneven and empty groups, and compares with a plain kernel. FP8:
// e4m3 with block scales, 0: BF16. Prints a line a case; exit status 1 if any is wrong.
//
// Not the library's launcher: operands are dense, out is BF16 or float32, and the driver's entry
// point makes the tensor maps. No torch.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

#include "cuda/gemm/sm90/kernel.cuh"

using namespace grouped_linear;
using namespace grouped_linear::cuda;
using namespace grouped_linear::cuda::sm90;

namespace {

#if FP8
using Element = __nv_fp8_e4m3;
constexpr Scaling kMScaling = Scaling::kScale128x128, kKScaling = Scaling::kScale1x128;
constexpr Major kKMajor = Major::kK;  // of a K-grouped GEMM's operands
constexpr CUtensorMapDataType kElementType = CU_TENSOR_MAP_DATA_TYPE_UINT8;
#else
using Element = __nv_bfloat16;
constexpr Scaling kMScaling = Scaling::kNone, kKScaling = Scaling::kNone;
constexpr Major kKMajor = Major::kMN;
constexpr CUtensorMapDataType kElementType = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
#endif
constexpr bool kFp8 = FP8;

constexpr GemmTraits traits(Grouping grouping, Scaling scaling, Major major) {
  return {.grouping = grouping,
          .scaling = scaling,
          .a_major = major,
          .b_major = major,
          .gathers = false,
          .transposed = false,
          .store_work = StoreWork::kStore,
          .tile_n = TILE_N,
          .stages = STAGES};
}
using MGrouped = GemmConfig<Element, Element, traits(Grouping::kM, kMScaling, Major::kK)>;
using KGrouped = GemmConfig<Element, Element, traits(Grouping::kK, kKScaling, kKMajor)>;

void require(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

template <typename T>
struct DeviceArray {
  explicit DeviceArray(size_t size) : size(size) {
    require(cudaMalloc(&data, std::max<size_t>(size, 1) * sizeof(T)), "cudaMalloc");
  }
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(values.size()) {
    require(cudaMemcpy(data, values.data(), size * sizeof(T), cudaMemcpyHostToDevice), "copy");
  }
  ~DeviceArray() { cudaFree(data); }
  DeviceArray(const DeviceArray&) = delete;
  std::vector<T> host() const {
    std::vector<T> values(size);
    require(cudaMemcpy(values.data(), data, size * sizeof(T), cudaMemcpyDeviceToHost), "copy");
    return values;
  }
  T* data = nullptr;
  size_t size;
};

CUtensorMap tensor_map(const void* first, CUtensorMapDataType type, int64_t item,
                       std::initializer_list<int64_t> sizes, std::initializer_list<int64_t> strides,
                       std::initializer_list<uint32_t> box, bool swizzled = true) {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    require(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                             cudaEnableDefault, &result),
            "cuTensorMapEncodeTiled");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  const std::vector<cuuint64_t> map_sizes(sizes.begin(), sizes.end());
  std::vector<cuuint64_t> map_strides(strides.begin(), strides.end());
  for (cuuint64_t& stride : map_strides) stride *= item;
  const std::vector<cuuint32_t> map_box(box.begin(), box.end()), steps(sizes.size(), 1);
  CUtensorMap map{};
  const CUresult result = encode(
      &map, type, static_cast<cuuint32_t>(sizes.size()), const_cast<void*>(first), map_sizes.data(),
      map_strides.data(), map_box.data(), steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE,
      swizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    std::printf("no tensor map: driver error %d\n", static_cast<int>(result));
    std::exit(1);
  }
  return map;
}

constexpr int64_t kMost = std::numeric_limits<int32_t>::max();

// Rows with an end that the kernel chooses, see RaggedRows.
CUtensorMap ragged_map(const void* first, CUtensorMapDataType type, int64_t item, int64_t cols,
                       uint32_t box_rows) {
  return tensor_map(first, type, item, {cols, RaggedRows::kOrigin, kMost, kMost},
                    {cols, cols, (int64_t{1} << 34) / item - cols},
                    {static_cast<uint32_t>(kSwizzleBytes / item), box_rows, 1, 1});
}

// out in float32: all groups' matrices, one below the other.
template <typename Config>
CUtensorMap out_map(const EpilogueArguments& epilogue, int64_t cols) {
  constexpr auto type = CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  if (!stores_whole_rows<Config>(epilogue, static_cast<int>(cols)))
    return ragged_map(epilogue.out, type, 4, cols, Config::kEpilogueRows);
  constexpr int64_t line = kSwizzleBytes / 4;
  return tensor_map(epilogue.out, type, 4, {line, RaggedRows::kOrigin, cols / line, kMost, kMost},
                    {cols, line, cols, (int64_t{1} << 34) / 4 - cols},
                    {line, Config::kEpilogueRows, Config::kEpilogueBuffers, 1, 1});
}

CUtensorMap scale_map(const float* scale, int64_t cols, int64_t rows, uint32_t width) {
  return tensor_map(scale, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, {cols, rows}, {cols}, {width, 1},
                    false);
}

// An epilogue of another file's: the kernel takes it without a change.
struct ReluEpilogue : LinearEpilogue {
  template <typename Config, typename Params, typename Sync>
  static __device__ __forceinline__ void apply(float (&accum)[Config::kTileN / 2],
                                               SharedStorage<Config>& shared, const Params& params,
                                               const WorkTile& tile, bool overwrite,
                                               const Sync& sync) {
#pragma unroll
    for (float& value : accum) value = fmaxf(value, 0);
    LinearEpilogue::apply<Config>(accum, shared, params, tile, overwrite, sync);
  }
};

template <typename Config, typename Epilogue = LinearEpilogue>
void launch(const TensorMaps& maps, const int32_t* offs, const Scale128x128View& scale_b,
            const EpilogueArguments& epilogue, const GemmShape& shape) {
  int multiprocessors = 0;
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0);
  const int clusters = std::min(multiprocessors / kClusterSize, kMaxClusters);
  const size_t flags = size_t(clusters) * kFlagsPerSlot,
               accumulators = size_t(clusters) * kAccumulatorsPerSlot<Config>;
  DeviceArray<uint64_t> room(kCounterWords + flags + accumulators / 2);
  const SplitKWorkspace workspace{reinterpret_cast<unsigned long long*>(room.data),
                                  room.data + kCounterWords,
                                  reinterpret_cast<float*>(room.data + kCounterWords + flags)};
  constexpr auto kernel = grouped_gemm_kernel<Config, Epilogue>;
  constexpr int bytes = shared_bytes<Config>();
  require(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
          "shared memory");
  kernel<<<clusters * kClusterSize, kThreads, bytes>>>(maps, offs, {}, scale_b, epilogue, workspace,
                                                       tile_counts<Config>(shape),
                                                       narrow_tile_counts<Config>(shape), shape);
  require(cudaGetLastError(), "launch");
  require(cudaDeviceSynchronize(), "kernel");
}

// --- the reference -------------------------------------------------------------------------------

// out[row, col] = sum_k a(row, k) * b(col, k), with the sum of magnitudes beside it for the
// tolerance.
template <typename Dot>
__global__ void reference_kernel(float* out, float* magnitude, int64_t count, Dot dot) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x)
    dot(i, out[i], magnitude[i]);
}

struct MGroupedDot {
  const Element *a, *b;
  const float *scale_a, *scale_b;
  const int32_t* offs;
  int E, N, K;
  int64_t scale_a_stride, scale_cols, scale_k;
  bool relu;
  __device__ void operator()(int64_t i, float& out, float& magnitude) const {
    const int64_t t = i / N, n = i % N;
    int e = 0;
    while (e < E && t >= offs[e]) ++e;
    double sum = 0, size = 0;
    if (e < E)
      for (int64_t k = 0; k < K; ++k) {
        double product = double(float(a[t * K + k])) * double(float(b[(e * N + n) * K + k]));
        if (scale_a)
          product *= double(scale_a[k / kScaleBlock * scale_a_stride + t]) *
                     scale_b[(e * scale_cols + n / kScaleBlock) * scale_k + k / kScaleBlock];
        sum += product;
        size += fabs(product);
      }
    out = float(relu ? fmax(sum, 0.0) : sum);
    magnitude = float(size);
  }
};

// Operands: [T, features], or in FP8 the padded columnwise layout [blocks, features, 128] with
// scales [blocks, features].
struct KGroupedDot {
  const Element *a, *b;
  const float *scale_a, *scale_b;
  const int32_t* offs;
  int N, K;
  __device__ void operator()(int64_t i, float& out, float& magnitude) const {
    const int64_t e = i / (int64_t{N} * K), n = i / K % N, k = i % K;
    int64_t block = 0;
    for (int g = 0; g < e; ++g)
      block += (offs[g] - (g ? offs[g - 1] : 0) + kPaddedBlock - 1) / kPaddedBlock;
    const int64_t begin = e ? offs[e - 1] : 0;
    double sum = 0, size = 0;
    for (int64_t t = begin; t < offs[e]; ++t) {
      double product;
      if (scale_a) {
        const int64_t at = block + (t - begin) / kPaddedBlock, in = (t - begin) % kPaddedBlock;
        product = double(float(a[(at * N + n) * kPaddedBlock + in])) *
                  double(float(b[(at * K + k) * kPaddedBlock + in])) * double(scale_a[at * N + n]) *
                  scale_b[at * K + k];
      } else {
        product = double(float(a[t * N + n])) * double(float(b[t * K + k]));
      }
      sum += product;
      size += fabs(product);
    }
    out = float(sum);
    magnitude = float(size);
  }
};

// The largest error in units of the sum of magnitudes. FP8: the tensor cores keep about 14 bits of
// a partial accumulator; BF16: float32 accumulation, whose order differs.
// The tensor cores keep about 14 bits of an FP8 sum: one k-block is off by up to 2^-12 a rounding.
constexpr double kTolerance = kFp8 ? 1.0 / (1 << 11) : 1e-5;

template <typename Dot>
bool agrees(const char* name, const DeviceArray<float>& out, const Dot& dot) {
  DeviceArray<float> expected(out.size), magnitude(out.size);
  reference_kernel<<<1024, 256>>>(expected.data, magnitude.data, int64_t(out.size), dot);
  require(cudaDeviceSynchronize(), "reference");
  const auto got = out.host(), want = expected.host(), size = magnitude.host();
  double worst = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double error = std::fabs(double(got[i]) - want[i]);
    const double relative = error == 0 ? 0 : size[i] > 0 ? error / size[i] : 1e9;
    worst = std::max(worst, std::isnan(got[i]) ? 1e9 : relative);
  }
  const bool good = worst <= kTolerance;
  std::printf("%s %s: error %.2e of the sum of magnitudes\n", good ? "ok   " : "WRONG", name,
              worst);
  return good;
}

// --- the cases -----------------------------------------------------------------------------------

std::mt19937 generator(0);

std::vector<Element> random_elements(size_t count) {
  std::normal_distribution<float> normal;
  std::vector<Element> values(count);
  for (Element& value : values) value = Element(normal(generator));
  return values;
}

std::vector<float> random_scales(size_t count) {
  std::uniform_real_distribution<float> uniform(0.5f, 2.0f);
  std::vector<float> values(count);
  for (float& value : values) value = uniform(generator);
  return values;
}

std::vector<int32_t> offsets_of(const std::vector<int>& rows) {
  std::vector<int32_t> offs;
  int end = 0;
  for (const int count : rows) offs.push_back(end += count);
  return offs;
}

EpilogueArguments float_output(const DeviceArray<float>& out) {
  // NaN everywhere: what the kernel leaves out shows.
  cudaMemset(out.data, 0xff, out.size * sizeof(float));
  return {out.data, OutputType::kFloat, true, nullptr, 0, nullptr, nullptr, false, nullptr};
}

template <typename Epilogue = LinearEpilogue>
bool m_grouped(const char* name, const std::vector<int>& rows, int rest, int N, int K) {
  using Config = MGrouped;
  const std::vector<int32_t> ends = offsets_of(rows);
  const int T = ends.back() + rest, E = static_cast<int>(rows.size());
  const int64_t blocks_k = ceil_div(K, kScaleBlock), blocks_n = ceil_div(N, kScaleBlock),
                scale_stride = round_up(T, kRowScaleAlignment);
  const DeviceArray<Element> a(random_elements(size_t(T) * K)),
      b(random_elements(size_t(E) * N * K));
  const DeviceArray<float> scale_a(random_scales(blocks_k * scale_stride)),
      scale_b(random_scales(E * blocks_n * blocks_k));
  const DeviceArray<int32_t> offs(ends);
  const DeviceArray<float> out(size_t(T) * N);
  const EpilogueArguments epilogue = float_output(out);

  constexpr int64_t item = sizeof(Element);
  constexpr uint32_t line = kSwizzleBytes / item;
  const auto map_of_b = [&](uint32_t box) {
    return tensor_map(b.data, kElementType, item, {K, N, E}, {K, int64_t{N} * K}, {line, box, 1});
  };
  TensorMaps maps{};
  maps.a = tensor_map(a.data, kElementType, item, {K, T}, {K}, {line, kTileM / 2});
  maps.b = map_of_b(Config::kTileN / Config::kBBoxes);
  maps.narrow_b = map_of_b(kNarrowTileN);
  maps.out = out_map<Config>(epilogue, N);
  Scale128x128View view{};
  if (kFp8) {
    maps.scale_a = scale_map(scale_a.data, scale_stride, blocks_k, kTileM + kRowScaleAlignment);
    view = {scale_b.data, blocks_n * blocks_k, blocks_k, 1};
  } else {
    maps.scale_a = maps.a;
  }
  maps.scale_b = maps.b;
  launch<Config, Epilogue>(maps, offs.data, view, epilogue, {T, E, T, N, K});
  return agrees(
      name, out,
      MGroupedDot{a.data, b.data, kFp8 ? scale_a.data : nullptr, scale_b.data, offs.data, E, N, K,
                  scale_stride, blocks_n, blocks_k, std::is_same_v<Epilogue, ReluEpilogue>});
}

bool k_grouped(const char* name, const std::vector<int>& rows, int N, int K) {
  using Config = KGrouped;
  const std::vector<int32_t> ends = offsets_of(rows);
  const int E = static_cast<int>(rows.size());
  int64_t blocks = 0;
  for (const int count : rows) blocks += ceil_div(count, kPaddedBlock);
  const int64_t data_rows = kFp8 ? blocks * kPaddedBlock : ends.back();
  auto a_values = random_elements(size_t(data_rows) * N),
       b_values = random_elements(size_t(data_rows) * K);
  if (kFp8) {  // the padded layout has zeros after a group's rows
    int64_t block = 0;
    for (const int count : rows)
      for (int64_t first = 0; first < count; first += kPaddedBlock, ++block)
        for (int64_t row = std::min<int64_t>(count - first, kPaddedBlock); row < kPaddedBlock;
             ++row) {
          for (int64_t n = 0; n < N; ++n)
            a_values[(block * N + n) * kPaddedBlock + row] = Element(0.f);
          for (int64_t k = 0; k < K; ++k)
            b_values[(block * K + k) * kPaddedBlock + row] = Element(0.f);
        }
  }
  // b's scales: shared by 128 columns in every other block of rows, so that both promotions run.
  auto b_scales = random_scales(blocks * K);
  for (int64_t block = 0; block < blocks; block += 2)
    for (int64_t k = 0; k < K; ++k)
      b_scales[block * K + k] = b_scales[block * K + k / kScaleBlock * kScaleBlock];
  const DeviceArray<Element> a(a_values), b(b_values);
  const DeviceArray<float> scale_a(random_scales(blocks * N)), scale_b(b_scales);
  const DeviceArray<int32_t> offs(ends);
  const DeviceArray<float> out(size_t(E) * N * K);
  const EpilogueArguments epilogue = float_output(out);

  TensorMaps maps{};
  if constexpr (kFp8) {
    const auto map_of = [&](const Element* data, int64_t features, uint32_t box) {
      return tensor_map(data, kElementType, 1, {kPaddedBlock, features, blocks},
                        {kPaddedBlock, features * kPaddedBlock}, {kSwizzleBytes, box, 1});
    };
    maps.a = map_of(a.data, N, kTileM / 2);
    maps.b = map_of(b.data, K, Config::kTileN / Config::kBBoxes);
    maps.scale_a = scale_map(scale_a.data, N, blocks, kTileM);
    maps.scale_b = scale_map(scale_b.data, K, blocks, Config::kTileN);
  } else {
    maps.a = ragged_map(a.data, kElementType, 2, N, Config::kTileK);
    maps.b = ragged_map(b.data, kElementType, 2, K, Config::kTileK);
    maps.scale_a = maps.a;
    maps.scale_b = maps.b;
  }
  maps.narrow_b = maps.b;
  maps.out = out_map<Config>(epilogue, K);
  const int T = static_cast<int>(kFp8 ? blocks * kPaddedBlock : ends.back());
  launch<Config>(maps, offs.data, {}, epilogue, {T, E, N, K, 0});
  return agrees(
      name, out,
      KGroupedDot{a.data, b.data, kFp8 ? scale_a.data : nullptr, scale_b.data, offs.data, N, K});
}

}  // namespace

int main() {
  cudaDeviceProp device{};
  if (cudaGetDeviceProperties(&device, 0) != cudaSuccess || device.major != 9) {
    std::printf("needs a Hopper GPU\n");
    return 1;
  }
  bool good = true;
  // M-grouped: narrow tiles (few rows), wide tiles with odd row tiles, rows past the last group, a
  // K that ends within a k-block.
  good &= m_grouped("M-grouped, few rows", {3, 0, 20, 1, 0, 9}, 7, 384, 512);
  good &= m_grouped("M-grouped, uneven", {1000, 0, 1, 700, 129, 128, 0}, 300, 2064, 1040);
  good &= m_grouped("M-grouped, one k-block", {4096, 300}, 0, 1024, 64);
  good &= m_grouped<ReluEpilogue>("M-grouped, another epilogue", {700, 129}, 30, 1024, 512);
  // K-grouped: tiles scheduled dynamically (uneven groups), split-K (equal groups, a last round
  // that is not full), groups without rows.
  good &= k_grouped("K-grouped, uneven", {300, 0, 1, 2000, 129, 128, 0}, 1040, 784);
  good &= k_grouped("K-grouped, split-K", {8192, 8192}, 1024, 1536);
  good &= k_grouped("K-grouped, short", std::vector<int>(40, 200), 512, 1024);
  return good ? 0 : 1;
}
