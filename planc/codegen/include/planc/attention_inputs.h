// What attention reads, and what it holds of rows and chunks while it runs.
#pragma once
#include <algorithm>
#include <limits>

#include "planc/attention_operands.h"

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

constexpr int CHUNK = 256;     // positions that are summed on their own
constexpr int AHEAD = 64;      // positions that are asked of memory before their turn: pages lie far apart
constexpr int LINE = 64;       // bytes that come together
constexpr int TILE_ROWS = 192;  // (token, head) rows, at most, that walk a chunk of K and V while it is in the cache
constexpr int TILES = 4;       // of each thread, if there are rows enough: with fewer, more threads wait for the last
                               // one, so that chunks of decode are shared out instead
constexpr float NEVER = -std::numeric_limits<float>::infinity();

// The positions that a token at one of them sees. Config: MASK, WINDOW.
template <class Config>
PLANC_INLINE Range seen_by(int position) {
    int begin = 0;
    if constexpr (Config::MASK == MaskKind::SLIDING) begin = std::max(0, position - Config::WINDOW + 1);
    if constexpr (Config::MASK == MaskKind::CHUNKED) begin = position / Config::WINDOW * Config::WINDOW;
    return {begin, position + 1};
}

// The state of one row's softmax over the chunks so far, or what one chunk gives to it.
template <int WIDTH>
struct RowState {
    float peak, sum;
    alignas(64) float values[WIDTH];
};

// One row of a tile: its query, its softmax state, and the half-open range of positions that it sees.
template <int WIDTH>
struct TileRow {
    const float* q;
    RowState<WIDTH>* state;
    int begin, end;
    float slope;
};

// A chunk of K and V as operands, made once for all rows of a tile.
template <class Ops>
struct PackedChunk {
    alignas(64) float keys[CHUNK / LANES][Ops::KEY_STEPS][LANES];
    alignas(64) float values[CHUNK / Ops::STEP][Ops::VALUE_VECS * LANES];
};

// A chunk's scores, then probabilities, of MR rows, and the part of the chunk that each row sees.
template <int MR, int WIDTH>
struct ChunkOfRows {
    int base;
    int begin[MR], end[MR];
    alignas(64) float peak[LANES], sum[LANES];
    alignas(64) float p[MR][CHUNK];
    alignas(64) float values[MR][WIDTH];
};

}  // namespace detail

}  // namespace planc
