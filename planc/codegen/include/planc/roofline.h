// What this machine can do at most, as kernels meet it: bytes read from memory, and products of the ISA that they use.
#pragma once
#include <algorithm>
#include <chrono>
#include <memory>
#include <vector>

#include "planc/dots.h"
#include "planc/pool.h"

namespace planc {

// READ: bytes a second, from memory that no cache holds. Operations a second: FMA on f32, DOTS on integers as codes are
// multiplied (bytes where the target multiplies those, else halves), BF16 on pairs of it (or on f32, as it is then widened).
enum Limit : int32_t { READ, FMA, DOTS, BF16 };

namespace detail {

constexpr size_t READ_BYTES = size_t(256) << 20;  // of all threads together
constexpr int CHAINS = 6;                         // of sums that do not wait for each other: more would not fit in registers
constexpr int TURNS = 1 << 14;

inline double read(const char* from, size_t size) {
    constexpr size_t LINES = 4 * 64;
    VecI sums[4] = {splat_int(0), splat_int(0), splat_int(0), splat_int(0)};
    for (size_t i = 0; i + LINES <= size; i += LINES) {
        PLANC_UNROLL for (int v = 0; v < 4; ++v) {
            __builtin_prefetch(from + i + 4096 + v * 64);
            sums[v] = sums[v] + load_int(from + i + v * 64);
        }
    }
    const VecI all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    asm volatile("" : : "m"(all));  // as if someone read the sum
    return double(size / LINES * LINES);
}

inline double multiply() {
    Vec sums[CHAINS], a = splat(1.0f), b = splat(0.5f);
    asm volatile("" : "+m"(a), "+m"(b));  // numbers that the compiler does not know
    PLANC_UNROLL for (int i = 0; i < CHAINS; ++i) sums[i] = splat(float(i));
    for (int turn = 0; turn < TURNS; ++turn) {
        PLANC_UNROLL for (int i = 0; i < CHAINS; ++i) sums[i] = fma(sums[i], b, a);
    }
    asm volatile("" : : "m"(sums));
    return 2.0 * LANES * CHAINS * TURNS;
}

inline double dot() {
    VecI sums[CHAINS], b = splat_int(0x00020001);
    asm volatile("" : "+m"(b));
    PLANC_UNROLL for (int i = 0; i < CHAINS; ++i) sums[i] = splat_int(i);
    for (int turn = 0; turn < TURNS; ++turn) {  // of the sums themselves: a product that stays the same would be made once
        PLANC_UNROLL for (int i = 0; i < CHAINS; ++i) {
            sums[i] = BYTE_DOTS ? as_int(dot_bytes(sums[i], b, as_float(sums[i]))) : dot_halves(sums[i], b, sums[i]);
        }
    }
    asm volatile("" : : "m"(sums));
    return (BYTE_DOTS ? 8.0 : 4.0) * LANES * CHAINS * TURNS;
}

inline double dot_pairs() {
    Vec sums[CHAINS];
    VecI b = splat_int(0x3f003e80);
    asm volatile("" : "+m"(b));
    PLANC_UNROLL for (int i = 0; i < CHAINS; ++i) sums[i] = splat(float(i));
    for (int turn = 0; turn < TURNS; ++turn) {
        PLANC_UNROLL for (int i = 0; i < CHAINS; ++i) sums[i] = dot_bf16(as_int(sums[i]), b, sums[i]);
    }
    asm volatile("" : : "m"(sums));
    return 4.0 * LANES * CHAINS * TURNS;
}

inline double done_by(Limit what) {
    if (what == DOTS) return dot();
    return what == BF16 && BF16_DOTS ? dot_pairs() : multiply();
}

}  // namespace detail

// Bytes or operations a second of `threads` threads together: the most of rounds that last `seconds`.
inline double measure(Limit what, int threads, double seconds) {
    using Clock = std::chrono::steady_clock;
    struct Work {
        Limit what;
        int threads;
        std::unique_ptr<char[]> memory;
        std::vector<double> done;
        bool filled = false;
    } work{what, threads, std::unique_ptr<char[]>(new char[what == READ ? detail::READ_BYTES : 1]), std::vector<double>(size_t(threads) * 8)};
    const Pool::Task task = [](void* context, int thread) noexcept {
        Work& w = *static_cast<Work*>(context);
        const size_t share = detail::READ_BYTES / size_t(w.threads);
        char* mine = w.memory.get() + (w.what == READ ? size_t(thread) * share : 0);
        if (w.what == READ && !w.filled) std::fill_n(mine, share, char(thread + 1));  // each thread's own pages, near to it
        double& done = w.done[size_t(thread) * 8];
        done = w.what == READ ? detail::read(mine, share) : detail::done_by(w.what);
    };
    Pool pool(threads);
    pool.run(task, &work);
    work.filled = true;
    double best = 0, spent = 0;
    while (spent < seconds) {
        const auto start = Clock::now();
        pool.run(task, &work);
        const double took = std::chrono::duration<double>(Clock::now() - start).count();
        double done = 0;
        for (int i = 0; i < threads; ++i) done += work.done[size_t(i) * 8];
        best = std::max(best, done / took);
        spent += took;
    }
    return best;
}

}  // namespace planc
