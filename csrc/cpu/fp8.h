// FP8 numbers from float32, for both formats, where a factor may be too large for what it meets.
//
// Works on bits without branches, as numerics.h does, so loops over it vectorise and agree with
// every other width bit for bit.
#pragma once

#include <bit>
#include <cstdint>

#include "numerics.h"
#include "rows.h"

namespace grouped_linear::cpu {

struct E4m3 {
  static constexpr ScalarType kType = ScalarType::Float8_e4m3fn;
  static constexpr int kMantissaBits = 3, kSmallestExponent = -6;
  static constexpr float kMax = 448.0f;
  static constexpr uint32_t kOfInfinity = 0x7f;  // it has none: NaN
};

struct E5m2 {
  static constexpr ScalarType kType = ScalarType::Float8_e5m2;
  static constexpr int kMantissaBits = 2, kSmallestExponent = -14;
  static constexpr float kMax = 57344.0f;
  static constexpr uint32_t kOfInfinity = 0x7c;
};

constexpr float largest_of(ScalarType format) {
  return format == E5m2::kType ? E5m2::kMax : E4m3::kMax;
}

// How a product that is not NaN becomes the nearest number of a format, ties to even; past the
// largest it saturates.
//
// With M bits of mantissa, adding 2^(e + 23 - M) to a magnitude of exponent e (the smallest exponent
// for subnormals, which are as far apart) rounds it to units of 2^(e - M), nearest even, and leaves
// their number in the sum's low bits: 0 .. 2^(M + 1). The code is 2^M * (e - smallest exponent)
// plus that number, for normal and subnormal results alike. kCancel takes the biases of both
// exponents out of the low 7 bits, and being even it moves no tie.
template <typename Format>
struct Rounding {
  static constexpr int M = Format::kMantissaBits, kShift = 23 - M;
  static constexpr uint32_t kCancel =
      ((-Format::kSmallestExponent - 127 - kShift) * (1 << M)) & 0x7f;
  static_assert(kCancel % 2 == 0);

  uint32_t sign, anchor;  // of float32
  float sum;

  explicit Rounding(float product) {
    constexpr uint32_t anchor_of_zero = (uint32_t{kShift} << 23) | kCancel;
    constexpr uint32_t smallest_anchor =
        (uint32_t{127 + Format::kSmallestExponent + kShift} << 23) | kCancel;
    constexpr uint32_t largest = std::bit_cast<uint32_t>(Format::kMax);
    const uint32_t bits = std::bit_cast<uint32_t>(product), magnitude = bits & kMagnitude;
    const uint32_t clamped = magnitude < largest ? magnitude : largest;
    const uint32_t exponent = (clamped & kInfinity) + anchor_of_zero;
    sign = bits & ~kMagnitude;
    anchor = exponent > smallest_anchor ? exponent : smallest_anchor;
    sum = std::bit_cast<float>(clamped) + std::bit_cast<float>(anchor);
  }
  uint32_t code() const {
    return ((std::bit_cast<uint32_t>(sum) + (anchor >> kShift)) & 0x7f) | (sign >> 24);
  }
  float value() const {
    const float magnitude = sum - std::bit_cast<float>(anchor);  // exact
    return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | sign);
  }
};

// x * factor. A product past the largest number saturates, also where it overflows float32: the
// factor of a delayed scale may be from a time of smaller numbers. Only what is not finite itself,
// or meets a factor that is NaN, becomes infinity or NaN.
template <typename Format>
inline uint32_t quantize(float x, float factor) {
  const uint32_t x_bits = std::bit_cast<uint32_t>(x), magnitude = x_bits & kMagnitude;
  const uint32_t sign = ((x_bits ^ std::bit_cast<uint32_t>(factor)) >> 24) & 0x80;
  const uint32_t product = std::bit_cast<uint32_t>(x * factor) & kMagnitude;
  uint32_t q = sign | Rounding<Format>(std::bit_cast<float>(product)).code();
  q = magnitude == kInfinity ? (Format::kOfInfinity == 0x7f ? 0x7f : sign | Format::kOfInfinity)
                             : q;
  return magnitude > kInfinity || (magnitude < kInfinity && product > kInfinity) ? 0x7f : q;
}

}  // namespace grouped_linear::cpu
