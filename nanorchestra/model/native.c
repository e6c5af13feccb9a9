// A Qwen3 decoder on a CPU: products with packed matrices, and the forward pass over KV pages.
//
// native.py compiles this file for the machine it runs on, with -DBF16 for models in bfloat16.
// Matrices, KV and what a product reads are of the model's type; everything else is float32.
// No sum depends on how many rows a step has, or on how threads share them: a row gets the same
// bits in every batch, whether it is decoded or prefilled.

#include <stdlib.h>
#include "native.h"

enum { CHUNK = 256, KEYS = 64, MAX_DIM = 256 };
enum { SMALL = 1 << 22 };  // multiplications: with fewer, threads wait longer than they compute

int panel_columns(void) { return PANEL; }
int chunk_rows(void) { return CHUNK; }

void linear(const element *x, long rows, long k, const element *w, long n, float *out,
            int threads) {
    phase only = {0};
    if (rows * k * n < SMALL) threads = 1;
#pragma omp parallel num_threads(threads)
    {
        phase *now = &only;
        product(&now, x, rows, k, w, n, out, 0);
    }
}

typedef struct {
    const element *input_norm, *q_norm, *k_norm, *post_norm;
    const element *qkv, *o, *gate_up, *down;
} layer;

typedef struct {
    const layer *layers;
    const element *embeddings, *norm, *output;
    const float *frequencies;    // rotary angles per position [dim / 2]
    element *k_cache, *v_cache;  // [layers, pages, kv_heads, page_size * dim]
    float *scratch;              // CHUNK rows of all that a layer computes
    int64_t depth, hidden, inner, heads, kv_heads, dim, pages, page_size, outputs;
} decoder;

// A step, and a layer's computation of its rows from `start` on.
typedef struct {
    const decoder *m;
    const int64_t *tokens, *positions, *first;  // of each row; first: its place in `tables`
    const int64_t *tables;                      // page numbers
    float *x, *turns;  // [rows, hidden], the residual stream; [rows, dim], cosines, then sines
    float eps;
    phase **now;
    const layer *l;
    long start, rows;
    float *qkv, *gate_up;                                // [rows, outputs]
    element *normed, *mixed, *gated, *k_cache, *v_cache;  // [rows, inputs]; this layer's caches
} chunk;

// Sixteen keys lie together: K as [dim / PAIR, 16, PAIR], V as [16 / PAIR, dim, PAIR].
static inline long sixteen(const chunk *c, long row, long key, long head) {
    const decoder *m = c->m;
    long page = c->tables[c->first[c->start + row] + key / m->page_size];
    return ((page * m->kv_heads + head) * m->page_size + key % m->page_size / 16 * 16) * m->dim;
}

// Looks the tokens up, and the rotation of their positions.
static void begin(const chunk *c, long rows) {
    phase **now = c->now;
    long hidden = c->m->hidden, half = c->m->dim / 2;
    EACH(row, rows) {
        const element *embedding = c->m->embeddings + c->tokens[row] * hidden;
        for (long i = 0; i < hidden; i++) c->x[row * hidden + i] = get(embedding[i]);
        for (long i = 0; i < half; i++) {
            float angle = c->positions[row] * c->m->frequencies[i];
            c->turns[row * 2 * half + i] = cosf(angle);
            c->turns[row * 2 * half + half + i] = sinf(angle);
        }
    }
}

// out [rows, hidden] = the norm of x, or of those rows of x that `places` names.
static void normalise(const chunk *c, const float *x, const int64_t *places, long rows,
                      const element *weight) {
    phase **now = c->now;
    long n = c->m->hidden;
    EACH(row, rows) {
        const float *from = x + (places ? places[row] : row) * n;
        float scale = inverse_rms(from, n, c->eps);
        for (long i = 0; i < n; i++) c->normed[row * n + i] = put(from[i] * scale * get(weight[i]));
    }
}

// Normalises and rotates q and k of qkv [rows, heads + 2 kv_heads, dim]; stores k and v.
static void rotate(const chunk *c) {
    phase **now = c->now;
    long heads = c->m->heads, kv_heads = c->m->kv_heads, all = heads + 2 * kv_heads;
    long dim = c->m->dim, half = dim / 2;
    EACH(row, c->rows) {
        const float *cos = c->turns + (c->start + row) * dim, *sin = cos + half;
        long key = c->positions[c->start + row], at = key % 16;
        for (long head = 0; head < all; head++) {
            float *x = c->qkv + (row * all + head) * dim;
            const element *weight = head < heads ? c->l->q_norm : c->l->k_norm;
            float scale = inverse_rms(x, dim, c->eps) * (head < heads ? 1 / sqrtf(dim) : 1);
            for (long i = 0; head < heads + kv_heads && i < half; i++) {
                float a = x[i] * scale * get(weight[i]);
                float b = x[i + half] * scale * get(weight[i + half]);
                x[i] = a * cos[i] - b * sin[i];
                x[i + half] = b * cos[i] + a * sin[i];
            }
            if (head < heads) continue;
            long base = sixteen(c, row, key, (head - heads) % kv_heads);
            for (long i = 0; i < dim; i++)
                if (head < heads + kv_heads)
                    c->k_cache[base + (i / PAIR * 16 + at) * PAIR + i % PAIR] = put(x[i]);
                else
                    c->v_cache[base + (at / PAIR * dim + i) * PAIR + at % PAIR] = put(x[i]);
        }
    }
}

// Returns the end of the rows from `row` on that read the same sixteen keys; *at is where these
// lie, -1 if they come after the rows' last.
static inline long same_keys(const chunk *c, long row, long end, long key, long head, long *at) {
    for (long next = row;; next++) {
        int seen = next < end && key <= c->positions[c->start + next];
        long here = seen ? sixteen(c, next, key, head) : -1;
        if (next == row) *at = here;
        if (next == end || here != *at) return next;
    }
}

// Adds a block of KEYS keys to a row's softmax. Returns what the sums so far are multiplied by.
static float soften(const float *scores, long valid, float *top, floats *total, element *weights) {
    ints index;
    for (int j = 0; j < LANES; j++) index[j] = j;
    floats score[KEYS / LANES], best = (floats){0} + *top, hidden = (floats){0} - 1e30f;
    for (int i = 0; i < KEYS / LANES; i++) {
        ints seen = index < (int)(valid - i * LANES), here = ((ints *)scores)[i];
        score[i] = (floats)((here & seen) | ((ints)hidden & ~seen));
        best = largest(best, score[i]);
    }
    float most = *top;
    for (int i = 0; i < LANES; i++) most = best[i] > most ? best[i] : most;
    float scale = exponential((floats){0} + (*top - most))[0];
    *top = most, *total *= scale;
    for (int i = 0; i < KEYS / LANES; i++) {
        floats weight = exponential(score[i] - most);
        *total += weight;
        for (int j = 0; j < LANES; j++) weights[i * LANES + j] = put(weight[j]);
    }
    return scale;
}

// Attention of the rows to `end` and of `heads` query heads, which share a kv head.
static void attend_tile(const chunk *c, long start, long end, long head, long heads) {
    const int64_t *positions = c->positions + c->start;
    long dim = c->m->dim, fold = c->m->heads / c->m->kv_heads, kv = head / fold;
    long all = c->m->heads + 2 * c->m->kv_heads, count = (end - start) * heads, longest = 0;
    element query[TILE * MAX_DIM], weights[TILE * KEYS];
    float sum[TILE * MAX_DIM] = {0}, scores[TILE * KEYS], top[TILE];
    floats total[TILE] = {0};
    for (long i = 0; i < count; i++) {
        long row = start + i / heads;
        const float *q = c->qkv + (row * all + head + i % heads) * dim;
        for (long j = 0; j < dim; j++) query[i * dim + j] = put(q[j]);
        top[i] = -1e30f;
        longest = positions[row] >= longest ? positions[row] + 1 : longest;
    }
    // Of each block of keys first the scores, then the softmax and the weighted sum of the values.
    for (long pass = 0; pass / 2 * KEYS < longest; pass++) {
        long key = pass / 2 * KEYS, stop = least(KEYS, longest - key), at = -1, next;
        for (long i = 0; pass % 2 && i < count; i++) {
            long valid = positions[start + i / heads] + 1 - key;
            float scale = soften(scores + i * KEYS, valid, top + i, total + i, weights + i * KEYS);
            for (long j = 0; scale != 1 && j < dim; j++) sum[i * dim + j] *= scale;
        }
        for (long k = 0; k < stop; k += 16)
            for (long row = start; row < end; row = next) {
                next = same_keys(c, row, end, key + k, kv, &at);
                long i = (row - start) * heads, rows = (next - row) * heads, later = key + KEYS + k;
                // Pages lie anywhere in memory. What no other row has brought nearer is asked for
                // early: the values before the softmax, the next block's keys after it.
                if (at >= 0 && next == row + 1 && pass % 2 == 0)
                    prefetch(c->v_cache + at, 16 * dim);
                else if (next == row + 1 && later <= positions[row])
                    prefetch(c->k_cache + sixteen(c, row, later, kv), 16 * dim);
                if (at >= 0 && pass % 2 == 0)
                    narrow_tile(rows, query + i * dim, dim, c->k_cache + at, 16 * PAIR,
                                scores + i * KEYS + k, KEYS, dim / PAIR, 0);
                for (long j = 0; at >= 0 && pass % 2 && j < dim; j += 16)
                    narrow_tile(rows, weights + i * KEYS + k, KEYS, c->v_cache + at + j * PAIR,
                                dim * PAIR, sum + i * dim + j, dim, 16 / PAIR, 1);
            }
    }
    for (long i = 0; i < count; i++) {
        element *out = c->mixed + ((start + i / heads) * c->m->heads + head + i % heads) * dim;
        float whole = 0;
        for (int j = 0; j < LANES; j++) whole += total[i][j];
        for (long j = 0; j < dim; j++) out[j] = put(sum[i * dim + j] / whole);
    }
}

static void attend(const chunk *c) {
    long fold = c->m->heads / c->m->kv_heads, heads = least(fold, TILE);
    while (fold % heads) heads--;
    phase **now = c->now;
    long each = TILE / heads, tiles = (c->rows + each - 1) / each;
    EACH(item, c->m->heads / heads * tiles) {
        long tile = tiles - 1 - item % tiles;  // the longest first
        attend_tile(c, tile * each, least(c->rows, (tile + 1) * each), item / tiles * heads, heads);
    }
}

// gate_up [rows, 2 * inner], gate first -> silu(gate) * up.
static void swiglu(const chunk *c) {
    phase **now = c->now;
    long inner = c->m->inner;
    EACH(row, c->rows)
        for (long i = 0; i < inner; i += LANES) {
            const float *gate = c->gate_up + row * 2 * inner + i;
            floats x = *(floats *)gate, y = *(floats *)(gate + inner);
            floats product = x * y / (1 + exponential((floats){0} - largest(x, (floats){0} - 88)));
            for (int j = 0; j < LANES; j++) c->gated[row * inner + i + j] = put(product[j]);
        }
}

static void compute(chunk c) {
    const decoder *m = c.m;
    long hidden = m->hidden, inner = m->inner, wide = m->heads * m->dim;
    long all = wide + 2 * m->kv_heads * m->dim;
    float *x = c.x + c.start * hidden;
    normalise(&c, x, NULL, c.rows, c.l->input_norm);
    product(c.now, c.normed, c.rows, hidden, c.l->qkv, all, c.qkv, 0);
    rotate(&c);
    attend(&c);
    product(c.now, c.mixed, c.rows, wide, c.l->o, hidden, x, 1);
    normalise(&c, x, NULL, c.rows, c.l->post_norm);
    product(c.now, c.normed, c.rows, hidden, c.l->gate_up, 2 * inner, c.gate_up, 0);
    swiglu(&c);
    product(c.now, c.gated, c.rows, inner, c.l->down, hidden, x, 1);
}
enum { LAYER_PHASES = 9 };  // of compute

// logits [wanted, outputs] of some of the rows. numbers: tokens, positions, first [rows], the
// wanted rows, tables. memory: x and turns. Rows go through a layer CHUNK at a time, so that what
// they leave stays in the cache. A row sees no key of a later row.
void forward(const decoder *m, const int64_t *numbers, long rows, long wanted, float eps,
             float *memory, float *logits, int threads) {
    long size = m->pages * m->kv_heads * m->page_size * m->dim, wide = m->heads * m->dim;
    long all = wide + 2 * m->kv_heads * m->dim, chunks = (rows + CHUNK - 1) / CHUNK;
    const int64_t *places = numbers + 3 * rows;
    float *gate_up = m->scratch + CHUNK * all;
    element *normed = (element *)(gate_up + CHUNK * 2 * m->inner);
    element *mixed = normed + CHUNK * m->hidden;
    long count = 1 + chunks * m->depth * LAYER_PHASES + 2 * (wanted / CHUNK + 1);
    phase *phases = calloc(count, sizeof(phase));
    if (rows * m->depth * m->hidden * (all + wide + 3 * m->inner) < SMALL) threads = 1;
#pragma omp parallel num_threads(threads)
    {
        phase *now = phases;
        chunk c = {.m = m, .now = &now, .eps = eps, .tokens = numbers, .positions = numbers + rows,
                   .first = numbers + 2 * rows, .tables = places + wanted, .x = memory,
                   .turns = memory + rows * m->hidden, .qkv = m->scratch, .gate_up = gate_up,
                   .normed = normed, .mixed = mixed, .gated = mixed + CHUNK * wide};
        begin(&c, rows);
        for (long i = 0; i < m->depth; i++)
            for (c.start = 0; c.start < rows; c.start += CHUNK) {
                c.l = m->layers + i, c.rows = least(CHUNK, rows - c.start);
                c.k_cache = m->k_cache + i * size, c.v_cache = m->v_cache + i * size;
                compute(c);
            }
        for (long i = 0; i < wanted; i += CHUNK) {
            long some = least(CHUNK, wanted - i);
            normalise(&c, c.x, places + i, some, m->norm);
            product(&now, normed, some, m->hidden, m->output, m->outputs,
                    logits + i * m->outputs, 0);
        }
    }
    free(phases);
}
