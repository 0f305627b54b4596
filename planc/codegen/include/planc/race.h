// Kernels of one product side by side: launches of one of them by a thread pool, timed together.
#pragma once
#include <chrono>
#include <system_error>

#include "planc/abi.h"
#include "planc/pool.h"

namespace planc {

// Nanoseconds of `repeats` launches over `rows` rows, each on the next of `copies` tables of `num_buffers` buffers; one
// launch before them wakes the threads. -1 when the machine has no thread left.
inline int64_t timed(planc_kernel kernel, void* const* buffers, int32_t num_buffers, int32_t copies, int32_t rows, int32_t repeats, int32_t threads) noexcept {
    struct Call {
        planc_kernel kernel;
        void* const* buffers;
        int32_t rows, threads;
    } call = {kernel, buffers, rows, threads};
    auto launch = [](void* context, int thread) noexcept {
        const Call& c = *static_cast<const Call*>(context);
        const planc_sizes sizes = {c.rows, c.rows, c.rows, 0, nullptr, 0};
        c.kernel(c.buffers, &sizes, c.rows, thread, c.threads);
    };
    try {
        Pool pool(threads);
        pool.run(launch, &call);
        const auto start = std::chrono::steady_clock::now();
        for (int32_t i = 1; i <= repeats; ++i) {
            call.buffers = buffers + int64_t(i % copies) * num_buffers;
            pool.run(launch, &call);
        }
        return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start).count();
    } catch (const std::system_error&) {
        return -1;
    }
}

}  // namespace planc
