// SPDX-License-Identifier: Apache-2.0
// MXFP4 numbers with the same bits on CPU and CUDA: E2M1 codes of 4 bits, and a scale of E8M0 for
// each block of 32.
//
//   code  0 1   2 3   4 5 6 7    magnitude  0 0.5 1 1.5 2 3 4 6    bit 3: the sign
//   scale 2^(byte - 127), a byte of 255 is NaN
//
// Two codes share a byte, the low nibble is the even element: the bytes of GPT-OSS's checkpoints.
// OCP Microscaling Formats (MX) Specification 1.0, 5.3.3 and 5.4.1.
#pragma once

#include <cstdint>

#include "exact_math.h"

namespace grouped_linear::mxfp4 {

constexpr uint8_t kNanScale = 255;
constexpr int kScaleBias = 127;
// A number of the block with the largest scale is so many powers of two larger in e4m3: 6 * 2^6 is
// 384, and the next power would pass e4m3's 448.
constexpr int kE4m3Shift = 6;

// The code's magnitude in halves: 0, 1, 2, 3, 4, 6, 8, 12.
GROUPED_LINEAR_DEVICE uint32_t halves_of(uint32_t code) {
  const uint32_t exponent = code >> 1 & 3, mantissa = code & 1;
  return exponent == 0 ? mantissa : (2 + mantissa) << (exponent - 1);
}

// Whether one of these eight codes is not zero.
GROUPED_LINEAR_DEVICE bool has_numbers(uint32_t codes) { return (codes & 0x77777777u) != 0; }

// The code's number times the scale, as float32. Exact, but where it is infinite. Works on bits, so
// that no mode of the processor flushes a subnormal.
GROUPED_LINEAR_DEVICE float decode(uint32_t code, uint32_t scale) {
  const uint32_t sign = (code & 8) << 28, exponent = code >> 1 & 3, mantissa = code & 1;
  if (scale == kNanScale) return exact::from_bits(0x7fc00000u);
  if ((code & 7) == 0) return exact::from_bits(sign);
  // 0.5 is the only subnormal code: 1.0 * 2^-1.
  const uint32_t significand = exponent == 0 ? 0x800000u : 0x800000u | mantissa << 22;
  const int field = (exponent == 0 ? 126 : static_cast<int>(126 + exponent)) +
                    static_cast<int>(scale) - kScaleBias;
  if (field >= 255) return exact::from_bits(sign | 0x7f800000u);
  if (field >= 1)
    return exact::from_bits(sign | static_cast<uint32_t>(field) << 23 | (significand & 0x7fffffu));
  return exact::from_bits(sign | significand >> (1 - field));
}

// The code's number in e4m3, of a block whose scale is 2^-below of the largest one that shares the
// e4m3 numbers' scale: the code's number times 2^(kE4m3Shift - below), to nearest even. Exact for
// below <= 14. scale: the block's own, NaN where that is.
GROUPED_LINEAR_DEVICE uint32_t to_e4m3(uint32_t code, uint32_t below, uint32_t scale) {
  if (scale == kNanScale) return 0x7f;
  // In units of e4m3's smallest number, 2^-9.
  constexpr uint32_t kExact = kE4m3Shift + 9 - 1;
  uint32_t units = halves_of(code);
  if (below <= kExact) {
    units <<= kExact - below;
  } else {
    const uint32_t shift = below - kExact < 8 ? below - kExact : 8;
    const uint32_t floor = units >> shift, rest = units - (floor << shift),
                   half = 1u << (shift - 1);
    units = floor + (rest > half || (rest == half && (floor & 1)));
  }
  const uint32_t sign = (code & 8) << 4;
  if (units < 8) return sign | units;
  const uint32_t top = (exact::bits_of(static_cast<float>(units)) >> 23) - 127;  // its highest bit
  return sign | (top - 2) << 3 | (units >> (top - 3) & 7);
}

// The scale of e4m3 numbers whose largest scale is this one.
GROUPED_LINEAR_DEVICE float e4m3_scale(uint32_t largest) {
  return decode(2, largest) * (1.0f / (1 << kE4m3Shift));
}

// The scale of a block with this largest magnitude: the smallest power of two of which it is at most
// 7 times. Up to there 6 is the nearest number; of a normal distribution the error is 3% less than
// with scales that let no number saturate, and 0.3% above that of the better one of both scales.
GROUPED_LINEAR_DEVICE uint32_t scale_of(float amax) {
  const uint32_t bits = exact::bits_of(amax), field = bits >> 23, mantissa = bits & 0x7fffffu;
  if (field == 255) return kNanScale;
  const uint32_t scale = field + (mantissa > 0x600000u);  // with the bias of 127 + 2
  return scale < 2 ? 0 : scale - 2;
}

// A number as a code, to nearest even; magnitudes above 6 saturate.
GROUPED_LINEAR_DEVICE uint32_t encode(float scaled) {
  const uint32_t bits = exact::bits_of(scaled), sign = bits >> 28 & 8;
  const float m = exact::from_bits(bits & 0x7fffffffu);
  return sign | ((m > 0.25f) + (m >= 0.75f) + (m > 1.25f) + (m >= 1.75f) + (m > 2.5f) +
                 (m >= 3.5f) + (m > 5.0f));
}

// Two numbers over a scale that scale_of gives, the first in the low nibble. Zero where that is NaN.
GROUPED_LINEAR_DEVICE uint32_t encode_pair(float first, float second, uint32_t scale) {
  if (scale == kNanScale) return 0;
  const float factor = exact::from_bits((254 - scale) << 23);
  return encode(exact::mul(first, factor)) | encode(exact::mul(second, factor)) << 4;
}

// The exponent field of the factor that makes e4m3 numbers of a tile with this largest scale: of
// 1 / e4m3_scale, at most 2^126.
GROUPED_LINEAR_DEVICE uint32_t factor_field(uint32_t largest) {
  const uint32_t field = 2 * kScaleBias + kE4m3Shift - largest;
  return field < 253 ? field : 253;
}

// The exponent field of the number 1.0 of a block with this scale, times the factor. The smallest
// field stands for all below: in e4m3 those numbers are zeros.
GROUPED_LINEAR_DEVICE uint32_t one_field(uint32_t scale, uint32_t factor_field) {
  const uint32_t field = scale + factor_field;
  return field > kScaleBias ? field - kScaleBias : 1;
}

// decode(encode()) of a number, all times the factor. E2M1's numbers from 2^e to 2^(e + 1) are
// 2^(e - 1) apart, and below 1.0 as far as above. Adding 1.5 * 2^(e + 22) to a magnitude rounds it
// to a multiple of that, to nearest even, which is the even code. NaN stays NaN.
GROUPED_LINEAR_DEVICE float round(float scaled, uint32_t one_field) {
  constexpr uint32_t kFields = 0x7f800000u, kAnchor = 22u << 23 | 1u << 22;
  const uint32_t bits = exact::bits_of(scaled), one = one_field << 23;
  const float most = exact::mul(6.0f, exact::from_bits(one));
  const float magnitude = exact::min(exact::from_bits(bits & 0x7fffffffu), most);
  const uint32_t own = exact::bits_of(magnitude) & kFields;
  const float anchor = exact::from_bits((own > one ? own : one) + kAnchor);
  const float rounded = exact::add(exact::add(magnitude, anchor), -anchor);
  return exact::from_bits(exact::bits_of(rounded) | (bits & 0x80000000u));
}

}  // namespace grouped_linear::mxfp4
