// SPDX-License-Identifier: Apache-2.0
//
// Elementary functions for activations, in fp32, within a few units in the last place. A GPU evaluates one of them for
// each output, so they have half the instructions of the C library's, and take no arguments that no activation has.
// The polynomials are minimax in relative error over the interval that is named.
#pragma once

#include <cmath>

#include "convt3d/host_device.hpp"
#include "convt3d/numerics.hpp"

namespace convt3d {

/// 1 / v of 1 <= v, or nan.
CONVT3D_HOST_DEVICE float reciprocal(float v) {
#if defined(__CUDA_ARCH__)
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));  // to one unit in the last place
  return r;
#else
  return 1.0f / v;
#endif
}

/// a / b of a = 1 or b - 1 and 1 <= b <= 2, as sigmoid has it, or nan. Nearly always rounded to nearest: what the
/// first quotient leaves of a is exact, for a small one too, as b is 1 there.
CONVT3D_HOST_DEVICE float quotient(float a, float b) {
#if defined(__CUDA_ARCH__)
  float const r = reciprocal(b);
  float const q = a * r;
  return fmaf(fmaf(-b, q, a), r, q);  // what is left of a, divided too
#else
  return a / b;
#endif
}

/// exp(t) - 1 of t < 0, or nan. t is n ln 2 + f with n whole and |f| <= ln 2 / 2, so that it is 2^n (exp(f) - 1) +
/// (2^n - 1), of which neither cancels the other. exp(f) - 1 is f + f^2 times a polynomial, |f| <= 0.3466.
CONVT3D_HOST_DEVICE float expm1_of_negative(float t) {
  constexpr float kLog2E = 1.44269504088896340736f;
  constexpr float kLn2High = 0.693145751953125f, kLn2Low = 1.42860682030941723212e-6f;
  constexpr float kWhole = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to a whole number, its last bits
  t = t < -88.0f ? -88.0f : t;           // -1 from far above that on; nan stays
  float const shifted = fmaf(t, kLog2E, kWhole);
  float const n = shifted - kWhole;
  float const f = fmaf(n, -kLn2Low, fmaf(n, -kLn2High, t));
  float p = 1.3946002582088113e-3f;
  p = fmaf(p, f, 8.36634635925293e-3f);
  p = fmaf(p, f, 4.1666291654109955e-2f);
  p = fmaf(p, f, 1.666654497385025e-1f);
  p = fmaf(p, f, 0.5f);
  p = fmaf(p, f * f, f);
  float const power = bits_to_float((float_to_bits(shifted) << 23) + (127u << 23));  // 2^n
  return fmaf(power, p, power - 1.0f);
}

/// The normal distribution's Phi(t). Below zero it is exp(-t^2 / 2) times a function without poles or zeros, here a
/// polynomial in 1 / (1 + 0.35 |t|), |t| <= 14.6, and nothing cancels; above zero it is 1 - Phi(-t). Of nan it is 1.
CONVT3D_HOST_DEVICE float normal_distribution(float t) {
  float const z = fminf(fabsf(t), 15.0f);  // where it is zero
  float const square = z * z;
  float const rest = fmaf(z, z, -square);  // what rounding took from it, which the exponential would show
  float const e = expf(-0.5f * square);
  float const p = reciprocal(fmaf(z, 0.35f, 1.0f));
  float r = -2.9159478843212128e-2f;
  r = fmaf(r, p, 1.440388262271881e-1f);
  r = fmaf(r, p, -2.5585564970970154e-1f);
  r = fmaf(r, p, 1.5933914482593536e-1f);
  r = fmaf(r, p, -2.32260562479496e-2f);
  r = fmaf(r, p, 1.0555845499038696e-1f);
  r = fmaf(r, p, 1.1981973797082901e-1f);
  r = fmaf(r, p, 1.398637294769287e-1f);
  r = fmaf(r, p, 1.396212875843048e-1f);
  float const tail = r * p * fmaf(-0.5f * rest, e, e);
  return t < 0.0f ? tail : 1.0f - tail;
}

}  // namespace convt3d
