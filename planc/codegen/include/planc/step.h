// One step of a plan: every thread walks the launch list, with a barrier after each kernel.
#pragma once
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "planc/abi.h"
#include "planc/collective.h"
#include "planc/pool.h"
#include "planc/scratch.h"

namespace planc {

// Where a buffer lies: an offset in bytes from the arena, the cache, an array of the batch or a weight; or the ranks.
enum Base : int32_t { ARENA, KV, IDS, POSITIONS, SLOTS, PAGE_TABLE, QUERY_START, LOGIT_ROWS, GROUP, FIRST_WEIGHT };

struct Ref {
    int32_t base;
    int64_t offset;
};
constexpr Ref arena(int64_t offset) { return {ARENA, offset}; }
constexpr Ref weight(int32_t index) { return {FIRST_WEIGHT + index, 0}; }
constexpr Ref input(Base base) { return {base, 0}; }
constexpr Ref group() { return {GROUP, 0}; }

// Length of a launch's token axis: that of a symbol, or a constant (>= 0).
constexpr int32_t TOKENS = -1, ROWS = -2, SEQS = -3;

template <int MAX_BUFFERS>
struct Launch {
    planc_kernel kernel;
    int32_t rows;
    int32_t count;
    Ref buffers[MAX_BUFFERS];
};

struct Limits {
    int32_t weights, tokens, rows, seqs;
};

template <int MAX_BUFFERS>
class Program {
   public:
    using Launches = const Launch<MAX_BUFFERS>*;

    // Throws std::bad_alloc or std::system_error when the machine has no memory or no thread left.
    Program(Launches begin, Launches end, const void* const* weights, int num_weights, void* arena, void* kv, int threads)
        : begin_(begin),
          end_(end),
          bases_(size_t(FIRST_WEIGHT + num_weights)),
          scratch_(static_cast<char*>(std::aligned_alloc(4096, SCRATCH_BYTES)), &std::free),
          pool_(threads) {
        if (!scratch_) throw std::bad_alloc();
        std::memset(scratch_.get(), 0, Scratch::HEAD);
        bases_[ARENA] = static_cast<char*>(arena);
        bases_[KV] = static_cast<char*>(kv);
        bases_[GROUP] = reinterpret_cast<char*>(&group_);
        for (int i = 0; i < num_weights; ++i) {
            bases_[size_t(FIRST_WEIGHT + i)] = static_cast<char*>(const_cast<void*>(weights[i]));
        }
    }

    // `nanoseconds`, where it is given, has a place for each launch: how long it took, the wait for all threads included.
    void step(const planc_batch& batch, int64_t* nanoseconds = nullptr) noexcept {
        const int32_t* arrays[] = {batch.ids, batch.positions, batch.slots, batch.page_table, batch.query_start, batch.logit_rows};
        for (int i = 0; i < 6; ++i) bases_[size_t(IDS + i)] = reinterpret_cast<char*>(const_cast<int32_t*>(arrays[i]));
        sizes_ = {batch.num_tokens, batch.num_seqs, batch.num_rows, batch.table_stride, scratch_.get(), SCRATCH_BYTES};
        nanoseconds_ = nanoseconds;
        pool_.run([](void* self, int thread) noexcept { static_cast<Program*>(self)->run(thread); }, this);
    }

    // A step whose last launch is `last`, which chooses the tokens instead of writing logits.
    void best_step(const planc_batch& batch, const planc_choice& choice, planc_kernel last) noexcept {
        remember(batch, choice);
        last_ = last;
        chosen_ = choice.chosen;
        step(batch);
        last_ = nullptr;
    }

    // Chooses the tokens of a step that has run, by `rows`, which takes a thread's share of them.
    void choose(const planc_batch& batch, const planc_choice& choice, planc_chooser rows) noexcept {
        remember(batch, choice);
        if (batch.num_rows == 0) return;
        struct Job {
            const planc_batch& batch;
            const planc_choice& choice;
            planc_chooser rows;
            int threads;
        } job = {batch, choice, rows, pool_.size()};
        pool_.run(
            [](void* given, int thread) noexcept {
                const Job& job = *static_cast<Job*>(given);
                job.rows(&job.batch, &job.choice, thread, job.threads);
            },
            &job);
    }

    Group& group() noexcept { return group_; }

   private:
    using Clock = std::chrono::steady_clock;
    static constexpr int64_t SCRATCH_BYTES = 64 << 20;  // of addresses: pages that no kernel touches cost nothing

    static void remember(const planc_batch& batch, const planc_choice& choice) noexcept {
        for (int t = 0; t < batch.num_tokens; ++t) {
            if (batch.slots[t] >= 0) choice.history[batch.slots[t]] = batch.ids[t];
        }
    }

    void run(int thread) noexcept {
        if (nanoseconds_) pool_.barrier().wait();  // threads that wake up are no kernel's time
        int64_t* const took = thread == 0 ? nanoseconds_ : nullptr;
        auto last = took ? Clock::now() : Clock::time_point();
        for (Launches launch = begin_; launch != end_; ++launch) {
            const int32_t rows = length(launch->rows);
            if (took) took[launch - begin_] = 0;
            if (rows == 0) continue;
            void* buffers[MAX_BUFFERS];
            for (int i = 0; i < launch->count; ++i) {
                buffers[i] = bases_[size_t(launch->buffers[i].base)] + launch->buffers[i].offset;
            }
            const bool chooses = last_ && launch + 1 == end_;
            if (chooses) buffers[launch->count - 1] = chosen_;
            (chooses ? last_ : launch->kernel)(buffers, &sizes_, rows, thread, pool_.size());
            pool_.barrier().wait();
            if (took) {
                const auto now = Clock::now();
                took[launch - begin_] = std::chrono::duration_cast<std::chrono::nanoseconds>(now - last).count();
                last = now;
            }
        }
    }

    int32_t length(int32_t rows) const {
        if (rows >= 0) return rows;
        return rows == TOKENS ? sizes_.tokens : rows == ROWS ? sizes_.rows : sizes_.seqs;
    }

    const Launches begin_, end_;
    std::vector<char*> bases_;
    planc_sizes sizes_ = {};
    std::unique_ptr<char, decltype(&std::free)> scratch_;
    int64_t* nanoseconds_ = nullptr;
    planc_kernel last_ = nullptr;
    int32_t* chosen_ = nullptr;
    Group group_;
    Pool pool_;
};

inline bool fits(const planc_batch& b, const Limits& limits) {
    return b.num_tokens > 0 && b.num_tokens <= limits.tokens && b.num_rows >= 0 && b.num_rows <= limits.rows && b.num_seqs > 0 &&
           b.num_seqs <= limits.seqs;
}

// The plan's C interface over a static launch list. NULL when an argument is wrong or a thread is refused.
template <int MAX_BUFFERS, int COUNT>
void* open_program(const Launch<MAX_BUFFERS> (&launches)[COUNT], const Limits& limits, const void* const* weights, int num_weights,
                   void* arena, void* kv, int threads) noexcept {
    if (num_weights != limits.weights || !arena || !kv || threads < 1) return nullptr;
    for (int i = 0; i < num_weights; ++i) {
        if (!weights[i]) return nullptr;
    }
    try {
        return new Program<MAX_BUFFERS>(launches, launches + COUNT, weights, num_weights, arena, kv, threads);
    } catch (...) {
        return nullptr;
    }
}

}  // namespace planc
