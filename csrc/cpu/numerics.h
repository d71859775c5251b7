// SPDX-License-Identifier: Apache-2.0
// Conversions between float32 and the narrow formats without branches, so that loops over them
// vectorise.
//
// Every conversion works on bits, and no intermediate value is a float32 subnormal. So the result
// does not depend on the vector width, FMA contraction or flush-to-zero modes.
#pragma once

#include <bit>
#include <cstdint>

namespace grouped_linear::cpu {

constexpr uint32_t kMagnitude = 0x7fffffff;
constexpr uint32_t kInfinity = 0x7f800000;
constexpr uint8_t kE4m3Nan = 0x7f;
constexpr uint16_t kBf16Nan = 0x7fc0;

inline float from_bf16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

inline float from_half(uint16_t bits) {
  const uint32_t sign = uint32_t{bits & 0x8000u} << 16;
  const uint32_t shifted = uint32_t{bits & 0x7fffu} << 13;
  // A subnormal half is mantissa * 2^-24: set the exponent of 2^-14, then subtract 2^-14.
  const float subnormal = std::bit_cast<float>(shifted + (113u << 23)) - 0x1p-14f;
  const uint32_t rebias = shifted >= (31u << 23) ? (224u << 23) : (112u << 23);
  const uint32_t magnitude =
      shifted < (1u << 23) ? std::bit_cast<uint32_t>(subnormal) : shifted + rebias;
  return std::bit_cast<float>(sign | magnitude);
}

inline float from_e4m3(uint8_t bits) {
  const uint32_t sign = uint32_t{bits & 0x80u} << 24;
  const uint32_t shifted = uint32_t{bits & 0x7fu} << 20;
  const float subnormal = std::bit_cast<float>(shifted + (121u << 23)) - 0x1p-6f;
  uint32_t magnitude =
      shifted < (1u << 23) ? std::bit_cast<uint32_t>(subnormal) : shifted + (120u << 23);
  magnitude = (bits & 0x7f) == kE4m3Nan ? 0x7fc00000u : magnitude;
  return std::bit_cast<float>(sign | magnitude);
}

// Nearest even. Adding just under half a unit in the last place, plus the last kept bit, carries
// exactly when rounding to nearest even goes up.
inline uint16_t to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return (bits & kMagnitude) > kInfinity ? kBf16Nan : static_cast<uint16_t>(rounded);
}

inline uint16_t to_half(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000;
  const uint32_t magnitude = bits & kMagnitude;
  const uint32_t normal = ((magnitude + 0xfff + ((magnitude >> 13) & 1)) >> 13) - (112u << 10);
  // Floats in [0.5, 1) are 2^-24 apart, as subnormal halves are.
  const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) -
                             std::bit_cast<uint32_t>(0.5f);
  uint32_t half = magnitude < (113u << 23) ? subnormal : normal;
  half = magnitude >= 0x477ff000 ? 0x7c00 : half;  // 65520 and above round to infinity
  half = magnitude > kInfinity ? 0x7e00 : half;
  return static_cast<uint16_t>(sign | half);
}

// A dtype of elements: conversions to float32 and back, and magnitudes as integers of the same
// order. These are signed, because narrow vector instructions only compare signed integers.
struct Bf16 {
  using Bits = uint16_t;
  using Magnitude = int16_t;
  static constexpr Magnitude kMask = 0x7fff, kNotFinite = 0x7f80;
  static float to_float(Bits bits) { return from_bf16(bits); }
  static Bits of_float(float value) { return to_bf16(value); }
};
struct Half {
  using Bits = uint16_t;
  using Magnitude = int16_t;
  static constexpr Magnitude kMask = 0x7fff, kNotFinite = 0x7c00;
  static float to_float(Bits bits) { return from_half(bits); }
  static Bits of_float(float value) { return to_half(value); }
};
struct Float {
  using Bits = float;
  using Magnitude = int32_t;
  static constexpr Magnitude kMask = kMagnitude, kNotFinite = kInfinity;
  static float to_float(Bits value) { return value; }
  static Bits of_float(float value) { return value; }
};

}  // namespace grouped_linear::cpu
