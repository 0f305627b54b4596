// The paged KV cache: where a position's key and value lie in a page, and appending a step's own.
//
// A page holds, for a layer, K as [kv heads][k_dim][block] (positions innermost: the lanes of attention's scores) and V
// as [kv heads][block][v_dim].
#pragma once
#include "planc/share.h"

namespace planc {

// Config: Element (float or uint16_t for bf16), KV_HEADS, K_DIM, V_DIM, BLOCK_SIZE, PAGE_BYTES. A layer's `keys` and `values`
// are the cache's address plus the layer's offsets in a page.
template <class Config>
struct Cache {
    using Element = typename Config::Element;
    static constexpr int BLOCK_SIZE = Config::BLOCK_SIZE;

    // K of `head` at d = 0 and this slot of the page; d + 1 lies BLOCK_SIZE elements further.
    static PLANC_INLINE Element* key(void* keys, int64_t page, int head, int slot) {
        char* base = static_cast<char*>(keys) + page * int64_t(Config::PAGE_BYTES);
        return reinterpret_cast<Element*>(base) + int64_t(head) * Config::K_DIM * BLOCK_SIZE + slot;
    }
    // V of `head` at this slot of the page; slot + 1 lies V_DIM elements further.
    static PLANC_INLINE Element* value(void* values, int64_t page, int head, int slot) {
        char* base = static_cast<char*>(values) + page * int64_t(Config::PAGE_BYTES);
        return reinterpret_cast<Element*>(base) + (int64_t(head) * BLOCK_SIZE + slot) * Config::V_DIM;
    }
};

// Writes k[T, KV_HEADS, K_DIM] and v[T, KV_HEADS, V_DIM] (strides KEY_ROW, KEY_HEAD, VALUE_ROW, VALUE_HEAD in floats) at
// slots[T] = page * BLOCK_SIZE + offset. A negative slot is skipped.
template <class Config>
void kv_append(int tokens, int thread, int threads, const float* k, const float* v, const int32_t* slots, void* keys,
               void* values) {
    using C = Cache<Config>;
    const Range units = share(int64_t(tokens) * Config::KV_HEADS, thread, threads);
    for (int unit = units.begin; unit < units.end; ++unit) {
        const int64_t t = unit / Config::KV_HEADS;
        const int head = unit % Config::KV_HEADS;
        if (slots[t] < 0) continue;
        const int page = slots[t] / C::BLOCK_SIZE, slot = slots[t] % C::BLOCK_SIZE;
        const float* key = k + t * Config::KEY_ROW + head * Config::KEY_HEAD;
        const float* value = v + t * Config::VALUE_ROW + head * Config::VALUE_HEAD;
        auto* k_to = C::key(keys, page, head, slot);
        auto* v_to = C::value(values, page, head, slot);
        for (int d = 0; d < Config::K_DIM; ++d) float_to_element(key[d], k_to + int64_t(d) * C::BLOCK_SIZE);
        for_each_vec(Config::V_DIM, [&](int i, int n) PLANC_INLINED {
            if (n == LANES) {
                store_from_float(v_to + i, load(value + i));
            } else {
                store_from_float(v_to + i, load(value + i, n), n);
            }
        });
    }
}

}  // namespace planc
