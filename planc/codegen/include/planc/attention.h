// Attention over the paged cache: y[T, HEADS, V_DIM] = softmax(mask(q . K * scale)) V, each token within its sequence.
//
// Elements of 8 bits are widened as codes. A key's scale multiplies its score and a value's scale its probability.
//
// Keys are walked in chunks of 256 absolute positions. A chunk gives (peak, sum, weighted values) of its own: scores,
// their peak, exponentials, the sum in 16 lanes (lane = position % 16), values added in order of position. Chunks join in
// order. Rows (token, query head) that share a KV head run together in registers, which never changes a row's bits.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

#include "planc/kv.h"
#include "planc/tile.h"
#include "planc/vecmath.h"

namespace planc {

enum class MaskKind { CAUSAL, SLIDING, CHUNKED };

// What attention reads of a step.
struct AttentionInputs {
    const float* q;              // [T, HEADS, K_DIM], strides Q_ROW and Q_HEAD
    CacheParts cache;            // the layer's, which already holds this step's own
    const int32_t* page_table;   // [S, table_stride]
    const int32_t* query_start;  // [S + 1]: the rows of each sequence
    const int32_t* positions;    // [T]
    const float* sinks;          // [HEADS] or null
    const float* slopes;         // [HEADS] or null: score += slope * (key's position - query's)
    int seqs, table_stride;
};

namespace detail {

constexpr int CHUNK = 256;      // positions that are summed on their own
constexpr int AHEAD = 64;       // positions that are asked of memory before their turn: pages lie far apart
constexpr int LINE = 64;        // bytes that come together
constexpr int TILE_ROWS = 24;   // (token, head) rows that walk a chunk of K and V while it is in the cache

// The state of one row's softmax over the chunks so far.
template <int WIDTH>
struct RowState {
    float peak = -std::numeric_limits<float>::infinity();
    float sum = 0.0f;
    alignas(64) float values[WIDTH] = {};
};

}  // namespace detail

// Config: that of Cache, HEADS, Q_ROW, Q_HEAD, SCALE, SOFTCAP (0: none), MASK, WINDOW, SINKS, ALIBI.
template <class Config>
class PagedAttention {
    using Element = typename Config::Element;
    static constexpr bool SCALED = Codes<Element>::SCALED;
    static constexpr int K_DIM = Config::K_DIM, V_DIM = Config::V_DIM, BLOCK_SIZE = Config::BLOCK_SIZE;
    static constexpr int GROUP = Config::HEADS / Config::KV_HEADS;
    static constexpr int TILE_TOKENS = std::max(1, detail::TILE_ROWS / GROUP);
    // Rows in registers: a token's query heads in equal parts (all that decode has), and as many as fit.
    static constexpr int FEW = (GROUP + (GROUP - 1) / MAX_TILE_ROWS) / ((GROUP - 1) / MAX_TILE_ROWS + 1);
    // Whether rows so few are those of decode, which reads the cache once: the others find it in their own caches.
    template <int MR>
    static constexpr bool STREAMS = MR <= FEW;
    static constexpr int VALUE_VECS = (V_DIM + LANES - 1) / LANES;
    static constexpr int WIDTH = VALUE_VECS * LANES;
    static_assert(BLOCK_SIZE % LANES == 0 && detail::CHUNK % LANES == 0);
    using State = detail::RowState<WIDTH>;

    // One row of a tile: its query, its softmax state, and the half-open range of positions that it sees.
    struct Row {
        const float* q;
        State* state;
        int begin, end;
        float slope;
    };

    // A chunk's scores, then probabilities, of MR rows, and the part of the chunk that each row sees.
    template <int MR>
    struct Chunk {
        int base;
        int begin[MR], end[MR];
        float peak[MR], sum[MR];
        alignas(64) float p[MR][detail::CHUNK];
        alignas(64) float values[MR][WIDTH];
    };

   public:
    PagedAttention(const AttentionInputs& in, float* y) : in_(in), y_(y) {}

    // Tiles go to threads in turn, since later tiles of a prompt see more keys.
    void run(int thread, int threads) const {
        int item = 0;
        for (int s = 0; s < in_.seqs; ++s) {
            for (int t = in_.query_start[s]; t < in_.query_start[s + 1]; t += TILE_TOKENS) {
                const int end = std::min(t + TILE_TOKENS, in_.query_start[s + 1]);
                for (int head = 0; head < Config::KV_HEADS; ++head) {
                    if (item++ % threads == thread) run_tile(s, {t, end}, head);
                }
            }
        }
    }

   private:
    void run_tile(int seq, Range tokens, int head) const {
        State states[TILE_TOKENS * GROUP];
        Row rows[TILE_TOKENS * GROUP];
        const int count = (tokens.end - tokens.begin) * GROUP;
        int first = std::numeric_limits<int>::max(), last = 0;
        for (int i = 0; i < count; ++i) {
            rows[i] = make_row(tokens.begin + i / GROUP, head * GROUP + i % GROUP, &states[i]);
            first = std::min(first, rows[i].begin);
            last = std::max(last, rows[i].end - 1);
        }
        const int32_t* pages = in_.page_table + int64_t(seq) * in_.table_stride;
        for (int chunk = first / detail::CHUNK; chunk <= last / detail::CHUNK; ++chunk) {
            for (int at = 0; at < count;) {
                if (count - at > FEW) {
                    at += run_chunk<MAX_TILE_ROWS>(rows + at, count - at, chunk * detail::CHUNK, pages, head);
                } else {
                    at += run_chunk<FEW>(rows + at, count - at, chunk * detail::CHUNK, pages, head);
                }
            }
        }
        for (int i = 0; i < count; ++i) finish(tokens.begin + i / GROUP, head * GROUP + i % GROUP, states[i]);
    }

    Row make_row(int token, int head, State* state) const {
        const int position = in_.positions[token];
        int begin = 0;
        if constexpr (Config::MASK == MaskKind::SLIDING) begin = std::max(0, position - Config::WINDOW + 1);
        if constexpr (Config::MASK == MaskKind::CHUNKED) begin = position / Config::WINDOW * Config::WINDOW;
        const float* q = in_.q + int64_t(token) * Config::Q_ROW + int64_t(head) * Config::Q_HEAD;
        return {q, state, begin, position + 1, Config::ALIBI ? in_.slopes[head] : 0.0f};
    }

    // Runs up to MR of `count` rows over one chunk and returns how many; the last row fills up for missing ones.
    template <int MR>
    int run_chunk(const Row* from, int count, int base, const int32_t* pages, int head) const {
        const int used = std::min(count, MR);
        Row rows[MR];
        Chunk<MR> c;
        c.base = base;
        int first = detail::CHUNK, last = 0;
        for (int m = 0; m < MR; ++m) {
            rows[m] = from[std::min(m, used - 1)];
            c.begin[m] = std::max(rows[m].begin - base, 0);
            c.end[m] = std::min(rows[m].end - base, detail::CHUNK);
            if (c.begin[m] >= c.end[m]) continue;
            first = std::min(first, c.begin[m] / LANES * LANES);
            last = std::max(last, c.end[m]);
        }
        if (first >= last) return used;
        score(c, rows, pages, head, first, last);
        exponentiate(c, pages, head, first, last);
        weigh_all(c, pages, head);
        for (int m = 0; m < used; ++m) {
            if (c.begin[m] < c.end[m]) join(*rows[m].state, c.peak[m], c.sum[m], c.values[m]);
        }
        return used;
    }

    // Masked scores of positions first..last and each row's peak.
    template <int MR>
    void score(Chunk<MR>& c, const Row* rows, const int32_t* pages, int head, int first, int last) const {
        constexpr int NB = tile_vecs(MR);
        Vec peak[MR];
        for (int m = 0; m < MR; ++m) peak[m] = splat(-std::numeric_limits<float>::infinity());
        int j = first;
        for (; j + NB * LANES <= last; j += NB * LANES) score_blocks<MR, NB>(c, rows, pages, head, j, {first, last}, peak);
        for (; j < last; j += LANES) score_blocks<MR, 1>(c, rows, pages, head, j, {first, last}, peak);
        for (int m = 0; m < MR; ++m) c.peak[m] = max(peak[m]);
    }

    // Where 16 keys from position j of the chunk on begin; beyond its part, as many of the part's values from its first on.
    PLANC_INLINE const char* key_or_value(int base, int j, Range part, const int32_t* pages, int head) const {
        const bool key = j < part.end;
        const int position = base + (key ? j : std::min(part.begin + j - part.end, part.end - 1));
        const int page = pages[position / BLOCK_SIZE], slot = position % BLOCK_SIZE;
        return reinterpret_cast<const char*>(key ? Cache<Config>::key(in_.cache.keys, page, head, slot)
                                                 : Cache<Config>::value(in_.cache.values, page, head, slot));
    }

    template <int MR, int NB>
    PLANC_INLINE void score_blocks(Chunk<MR>& c, const Row* rows, const int32_t* pages, int head, int j, Range part,
                                   Vec (&peak)[MR]) const {
        const Element* key[NB];
        const float* q[MR];
        Vec acc[MR][NB] = {}, scale[NB];
        for (int b = 0; b < NB; ++b) {
            const int position = c.base + j + b * LANES;
            key[b] = Cache<Config>::key(in_.cache.keys, pages[position / BLOCK_SIZE], head, position % BLOCK_SIZE);
            scale[b] = scales(in_.cache.key_scales, position, pages, head, Config::SCALE);
        }
        for (int m = 0; m < MR; ++m) q[m] = rows[m].q;
        [[maybe_unused]] const char* ahead[NB];
        if constexpr (STREAMS<MR>) {
            for (int b = 0; b < NB; ++b) ahead[b] = key_or_value(c.base, j + b * LANES + detail::AHEAD, part, pages, head);
        }
        for (int d = 0; d < K_DIM; ++d) {
            if constexpr (STREAMS<MR>) {
                constexpr int STEP = BLOCK_SIZE * int(sizeof(Element));  // bytes from a d to the next
                PLANC_UNROLL for (int b = 0; b < NB; ++b) {
                    if (d * STEP % detail::LINE == 0) prefetch(ahead[b] + d * STEP);
                }
            }
            Vec k[NB];
            PLANC_UNROLL for (int b = 0; b < NB; ++b) k[b] = load_as_float(key[b] + int64_t(d) * BLOCK_SIZE);
            PLANC_UNROLL for (int m = 0; m < MR; ++m) {
                const Vec qd = broadcast(q[m] + d);
                PLANC_UNROLL for (int b = 0; b < NB; ++b) acc[m][b] = fma(qd, k[b], acc[m][b]);
            }
        }
        PLANC_UNROLL for (int m = 0; m < MR; ++m) {
            PLANC_UNROLL for (int b = 0; b < NB; ++b) {
                const int at = j + b * LANES;
                const Vec s = masked(biased(adjusted(acc[m][b], scale[b]), rows[m], c.base + at), c.begin[m] - at, c.end[m] - at);
                store(c.p[m] + at, s);
                peak[m] = max(peak[m], s);
            }
        }
    }

    // `factor` times the scales of 16 positions from `position` on, for codes as they are widened.
    static PLANC_INLINE Vec scales(void* part, int position, const int32_t* pages, int head, float factor) {
        if constexpr (!SCALED) {
            return splat(factor);
        } else {
            const float* at = Cache<Config>::scale(part, pages[position / BLOCK_SIZE], head, position % BLOCK_SIZE);
            return load(at) * splat(factor / Codes<Element>::UNIT);
        }
    }

    static PLANC_INLINE Vec adjusted(Vec dot, Vec scale) {
        const Vec s = dot * scale;
        if constexpr (Config::SOFTCAP == 0.0f) return s;
        return splat(Config::SOFTCAP) * tanh(s / splat(Config::SOFTCAP));
    }

    // Scores of the keys from `position` on, with the bias of their distance to the row's query.
    static PLANC_INLINE Vec biased(Vec s, const Row& row, int position) {
        if constexpr (!Config::ALIBI) return s;
        return fma(splat(row.slope), to_float(iota() + splat_int(position - (row.end - 1))), s);
    }

    // Lanes begin..end of a score, -infinity elsewhere.
    static PLANC_INLINE Vec masked(Vec s, int begin, int end) {
        if (begin <= 0 && end >= LANES) return s;
        const Vec never = splat(-std::numeric_limits<float>::infinity());
        const VecI lane = iota();
        return select(less(lane, splat_int(begin)), never, select(less(lane, splat_int(end)), s, never));
    }

    // Scores become exp(score - peak), times the scale of the value that they weigh; the sum is without it.
    template <int MR>
    void exponentiate(Chunk<MR>& c, const int32_t* pages, int head, int first, int last) const {
        for (int m = 0; m < MR; ++m) {
            if (c.begin[m] >= c.end[m]) continue;
            const Vec peak = splat(c.peak[m]);
            Vec total = zero();
            for (int j = first; j < last; j += LANES) {
                const Vec e = exp(load(c.p[m] + j) - peak);
                store(c.p[m] + j, SCALED ? e * scales(in_.cache.value_scales, c.base + j, pages, head, 1.0f) : e);
                total = total + e;
            }
            c.sum[m] = sum(total);
        }
    }

    // values[m] = sum of p[m][j] V[j], j ascending over what row m sees. Positions that all rows see run together; the
    // others may hold anything, so that not even a zero weight may touch them.
    template <int MR>
    void weigh_all(Chunk<MR>& c, const int32_t* pages, int head) const {
        std::memset(c.values, 0, sizeof c.values);
        const int begin = *std::max_element(c.begin, c.begin + MR), end = *std::min_element(c.end, c.end + MR);
        if (begin >= end) {
            for (int m = 0; m < MR; ++m) weigh<1>(c.p + m, c.values + m, {c.begin[m], c.end[m]}, c.base, pages, head);
            return;
        }
        for (int m = 0; m < MR; ++m) weigh<1>(c.p + m, c.values + m, {c.begin[m], begin}, c.base, pages, head);
        weigh<MR>(c.p, c.values, {begin, end}, c.base, pages, head);
        for (int m = 0; m < MR; ++m) weigh<1>(c.p + m, c.values + m, {end, c.end[m]}, c.base, pages, head);
    }

    template <int MR>
    void weigh(const float (*p)[detail::CHUNK], float (*values)[WIDTH], Range part, int base, const int32_t* pages, int head) const {
        if (part.begin >= part.end) return;
        constexpr int NV = tile_vecs(MR), TILED = VALUE_VECS / NV * NV;
        for (int v = 0; v < TILED; v += NV) weigh_vecs<MR, NV>(p, values, v, part, base, pages, head);
        for (int v = TILED; v < VALUE_VECS; ++v) weigh_vecs<MR, 1>(p, values, v, part, base, pages, head);
    }

    template <int MR, int NV>
    PLANC_INLINE void weigh_vecs(const float (*p)[detail::CHUNK], float (*values)[WIDTH], int first, Range part, int base,
                                 const int32_t* pages, int head) const {
        Vec acc[MR][NV] = {};
        PLANC_UNROLL for (int m = 0; m < MR; ++m) {
            PLANC_UNROLL for (int v = 0; v < NV; ++v) acc[m][v] = load(values[m] + (first + v) * LANES);
        }
        for (int j = part.begin; j < part.end;) {
            const int slot = (base + j) % BLOCK_SIZE, stop = std::min(part.end, j + BLOCK_SIZE - slot);
            const Element* row = Cache<Config>::value(in_.cache.values, pages[(base + j) / BLOCK_SIZE], head, slot);
            const Element* ahead = row;
            if constexpr (STREAMS<MR>) {
                const int then = base + std::min(j + detail::AHEAD, part.end - 1);
                ahead = Cache<Config>::value(in_.cache.values, pages[then / BLOCK_SIZE], head, then % BLOCK_SIZE);
            }
            for (; j < stop; ++j, row += V_DIM) {
                if constexpr (STREAMS<MR>) {
                    const char* line = reinterpret_cast<const char*>(ahead + first * LANES);
                    PLANC_UNROLL for (int at = 0; at < NV * LANES * int(sizeof(Element)); at += detail::LINE) prefetch(line + at);
                    ahead += V_DIM;
                }
                Vec x[NV];
                PLANC_UNROLL for (int v = 0; v < NV; ++v) x[v] = load_value(row, first + v);
                PLANC_UNROLL for (int m = 0; m < MR; ++m) {
                    const Vec weight = broadcast(p[m] + j);
                    PLANC_UNROLL for (int v = 0; v < NV; ++v) acc[m][v] = fma(weight, x[v], acc[m][v]);
                }
            }
        }
        PLANC_UNROLL for (int m = 0; m < MR; ++m) {
            PLANC_UNROLL for (int v = 0; v < NV; ++v) store(values[m] + (first + v) * LANES, acc[m][v]);
        }
    }

    static PLANC_INLINE Vec load_value(const Element* row, int v) {
        if (V_DIM % LANES == 0 || v + 1 < VALUE_VECS) return load_as_float(row + v * LANES);
        return load_as_float(row + v * LANES, V_DIM % LANES);
    }

    // Adds a chunk to a row's state, both rescaled to the larger peak.
    static void join(State& state, float peak, float total, const float* values) {
        const float top = std::max(state.peak, peak);
        const Vec old = exp(splat(state.peak - top)), now = exp(splat(peak - top));
        for (int v = 0; v < VALUE_VECS; ++v) {
            float* to = state.values + v * LANES;
            store(to, fma(load(to), old, load(values + v * LANES) * now));
        }
        state.sum = first_lane(fma(splat(state.sum), old, splat(total) * now));
        state.peak = top;
    }

    static PLANC_INLINE float first_lane(Vec x) {
        float lanes[LANES];
        store(lanes, x);
        return lanes[0];
    }

    void finish(int token, int head, State& state) const {
        if constexpr (Config::SINKS) {
            alignas(64) const float nothing[WIDTH] = {};
            join(state, in_.sinks[head], 1.0f, nothing);
        }
        float* y = y_ + (int64_t(token) * Config::HEADS + head) * V_DIM;
        const Vec total = splat(state.sum);
        for_each_vec(V_DIM, [&](int i, int n) PLANC_INLINED { store_lanes(y + i, load(state.values + i) / total, n); });
    }

    const AttentionInputs& in_;
    float* const y_;
};

}  // namespace planc
