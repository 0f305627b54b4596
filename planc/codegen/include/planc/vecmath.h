// exp, tanh, sigmoid and erf on sixteen lanes: the same operations in the same order in every backend.
#pragma once
#include "planc/simd.h"

namespace planc {

namespace detail {
template <int N>
PLANC_INLINE Vec polynomial(Vec x, const float (&c)[N]) {
    Vec y = splat(c[0]);
    PLANC_UNROLL for (int i = 1; i < N; ++i) y = fma(y, x, splat(c[i]));
    return y;
}
// 2^n for integer n in -126..127.
PLANC_INLINE Vec power_of_two(VecI n) { return as_float(shift_left<23>(n + splat_int(127))); }
// Rounds |x| < 2^22 to the nearest integer, ties to even: the sum keeps no fraction bits.
PLANC_INLINE Vec round_nearest(Vec x) {
    const Vec magic = splat(12582912.0f);
    return (x + magic) - magic;
}
}  // namespace detail

PLANC_INLINE Vec negate(Vec x) { return as_float(as_int(x) + splat_int(int32_t(0x80000000u))); }
PLANC_INLINE Vec abs(Vec x) { return as_float(as_int(x) & splat_int(0x7fffffff)); }
PLANC_INLINE Vec copy_sign(Vec magnitude, Vec sign) {
    return as_float((as_int(magnitude) & splat_int(0x7fffffff)) | (as_int(sign) & splat_int(int32_t(0x80000000u))));
}

// e^x within 2 ulp; 0 below -104, infinity above 88.73, a NaN stays a NaN. Reduction and coefficients: Cephes expf.
PLANC_INLINE Vec exp(Vec x) {
    static constexpr float C[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
    x = min(splat(89.0f), max(splat(-105.0f), x));
    Vec n = detail::round_nearest(x * splat(1.44269504088896341f));
    Vec r = fma(n, splat(-0.693359375f), x);
    r = fma(n, splat(2.12194440e-4f), r);
    Vec y = fma(detail::polynomial(r, C), r * r, r) + splat(1.0f);
    // Two factors, since 2^n alone leaves the normal range at both ends.
    VecI whole = to_int(n);
    VecI half = to_int(detail::round_nearest(n * splat(0.5f)));
    return y * detail::power_of_two(half) * detail::power_of_two(whole - half);
}

constexpr float LOG2_E = 1.44269504088896341f;

namespace detail {
// 2^x for -127 <= x <= 0 by a polynomial of 2^fraction (1 at 0), to whose exponent the nearest integer is added.
template <int N>
PLANC_INLINE Vec power_by(Vec x, const float (&c)[N]) {
    const Vec power = max(splat(-127.0f), x), magic = splat(12582912.0f);
    const Vec shifted = power + magic;  // its lowest bits are the integer
    const Vec fraction = polynomial(power - (shifted - magic), c);
    return as_float(as_int(fraction) + shift_left<23>(as_int(shifted)));
}
}  // namespace detail

// 2^x for x <= 0, within 3e-7 of itself down to -126; 0 from -127 on. What softmax needs of exp at half its cost.
PLANC_INLINE Vec power_of_two_below_one(Vec x) {
    static constexpr float C[] = {1.326472731e-3f, 9.671512991e-3f, 5.550733581e-2f, 2.402224243e-1f, 6.931470037e-1f, 1.0f};
    return detail::power_by(x, C);
}

// The same within 1.1e-4, a twentieth of what rounding to bf16 may change.
PLANC_INLINE Vec coarse_power_of_two_below_one(Vec x) {
    static constexpr float C[] = {5.500892922e-2f, 2.422109544e-1f, 6.932829022e-1f, 1.0f};
    return detail::power_by(x, C);
}

PLANC_INLINE Vec sigmoid(Vec x) { return splat(1.0f) / (splat(1.0f) + exp(negate(x))); }

// Cephes tanhf: an odd polynomial below 0.625, where 1 - 2 / (e^2x + 1) would cancel.
PLANC_INLINE Vec tanh(Vec x) {
    static constexpr float C[] = {-5.70498872745e-3f, 2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f, -3.33332819422e-1f};
    Vec a = abs(x), z = x * x;
    Vec small = fma(detail::polynomial(z, C) * z, x, x);
    Vec large = splat(1.0f) - splat(2.0f) / (exp(a + a) + splat(1.0f));
    return select(less(a, splat(0.625f)), small, copy_sign(large, x));
}

// Rational approximation on [-4, 4] (as in XLA and Eigen), within 4e-7 of the true value; +-1 in f32 beyond.
PLANC_INLINE Vec erf(Vec x) {
    static constexpr float P[] = {-2.72614225801306e-10f, 2.77068142495902e-08f,  -2.10102402082508e-06f, -5.69250639462346e-05f,
                                  -7.34990630326855e-04f, -2.95459980854025e-03f, -1.60960333262415e-02f};
    static constexpr float Q[] = {-1.45660718464996e-05f, -2.13374055278905e-04f, -1.68282697438203e-03f, -7.37332916720468e-03f,
                                  -1.42647390514189e-02f};
    x = min(splat(4.0f), max(splat(-4.0f), x));
    Vec z = x * x;
    return x * detail::polynomial(z, P) / detail::polynomial(z, Q);
}

}  // namespace planc
