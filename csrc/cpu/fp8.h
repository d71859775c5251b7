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

// x * factor, nearest even. A product past the largest number saturates, also where it overflows
// float32: the factor of a delayed scale may be from a time of smaller numbers. Only what is not
// finite itself, or meets a factor that is NaN, becomes infinity or NaN.
template <typename Format>
inline uint8_t quantize(float x, float factor) {
  constexpr int shift = 23 - Format::kMantissaBits;
  constexpr int unit = Format::kSmallestExponent - Format::kMantissaBits;  // of subnormal numbers
  constexpr float like_unit = std::bit_cast<float>(uint32_t{127 + 23 + unit} << 23);
  constexpr uint32_t smallest = uint32_t{127 + Format::kSmallestExponent} << 23;
  constexpr uint32_t rebias = uint32_t{126 + Format::kSmallestExponent} << Format::kMantissaBits;
  constexpr uint32_t largest = std::bit_cast<uint32_t>(Format::kMax);

  const uint32_t x_bits = std::bit_cast<uint32_t>(x), magnitude = x_bits & kMagnitude;
  const uint32_t sign = ((x_bits ^ std::bit_cast<uint32_t>(factor)) >> 24) & 0x80;
  const uint32_t product = std::bit_cast<uint32_t>(x * factor) & kMagnitude;
  const uint32_t clamped = product < largest ? product : largest;
  const uint32_t normal =
      ((clamped + ((1u << (shift - 1)) - 1) + ((clamped >> shift) & 1)) >> shift) - rebias;
  // Floats from like_unit to twice that are as far apart as the format's subnormal numbers.
  const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(clamped) + like_unit) -
                             std::bit_cast<uint32_t>(like_unit);
  uint32_t q = sign | (clamped < smallest ? subnormal : normal);
  q = magnitude == kInfinity ? (Format::kOfInfinity == 0x7f ? 0x7f : sign | Format::kOfInfinity)
                             : q;
  q = magnitude > kInfinity || (magnitude < kInfinity && product > kInfinity) ? 0x7f : q;
  return static_cast<uint8_t>(q);
}

}  // namespace grouped_linear::cpu
