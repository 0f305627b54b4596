// Rotary embedding of queries and keys, where the keys go straight to their page with their values.
#pragma once
#include "planc/kv.h"
#include "planc/rotary.h"

namespace planc {

// Config: those of Rotary (of queries; keys turn alike, K_DIM is WIDTH) and of kv_append. y are the turned queries, dense.
template <class Config>
class RotaryAppend {
    using Turn = Rotary<Config>;
    static constexpr int HEADS = Config::HEADS, ALL = HEADS + Config::KV_HEADS;

   public:
    RotaryAppend(const float* cos, const float* sin, const int32_t* positions, const int32_t* slots, const CacheParts& to)
        : cos_(cos), sin_(sin), positions_(positions), slots_(slots), to_(to) {}

    void run(int tokens, int thread, int threads, const float* q, const float* k, const float* v, float* y) const {
        const Range units = share(int64_t(tokens) * ALL, thread, threads);
        for (int unit = units.begin; unit < units.end; ++unit) {
            const int64_t t = unit / ALL;
            const int head = unit % ALL;
            if (head < HEADS) {
                const float* from = q + t * Config::X_ROW + int64_t(head) * Config::X_HEAD;
                Turn::turn(from, cos_, sin_, positions_[t], y + (t * HEADS + head) * Config::WIDTH);
            } else if (slots_[t] >= 0) {
                append(k, v, t, head - HEADS);
            }
        }
    }

   private:
    void append(const float* k, const float* v, int64_t t, int head) const {
        alignas(64) float turned[(Config::K_DIM + LANES - 1) / LANES * LANES];  // whole vectors: gcc sees masked loads as whole
        Turn::turn(k + t * Config::KEY_ROW + int64_t(head) * Config::KEY_HEAD, cos_, sin_, positions_[t], turned);
        append_head<Config>(turned, v + t * Config::VALUE_ROW + int64_t(head) * Config::VALUE_HEAD, slots_[t], head, to_);
    }

    const float *cos_, *sin_;
    const int32_t *positions_, *slots_;
    const CacheParts& to_;
};

}  // namespace planc
