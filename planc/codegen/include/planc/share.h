// How work splits over threads: contiguous parts of a count.
#pragma once
#include "planc/simd.h"

namespace planc {

// The part of `count` items that is `thread`'s: contiguous, the same in each step, sizes differing by one at most.
struct Range {
    int begin, end;
};
PLANC_INLINE Range share(int64_t count, int thread, int threads) {
    return {int(count * thread / threads), int(count * (thread + 1) / threads)};
}

}  // namespace planc
