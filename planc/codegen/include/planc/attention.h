// Attention over the paged cache: y[T, HEADS, V_DIM] = softmax(mask(q . K * scale)) V, each token within its sequence.
//
// Elements of 8 bits are widened as codes. A key's scale multiplies its score and a value's scale its probability.
//
// Keys are walked in chunks of 256 absolute positions. A chunk gives (peak, sum, weighted values) of its own: scores,
// their peak, exponentials, the sum in 16 lanes (lane = position % 16), values added in order of position. Chunks join in
// order. Scores are in powers of two: what multiplies them has log2(e) in it. Rows (token, query head) that share a KV head
// run together in registers, which never changes a row's bits. Where values are multiplied in pairs of positions
// (attention_operands.h), an even one begins a pair, whichever a row sees.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

#include "planc/attention_inputs.h"
#include "planc/scratch.h"
#include "planc/tile.h"
#include "planc/vecmath.h"

namespace planc {

// Config: that of Cache, HEADS, Q_ROW, Q_HEAD, SCALE, SOFTCAP (0: none), MASK, WINDOW, SINKS, ALIBI.
template <class Config>
class PagedAttention {
    using Element = typename Config::Element;
    using Ops = Operands<Config>;
    static constexpr bool SCALED = Codes<Element>::SCALED;
    static constexpr int V_DIM = Config::V_DIM, BLOCK_SIZE = Config::BLOCK_SIZE, STEP = Ops::STEP;
    static constexpr bool PAIRED = Ops::PAIRED;
    static constexpr int GROUP = Config::HEADS / Config::KV_HEADS;
    // Tokens of a tile: as few as fill the registers, to as many as divide into those.
    static constexpr int FULL_TOKENS = std::max(1, MAX_TILE_ROWS / GROUP);
    static constexpr int TILE_TOKENS = std::max(1, detail::TILE_ROWS / GROUP / FULL_TOKENS) * FULL_TOKENS;
    // Rows in registers: a token's query heads in equal parts (all that decode has), and as many as fit.
    static constexpr int FEW = (GROUP + (GROUP - 1) / MAX_TILE_ROWS) / ((GROUP - 1) / MAX_TILE_ROWS + 1);
    static constexpr int VALUE_VECS = Ops::VALUE_VECS, WIDTH = VALUE_VECS * LANES;
    static_assert(BLOCK_SIZE % LANES == 0 && detail::CHUNK % (2 * LANES) == 0);
    using State = detail::RowState<WIDTH>;

    using Row = detail::TileRow<WIDTH>;
    using Packed = detail::PackedChunk<Ops>;

    // Where a tile's keys and values are. A token alone reads them from the pages, since it does so once.
    struct Source {
        const int32_t* pages;
        int head;
        Packed* packed;
    };

    template <int MR>
    using Chunk = detail::ChunkOfRows<MR, WIDTH>;

   public:
    PagedAttention(const AttentionInputs& in, float* y) : in_(in), y_(y) {}

    // Tiles go to threads in turn, to and fro, since later tiles of a prompt see more keys.
    void run(int thread, int threads, const Scratch& scratch) const {
        if (run_apart(thread, threads, scratch)) return;
        const int share = in_.query_start[in_.seqs] * Config::KV_HEADS / (threads * detail::TILES) / FULL_TOKENS * FULL_TOKENS;
        const int tokens = std::clamp(share, FULL_TOKENS, TILE_TOKENS);
        int item = 0;
        for (int s = 0; s < in_.seqs; ++s) {
            for (int t = in_.query_start[s]; t < in_.query_start[s + 1]; t += tokens) {
                const int end = std::min(t + tokens, in_.query_start[s + 1]);
                for (int head = 0; head < Config::KV_HEADS; ++head) {
                    const int turn = item / threads % 2, place = item % threads;
                    if ((turn ? threads - 1 - place : place) == thread) run_tile(s, {t, end}, head);
                    ++item;
                }
            }
        }
    }

   private:
    static constexpr int64_t PART_FLOATS = GROUP * int64_t(sizeof(State) / sizeof(float));  // of all rows of a chunk

    // Decode of fewer (sequence, KV head) than threads can share evenly: chunks go to threads in equal parts, and who has
    // finished the last one of a sequence and head joins them in order. False, and nothing done, for other steps.
    bool run_apart(int thread, int threads, const Scratch& scratch) const {
        const int pairs = in_.seqs * Config::KV_HEADS;
        if (threads == 1 || pairs >= detail::TILES * threads) return false;
        int64_t chunks = 0;
        for (int s = 0; s < in_.seqs; ++s) {
            if (in_.query_start[s + 1] - in_.query_start[s] != 1) return false;
            chunks += chunks_of(s).end * Config::KV_HEADS;
        }
        if (!scratch.holds(pairs, chunks * PART_FLOATS)) return false;
        const Range mine = share(chunks, thread, threads);
        int first = 0, pair = 0;  // the chunk that a pair begins with
        for (int s = 0; s < in_.seqs; ++s) {
            const int count = chunks_of(s).end;
            for (int head = 0; head < Config::KV_HEADS; ++head, ++pair, first += count) {
                const Range own = {std::max(mine.begin - first, 0), std::min(mine.end - first, count)};
                if (own.begin >= own.end) continue;
                State* parts = reinterpret_cast<State*>(scratch.floats() + first * PART_FLOATS);
                run_parts(s, head, own, parts);
                if (scratch.finished(pair, own.end - own.begin, count)) join_parts(s, head, count, parts);
            }
        }
        return true;
    }

    // Of a sequence's one token: the position that the first chunk which it sees begins at, and how many it sees.
    Range chunks_of(int seq) const {
        const Range sees = detail::seen_by<Config>(in_.positions[in_.query_start[seq]]);
        const int base = sees.begin / detail::CHUNK * detail::CHUNK;
        return {base, (sees.end - base + detail::CHUNK - 1) / detail::CHUNK};
    }

    // Stack and code of their own, as those of run_packed.
    __attribute__((noinline)) void run_parts(int seq, int head, Range chunks, State* parts) const {
        alignas(64) float queries[GROUP][PAIRED ? Ops::QUERY_WIDTH : 1];
        State states[GROUP];
        Row rows[GROUP];
        const int token = in_.query_start[seq];
        for (int i = 0; i < GROUP; ++i) rows[i] = make_row(token, head * GROUP + i, queries[i], states[i]);
        const Source from = {in_.page_table + int64_t(seq) * in_.table_stride, head, nullptr};
        const int base = chunks_of(seq).begin;
        for (int chunk = chunks.begin; chunk < chunks.end; ++chunk) {
            for (int at = 0; at < GROUP;) {
                const auto keep = [to = parts + chunk * GROUP + at](const Row*, const auto& c, int used) {
                    for (int m = 0; m < used; ++m) {
                        to[m].peak = c.peak[m];
                        to[m].sum = c.sum[m];
                        std::memcpy(to[m].values, c.values[m], sizeof to[m].values);
                    }
                };
                at += run_chunk<FEW, false>(rows + at, GROUP - at, base + chunk * detail::CHUNK, from, keep);
            }
        }
    }

    __attribute__((noinline)) void join_parts(int seq, int head, int chunks, const State* parts) const {
        State states[GROUP];
        Row rows[GROUP] = {};
        for (int i = 0; i < GROUP; ++i) {
            clear(states[i]);
            rows[i].state = &states[i];
        }
        Chunk<1> c;
        c.begin[0] = 0, c.end[0] = 1;  // it has seen something
        for (int part = 0; part < chunks * GROUP; ++part) {
            c.peak[0] = parts[part].peak, c.sum[0] = parts[part].sum;
            std::memcpy(c.values[0], parts[part].values, sizeof parts[part].values);
            join(rows + part % GROUP, c, 1);
        }
        for (int i = 0; i < GROUP; ++i) finish(in_.query_start[seq], head * GROUP + i, states[i]);
    }

    void run_tile(int seq, Range tokens, int head) const {
        constexpr int ROWS = TILE_TOKENS * GROUP;
        alignas(64) float queries[ROWS][PAIRED ? Ops::QUERY_WIDTH : 1];
        State states[ROWS];
        Row rows[ROWS];
        const int count = (tokens.end - tokens.begin) * GROUP;
        const auto token = [&](int i) { return tokens.begin + i / GROUP; };
        const auto query_head = [&](int i) { return head * GROUP + i % GROUP; };
        for (int i = 0; i < count; ++i) rows[i] = make_row(token(i), query_head(i), queries[i], states[i]);
        Source from = {in_.page_table + int64_t(seq) * in_.table_stride, head, nullptr};
        if (PAIRED && count > std::max(MAX_TILE_ROWS, GROUP)) {
            run_packed(rows, count, from);
        } else {
            run_chunks<false>(rows, count, from);
        }
        for (int i = 0; i < count; ++i) finish(token(i), query_head(i), states[i]);
    }

    Row make_row(int token, int head, float* rounded, State& state) const {
        const Range sees = detail::seen_by<Config>(in_.positions[token]);
        const float* q = in_.q + int64_t(token) * Config::Q_ROW + int64_t(head) * Config::Q_HEAD;
        if constexpr (PAIRED) {
            Ops::round_query(q, rounded);
            q = rounded;
        }
        clear(state);
        return {q, &state, sees.begin, sees.end, Config::ALIBI ? in_.slopes[head] : 0.0f};
    }

    static void clear(State& state) {
        state.peak = detail::NEVER;
        state.sum = 0.0f;
        std::memset(state.values, 0, sizeof state.values);
    }

    // Apart from run_tile, whose stack stays small for decode.
    __attribute__((noinline)) void run_packed(const Row* rows, int count, Source from) const {
        Packed packed;
        from.packed = &packed;
        run_chunks<PAIRED>(rows, count, from);
    }

    template <bool PACKED>
    void run_chunks(const Row* rows, int count, const Source& from) const {
        const Range all = seen(rows, count, 0, std::numeric_limits<int>::max());
        const auto keep = [](const Row* rows, const auto& c, int used) { join(rows, c, used); };
        for (int base = all.begin / detail::CHUNK * detail::CHUNK; base < all.end; base += detail::CHUNK) {
            if constexpr (PACKED) pack(from, base, seen(rows, count, base, detail::CHUNK));
            for (int at = 0; at < count;) {
                if (count - at > FEW) {
                    at += run_chunk<MAX_TILE_ROWS, PACKED>(rows + at, count - at, base, from, keep);
                } else {
                    at += run_chunk<FEW, PACKED>(rows + at, count - at, base, from, keep);
                }
            }
        }
    }

    // The `length` positions from `base` on, less those before and after what any of the rows sees.
    static Range seen(const Row* rows, int count, int base, int length) {
        Range all = {length, 0};
        for (int i = 0; i < count; ++i) {
            const Range own = {std::max(rows[i].begin - base, 0), std::min(rows[i].end - base, length)};
            if (own.begin >= own.end) continue;
            all = {std::min(all.begin, own.begin), std::max(all.end, own.end)};
        }
        return all;
    }

    // Makes operands of a part of the chunk from position `base` on.
    void pack(const Source& from, int base, Range part) const {
        for (int j = part.begin / LANES * LANES; j < part.end; j += LANES) {
            const Element* key = key_at(from, base + j);
            for (int i = 0; i < Ops::KEY_STEPS; ++i) store(from.packed->keys[j / LANES][i], Ops::key(key, i));
            const Element* value = value_at(from, base + j);
            for (int i = 0; i < LANES / STEP; ++i) {
                float* to = from.packed->values[j / STEP + i];
                PLANC_UNROLL for (int v = 0; v < VALUE_VECS; ++v) store(to + v * LANES, Ops::value(value + i * STEP * V_DIM, v));
            }
        }
    }

    PLANC_INLINE const Element* key_at(const Source& from, int position) const {
        return Cache<Config>::key(in_.cache.keys, from.pages[position / BLOCK_SIZE], from.head, position % BLOCK_SIZE);
    }
    PLANC_INLINE const Element* value_at(const Source& from, int position) const {
        return Cache<Config>::value(in_.cache.values, from.pages[position / BLOCK_SIZE], from.head, position % BLOCK_SIZE);
    }

    // Runs up to MR of `count` rows over one chunk and returns how many; the last row fills up for missing ones. What the
    // chunk gives is for keep(rows, chunk, rows of it).
    template <int MR, bool PACKED, class Keep>
    int run_chunk(const Row* given, int count, int base, const Source& from, Keep keep) const {
        const int used = std::min(count, MR);
        Row rows[MR];
        Chunk<MR> c;
        c.base = base;
        int first = detail::CHUNK, last = 0;
        for (int m = 0; m < MR; ++m) {
            rows[m] = given[std::min(m, used - 1)];
            c.begin[m] = std::max(rows[m].begin - base, 0);
            c.end[m] = std::min(rows[m].end - base, detail::CHUNK);
            if (c.begin[m] >= c.end[m]) continue;
            first = std::min(first, c.begin[m] / LANES * LANES);
            last = std::max(last, c.end[m]);
        }
        if (first >= last) return used;
        score<MR, PACKED>(c, rows, from, first, last);
        exponentiate(c, from, first, last);
        weigh_all<MR, PACKED>(c, from);
        keep(rows, c, used);
        return used;
    }

    // Masked scores of positions first..last and each row's peak.
    template <int MR, bool PACKED>
    void score(Chunk<MR>& c, const Row* rows, const Source& from, int first, int last) const {
        constexpr int NB = tile_vecs(MR);
        Vec peak[MR];
        for (int m = 0; m < MR; ++m) peak[m] = splat(detail::NEVER);
        int j = first;
        for (; j + NB * LANES <= last; j += NB * LANES) score_blocks<MR, NB, PACKED>(c, rows, from, j, {first, last}, peak);
        for (; j < last; j += LANES) score_blocks<MR, 1, PACKED>(c, rows, from, j, {first, last}, peak);
        for (int m = 0; m < MR; ++m) c.peak[m] = max(peak[m]);
    }

    // Where 16 keys from position j of the chunk on begin; beyond its part, as many of the part's values from its first on.
    PLANC_INLINE const char* key_or_value(const Source& from, int base, int j, Range part) const {
        if (j < part.end) return reinterpret_cast<const char*>(key_at(from, base + j));
        return reinterpret_cast<const char*>(value_at(from, base + std::min(part.begin + j - part.end, part.end - 1)));
    }

    template <int MR, int NB, bool PACKED>
    PLANC_INLINE void score_blocks(Chunk<MR>& c, const Row* rows, const Source& from, int j, Range part, Vec (&peak)[MR]) const {
        const Element* key[NB];
        const float* q[MR];
        Vec acc[MR][NB] = {}, scale[NB];
        for (int b = 0; b < NB; ++b) {
            const int position = c.base + j + b * LANES;
            if constexpr (!PACKED) key[b] = key_at(from, position);
            scale[b] = scales(in_.cache.key_scales, position, from, Config::SOFTCAP == 0.0f ? Config::SCALE * LOG2_E : Config::SCALE);
        }
        for (int m = 0; m < MR; ++m) q[m] = rows[m].q;
        [[maybe_unused]] const char* ahead[NB];
        if constexpr (STREAMS<MR, PACKED>) {
            for (int b = 0; b < NB; ++b) ahead[b] = key_or_value(from, c.base, j + b * LANES + detail::AHEAD, part);
        }
        for (int i = 0; i < Ops::KEY_STEPS; ++i) {
            if constexpr (STREAMS<MR, PACKED>) {
                constexpr int BYTES = STEP * BLOCK_SIZE * int(sizeof(Element));  // from a step to the next
                PLANC_UNROLL for (int b = 0; b < NB; ++b) {
                    if (i * BYTES % detail::LINE == 0) prefetch_l2(ahead[b] + i * BYTES);
                }
            }
            Vec k[NB];
            PLANC_UNROLL for (int b = 0; b < NB; ++b) {
                if constexpr (PACKED) {
                    k[b] = load(from.packed->keys[j / LANES + b][i]);
                } else {
                    k[b] = Ops::key(key[b], i);
                }
            }
            PLANC_UNROLL for (int m = 0; m < MR; ++m) {
                const Vec qi = broadcast(q[m] + i);
                PLANC_UNROLL for (int b = 0; b < NB; ++b) acc[m][b] = Ops::multiply_add(qi, k[b], acc[m][b]);
            }
        }
        bool all_seen = true;
        PLANC_UNROLL for (int m = 0; m < MR; ++m) all_seen &= c.begin[m] <= j && c.end[m] >= j + NB * LANES;
        PLANC_UNROLL for (int m = 0; m < MR; ++m) {
            PLANC_UNROLL for (int b = 0; b < NB; ++b) {
                const int at = j + b * LANES;
                Vec s = biased(adjusted(acc[m][b], scale[b]), rows[m], c.base + at);
                if (!all_seen) s = masked(s, c.begin[m] - at, c.end[m] - at);
                store(c.p[m] + at, s);
                peak[m] = max(peak[m], s);
            }
        }
    }

    // `factor` times the scales of 16 positions from `position` on, for codes as they are widened.
    static PLANC_INLINE Vec scales(void* part, int position, const Source& from, float factor) {
        if constexpr (!SCALED) {
            return splat(factor);
        } else {
            const float* at = Cache<Config>::scale(part, from.pages[position / BLOCK_SIZE], from.head, position % BLOCK_SIZE);
            return load(at) * splat(factor / Codes<Element>::UNIT);
        }
    }

    static PLANC_INLINE Vec adjusted(Vec dot, Vec scale) {
        const Vec s = dot * scale;
        if constexpr (Config::SOFTCAP == 0.0f) return s;
        return splat(Config::SOFTCAP * LOG2_E) * tanh(s / splat(Config::SOFTCAP));
    }

    // Scores of the keys from `position` on, with the bias of their distance to the row's query.
    static PLANC_INLINE Vec biased(Vec s, const Row& row, int position) {
        if constexpr (!Config::ALIBI) return s;
        return fma(splat(row.slope * LOG2_E), to_float(iota() + splat_int(position - (row.end - 1))), s);
    }

    // Lanes begin..end of a score, -infinity elsewhere.
    static PLANC_INLINE Vec masked(Vec s, int begin, int end) {
        if (begin <= 0 && end >= LANES) return s;
        const Vec never = splat(detail::NEVER);
        const VecI lane = iota();
        return select(less(lane, splat_int(begin)), never, select(less(lane, splat_int(end)), s, never));
    }

    // Scores become exp(score - peak), times the scale of the value that they weigh; the sum is without it.
    template <int MR>
    void exponentiate(Chunk<MR>& c, const Source& from, int first, int last) const {
        for (int m = 0; m < MR; ++m) {
            if (c.begin[m] >= c.end[m]) continue;
            const Vec peak = splat(c.peak[m]);
            Vec total = zero();
            const auto weight = [&](int j) PLANC_INLINED {
                const Vec e = Ops::power_below_one(load(c.p[m] + j) - peak);
                total = total + e;
                return SCALED ? e * scales(in_.cache.value_scales, c.base + j, from, 1.0f) : e;
            };
            if constexpr (PAIRED) {  // pairs of two vectors are one, and take the place of scores that were read
                for (int j = first / (2 * LANES) * 2 * LANES; j < last; j += 2 * LANES) {
                    const Vec low = j < first ? zero() : weight(j), high = j + LANES < last ? weight(j + LANES) : zero();
                    store(c.p[m] + j / 2, Ops::round_pairs(low, high));
                }
            } else {
                for (int j = first; j < last; j += LANES) store(c.p[m] + j, weight(j));
            }
            c.sum[m] = sum(total);
        }
    }

    // values[m] = sum of p[m][j] V[j], j ascending over what row m sees. Steps whose positions all rows see run together;
    // the other positions may hold anything, so that not even a zero weight may touch them.
    template <int MR, bool PACKED>
    void weigh_all(Chunk<MR>& c, const Source& from) const {
        std::memset(c.values, 0, sizeof c.values);
        const int begin = (*std::max_element(c.begin, c.begin + MR) + STEP - 1) / STEP * STEP;
        const int end = *std::min_element(c.end, c.end + MR) / STEP * STEP;
        if (begin >= end) {
            for (int m = 0; m < MR; ++m) weigh<1, PACKED, true>(c.p + m, c.values + m, {c.begin[m], c.end[m]}, c.base, from);
            return;
        }
        for (int m = 0; m < MR; ++m) weigh<1, PACKED, true>(c.p + m, c.values + m, {c.begin[m], begin}, c.base, from);
        weigh<MR, PACKED, false>(c.p, c.values, {begin, end}, c.base, from);
        for (int m = 0; m < MR; ++m) weigh<1, PACKED, true>(c.p + m, c.values + m, {end, c.end[m]}, c.base, from);
    }

    // EDGES: a step may have positions outside of the part.
    template <int MR, bool PACKED, bool EDGES>
    void weigh(const float (*p)[detail::CHUNK], float (*values)[WIDTH], Range part, int base, const Source& from) const {
        if (part.begin >= part.end) return;
        constexpr int NV = tile_vecs(MR), TILED = VALUE_VECS / NV * NV;
        for (int v = 0; v < TILED; v += NV) weigh_vecs<MR, NV, PACKED, EDGES>(p, values, v, part, base, from);
        for (int v = TILED; v < VALUE_VECS; ++v) weigh_vecs<MR, 1, PACKED, EDGES>(p, values, v, part, base, from);
    }

    template <int MR, int NV, bool PACKED, bool EDGES>
    PLANC_INLINE void weigh_vecs(const float (*p)[detail::CHUNK], float (*values)[WIDTH], int first, Range part, int base,
                                 const Source& from) const {
        Vec acc[MR][NV] = {};
        PLANC_UNROLL for (int m = 0; m < MR; ++m) {
            PLANC_UNROLL for (int v = 0; v < NV; ++v) acc[m][v] = load(values[m] + (first + v) * LANES);
        }
        for (int j = part.begin / STEP * STEP; j < part.end;) {
            const int stop = std::min(part.end, PACKED ? detail::CHUNK : j + BLOCK_SIZE - (base + j) % BLOCK_SIZE);
            [[maybe_unused]] const Element *row = nullptr, *ahead = nullptr;
            if constexpr (!PACKED) row = value_at(from, base + j);
            if constexpr (STREAMS<MR, PACKED>) ahead = value_at(from, base + std::min(j + detail::AHEAD, part.end - 1));
            for (; j < stop; j += STEP) {
                if constexpr (STREAMS<MR, PACKED>) {
                    PLANC_UNROLL for (int s = 0; s < STEP; ++s, ahead += V_DIM) {
                        const char* line = reinterpret_cast<const char*>(ahead + first * LANES);
                        constexpr int BYTES = NV * LANES * int(sizeof(Element));
                        PLANC_UNROLL for (int at = 0; at < BYTES; at += detail::LINE) prefetch_l2(line + at);
                    }
                }
                Vec x[NV];
                PLANC_UNROLL for (int v = 0; v < NV; ++v) {
                    if constexpr (PACKED) {
                        x[v] = load(from.packed->values[j / STEP] + (first + v) * LANES);
                    } else {
                        x[v] = Ops::value(row, first + v);
                    }
                    if constexpr (EDGES) x[v] = Ops::only(x[v], j, part);
                }
                PLANC_UNROLL for (int m = 0; m < MR; ++m) {
                    Vec weight = broadcast(p[m] + j / STEP);
                    if constexpr (EDGES) weight = Ops::only(weight, j, part);
                    PLANC_UNROLL for (int v = 0; v < NV; ++v) acc[m][v] = Ops::multiply_add(weight, x[v], acc[m][v]);
                }
                if constexpr (!PACKED) row += STEP * V_DIM;
            }
        }
        PLANC_UNROLL for (int m = 0; m < MR; ++m) {
            PLANC_UNROLL for (int v = 0; v < NV; ++v) store(values[m] + (first + v) * LANES, acc[m][v]);
        }
    }

    // Adds a chunk to its rows' states, both rescaled to the larger peak.
    template <int MR>
    static void join(const Row* rows, const Chunk<MR>& c, int used) {
        alignas(64) float peak[LANES] = {}, old[LANES] = {}, now[LANES] = {}, sums[LANES] = {};
        for (int m = 0; m < MR; ++m) {
            const State& state = *rows[m].state;
            peak[m] = std::max(state.peak, c.peak[m]);
            old[m] = state.peak - peak[m];
            now[m] = c.peak[m] - peak[m];
            sums[m] = state.sum;
        }
        store(old, power_of_two_below_one(load(old)));
        store(now, power_of_two_below_one(load(now)));
        store(sums, fma(load(sums), load(old), load(c.sum) * load(now)));
        for (int m = 0; m < used; ++m) {
            if (c.begin[m] >= c.end[m]) continue;
            State& state = *rows[m].state;
            state.peak = peak[m];
            state.sum = sums[m];
            for (int v = 0; v < WIDTH; v += LANES) {
                const Vec more = load(c.values[m] + v) * broadcast(now + m);
                store(state.values + v, fma(load(state.values + v), broadcast(old + m), more));
            }
        }
    }

    void finish(int token, int head, State& state) const {
        Vec total = splat(state.sum), factor = splat(1.0f);
        if constexpr (Config::SINKS) {
            const float sink = in_.sinks[head] * LOG2_E, top = std::max(state.peak, sink);
            factor = power_of_two_below_one(splat(state.peak - top));
            total = fma(total, factor, power_of_two_below_one(splat(sink - top)));
        }
        float* y = y_ + (int64_t(token) * Config::HEADS + head) * V_DIM;
        for_each_vec(V_DIM, [&](int i, int n) PLANC_INLINED {
            const Vec x = load(state.values + i);
            store_lanes(y + i, (Config::SINKS ? x * factor : x) / total, n);
        });
    }

    // Whether keys and values come from memory: only there are they asked for ahead.
    template <int MR, bool PACKED>
    static constexpr bool STREAMS = !PACKED && MR <= FEW;

    const AttentionInputs& in_;
    float* const y_;
};

}  // namespace planc
