// Token choice: in go a row of logits and its record, out come a token and the best logit, as runtime/sampler.py chooses.
//
// A row is one thread's alone and its sums have one order, so its token is a matter of the row and its record.
#pragma once
#include <algorithm>
#include <limits>
#include <vector>

#include "planc/record.h"
#include "planc/share.h"
#include "planc/vecmath.h"

namespace planc {

namespace detail {
constexpr int LOGIT_BLOCK = 128;       // logits whose best and whose sum are kept
constexpr int FIRST_CANDIDATES = 256;  // top_p looks at this many of the most likely tokens first; enough in nearly all cases
}  // namespace detail

// Chooses rows one after the other, in memory that is used again.
class Chooser {
   public:
    // `token_at(position)` is a token of the row's sequence. Penalties, biases and masks change the logits in place.
    template <class TokenAt>
    void run(float* logits, int vocab, const Record& record, TokenAt token_at, int32_t* chosen) {
        x_ = logits;
        vocab_ = vocab;
        blocks_ = (vocab + detail::LOGIT_BLOCK - 1) / detail::LOGIT_BLOCK;
        tops_.resize(size_t(blocks_));
        penalise(record, token_at);
        edit(record);
        int token = first_best();
        const float best = token < 0 ? std::numeric_limits<float>::quiet_NaN() : x_[token];
        if (record[Record::KIND] == Record::DRAWN && std::isfinite(best)) token = draw(record, best);
        chosen[0] = token;
        std::memcpy(chosen + 1, &best, sizeof best);
    }

   private:
    // Repetition looks at prompt and output; presence and frequency at the output alone.
    template <class TokenAt>
    void penalise(const Record& record, TokenAt token_at) {
        const float repetition = record.real(Record::REPETITION), presence = record.real(Record::PRESENCE);
        const float frequency = record.real(Record::FREQUENCY);
        const int length = record[Record::LENGTH];
        if (repetition != 1.0f) {
            count(0, length, token_at);
            for (int token : seen_) x_[token] = x_[token] > 0.0f ? x_[token] / repetition : x_[token] * repetition;
        }
        if (presence != 0.0f || frequency != 0.0f) {
            count(record[Record::PROMPT], length, token_at);
            for (size_t i = 0; i < seen_.size(); ++i) x_[seen_[i]] -= std::fma(frequency, float(times_[i]), presence);
        }
    }

    // Each token at the positions from begin to end once, and how often it is there.
    template <class TokenAt>
    void count(int begin, int end, TokenAt token_at) {
        place_.resize(size_t(vocab_), 0);
        seen_.clear();
        times_.clear();
        for (int at = begin; at < end; ++at) {
            const int32_t token = token_at(at);
            if (uint32_t(token) >= uint32_t(vocab_)) continue;
            if (!place_[size_t(token)]) {
                seen_.push_back(token);
                times_.push_back(0);
                place_[size_t(token)] = int32_t(seen_.size());
            }
            ++times_[size_t(place_[size_t(token)]) - 1];
        }
        for (int token : seen_) place_[size_t(token)] = 0;
    }

    void edit(const Record& record) {
        for (int j = 0; j < record[Record::EDITS]; ++j) {
            float& x = x_[record[Record::LIST + 2 * j]];
            const float added = record.real(Record::LIST + 2 * j + 1);
            x = std::isinf(added) ? added : x + added;
        }
    }

    Range block(int b) const { return {b * detail::LOGIT_BLOCK, std::min(vocab_, (b + 1) * detail::LOGIT_BLOCK)}; }

    // The first of the largest logits; -1 when one of them is no number.
    int first_best() {
        Vec strange = zero();
        for (int b = 0; b < blocks_; ++b) {
            const Range part = block(b);
            Vec top = splat(-std::numeric_limits<float>::infinity());
            for_each_vec(part.end - part.begin, [&](int i, int n) PLANC_INLINED {
                const Vec x = n == LANES ? load(x_ + part.begin + i) : only(load(x_ + part.begin + i, n), n, -std::numeric_limits<float>::infinity());
                top = max(top, x);
                strange = select(is_nan(x), splat(1.0f), strange);
            });
            tops_[size_t(b)] = max(top);
        }
        if (max(strange) > 0.0f) return -1;
        const int b = int(std::max_element(tops_.begin(), tops_.end()) - tops_.begin());
        const Range part = block(b);
        return int(std::find(x_ + part.begin, x_ + part.end, tops_[size_t(b)]) - x_);
    }

    // A token from softmax(logits / temperature), cut by min_p, top_k and top_p, at the record's quantile.
    int draw(const Record& record, float best) {
        const double total = weigh(best, record.real(Record::TEMPERATURE), record.real(Record::MIN_P));
        const int top_k = record[Record::TOP_K];
        const bool nucleus = record[Record::TOP_P] != 0 || record[Record::TOP_P + 1] != 0;
        const double u = record.share(Record::UNIFORM), top_p = record.share(Record::TOP_P);
        if (top_k == 0 && !nucleus) return at_quantile(std::min(u * total, std::nextafter(total, 0.0)));
        double whole = nucleus && top_k == 0 ? sum_of_weights() : total;
        if (top_k > 0) {
            find_largest(top_k);
            if (candidates_.size() > size_t(top_k)) candidates_.resize(size_t(top_k));
            whole = sum_of_candidates();
        } else {
            for (int64_t count = detail::FIRST_CANDIDATES; !find_largest(count) && sum_of_candidates() <= top_p * whole;) count *= 8;
        }
        double held = 0.0;  // by the candidates that stay
        size_t size = 0;
        while (size < candidates_.size() && (!nucleus || size == 0 || held < top_p * whole)) held += double(candidates_[size++].weight);
        double upto = 0.0;
        for (size_t i = 0; i < size; ++i) {
            upto += double(candidates_[i].weight);
            if (upto > u * held) return candidates_[i].token;
        }
        return candidates_[size - 1].token;  // rounding put the quantile past every weight
    }

    // Weights of all tokens, at most 1, and 0 for those below `least`; the largest and the sum of each block. Their sum.
    double weigh(float best, float temperature, float least) {
        weights_.resize(size_t(vocab_));
        sums_.resize(size_t(blocks_));
        double total = 0.0;
        for (int b = 0; b < blocks_; ++b) {
            const Range part = block(b);
            Vec top = zero(), sum = zero();
            for_each_vec(part.end - part.begin, [&](int i, int n) PLANC_INLINED {
                const Vec x = exp((load_lanes(x_ + part.begin + i, n) - splat(best)) / splat(temperature));
                const Vec w = select(less(x, splat(least)), zero(), n == LANES ? x : only(x, n, 0.0f));
                store_lanes(&weights_[size_t(part.begin + i)], w, n);
                top = max(top, w);
                sum = sum + w;
            });
            tops_[size_t(b)] = max(top);
            sums_[size_t(b)] = planc::sum(sum);
            total += double(sums_[size_t(b)]);
        }
        return total;
    }

    // Their sum to the last digit: a nucleus may end exactly at a token.
    double sum_of_weights() const {
        double sums[4] = {};
        for (int b = 0; b < blocks_; ++b) {
            const Range part = block(b);
            for (int i = part.begin; i < part.end && tops_[size_t(b)] > 0.0f; ++i) sums[i % 4] += double(weights_[size_t(i)]);
        }
        return (sums[0] + sums[1]) + (sums[2] + sums[3]);
    }

    // The first token at which the running sum of all weights passes the target, which is less than their sum.
    int at_quantile(double target) const {
        double before = 0.0;
        int b = 0;
        while (b + 1 < blocks_ && before + double(sums_[size_t(b)]) <= target) before += double(sums_[size_t(b++)]);
        const Range part = block(b);
        int token = part.begin;
        for (int i = part.begin; i < part.end && before <= target; ++i) {
            if (weights_[size_t(i)] > 0.0f) token = i;  // the last, where a block's sum was rounded up past the target
            before += double(weights_[size_t(i)]);
        }
        return token;
    }

    struct Candidate {
        float weight;
        int32_t token;
    };

    // At least the `count` tokens of the largest weights, in falling order, of equals the first; whether that is all.
    bool find_largest(int64_t count) {
        float least = std::numeric_limits<float>::denorm_min();
        if (count < vocab_) {  // as many blocks as that, or weights, have one that large
            const bool by_block = count <= blocks_;
            order_.assign(by_block ? tops_.begin() : weights_.begin(), by_block ? tops_.end() : weights_.end());
            std::nth_element(order_.begin(), order_.begin() + (count - 1), order_.end(), std::greater<float>());
            least = std::max(least, order_[size_t(count - 1)]);
        }
        candidates_.clear();
        for (int b = 0; b < blocks_; ++b) {
            if (tops_[size_t(b)] < least) continue;
            const Range part = block(b);
            for (int i = part.begin; i < part.end; ++i) {
                if (weights_[size_t(i)] >= least) candidates_.push_back({weights_[size_t(i)], i});
            }
        }
        std::sort(candidates_.begin(), candidates_.end(), [](const Candidate& a, const Candidate& b) {
            return a.weight > b.weight || (a.weight == b.weight && a.token < b.token);
        });
        return least == std::numeric_limits<float>::denorm_min();
    }

    double sum_of_candidates() const {
        double sum = 0.0;
        for (const Candidate& c : candidates_) sum += double(c.weight);
        return sum;
    }

    static PLANC_INLINE Vec only(Vec x, int n, float other) { return select(less(iota(), splat_int(n)), x, splat(other)); }

    float* x_ = nullptr;
    int vocab_ = 0, blocks_ = 0;
    std::vector<float> tops_, sums_, weights_, order_;
    std::vector<int32_t> place_, seen_, times_;
    std::vector<Candidate> candidates_;
};

// A thread's share of a step's rows.
inline void choose_rows(const planc_batch& batch, const planc_choice& choice, int thread, int threads) {
    static thread_local Chooser chooser;
    const Range rows = share(batch.num_rows, thread, threads);
    for (int row = rows.begin; row < rows.end; ++row) {
        const Record record = {choice.records + int64_t(row) * Record::WORDS};
        if (record[Record::KIND] == Record::HOST) continue;
        const int32_t* pages = batch.page_table + int64_t(record[Record::SEQUENCE]) * batch.table_stride;
        const auto token_at = [&](int position) {
            return choice.history[int64_t(pages[position / choice.block_size]) * choice.block_size + position % choice.block_size];
        };
        chooser.run(choice.logits + int64_t(row) * choice.vocab, choice.vocab, record, token_at, choice.chosen + 2 * row);
    }
}

}  // namespace planc
