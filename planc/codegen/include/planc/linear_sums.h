// The innermost loops of linear layers: sums of a register tile over lines of weights, one k after the other.
#pragma once
#include "planc/input_rows.h"
#include "planc/tile.h"
#include "planc/weights.h"

namespace planc::detail {

constexpr int PREFETCH_BYTES = 4096;  // ahead of the line in use: some 100 ns at 40 GB/s

// `accumulate` with all k of a line before the next line: what they share is then the one thing that registers must hold.
template <class Source, class Tile, int MR, int NV>
PLANC_INLINE void accumulate_by_vector(Vec (&acc)[MR][NV], const Tile& x, const char* w, int count, const Source (&source)[NV]) {
    for (int k = 0; k < count; k += Source::GROUP, w += Source::STRIDE) {
        PLANC_UNROLL for (int v = 0; v < NV; ++v) {
            prefetch(w + PREFETCH_BYTES + v * LINE_BYTES);
            unrolled<Source::GROUP>([&](auto i) PLANC_INLINED {
                const Vec b = source[v].template unpack<i.value>(w + v * LINE_BYTES);
                PLANC_UNROLL for (int m = 0; m < MR; ++m) acc[m][v] = fma(broadcast(x(m) + k + i.value), b, acc[m][v]);
            });
        }
    }
}

// acc[m][v] += x[m][0..count) * w[0..count)[v], k ascending. `x(m)` is row m of the tile, `w` points at the first group's
// line of the first vector, which source[0] unpacks.
template <class Source, class Tile, int MR, int NV>
PLANC_INLINE void accumulate(Vec (&acc)[MR][NV], const Tile& x, const char* w, int count, const Source (&source)[NV]) {
    constexpr int GROUP = Source::GROUP;
    if constexpr (Source::BY_VECTOR) return accumulate_by_vector(acc, x, w, count, source);
    auto step = [&](auto i, int k, const char* wk) PLANC_INLINED {
        Vec b[NV];
        PLANC_UNROLL for (int v = 0; v < NV; ++v) b[v] = source[v].template unpack<i.value>(wk + v * LINE_BYTES);
        PLANC_UNROLL for (int m = 0; m < MR; ++m) {
            Vec a = broadcast(x(m) + k + i.value);
            PLANC_UNROLL for (int v = 0; v < NV; ++v) acc[m][v] = fma(a, b[v], acc[m][v]);
        }
    };
    int k = 0;
    for (; k + GROUP <= count; k += GROUP, w += Source::STRIDE) {
        if constexpr (Source::PREFETCH) {
            PLANC_UNROLL for (int v = 0; v < NV; ++v) prefetch(w + PREFETCH_BYTES + v * LINE_BYTES);
        }
        unrolled<GROUP>([&](auto i) PLANC_INLINED { step(i, k, w); });
    }
    if constexpr (GROUP > 1 && !Source::BY_VECTOR) {
        unrolled<GROUP - 1>([&](auto i) PLANC_INLINED {
            if (k + i.value < count) step(i, k, w);
        });
    }
}

template <int MR, int NV>
PLANC_INLINE void hold_all(Vec (&sums)[MR][NV]) {
    PLANC_UNROLL for (int m = 0; m < MR; ++m) {
        PLANC_UNROLL for (int v = 0; v < NV; ++v) sums[m][v] = held(sums[m][v]);
    }
}

// Like `accumulate` with several k at once, as rows of a Form multiply them. Integers lie in the lanes of acc as i32.
template <class Form, class Source, class Tile, int MR, int NV>
PLANC_INLINE void accumulate_dots(Vec (&acc)[MR][NV], const Tile& x, const char* w, int count, const Source (&source)[NV]) {
    constexpr int STEPS = Source::GROUP / Form::GROUP * Form::STEPS;
    auto add = [&](auto p, int m, int k, VecI b, Vec sum) PLANC_INLINED { return Form::dot(b, x.template dots<p.value>(m, k), sum); };
    hold_all(acc);
    for (int k = 0; k < count; k += Source::GROUP, w += Source::STRIDE) {
        if constexpr (Source::PREFETCH) {
            PLANC_UNROLL for (int v = 0; v < NV; ++v) prefetch(w + PREFETCH_BYTES + v * LINE_BYTES);
        }
        if constexpr (Source::BY_VECTOR) {
            PLANC_UNROLL for (int v = 0; v < NV; ++v) {
                unrolled<STEPS>([&](auto p) PLANC_INLINED {
                    const VecI b = source[v].template dots<p.value>(w + v * LINE_BYTES);
                    PLANC_UNROLL for (int m = 0; m < MR; ++m) acc[m][v] = add(p, m, k, b, acc[m][v]);
                });
            }
        } else {
            unrolled<STEPS>([&](auto p) PLANC_INLINED {
                VecI b[NV];
                PLANC_UNROLL for (int v = 0; v < NV; ++v) b[v] = source[v].template dots<p.value>(w + v * LINE_BYTES);
                PLANC_UNROLL for (int m = 0; m < MR; ++m) {
                    PLANC_UNROLL for (int v = 0; v < NV; ++v) acc[m][v] = add(p, m, k, b[v], acc[m][v]);
                }
            });
        }
    }
    hold_all(acc);
}

// acc[digit] += x's digit * w, integers in the lanes.
template <class Source, class Tile, int MR, int NV>
PLANC_INLINE void accumulate_digits(Vec (&acc)[2][MR][NV], const Tile& x, const char* w, int count, const Source (&source)[NV]) {
    hold_all(acc[0]);
    hold_all(acc[1]);
    for (int k = 0; k < count; k += Source::GROUP, w += Source::STRIDE) {
        if constexpr (Source::PREFETCH) {
            PLANC_UNROLL for (int v = 0; v < NV; ++v) prefetch(w + PREFETCH_BYTES + v * LINE_BYTES);
        }
        unrolled<Source::GROUP / AsDigits::GROUP>([&](auto p) PLANC_INLINED {
            VecI b[NV];
            PLANC_UNROLL for (int v = 0; v < NV; ++v) b[v] = source[v].template dots<p.value>(w + v * LINE_BYTES);
            PLANC_UNROLL for (int m = 0; m < MR; ++m) {
                const VecI one = x.template dots<p.value, 0>(m, k), two = x.template dots<p.value, 1>(m, k);
                PLANC_UNROLL for (int v = 0; v < NV; ++v) acc[0][m][v] = dot_bytes(b[v], one, acc[0][m][v]);
                PLANC_UNROLL for (int v = 0; v < NV; ++v) acc[1][m][v] = dot_bytes(b[v], two, acc[1][m][v]);
            }
        });
    }
    hold_all(acc[0]);
    hold_all(acc[1]);
}

}  // namespace planc::detail
