// The calls between a plan's runtime, its step and its kernels: plain C types only.
#pragma once
#include <cstdint>

extern "C" {

// One step: `num_tokens` packed tokens of `num_seqs` sequences; `logit_rows` names the rows whose logits are wanted.
typedef struct {
    int32_t num_tokens, num_seqs, num_rows, table_stride;
    const int32_t *ids, *positions, *slots, *page_table, *query_start, *logit_rows;
} planc_batch;

// What chooses a step's tokens: a record for each of its rows (plans/sampling.py), which gives a token and the bits of the
// best logit in `chosen` [rows, 2] unless it leaves the row to the host. `logits` [rows, vocab] are those of the step;
// `history` has the token of each slot of the cache.
typedef struct {
    int32_t vocab, block_size;
    const int32_t* records;
    int32_t *history, *chosen;
    float* logits;
} planc_choice;

// Sizes of a step that kernels read: T, S, R and the pages a row of the page table has. `scratch` is `scratch_bytes` of
// memory, at a multiple of 64, that the threads of a kernel share as scratch.h says; null where there is none.
typedef struct {
    int32_t tokens, seqs, rows, table_stride;
    void* scratch;
    int64_t scratch_bytes;
} planc_sizes;

// A kernel runs its share `thread` of `threads`. `buffers` holds a node's inputs, then its outputs; `rows` is the length
// of their token axis.
typedef void (*planc_kernel)(void* const* buffers, const planc_sizes* sizes, int32_t rows, int32_t thread, int32_t threads);

// Chooses the tokens of a share `thread` of `threads` of a step's rows.
typedef void (*planc_chooser)(const planc_batch* batch, const planc_choice* choice, int32_t thread, int32_t threads);
}

#define PLANC_KERNEL(name) \
    extern "C" void name(void* const* buffers, const planc_sizes* sizes, int32_t rows, int32_t thread, int32_t threads)

namespace planc {
template <class T>
const T* in(void* const* buffers, int i) {
    return static_cast<const T*>(buffers[i]);
}
template <class T>
T* out(void* const* buffers, int i) {
    return static_cast<T*>(buffers[i]);
}
}  // namespace planc
