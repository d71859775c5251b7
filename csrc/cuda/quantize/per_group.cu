// Current and delayed scaling: one scale a group.
#include <type_traits>
#include <vector>

#include "checks.h"
#include "cuda/quantize/per_group.cuh"
#include "cuda/quantize/tile_passes.h"
#include "experts.h"
#include "ops.h"

namespace grouped_linear::cuda {
namespace {

constexpr ScalarType kE4m3 = ScalarType::Float8_e4m3fn;

// Rows in groups: x [T, K] as offs say, or a weight's experts.
struct Source {
  Source(const Tensor& x, const Tensor& offs_in)
      : values(with_dense_rows(x)),
        offs(as_dense(offs_in)),
        row_stride(values.stride(0)),
        most_blocks(padded_rows(x.size(0), offs->size(0)) / kBlock),
        tiles{offs->const_data_ptr<int32_t>(), static_cast<int>(offs->size(0)),
              countable_rows(x.size(0)), static_cast<int>(x.size(1)), 0} {}
  explicit Source(const Tensor& weight)
      : values(as_dense(weight)),
        row_stride(weight.size(2)),
        most_blocks(weight.size(0) * ceil_div(weight.size(1), kBlock)),
        tiles{nullptr, static_cast<int>(weight.size(0)), 0, static_cast<int>(weight.size(2)),
              static_cast<int>(weight.size(1))} {}

  bool vectorised() const { return is_aligned(values) && row_stride * item_size(values) % 16 == 0; }

  template <typename Element>
  unsigned grid(const Launch& launch) const {
    return tile_grid(launch, most_blocks * ceil_div(tiles.K, kBlock), kTileOccupancy<Element>,
                     kGenerations);
  }

  Tensor values;
  std::optional<Tensor> offs;
  int64_t row_stride, most_blocks;
  GroupedTiles tiles;
};

// The amax of every group, as the bits of a float32, in an int32 tensor [E].
Tensor find_amax(const Launch& launch, const Source& source, const bool* refresh = nullptr) {
  Tensor amax = torch::stable::new_zeros(source.values, std::vector<int64_t>{source.tiles.E},
                                         ScalarType::Int);
  for_element(source.values.scalar_type(), [&](auto element) {
    using Element = typename decltype(element)::type;
    run_over_tiles<group_amax_kernel<Element>>(
        launch, source.grid<Element>(launch), 0, kTileOccupancy<Element>,
        static_cast<const Element*>(source.values.const_data_ptr()), source.row_stride,
        source.vectorised(), source.tiles, refresh,
        static_cast<uint32_t*>(amax.mutable_data_ptr()));
  });
  return amax;
}

// bias_grad [E, K] has no elements where it is not asked for.
void quantize(const Launch& launch, const Source& source, ScalarType dtype, const GroupScale& scale,
              PerGroupQuantized out, Tensor& bias_grad, const bool* refresh = nullptr) {
  const bool sums = bias_grad.numel() > 0;
  const int64_t K = source.tiles.K;
  Tensor block_sums =
      new_tensor(source.values, sums ? Shape{source.most_blocks, K} : Shape{0}, ScalarType::Float);
  if (sums) out.block_sums = block_sums.mutable_data_ptr<float>();

  const auto run = [&](auto element, auto is_e5m2) {
    using Element = typename decltype(element)::type;
    constexpr auto kernel = quantize_per_group_kernel<Element, decltype(is_e5m2)::value>;
    const int shared = out.q_t ? static_cast<int>(sizeof(TurnedTile)) : 0;
    run_over_tiles<kernel>(launch, source.grid<Element>(launch), shared, kTileOccupancy<Element>,
                           static_cast<const Element*>(source.values.const_data_ptr()),
                           source.row_stride, source.vectorised(), source.tiles, scale, refresh,
                           out);
  };
  for_element(source.values.scalar_type(), [&](auto element) {
    if (dtype == ScalarType::Float8_e5m2)
      run(element, std::true_type());
    else
      run(element, std::false_type());
  });
  if (sums) add_block_sums(launch, out.block_sums, source.tiles.offs, source.tiles.T, bias_grad);
}

uint8_t* bytes_of(bool wanted, Tensor& t) {
  return wanted ? static_cast<uint8_t*>(t.mutable_data_ptr()) : nullptr;
}

uint32_t* amax_of(const std::optional<Tensor>& amax) {
  return amax ? static_cast<uint32_t*>(amax->mutable_data_ptr()) : nullptr;
}

const bool* flag_of(const std::optional<Tensor>& refresh) {
  return refresh ? refresh->const_data_ptr<bool>() : nullptr;
}

// The outputs that a caller keeps.
PerGroupQuantized kept(const Tensor& q, const std::optional<Tensor>& q_t, uint32_t* amax) {
  return {static_cast<uint8_t*>(q.mutable_data_ptr()),
          q_t ? static_cast<uint8_t*>(q_t->mutable_data_ptr()) : nullptr, nullptr, amax};
}

struct RowOutputs {
  RowOutputs(const Tensor& x, const Tensor& offs, ScalarType dtype, bool rowwise, bool columnwise,
             bool bias_grad)
      : q(new_tensor(x, rowwise ? Shape{x.size(0), x.size(1)} : Shape{0}, dtype)),
        q_t(new_tensor(x,
                       columnwise
                           ? Shape{padded_rows(x.size(0), offs.size(0)) / kBlock, x.size(1), kBlock}
                           : Shape{0},
                       dtype)),
        grad(new_tensor(x, bias_grad ? Shape{offs.size(0), x.size(1)} : Shape{0},
                        ScalarType::Float)) {}

  Tensor q, q_t, grad;
};

struct WeightOutputs {
  WeightOutputs(const Tensor& w, bool columnwise)
      : q(new_tensor(w, {w.size(0), w.size(1), w.size(2)}, kE4m3)),
        q_t(new_tensor(w, columnwise ? Shape{w.size(0), w.size(2), w.size(1)} : Shape{0}, kE4m3)),
        no_grad(new_tensor(w, {0}, ScalarType::Float)) {}

  Tensor q, q_t, no_grad;
};

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> group_quantize_current(
    const Tensor& x, const Tensor& offs, ScalarType dtype, double amax_epsilon,
    bool power_of_two_scales, bool rowwise, bool columnwise, bool bias_grad) {
  check_group_quantize_current(x, offs, dtype, amax_epsilon, rowwise, columnwise);

  const Launch launch("group_quantize_current", x);
  const Source source(x, offs);
  RowOutputs out(x, offs, dtype, rowwise, columnwise, bias_grad);
  Tensor scale = new_tensor(x, {offs.size(0)}, ScalarType::Float);

  const Tensor amax = find_amax(launch, source);
  const ScaleRule rule{static_cast<float>(amax_epsilon), power_of_two_scales};
  quantize(launch, source, dtype,
           {static_cast<const uint32_t*>(amax.const_data_ptr()), rule,
            scale.mutable_data_ptr<float>(), nullptr},
           {bytes_of(rowwise, out.q), bytes_of(columnwise, out.q_t), nullptr, nullptr}, out.grad);
  return {out.q, scale, out.q_t, out.grad};
}

std::tuple<Tensor, Tensor, Tensor> quantize_weight_current(const Tensor& w, double amax_epsilon,
                                                           bool power_of_two_scales,
                                                           bool columnwise) {
  check_quantize_weight("quantize_weight_current", w, amax_epsilon);

  const Launch launch("quantize_weight_current", w);
  const Source source(w);
  WeightOutputs out(w, columnwise);
  Tensor scale = new_tensor(w, {w.size(0)}, ScalarType::Float);

  const Tensor amax = find_amax(launch, source);
  const ScaleRule rule{static_cast<float>(amax_epsilon), power_of_two_scales};
  quantize(launch, source, kE4m3,
           {static_cast<const uint32_t*>(amax.const_data_ptr()), rule,
            scale.mutable_data_ptr<float>(), nullptr},
           {bytes_of(true, out.q), bytes_of(columnwise, out.q_t), nullptr, nullptr}, out.no_grad);
  return {out.q, scale, out.q_t};
}

std::tuple<Tensor, Tensor, Tensor> group_quantize_delayed_(const std::optional<Tensor>& amax,
                                                           const Tensor& x, const Tensor& offs,
                                                           const Tensor& scale_in, ScalarType dtype,
                                                           bool rowwise, bool columnwise,
                                                           bool bias_grad) {
  check_group_quantize_delayed(amax, x, offs, scale_in, dtype, rowwise, columnwise);

  const Launch launch("group_quantize_delayed_", x);
  const Source source(x, offs);
  const Tensor scale = as_dense(scale_in);
  RowOutputs out(x, offs, dtype, rowwise, columnwise, bias_grad);

  quantize(launch, source, dtype, {nullptr, {}, nullptr, scale.const_data_ptr<float>()},
           {bytes_of(rowwise, out.q), bytes_of(columnwise, out.q_t), nullptr, amax_of(amax)},
           out.grad);
  return {out.q, out.q_t, out.grad};
}

std::tuple<Tensor, Tensor> quantize_weight_delayed_(const std::optional<Tensor>& amax,
                                                    const Tensor& w, const Tensor& scale_in,
                                                    bool columnwise) {
  check_quantize_weight_delayed(amax, w, scale_in);

  const Launch launch("quantize_weight_delayed_", w);
  const Source source(w);
  const Tensor scale = as_dense(scale_in);
  WeightOutputs out(w, columnwise);

  quantize(launch, source, kE4m3, {nullptr, {}, nullptr, scale.const_data_ptr<float>()},
           {bytes_of(true, out.q), bytes_of(columnwise, out.q_t), nullptr, amax_of(amax)},
           out.no_grad);
  return {out.q, out.q_t};
}

void refresh_weight_current_(const std::vector<Tensor>& w, const std::optional<Tensor>& refresh,
                             const Tensor& q, const Tensor& scale, const std::optional<Tensor>& q_t,
                             double amax_epsilon, bool power_of_two_scales) {
  check_refresh_weight_current(w, refresh, q, scale, q_t, amax_epsilon);

  const Launch launch("refresh_weight_current_", w[0]);
  const Source source(packed(w));
  const bool* flag = flag_of(refresh);
  Tensor no_grad = new_tensor(q, {0}, ScalarType::Float);

  const Tensor amax = find_amax(launch, source, flag);
  const ScaleRule rule{static_cast<float>(amax_epsilon), power_of_two_scales};
  quantize(launch, source, kE4m3,
           {static_cast<const uint32_t*>(amax.const_data_ptr()), rule,
            static_cast<float*>(scale.mutable_data_ptr()), nullptr},
           kept(q, q_t, nullptr), no_grad, flag);
}

void refresh_weight_delayed_(const std::optional<Tensor>& amax, const std::vector<Tensor>& w,
                             const Tensor& state_in, const std::optional<Tensor>& refresh,
                             const Tensor& q, const Tensor& scale,
                             const std::optional<Tensor>& q_t) {
  check_refresh_weight_delayed(amax, w, state_in, refresh, q, scale, q_t);

  const Launch launch("refresh_weight_delayed_", w[0]);
  const Source source(packed(w));
  const Tensor state = as_dense(state_in);
  Tensor no_grad = new_tensor(q, {0}, ScalarType::Float);

  quantize(
      launch, source, kE4m3,
      {nullptr, {}, static_cast<float*>(scale.mutable_data_ptr()), state.const_data_ptr<float>()},
      kept(q, q_t, amax_of(amax)), no_grad, flag_of(refresh));
}

}  // namespace grouped_linear::cuda
