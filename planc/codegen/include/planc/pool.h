// A persistent thread pool and its barrier: every thread runs one task together, spins briefly between tasks, then sleeps.
#pragma once
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "planc/simd.h"

namespace planc {

namespace detail {
// Some 50 microseconds: longer than the gap between two kernels, shorter than a scheduler's time slice.
constexpr int SPINS = 1500;

// Returns once value differs from seen: spins if the cores suffice for it, then sleeps in the kernel.
inline void wait_for_change(const std::atomic<uint32_t>& value, uint32_t seen, int spins) noexcept {
    for (int i = 0; i < spins; ++i) {
        if (value.load(std::memory_order_acquire) != seen) return;
        pause();
    }
    while (value.load(std::memory_order_acquire) == seen) value.wait(seen, std::memory_order_acquire);
}
}  // namespace detail

class Barrier {
   public:
    explicit Barrier(int threads) noexcept
        : threads_(uint32_t(threads)), spins_(threads <= int(std::thread::hardware_concurrency()) ? detail::SPINS : 0) {}

    // Returns when all threads have called it; what they wrote before is visible after.
    void wait() noexcept {
        if (threads_ == 1) return;
        uint32_t phase = phase_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
            arrived_.store(0, std::memory_order_relaxed);
            phase_.store(phase + 1, std::memory_order_release);
            phase_.notify_all();
        } else {
            detail::wait_for_change(phase_, phase, spins_);
        }
    }

   private:
    const uint32_t threads_;
    const int spins_;
    alignas(64) std::atomic<uint32_t> arrived_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};
};

class Pool {
   public:
    using Task = void (*)(void* context, int thread) noexcept;

    // Starts threads - 1 threads; the caller of run is thread 0. Throws std::system_error if the system refuses one.
    explicit Pool(int threads) : size_(threads), barrier_(threads) {
        try {
            for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
        } catch (...) {
            stop();
            throw;
        }
    }
    ~Pool() { stop(); }
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int size() const noexcept { return size_; }
    Barrier& barrier() noexcept { return barrier_; }

    // Runs task(context, 0..size-1) at once on all threads and returns when all are done. One caller at a time.
    void run(Task task, void* context) noexcept {
        task_ = task;
        context_ = context;
        round_.fetch_add(1, std::memory_order_release);
        round_.notify_all();
        task(context, 0);
        barrier_.wait();
    }

   private:
    void work(int thread) noexcept {
        const int spins = size_ <= int(std::thread::hardware_concurrency()) ? detail::SPINS : 0;
        for (uint32_t seen = 0;; ++seen) {
            detail::wait_for_change(round_, seen, spins);
            if (stopping_) return;
            task_(context_, thread);
            barrier_.wait();
        }
    }

    void stop() noexcept {
        stopping_ = true;
        round_.fetch_add(1, std::memory_order_release);
        round_.notify_all();
        for (std::thread& worker : workers_) worker.join();
    }

    const int size_;
    Barrier barrier_;
    std::vector<std::thread> workers_;
    Task task_ = nullptr;
    void* context_ = nullptr;
    bool stopping_ = false;
    alignas(64) std::atomic<uint32_t> round_{0};
};

}  // namespace planc
