// Memory that the threads of one kernel share, for parts that the last thread to have made one joins: no barrier is needed.
#pragma once
#include <atomic>
#include <cstdint>

namespace planc {

// COUNTERS of finished parts, which are zero between kernels, then floats.
class Scratch {
   public:
    static constexpr int COUNTERS = 1024;
    static constexpr int64_t HEAD = COUNTERS * int64_t(sizeof(std::atomic<int32_t>));

    Scratch(void* memory, int64_t bytes) : memory_(static_cast<char*>(memory)), bytes_(bytes) {}

    bool holds(int counters, int64_t floats) const {
        return memory_ && counters <= COUNTERS && HEAD + floats * int64_t(sizeof(float)) <= bytes_;
    }
    float* floats() const { return reinterpret_cast<float*>(memory_ + HEAD); }

    // Adds parts that are finished; true for who has finished the last of `all`, to whom all of them are visible then.
    bool finished(int counter, int parts, int all) const {
        std::atomic<int32_t>& count = reinterpret_cast<std::atomic<int32_t>*>(memory_)[counter];
        if (count.fetch_add(parts, std::memory_order_acq_rel) + parts != all) return false;
        count.store(0, std::memory_order_relaxed);  // whoever waits for this kernel sees it
        return true;
    }

   private:
    char* const memory_;
    const int64_t bytes_;
};

}  // namespace planc
