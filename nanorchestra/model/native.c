// A Qwen3 decoder on a CPU: products with packed matrices, and the forward pass over KV pages.
//
// native.py compiles this file for the machine it runs on, with -DBF16 for models in bfloat16.
// Matrices, KV and what a product reads are of the model's type; everything else is float32.
// No sum depends on how many rows a step has, or on how threads share them: a row gets the same
// bits in every batch, whether it is decoded or prefilled.

#include <math.h>
#include "native.h"

enum { CHUNK = 256, KEYS = 64, MAX_DIM = 256 };
enum { SMALL = 1 << 22 };  // multiplications: with fewer, threads wait longer than they compute

int panel_columns(void) { return PANEL; }
int chunk_rows(void) { return CHUNK; }

void linear(const element *x, long rows, long k, const element *w, long n, float *out,
            int threads) {
    if (rows * k * n < SMALL) threads = 1;
#pragma omp parallel num_threads(threads)
    product(x, rows, k, w, n, out, 0);
}

static inline float inverse_rms(const float *x, long n, float eps) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (long i = 0; i < n; i++) sum += x[i] * x[i];
    return 1 / sqrtf(sum / n + eps);
}

static inline floats largest(floats a, floats b) {
    ints more = a > b;
    return (floats)(((ints)a & more) | ((ints)b & ~more));
}

// exp(x) for x <= 88; 0 below -87. 2^n e^r, with |r| <= ln(2) / 2 and a polynomial for e^r.
static inline floats exponential(floats x) {
    const float round = 12582912;  // 1.5 * 2^23: adding it leaves n in the low bits
    floats clipped = largest(x, (floats){0} - 87), shifted = clipped * 1.442695041f + round;
    floats n = shifted - round, r = clipped - n * 0.693145752f - n * 1.42860677e-6f;
    floats p = 1.0f / 720 + r * (1.0f / 5040);
    p = 1.0f / 120 + r * p;
    p = 1.0f / 24 + r * p;
    p = 1.0f / 6 + r * p;
    p = 1.0f / 2 + r * p;
    p = 1 + r * (1 + r * p);
    return (floats)(((ints)p + ((ints)shifted << 23)) & (x > -87));
}

typedef struct {
    const element *input_norm, *q_norm, *k_norm, *post_norm;
    const element *qkv, *o, *gate_up, *down;
} layer;

typedef struct {
    const layer *layers;
    const element *norm;
    element *k_cache, *v_cache;  // [layers, pages, kv_heads, page_size * dim]
    float *scratch;              // CHUNK rows of all that a layer computes
    int64_t depth, hidden, inner, heads, kv_heads, dim, pages, page_size;
} decoder;

typedef struct {
    float *x;                        // [rows, hidden]: embeddings, then the residual stream
    const float *cos, *sin;          // [rows, dim / 2]
    const int64_t *lengths, *first;  // of each row: keys it sees, its own last; its place in tables
    const int64_t *tables;           // page numbers
    int64_t rows;
} step;

// A layer's computation of the step's rows from `start` on.
typedef struct {
    const decoder *m;
    const layer *l;
    const step *s;
    long start, rows;
    float eps, *qkv, *gate_up;                           // [rows, outputs]
    element *normed, *mixed, *gated, *k_cache, *v_cache;  // [rows, inputs]; this layer's caches
} chunk;

// Sixteen keys lie together: K as [dim / PAIR, 16, PAIR], V as [16 / PAIR, dim, PAIR].
static inline long sixteen(const chunk *c, long row, long key, long head) {
    const decoder *m = c->m;
    long page = c->s->tables[c->s->first[c->start + row] + key / m->page_size];
    return ((page * m->kv_heads + head) * m->page_size + key % m->page_size / 16 * 16) * m->dim;
}

static void normalise(const float *x, long rows, long n, const element *weight, float eps,
                      element *out) {
#pragma omp for schedule(static)
    for (long row = 0; row < rows; row++) {
        float scale = inverse_rms(x + row * n, n, eps);
        for (long i = 0; i < n; i++)
            out[row * n + i] = put(x[row * n + i] * scale * get(weight[i]));
    }
}

// Normalises and rotates q and k of qkv [rows, heads + 2 kv_heads, dim]; stores k and v.
static void rotate(const chunk *c) {
    long heads = c->m->heads, kv_heads = c->m->kv_heads, all = heads + 2 * kv_heads;
    long dim = c->m->dim, half = dim / 2;
#pragma omp for collapse(2) schedule(static)
    for (long row = 0; row < c->rows; row++)
        for (long head = 0; head < all; head++) {
            float *x = c->qkv + (row * all + head) * dim;
            const float *cos = c->s->cos + (c->start + row) * half;
            const float *sin = c->s->sin + (c->start + row) * half;
            const element *weight = head < heads ? c->l->q_norm : c->l->k_norm;
            float scale = inverse_rms(x, dim, c->eps) * (head < heads ? 1 / sqrtf(dim) : 1);
            for (long i = 0; head < heads + kv_heads && i < half; i++) {
                float a = x[i] * scale * get(weight[i]);
                float b = x[i + half] * scale * get(weight[i + half]);
                x[i] = a * cos[i] - b * sin[i];
                x[i + half] = b * cos[i] + a * sin[i];
            }
            if (head < heads) continue;
            long key = c->s->lengths[c->start + row] - 1, at = key % 16;
            long base = sixteen(c, row, key, (head - heads) % kv_heads);
            for (long i = 0; i < dim; i++)
                if (head < heads + kv_heads)
                    c->k_cache[base + (i / PAIR * 16 + at) * PAIR + i % PAIR] = put(x[i]);
                else
                    c->v_cache[base + (at / PAIR * dim + i) * PAIR + at % PAIR] = put(x[i]);
        }
}

// Returns the end of the rows from `row` on that read the same sixteen keys; *at is where these
// lie, -1 if they come after the rows' last.
static inline long same_keys(const chunk *c, long row, long end, long key, long head, long *at) {
    for (long next = row;; next++) {
        int seen = next < end && key < c->s->lengths[c->start + next];
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
    const int64_t *lengths = c->s->lengths + c->start;
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
        longest = lengths[row] > longest ? lengths[row] : longest;
    }
    // Of each block of keys first the scores, then the softmax and the weighted sum of the values.
    for (long pass = 0; pass / 2 * KEYS < longest; pass++) {
        long key = pass / 2 * KEYS, stop = least(KEYS, longest - key), at = -1, next;
        for (long i = 0; pass % 2 && i < count; i++) {
            long valid = lengths[start + i / heads] - key;
            float scale = soften(scores + i * KEYS, valid, top + i, total + i, weights + i * KEYS);
            for (long j = 0; scale != 1 && j < dim; j++) sum[i * dim + j] *= scale;
        }
        for (long k = 0; k < stop; k += 16)
            for (long row = start; row < end; row = next) {
                next = same_keys(c, row, end, key + k, kv, &at);
                long i = (row - start) * heads, rows = (next - row) * heads;
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
    long each = TILE / heads, tiles = (c->rows + each - 1) / each;
#pragma omp for collapse(2) schedule(dynamic)
    for (long head = 0; head < c->m->heads; head += heads)
        for (long tile = tiles - 1; tile >= 0; tile--)  // the longest first
            attend_tile(c, tile * each, least(c->rows, (tile + 1) * each), head, heads);
}

// gate_up [rows, 2 * inner], gate first -> silu(gate) * up.
static void swiglu(const float *gate_up, long rows, long inner, element *out) {
#pragma omp for schedule(static)
    for (long row = 0; row < rows; row++)
        for (long i = 0; i < inner; i += LANES) {
            const float *gate = gate_up + row * 2 * inner + i;
            floats x = *(floats *)gate, y = *(floats *)(gate + inner);
            floats product = x * y / (1 + exponential((floats){0} - largest(x, (floats){0} - 88)));
            for (int j = 0; j < LANES; j++) out[row * inner + i + j] = put(product[j]);
        }
}

static void compute(chunk c) {
    const decoder *m = c.m;
    long hidden = m->hidden, inner = m->inner, wide = m->heads * m->dim;
    long all = wide + 2 * m->kv_heads * m->dim;
    float *x = c.s->x + c.start * hidden;
    c.qkv = m->scratch, c.gate_up = c.qkv + CHUNK * all;
    c.normed = (element *)(c.gate_up + CHUNK * 2 * inner), c.mixed = c.normed + CHUNK * hidden;
    c.gated = c.mixed + CHUNK * wide;
    normalise(x, c.rows, hidden, c.l->input_norm, c.eps, c.normed);
    product(c.normed, c.rows, hidden, c.l->qkv, all, c.qkv, 0);
    rotate(&c);
    attend(&c);
    product(c.mixed, c.rows, wide, c.l->o, hidden, x, 1);
    normalise(x, c.rows, hidden, c.l->post_norm, c.eps, c.normed);
    product(c.normed, c.rows, hidden, c.l->gate_up, 2 * inner, c.gate_up, 0);
    swiglu(c.gate_up, c.rows, inner, c.gated);
    product(c.gated, c.rows, inner, c.l->down, hidden, x, 1);
}

// out [rows, hidden] = the hidden states after the final norm. Rows go through a layer CHUNK at a
// time, so that what they leave stays in the cache. A row sees no key of a later row.
void forward(const decoder *m, const step *s, float eps, element *out, int threads) {
    long size = m->pages * m->kv_heads * m->page_size * m->dim;
    long outputs = 2 * (m->heads + m->kv_heads) * m->dim + 3 * m->inner;
    if (s->rows * m->depth * m->hidden * outputs < SMALL) threads = 1;
#pragma omp parallel num_threads(threads)
    {
        for (long i = 0; i < m->depth; i++)
            for (long start = 0; start < s->rows; start += CHUNK)
                compute((chunk){.m = m, .l = m->layers + i, .s = s, .start = start,
                                .rows = least(CHUNK, s->rows - start), .eps = eps,
                                .k_cache = m->k_cache + i * size,
                                .v_cache = m->v_cache + i * size});
        normalise(s->x, s->rows, m->hidden, m->norm, eps, out);
    }
}
