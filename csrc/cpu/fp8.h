// FP8 numbers from float32, for both formats, where a factor may be too large for what it meets.
//
// Works on bits without branches, as numerics.h does, so loops over it vectorise and agree with
// every other width bit for bit.
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

// How a magnitude becomes the nearest number of a format, ties to even.
//
// With M bits of mantissa, adding 2^(e + 23 - M) to a magnitude of exponent e (the smallest exponent
// for subnormals, which are as far apart) rounds it to units of 2^(e - M), nearest even, and leaves
// their number in the sum's low bits: 0 .. 2^(M + 1). The code is 2^M * (e - smallest exponent)
// plus that number, for normal and subnormal results alike. So an anchor, which is what is added,
// has 2^M * e in its low bits too (being even it moves no tie), and the sum's low byte less that of
// the smallest anchor is the code.
//
// A factor that is a power of two moves exponents and nothing else: the code of x * factor is that
// of x where the smallest exponent is less by the factor's. No multiplication, and what a number
// needs for one factor is what it needs for another.
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
  // The factors for which no anchor leaves the range of float32, where x * factor is at most the
  // format's largest number.
  static constexpr float kSmallestFactor = 0x1p-99f;
  static constexpr float kLargestFactor = 0x1p121f;

  uint32_t anchor;
  float sum;

  Rounding(float magnitude, uint32_t smallest) {
    const uint32_t own = anchor_of(std::bit_cast<uint32_t>(magnitude) & kInfinity);
    anchor = own > smallest ? own : smallest;
    sum = magnitude + std::bit_cast<float>(anchor);
  }
  // In the low byte: the code, more by that of the smallest anchor.
  uint32_t bits() const { return std::bit_cast<uint32_t>(sum); }
  float magnitude() const { return sum - std::bit_cast<float>(anchor); }  // exact
};

// A product that is not NaN, to a number of a format; past the largest it saturates.
template <typename Format>
struct Rounded {
  static constexpr uint32_t kSmallest = Rounding<Format>::smallest_anchor(1);
  uint32_t sign;  // of float32
  Rounding<Format> rounding;

  explicit Rounded(float product)
      : sign(std::bit_cast<uint32_t>(product) & ~kMagnitude),
        rounding(clamped(product), kSmallest) {}
  static float clamped(float product) {
    constexpr uint32_t largest = std::bit_cast<uint32_t>(Format::kMax);
    const uint32_t magnitude = std::bit_cast<uint32_t>(product) & kMagnitude;
    return std::bit_cast<float>(magnitude < largest ? magnitude : largest);
  }
  uint32_t code() const { return ((rounding.bits() - kSmallest) & 0x7f) | (sign >> 24); }
  float value() const {
    return std::bit_cast<float>(std::bit_cast<uint32_t>(rounding.magnitude()) | sign);
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
  uint32_t q = sign | Rounded<Format>(std::bit_cast<float>(product)).code();
  q = magnitude == kInfinity ? (Format::kOfInfinity == 0x7f ? 0x7f : sign | Format::kOfInfinity)
                             : q;
  return magnitude > kInfinity || (magnitude < kInfinity && product > kInfinity) ? 0x7f : q;
}

}  // namespace grouped_linear::cpu
