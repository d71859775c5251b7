#include "swiglu.h"

#include "../checks.h"
#include "../ops.h"
#include "../swiglu.h"

namespace grouped_linear::cpu {
namespace {

// Elements converted at a time: they stay in the L1 cache.
constexpr int64_t kChunk = 128;

GROUPED_LINEAR_EVERY_WIDTH void h_of(const float* gate, const float* up, float* h) {
  for (int64_t i = 0; i < kChunk; ++i) h[i] = swiglu_of(gate[i], up[i]);
}
GROUPED_LINEAR_EVERY_WIDTH void grad_gate_of(const float* dh, const float* gate, const float* up,
                                             float* d_gate) {
  for (int64_t i = 0; i < kChunk; ++i) d_gate[i] = swiglu_grad_gate(dh[i], gate[i], up[i]);
}
GROUPED_LINEAR_EVERY_WIDTH void grad_up_of(const float* dh, const float* gate, float* d_up) {
  for (int64_t i = 0; i < kChunk; ++i) d_up[i] = swiglu_grad_up(dh[i], gate[i]);
}

// Calls work(inputs as float32, result) for kChunk elements at a time; what it computes past n is
// not stored.
template <size_t inputs, typename Work>
void by_chunks(const void* const (&from)[inputs], ScalarType dtype, int64_t n, void* to,
               const Work& work) {
  const int64_t element = element_size(dtype);
  float in[inputs][kChunk] = {}, out[kChunk];
  for (int64_t i = 0; i < n; i += kChunk) {
    const int64_t count = std::min(kChunk, n - i);
    for (size_t k = 0; k < inputs; ++k)
      load_row(static_cast<const char*>(from[k]) + i * element, dtype, count, in[k]);
    work(in, out);
    store_row(out, count, dtype, static_cast<char*>(to) + i * element);
  }
}

// Calls row(t) for every row of every group, and zeroes the others of `out`.
template <typename Row>
void for_each_row(const char* op, const Tensor& offs, const Tensor& out, const Row& row) {
  const int64_t end = group_starts(op, offs, out.size(0)).back();
  torch::stable::parallel_for(0, end, 16, [&](int64_t from, int64_t to) {
    for (int64_t t = from; t < to; ++t) row(t);
  });
  zero_rows(out, end);
}

}  // namespace

void swiglu_row(const void* gate, const void* up, ScalarType dtype, int64_t n, void* h) {
  const void* const inputs[] = {gate, up};
  by_chunks(inputs, dtype, n, h, [](auto& in, float* out) { h_of(in[0], in[1], out); });
}

void swiglu_grad_gate_row(const void* dh, const void* gate, const void* up, ScalarType dtype,
                          int64_t n, void* d_gate) {
  const void* const inputs[] = {dh, gate, up};
  by_chunks(inputs, dtype, n, d_gate,
            [](auto& in, float* out) { grad_gate_of(in[0], in[1], in[2], out); });
}

void swiglu_grad_up_row(const void* dh, const void* gate, ScalarType dtype, int64_t n, void* d_up) {
  const void* const inputs[] = {dh, gate};
  by_chunks(inputs, dtype, n, d_up, [](auto& in, float* out) { grad_up_of(in[0], in[1], out); });
}

void swiglu_grad_row(const char* dh, const char* gate_up, ScalarType dtype, int64_t K, int64_t col,
                     int64_t n, char* d_gate_up) {
  const int64_t element = element_size(dtype);
  const int64_t of_gate = std::clamp<int64_t>(K - col, 0, n);  // the others are of up
  const char *gate = gate_up + col * element, *up = gate + K * element;
  if (of_gate > 0) swiglu_grad_gate_row(dh + col * element, gate, up, dtype, of_gate, d_gate_up);
  if (of_gate < n) {
    const int64_t first = (col + of_gate - K) * element;
    swiglu_grad_up_row(dh + first, gate_up + first, dtype, n - of_gate,
                       d_gate_up + of_gate * element);
  }
}

Tensor swiglu(const Tensor& gate_up_in, const Tensor& offs) {
  check_swiglu("swiglu", gate_up_in, offs);
  const Tensor gate_up = inner_contiguous(gate_up_in);
  const ScalarType dtype = gate_up.scalar_type();
  const int64_t T = gate_up.size(0), K = gate_up.size(1) / 2, element = element_size(dtype);
  Tensor h = new_output(gate_up, std::vector<int64_t>{T, K}, dtype);
  const int64_t stride = gate_up.stride(0) * element;
  const auto* inputs = static_cast<const char*>(gate_up.data_ptr());
  auto* results = static_cast<char*>(h.data_ptr());
  for_each_row("swiglu", offs, h, [&](int64_t t) {
    const char* gate = inputs + t * stride;
    swiglu_row(gate, gate + K * element, dtype, K, results + t * K * element);
  });
  return h;
}

Tensor swiglu_grad(const Tensor& dh_in, const Tensor& gate_up_in, const Tensor& offs) {
  check_swiglu_grad("swiglu_grad", dh_in, gate_up_in, offs);
  const Tensor dh = inner_contiguous(dh_in), gate_up = inner_contiguous(gate_up_in);
  const ScalarType dtype = dh.scalar_type();
  const int64_t T = dh.size(0), K = dh.size(1), element = element_size(dtype);
  Tensor d_gate_up = new_output(dh, std::vector<int64_t>{T, 2 * K}, dtype);
  const int64_t dh_stride = dh.stride(0) * element, stride = gate_up.stride(0) * element;
  const auto* gradients = static_cast<const char*>(dh.data_ptr());
  const auto* inputs = static_cast<const char*>(gate_up.data_ptr());
  auto* results = static_cast<char*>(d_gate_up.data_ptr());
  for_each_row("swiglu_grad", offs, d_gate_up, [&](int64_t t) {
    swiglu_grad_row(gradients + t * dh_stride, inputs + t * stride, dtype, K, 0, 2 * K,
                    results + t * 2 * K * element);
  });
  return d_gate_up;
}

}  // namespace grouped_linear::cpu
