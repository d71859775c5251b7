// SPDX-License-Identifier: Apache-2.0
// float32 to FP8, in both formats.
//
// Works on bits without branches, as numerics.h does, so loops over it vectorise and have the same
// bits with every vector width.
#pragma once

#include <bit>
#include <cstdint>

#include "cpu/numerics.h"
#include "cpu/rows.h"

namespace grouped_linear::cpu {

struct E4m3 {
  static constexpr ScalarType kType = ScalarType::Float8_e4m3fn;
  static constexpr int kMantissaBits = 3, kSmallestExponent = -6;
  static constexpr float kMax = 448.0f;
  static constexpr uint32_t kInfinityCode = 0x7f;  // NaN: e4m3 has no infinity
};

struct E5m2 {
  static constexpr ScalarType kType = ScalarType::Float8_e5m2;
  static constexpr int kMantissaBits = 2, kSmallestExponent = -14;
  static constexpr float kMax = 57344.0f;
  static constexpr uint32_t kInfinityCode = 0x7c;
};

constexpr float fp8_max(ScalarType format) {
  return format == E5m2::kType ? E5m2::kMax : E4m3::kMax;
}

// Rounds a magnitude to the nearest number of a format, ties to even.
//
// With M bits of mantissa, adding 2^(e + 23 - M) to a magnitude of exponent e (the smallest
// exponent for subnormals, which are as far apart) rounds it to units of 2^(e - M), nearest even,
// and leaves their number in the sum's low bits: 0 .. 2^(M + 1). The code is 2^M * (e - smallest
// exponent) plus that number, for normal and subnormal results alike. So an anchor, the
// addend, has 2^M * e in its low bits too (being even it moves no tie), and the sum's low byte
// less that of the smallest anchor is the code.
//
// A factor that is a power of two only shifts exponents: the code of x * factor is the code of x
// with a smallest exponent that is less by the factor's. That needs no multiplication, and one
// number's own anchor serves every factor.
template <typename Format>
struct Rounding {
  static constexpr int kShift = 23 - Format::kMantissaBits;

  static constexpr uint32_t anchor_of(uint32_t exponent) {  // the bits of a float32
    return exponent + (uint32_t{kShift} << 23) + (exponent >> kShift);
  }
  static constexpr uint32_t smallest_anchor(float power_of_two) {
    constexpr uint32_t smallest = uint32_t{254 + Format::kSmallestExponent} << 23;
    return anchor_of(smallest - std::bit_cast<uint32_t>(power_of_two));
  }
  // With these factors no anchor overflows float32, if x * factor is at most the format's maximum.
  static constexpr float kSmallestFactor = 0x1p-99f;
  static constexpr float kLargestFactor = 0x1p121f;

  uint32_t anchor;
  float sum;

  Rounding(float magnitude, uint32_t smallest) {
    const uint32_t own = anchor_of(std::bit_cast<uint32_t>(magnitude) & kInfinity);
    anchor = own > smallest ? own : smallest;
    sum = magnitude + std::bit_cast<float>(anchor);
  }
  // The low byte is the code plus the low byte of the smallest anchor.
  uint32_t bits() const { return std::bit_cast<uint32_t>(sum); }
  float magnitude() const { return sum - std::bit_cast<float>(anchor); }  // exact
};

// A product that is not NaN, rounded to a number of a format; it saturates at the maximum.
template <typename Format>
struct Rounded {
  static constexpr uint32_t kSmallest = Rounding<Format>::smallest_anchor(1);
  uint32_t sign;  // of float32
  Rounding<Format> rounding;

  explicit Rounded(float product)
      : sign(std::bit_cast<uint32_t>(product) & ~kMagnitude),
        rounding(clamped(product), kSmallest) {}
  static float clamped(float product) {
    constexpr uint32_t max = std::bit_cast<uint32_t>(Format::kMax);
    const uint32_t magnitude = std::bit_cast<uint32_t>(product) & kMagnitude;
    return std::bit_cast<float>(magnitude < max ? magnitude : max);
  }
  uint32_t code() const { return ((rounding.bits() - kSmallest) & 0x7f) | (sign >> 24); }
  float value() const {
    return std::bit_cast<float>(std::bit_cast<uint32_t>(rounding.magnitude()) | sign);
  }
};

// x * factor, saturated at the format's maximum even if the product overflows float32: a delayed
// scale may come from steps with smaller numbers. The result is infinity or NaN only if x is not
// finite or the product is NaN.
template <typename Format>
inline uint32_t quantize(float x, float factor) {
  const uint32_t x_bits = std::bit_cast<uint32_t>(x), magnitude = x_bits & kMagnitude;
  const uint32_t sign = ((x_bits ^ std::bit_cast<uint32_t>(factor)) >> 24) & 0x80;
  const uint32_t product = std::bit_cast<uint32_t>(x * factor) & kMagnitude;
  uint32_t q = sign | Rounded<Format>(std::bit_cast<float>(product)).code();
  q = magnitude == kInfinity ? (Format::kInfinityCode == 0x7f ? 0x7f : sign | Format::kInfinityCode)
                             : q;
  return magnitude > kInfinity || (magnitude < kInfinity && product > kInfinity) ? 0x7f : q;
}

}  // namespace grouped_linear::cpu
