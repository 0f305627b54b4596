// The paged KV cache: where a position's key and value lie in a page, and appending a step's own.
//
// A page holds, for a layer, K as [kv heads][k_dim][block] (positions innermost: the lanes of attention's scores) and V
// as [kv heads][block][v_dim]. Elements of 8 bits share a scale by position and head: f32 [kv heads][block], for K and V.
#pragma once
#include "planc/narrow.h"
#include "planc/share.h"

namespace planc {

// A layer's parts of the cache: its address plus the layer's offsets in a page. Scales are null where elements have none.
struct CacheParts {
    void *keys, *values, *key_scales, *value_scales;
};

// Config: Element (float, uint16_t for bf16, int8_t or F8E3M4), KV_HEADS, K_DIM, V_DIM, BLOCK_SIZE, PAGE_BYTES.
template <class Config>
struct Cache {
    using Element = typename Config::Element;
    static constexpr int BLOCK_SIZE = Config::BLOCK_SIZE;

    // K of `head` at d = 0 and this slot of the page; d + 1 lies BLOCK_SIZE elements further.
    static PLANC_INLINE Element* key(void* keys, int64_t page, int head, int slot) {
        return at<Element>(keys, page) + int64_t(head) * Config::K_DIM * BLOCK_SIZE + slot;
    }
    // V of `head` at this slot of the page; slot + 1 lies V_DIM elements further.
    static PLANC_INLINE Element* value(void* values, int64_t page, int head, int slot) {
        return at<Element>(values, page) + (int64_t(head) * BLOCK_SIZE + slot) * Config::V_DIM;
    }
    // The scale of K or V of `head` at this slot of the page; that of slot + 1 is next.
    static PLANC_INLINE float* scale(void* scales, int64_t page, int head, int slot) {
        return at<float>(scales, page) + int64_t(head) * BLOCK_SIZE + slot;
    }

   private:
    template <class T>
    static PLANC_INLINE T* at(void* part, int64_t page) {
        return reinterpret_cast<T*>(static_cast<char*>(part) + page * int64_t(Config::PAGE_BYTES));
    }
};

// Writes one head's key [K_DIM] and value [V_DIM] at `slot` = page * BLOCK_SIZE + offset.
template <class Config>
PLANC_INLINE void append_head(const float* key, const float* value, int slot, int head, const CacheParts& to) {
    using C = Cache<Config>;
    const int page = slot / C::BLOCK_SIZE, inside = slot % C::BLOCK_SIZE;
    auto* k_to = C::key(to.keys, page, head, inside);
    auto* v_to = C::value(to.values, page, head, inside);
    if constexpr (Codes<typename C::Element>::SCALED) {
        *C::scale(to.key_scales, page, head, inside) = narrow<Config::K_DIM>(key, k_to, C::BLOCK_SIZE);
        *C::scale(to.value_scales, page, head, inside) = narrow<Config::V_DIM>(value, v_to, 1);
    } else {
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

// Writes k[T, KV_HEADS, K_DIM] and v[T, KV_HEADS, V_DIM] (strides KEY_ROW, KEY_HEAD, VALUE_ROW, VALUE_HEAD in floats) at
// slots[T] = page * BLOCK_SIZE + offset. A negative slot is skipped.
template <class Config>
void kv_append(int tokens, int thread, int threads, const float* k, const float* v, const int32_t* slots,
               const CacheParts& to) {
    const Range units = share(int64_t(tokens) * Config::KV_HEADS, thread, threads);
    for (int unit = units.begin; unit < units.end; ++unit) {
        const int64_t t = unit / Config::KV_HEADS;
        const int head = unit % Config::KV_HEADS;
        if (slots[t] < 0) continue;
        const float* key = k + t * Config::KEY_ROW + head * Config::KEY_HEAD;
        const float* value = v + t * Config::VALUE_ROW + head * Config::VALUE_HEAD;
        append_head<Config>(key, value, slots[t], head, to);
    }
}

}  // namespace planc
