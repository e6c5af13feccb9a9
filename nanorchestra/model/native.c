// A Qwen3 decoder on a CPU: products with packed matrices, and the whole forward pass over KV pages.
//
// native.py compiles this file for the machine it runs on, with -DBF16 for models in bfloat16.
// Matrices, KV and what a product reads are of the model's type; everything else is float32.
// No sum depends on how many rows a step has, or on how threads share them: a row gets the same
// bits in every batch, whether it is decoded or prefilled.

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef float floats __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(64), aligned(4), may_alias));

// A product adds up PAIR neighbouring elements at a time: what one instruction multiplies.
#ifdef BF16
#include <immintrin.h>
enum { PAIR = 2 };
typedef uint16_t element;

static inline float get(element x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline element put(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0;
}

static inline floats multiply_add(floats sum, const element *x, ints w) {
    int32_t pair;
    memcpy(&pair, x, 4);
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)w);
}
#else
enum { PAIR = 1 };
typedef float element;

static inline float get(element x) { return x; }
static inline element put(float x) { return x; }

static inline floats multiply_add(floats sum, const element *x, ints w) {
    return sum + *x * (floats)w;
}
#endif

// A tile of TILE rows and 16 * WIDE columns is summed in registers.
#ifdef __AVX512F__
enum { TILE = 8, WIDE = 2 };
#else
enum { TILE = 6, WIDE = 1 };
#endif
enum { LANES = 16, PANEL = LANES * WIDE, ROWS = 64, CHUNK = 256, KEYS = 64, MAX_DIM = 256 };

int panel_columns(void) { return PANEL; }
int chunk_rows(void) { return CHUNK; }

static inline long least(long a, long b) { return a < b ? a : b; }

// out [rows, 16 * wide] = x [rows, steps * PAIR] w, added to what it holds if `add`.
static inline __attribute__((always_inline)) void sum_tile(
    int rows, int wide, const element *x, long x_stride, const element *w, long w_stride,
    float *out, long out_stride, long steps, int add) {
    floats sum[TILE][WIDE];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int c = 0; c < wide; c++)
            sum[r][c] = add ? *(floats *)(out + r * out_stride + c * LANES) : (floats){0};
    for (long step = 0; step < steps; step++)
#pragma GCC unroll 2
        for (int c = 0; c < wide; c++) {
            ints column = *(const ints *)(w + step * w_stride + c * LANES * PAIR);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
                sum[r][c] = multiply_add(sum[r][c], x + r * x_stride + step * PAIR, column);
        }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int c = 0; c < wide; c++)
            *(floats *)(out + r * out_stride + c * LANES) = sum[r][c];
}

#define CASE(n) case n: sum_tile(n, wide, x, xs, w, ws, out, os, steps, add); break;
#define TILES(name, columns)                                                              \
    static void name(int rows, const element *x, long xs, const element *w, long ws,      \
                     float *out, long os, long steps, int add) {                          \
        enum { wide = columns };                                                          \
        switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) } \
    }
TILES(wide_tile, WIDE)
TILES(narrow_tile, 1)

// out [rows, n] = x [rows, k] W^T + bias, added to what it holds if `add`.
// w: panels of PANEL outputs, each [k / PAIR, PANEL, PAIR]; the last is padded.
static void product(const element *x, long rows, long k, const element *w, const element *bias,
                    long n, float *out, int add) {
#pragma omp for collapse(2) schedule(static)
    for (long block = 0; block < rows; block += ROWS)
        for (long first = 0; first < n; first += PANEL) {
            long width = least(PANEL, n - first), end = least(rows, block + ROWS);
            for (long row = block; row < end; row += TILE) {
                float edge[TILE * PANEL], *mine = out + row * n + first, *to = mine;
                long count = least(TILE, end - row), stride = n;
                if (width < PANEL) to = edge, stride = PANEL;
                if (bias || (add && to == edge))
                    for (long r = 0; r < count; r++)
                        for (long c = 0; c < width; c++)
                            to[r * stride + c] =
                                (add ? mine[r * n + c] : 0) + (bias ? get(bias[first + c]) : 0);
                wide_tile(count, x + row * k, k, w + first * k, PANEL * PAIR, to, stride, k / PAIR,
                          add || bias);
                for (long r = 0; to == edge && r < count; r++)
                    memcpy(mine + r * n, edge + r * PANEL, width * sizeof(float));
            }
        }
}

void linear(const element *x, long rows, long k, const element *w, const element *bias, long n,
            float *out, int threads) {
#pragma omp parallel num_threads(threads)
    product(x, rows, k, w, bias, n, out, 0);
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
    const element *qkv, *qkv_bias, *o, *o_bias, *gate_up, *down;
} layer;

typedef struct {
    const layer *layers;
    const element *norm;
    element *k_cache, *v_cache;  // [layers, pages, kv_heads, page_size * dim]
    float *scratch;              // CHUNK rows of all that a layer computes
    int64_t depth, hidden, inner, heads, kv_heads, dim, pages, page_size;
} decoder;

typedef struct {
    float *x;                        // [rows, hidden]: embeddings, then the final hidden states
    const float *cos, *sin;          // [rows, dim / 2]
    const int64_t *lengths, *first;  // of each row: keys it sees, its own last; its place in tables
    const int64_t *tables;           // page numbers
    int64_t rows;
} step;

// Sixteen keys lie together: K as [dim / PAIR, 16, PAIR], V as [16 / PAIR, dim, PAIR].
static inline long sixteen(const decoder *m, const step *s, long row, long key, long head) {
    long page = s->tables[s->first[row] + key / m->page_size];
    return ((page * m->kv_heads + head) * m->page_size + key % m->page_size / 16 * 16) * m->dim;
}

static void normalise(const float *x, long rows, long n, const element *weight, float eps,
                      element *out) {
#pragma omp for schedule(static)
    for (long row = 0; row < rows; row++) {
        float scale = inverse_rms(x + row * n, n, eps);
        for (long i = 0; i < n; i++) out[row * n + i] = put(x[row * n + i] * scale * get(weight[i]));
    }
}

// Normalises and rotates q and k of qkv [rows, heads + 2 kv_heads, dim]; stores k and v.
static void rotate(const decoder *m, const layer *l, const step *s, long start, long rows,
                   float eps, float *qkv, element *k_cache, element *v_cache) {
    long all = m->heads + 2 * m->kv_heads, dim = m->dim, half = dim / 2;
#pragma omp for collapse(2) schedule(static)
    for (long row = 0; row < rows; row++)
        for (long head = 0; head < all; head++) {
            float *x = qkv + (row * all + head) * dim;
            const float *cos = s->cos + (start + row) * half, *sin = s->sin + (start + row) * half;
            long kv = head - m->heads, key = s->lengths[start + row] - 1;
            if (kv < m->kv_heads) {
                const element *weight = kv < 0 ? l->q_norm : l->k_norm;
                float scale = inverse_rms(x, dim, eps) * (kv < 0 ? 1 / sqrtf(dim) : 1);
                for (long i = 0; i < half; i++) {
                    float a = x[i] * scale * get(weight[i]);
                    float b = x[i + half] * scale * get(weight[i + half]);
                    x[i] = a * cos[i] - b * sin[i];
                    x[i + half] = b * cos[i] + a * sin[i];
                }
            }
            if (kv < 0) continue;
            long at = key % 16, base = sixteen(m, s, start + row, key, kv % m->kv_heads);
            for (long i = 0; i < dim; i++)
                if (kv < m->kv_heads)
                    k_cache[base + (i / PAIR * 16 + at) * PAIR + i % PAIR] = put(x[i]);
                else
                    v_cache[base + (at / PAIR * dim + i) * PAIR + at % PAIR] = put(x[i]);
        }
}

// The rows from `row` on of a tile that read the same sixteen keys; `at` is -1 if they are past
// the row's end.
static inline long same_keys(const decoder *m, const step *s, long row, long end, long key,
                             long head, long *at) {
    long next = row;
    for (*at = -1; next < end; next++) {
        long here = key < s->lengths[next] ? sixteen(m, s, next, key, head) : -1;
        if (next == row) *at = here;
        if (here != *at) break;
    }
    return next;
}

// Adds a block of KEYS keys to a row's softmax. Returns what the sums so far are multiplied by.
static float soften(const float *scores, long valid, float *top, floats *total, element *weights) {
    const ints index = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    floats score[KEYS / LANES], best = (floats){0} + *top;
    for (int i = 0; i < KEYS / LANES; i++) {
        ints seen = index < (int)(valid - i * LANES);
        score[i] = (floats)(((ints)((floats *)scores)[i] & seen) | ((ints)((floats){0} - 1e30f) & ~seen));
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

// Attention of `heads` query heads, which share a kv head, of the rows start to end.
static void attend_tile(const decoder *m, const step *s, long start, long end, long head, long heads,
                        const float *q, long q_stride, const element *k_cache,
                        const element *v_cache, element *out, long out_stride) {
    long dim = m->dim, kv = head / (m->heads / m->kv_heads), count = (end - start) * heads, at, next;
    element query[TILE * MAX_DIM], weights[TILE * KEYS];
    float sum[TILE * MAX_DIM], scores[TILE * KEYS], top[TILE];
    floats total[TILE];
    long longest = 0;
    memset(sum, 0, count * dim * sizeof(float));
    for (long i = 0; i < count; i++) {
        const float *mine = q + i / heads * q_stride + (head + i % heads) * dim;
        for (long j = 0; j < dim; j++) query[i * dim + j] = put(mine[j]);
        top[i] = -1e30f, total[i] = (floats){0};
        longest = -least(-longest, -s->lengths[start + i / heads]);
    }
    for (long key = 0; key < longest; key += KEYS) {
        long stop = least(KEYS, longest - key);
        for (long k = 0; k < stop; k += 16)
            for (long row = start; row < end; row = next) {
                next = same_keys(m, s, row, end, key + k, kv, &at);
                long i = (row - start) * heads;
                if (at >= 0)
                    narrow_tile((next - row) * heads, query + i * dim, dim, k_cache + at, 16 * PAIR,
                                scores + i * KEYS + k, KEYS, dim / PAIR, 0);
            }
        for (long i = 0; i < count; i++) {
            long valid = s->lengths[start + i / heads] - key;
            float scale = soften(scores + i * KEYS, valid, top + i, total + i, weights + i * KEYS);
            if (scale != 1)
                for (long j = 0; j < dim; j++) sum[i * dim + j] *= scale;
        }
        for (long k = 0; k < stop; k += 16)
            for (long row = start; row < end; row = next) {
                next = same_keys(m, s, row, end, key + k, kv, &at);
                long i = (row - start) * heads;
                for (long j = 0; at >= 0 && j < dim; j += LANES)
                    narrow_tile((next - row) * heads, weights + i * KEYS + k, KEYS,
                                v_cache + at + j * PAIR, dim * PAIR, sum + i * dim + j, dim,
                                16 / PAIR, 1);
            }
    }
    for (long i = 0; i < count; i++) {
        element *mine = out + i / heads * out_stride + (head + i % heads) * dim;
        float all = 0;
        for (int j = 0; j < LANES; j++) all += total[i][j];
        for (long j = 0; j < dim; j++) mine[j] = put(sum[i * dim + j] / all);
    }
}

static void attend(const decoder *m, const step *s, long start, long rows, const float *qkv,
                   const element *k_cache, const element *v_cache, element *out) {
    long fold = m->heads / m->kv_heads, heads = least(fold, TILE), dim = m->dim;
    while (fold % heads) heads--;
    long each = TILE / heads, tiles = (rows + each - 1) / each;
    long q_stride = (m->heads + 2 * m->kv_heads) * dim, out_stride = m->heads * dim;
#pragma omp for collapse(2) schedule(dynamic)
    for (long head = 0; head < m->heads; head += heads)
        for (long tile = tiles - 1; tile >= 0; tile--) {  // the longest first
            long first = tile * each, last = least(rows, first + each);
            attend_tile(m, s, start + first, start + last, head, heads, qkv + first * q_stride,
                        q_stride, k_cache, v_cache, out + first * out_stride, out_stride);
        }
}

// gate_up [rows, 2 * inner], gate first -> silu(gate) * up.
static void swiglu(const float *gate_up, long rows, long inner, element *out) {
#pragma omp for schedule(static)
    for (long row = 0; row < rows; row++)
        for (long i = 0; i < inner; i += LANES) {
            const float *gate = gate_up + row * 2 * inner + i;
            floats x = *(floats *)gate, y = *(floats *)(gate + inner);
            floats product = x * y / (1 + exponential(largest((floats){0} - 88, (floats){0} - x)));
            for (int j = 0; j < LANES; j++) out[row * inner + i + j] = put(product[j]);
        }
}

static void compute_layer(const decoder *m, const layer *l, const step *s, long start, long rows,
                          float eps, element *k_cache, element *v_cache) {
    long hidden = m->hidden, inner = m->inner, wide = m->heads * m->dim;
    long all = (m->heads + 2 * m->kv_heads) * m->dim;
    float *x = s->x + start * hidden, *qkv = m->scratch, *gate_up = qkv + CHUNK * all;
    element *normed = (element *)(gate_up + CHUNK * 2 * inner), *mixed = normed + CHUNK * hidden;
    element *gated = mixed + CHUNK * wide;
    normalise(x, rows, hidden, l->input_norm, eps, normed);
    product(normed, rows, hidden, l->qkv, l->qkv_bias, all, qkv, 0);
    rotate(m, l, s, start, rows, eps, qkv, k_cache, v_cache);
    attend(m, s, start, rows, qkv, k_cache, v_cache, mixed);
    product(mixed, rows, wide, l->o, l->o_bias, hidden, x, 1);
    normalise(x, rows, hidden, l->post_norm, eps, normed);
    product(normed, rows, hidden, l->gate_up, 0, 2 * inner, gate_up, 0);
    swiglu(gate_up, rows, inner, gated);
    product(gated, rows, inner, l->down, 0, hidden, x, 1);
}

// Rows go through a layer CHUNK at a time, so that what they leave stays in the cache. A row sees
// no key of a later row.
void forward(const decoder *m, const step *s, float eps, element *out, int threads) {
    long size = m->pages * m->kv_heads * m->page_size * m->dim;
#pragma omp parallel num_threads(threads)
    {
        for (long i = 0; i < m->depth; i++)
            for (long start = 0; start < s->rows; start += CHUNK)
                compute_layer(m, m->layers + i, s, start, least(CHUNK, s->rows - start), eps,
                              m->k_cache + i * size, m->v_cache + i * size);
        normalise(s->x, s->rows, m->hidden, m->norm, eps, out);
    }
}
