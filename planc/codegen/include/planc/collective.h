// Collectives of a plan's ranks over shared memory: every rank is a process, and all of its threads take part.
//
// What a rank gives goes to its slot, all wait for all, then each rank reads the slots in the order of the ranks. There
// are two sets of slots, taken in turn: when one is written again, every rank has passed the wait of the other, and so
// has read it.
#pragma once
#include <atomic>
#include <climits>
#include <cstdint>
#include <cstring>
#include <thread>

#include "planc/pool.h"
#include "planc/share.h"
#include "planc/simd.h"

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#endif

namespace planc {

constexpr int SLOT_FLOATS = 1 << 18;  // 1 MiB a rank: larger values go in rounds

// The head of the shared memory; it begins as zeros. Atomics of 32 bits hold no lock and no address.
struct GroupHead {
    std::atomic<uint32_t> failed;  // not 0: a rank is gone, nobody waits any more
    alignas(64) std::atomic<uint32_t> arrived;
    alignas(64) std::atomic<uint32_t> phase;
    alignas(64) char end[1];
};
static_assert(std::atomic<uint32_t>::is_always_lock_free);

namespace detail {
// Sleeps while the value is `seen`, for a tenth of a second at most: a rank that is gone wakes nobody.
inline void sleep_shared(const std::atomic<uint32_t>& value, uint32_t seen) noexcept {
#ifdef __linux__
    const timespec most = {0, 100'000'000};
    syscall(SYS_futex, &value, FUTEX_WAIT, seen, &most, nullptr, 0);
#else
    if (value.load(std::memory_order_acquire) == seen) std::this_thread::yield();
#endif
}
inline void wake_shared(std::atomic<uint32_t>& value) noexcept {
#ifdef __linux__
    syscall(SYS_futex, &value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#else
    (void)value;
#endif
}
}  // namespace detail

// One rank's view of the group. `members` are the threads of all ranks together.
class Group {
   public:
    static constexpr int64_t bytes(int ranks) { return int64_t(sizeof(GroupHead)) + 2 * ranks * int64_t(SLOT_FLOATS) * 4; }

    void join(void* memory, int rank, int ranks, int members) noexcept {
        head_ = static_cast<GroupHead*>(memory);
        slots_ = reinterpret_cast<float*>(static_cast<char*>(memory) + sizeof(GroupHead));
        rank_ = rank;
        ranks_ = ranks;
        members_ = uint32_t(members);
        spins_ = members <= int(std::thread::hardware_concurrency()) ? detail::SPINS : 0;
    }
    bool joined() const noexcept { return head_ != nullptr; }
    bool failed() const noexcept { return head_ && head_->failed.load(std::memory_order_acquire) != 0; }
    int rank() const noexcept { return rank_; }
    int ranks() const noexcept { return ranks_; }

    // Counts the waits so far: the same for all threads that are between two of them.
    uint32_t round() const noexcept { return head_->phase.load(std::memory_order_acquire); }
    float* slot(int rank, uint32_t round) const noexcept { return slots_ + (int64_t(round & 1) * ranks_ + rank) * SLOT_FLOATS; }

    // Returns true when the threads of all ranks have called it, and false when a rank is gone.
    bool wait() const noexcept {
        const uint32_t phase = head_->phase.load(std::memory_order_acquire);
        if (head_->arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == members_) {
            head_->arrived.store(0, std::memory_order_relaxed);
            head_->phase.store(phase + 1, std::memory_order_release);
            detail::wake_shared(head_->phase);
            return !failed();
        }
        for (int i = 0; i < spins_; ++i) {
            if (head_->phase.load(std::memory_order_acquire) != phase) return true;
            pause();
        }
        while (head_->phase.load(std::memory_order_acquire) == phase) {
            if (failed()) return false;
            detail::sleep_shared(head_->phase, phase);
        }
        return true;
    }

   private:
    GroupHead* head_ = nullptr;
    float* slots_ = nullptr;
    int rank_ = 0, ranks_ = 1, spins_ = 0;
    uint32_t members_ = 1;
};

// y = x of rank 0 + x of rank 1 + ..: one order of additions, so that all ranks hold the same bits. y may be x.
inline void all_reduce(const Group& group, const float* x, float* y, int64_t count, int thread, int threads) {
    for (int64_t at = 0; at < count; at += SLOT_FLOATS) {
        const uint32_t round = group.round();
        const int64_t size = count - at < SLOT_FLOATS ? count - at : SLOT_FLOATS;
        const Range lines = share((size + LANES - 1) / LANES, thread, threads);
        const int64_t begin = int64_t(lines.begin) * LANES, stop = int64_t(lines.end) * LANES;
        const int64_t end = stop < size ? stop : size;
        if (begin < end) std::memcpy(group.slot(group.rank(), round) + begin, x + at + begin, size_t(end - begin) * 4);
        if (!group.wait()) return;
        for (int64_t i = begin; i < end; i += LANES) {
            const int n = int(end - i < LANES ? end - i : LANES);
            Vec sum = load_lanes(group.slot(0, round) + i, n);
            for (int r = 1; r < group.ranks(); ++r) sum = sum + load_lanes(group.slot(r, round) + i, n);
            store_lanes(y + at + i, sum, n);
        }
    }
}

// y[row, starts[r] ..] = x[row] of rank r, `width` wide; y is `total` wide.
inline void all_gather(const Group& group, const float* x, float* y, int64_t rows, int64_t width, int64_t total,
                       const int64_t* starts, int thread, int threads) {
    const int64_t wide = width < SLOT_FLOATS ? width : SLOT_FLOATS, tall = SLOT_FLOATS / wide;
    for (int64_t row = 0; row < rows; row += tall) {
        const int64_t count = rows - row < tall ? rows - row : tall;
        for (int64_t at = 0; at < width; at += wide) {
            const uint32_t round = group.round();
            const size_t bytes = size_t(width - at < wide ? width - at : wide) * 4;
            const Range mine = share(count, thread, threads);
            for (int64_t i = mine.begin; i < mine.end; ++i) {
                std::memcpy(group.slot(group.rank(), round) + i * wide, x + (row + i) * width + at, bytes);
            }
            if (!group.wait()) return;
            for (int r = 0; r < group.ranks(); ++r) {
                for (int64_t i = mine.begin; i < mine.end; ++i) {
                    std::memcpy(y + (row + i) * total + starts[r] + at, group.slot(r, round) + i * wide, bytes);
                }
            }
        }
    }
}

}  // namespace planc
