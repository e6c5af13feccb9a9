// The decoder of qwen3.py on a CPU: products with packed matrices, and the forward pass over pages.
//
// __init__.py compiles this file for the machine it runs on, with -DBF16 for models in bfloat16.
// Matrices, KV and what a product reads are of the model's type; everything else is float32.
// No sum depends on how many rows a step has, or on how threads share them: a row gets the same
// bits in every batch, whether it is decoded or prefilled. A NaN stays one: in a weight or in the KV
// it makes every result that depends on it NaN.

#include <assert.h>
#include <stdlib.h>
#include "native.h"

enum { ROWS_AT_ONCE = 256 };  // go through a layer together, so that they stay in cache
enum { KEYS = 64 };           // of one update of the softmax, whole strips
enum { FEW = 1 << 22 };       // multiplications: with fewer, threads wait longer than they compute

int panel_columns(void) { return PANEL; }
int rows_at_once(void) { return ROWS_AT_ONCE; }

void linear(const element *x, long rows, long inputs, const element *w, long outputs, float *out,
            int threads) {
    phase only = {0};
    if (rows * inputs * outputs < FEW) threads = 1;
#pragma omp parallel num_threads(threads)
    {
        phase *current = &only;
        product(&current, x, rows, inputs, w, outputs, out, 0);
    }
}

// Norms of queries and keys, and the bias, are NULL in a model without them.
typedef struct {
    const element *input_norm, *q_norm, *k_norm, *post_attention_norm;
    const element *qkv, *qkv_bias, *o, *gate_up, *down;
} layer;

typedef struct {
    const layer *layers;
    const element *embeddings, *norm, *output;
    const float *frequencies;    // rotary angles per position [dim / 2]
    element *k_cache, *v_cache;  // [layers, pages, kv_heads, page_size * dim]
    // ROWS_AT_ONCE rows of what a layer computes, which all steps use.
    float *qkv, *gate_up;                // [ROWS_AT_ONCE, outputs of their product]
    element *normed, *attended, *gated;  // [ROWS_AT_ONCE, inputs of the products that read them]
    int64_t depth, hidden, inner, heads, kv_heads, dim, pages, page_size, outputs;
    float eps, attention_factor;  // attention_factor: of cosines and sines
} decoder;

// A step: its tokens, its memory, and what it returns.
typedef struct {
    int64_t rows, output_count;
    const int64_t *tokens, *positions;  // of each row
    const int64_t *table_starts;        // of each row: where its block table begins in block_tables
    const int64_t *block_tables;        // page numbers
    const int64_t *output_rows;         // [output_count], the rows whose logits are computed
    float *stream;                      // [rows, hidden], the residual stream
    float *rotations;                   // [rows, dim], cosines, then sines
    float *logits;                      // [output_count, outputs]
} step;

// What the functions of a step share. Each thread has one of its own.
typedef struct {
    const decoder *model;
    const step *step;
    phase **current;  // that the thread takes part in

    const layer *weights;
    element *k_cache, *v_cache;  // of this layer

    // The rows that go through the layer together. Each has its place in the step's arrays here.
    long rows;
    const int64_t *positions, *table_starts;
    float *stream, *rotations;
} context;

// Returns where the strip with a row's key lies in a cache: the page is found in the row's block
// table, and in it the kv head and the whole strips before the key. A strip of STRIP keys is stored
// as [dim / PAIR, STRIP, PAIR] in k_cache, and as [STRIP / PAIR, dim, PAIR] in v_cache: the order in
// which products read it.
static inline long strip_of(const context *c, long row, long key, long kv_head) {
    const decoder *m = c->model;
    long page = c->step->block_tables[c->table_starts[row] + key / m->page_size];
    long offset = key % m->page_size / STRIP * STRIP;
    return ((page * m->kv_heads + kv_head) * m->page_size + offset) * m->dim;
}

// Returns strip_of, or -1 if the row does not see the key.
static inline long strip_or_none(const context *c, long row, long key, long kv_head) {
    if (key > c->positions[row]) return -1;
    return strip_of(c, row, key, kv_head);
}

// Returns the end of the rows from `row` on, all before `end`, whose strip with this key is `strip`.
static inline long rows_of_strip(const context *c, long row, long end, long key, long kv_head,
                                 long strip) {
    long next = row + 1;
    while (next < end && strip_or_none(c, next, key, kv_head) == strip) next++;
    return next;
}

// Looks the tokens up, and the rotation of their positions.
static void embed(const context *c, long rows) {
    const decoder *m = c->model;
    long hidden = m->hidden, half = m->dim / 2;
    SHARED_LOOP(c->current, row, rows) {
        const element *embedding = m->embeddings + c->step->tokens[row] * hidden;
        for (long i = 0; i < hidden; i++) c->step->stream[row * hidden + i] = to_float(embedding[i]);
        float *cos = c->step->rotations + row * m->dim, *sin = cos + half;
        for (long i = 0; i < half; i++) {
            float angle = c->step->positions[row] * m->frequencies[i];
            cos[i] = cosf(angle) * m->attention_factor;
            sin[i] = sinf(angle) * m->attention_factor;
        }
    }
}

// normed [rows, hidden] = the norm of x, or of those rows of x that `picked` names.
static void normalise(const context *c, const float *x, const int64_t *picked, long rows,
                      const element *weight) {
    long n = c->model->hidden;
    SHARED_LOOP(c->current, row, rows) {
        const float *from = x + (picked ? picked[row] : row) * n;
        float scale = inverse_rms(from, n, c->model->eps);
        for (long i = 0; i < n; i++)
            c->model->normed[row * n + i] = to_element(from[i] * scale * to_float(weight[i]));
    }
}

// Bias, norm and rotation of qkv [rows, heads + 2 kv_heads, dim]; stores k and v. Queries are
// divided by sqrt(dim), for the softmax.
static void norm_rope_store(const context *c) {
    const decoder *m = c->model;
    const layer *w = c->weights;
    long heads = m->heads, kv_heads = m->kv_heads, total = heads + 2 * kv_heads;
    long dim = m->dim, half = dim / 2;
    SHARED_LOOP(c->current, row, c->rows) {
        const float *cos = c->rotations + row * dim, *sin = cos + half;
        long key = c->positions[row];
        long key_in_strip = key % STRIP;
        for (long head = 0; head < total; head++) {
            float *x = c->model->qkv + (row * total + head) * dim;
            if (w->qkv_bias) {
                for (long i = 0; i < dim; i++) x[i] += to_float(w->qkv_bias[head * dim + i]);
            }
            if (head >= heads + kv_heads) {
                element *v = c->v_cache + strip_of(c, row, key, head - heads - kv_heads);
                for (long i = 0; i < dim; i++) {
                    long at = (key_in_strip / PAIR * dim + i) * PAIR + key_in_strip % PAIR;
                    v[at] = to_element(x[i]);
                }
                continue;
            }
            const element *norm = head < heads ? w->q_norm : w->k_norm;
            float scale = head < heads ? 1 / sqrtf(dim) : 1;
            if (norm) scale *= inverse_rms(x, dim, m->eps);
            for (long i = 0; i < half; i++) {
                float a = x[i] * scale, b = x[i + half] * scale;
                if (norm) {
                    a *= to_float(norm[i]);
                    b *= to_float(norm[i + half]);
                }
                x[i] = a * cos[i] - b * sin[i];
                x[i + half] = b * cos[i] + a * sin[i];
            }
            if (head >= heads) {
                element *k = c->k_cache + strip_of(c, row, key, head - heads);
                for (long i = 0; i < dim; i++) {
                    long at = (i / PAIR * STRIP + key_in_strip) * PAIR + i % PAIR;
                    k[at] = to_element(x[i]);
                }
            }
        }
    }
}

// Adds KEYS scores, of which the first `valid` count, to a row's softmax: running_max and
// running_sum so far. Writes probabilities, not divided by the sum yet. Returns what the sums so far
// are multiplied by.
static float update_softmax(const float *scores, long valid, float *running_max,
                            floats *running_sum, element *probabilities) {
    enum { VECTORS = KEYS / LANES };
    ints lane;
    for (int j = 0; j < LANES; j++) lane[j] = j;
    floats score[VECTORS], maxima = all(*running_max);
    ints masked = (ints)all(-1e30f);
    for (int i = 0; i < VECTORS; i++) {
        ints seen = lane < (int)(valid - i * LANES);
        score[i] = (floats)((((ints *)scores)[i] & seen) | (masked & ~seen));
        maxima = max_of_each(maxima, score[i]);
    }
    float new_max = *running_max;
    for (int j = 0; j < LANES; j++) new_max = maxima[j] > new_max ? maxima[j] : new_max;
    float rescale = exponential(all(*running_max - new_max))[0];
    *running_max = new_max;
    *running_sum *= rescale;
    for (int i = 0; i < VECTORS; i++) {
        floats probability = exponential(score[i] - new_max);
        *running_sum += probability;
        store(probabilities + i * LANES, probability);
    }
    return rescale;
}

// Attention of the rows start .. end - 1 and of `heads` query heads from `head` on, which share a kv
// head: TILE queries at most, row by row. KEYS keys at a time: their scores, the softmax, the
// weighted sum of their values. Neighbouring rows that read the same strip go through one product.
// Pages lie anywhere in memory, so what no other row has brought nearer is asked for early: the
// values before the softmax, the next keys after it.
static void attend_tile(const context *c, long start, long end, long head, long heads) {
    const decoder *m = c->model;
    long dim = m->dim, total_heads = m->heads + 2 * m->kv_heads;
    long kv_head = head / (m->heads / m->kv_heads);
    long queries = (end - start) * heads;
    element query[TILE * MAX_DIM], probabilities[TILE * KEYS];
    float sum[TILE * MAX_DIM] = {0}, scores[TILE * KEYS], running_max[TILE];
    floats running_sum[TILE] = {0};
    long context_len = 0;  // the longest of the rows
    for (long i = 0; i < queries; i++) {
        long row = start + i / heads;
        const float *q = c->model->qkv + (row * total_heads + head + i % heads) * dim;
        for (long j = 0; j < dim; j++) query[i * dim + j] = to_element(q[j]);
        running_max[i] = -1e30f;
        context_len = max(context_len, c->positions[row] + 1);
    }
    for (long keys_start = 0; keys_start < context_len; keys_start += KEYS) {
        long keys_end = min(context_len, keys_start + KEYS);
        for (long key = keys_start; key < keys_end; key += STRIP) {
            for (long row = start, next; row < end; row = next) {
                long strip = strip_or_none(c, row, key, kv_head);
                next = rows_of_strip(c, row, end, key, kv_head, strip);
                if (strip < 0) continue;
                if (next == row + 1) prefetch(c->v_cache + strip, STRIP * dim);
                long i = (row - start) * heads;
                strip_tile((next - row) * heads, query + i * dim, dim, c->k_cache + strip,
                           STRIP * PAIR, scores + i * KEYS + key - keys_start, KEYS, dim / PAIR, 0);
            }
        }
        for (long i = 0; i < queries; i++) {
            long valid = c->positions[start + i / heads] + 1 - keys_start;
            float rescale = update_softmax(scores + i * KEYS, valid, running_max + i,
                                           running_sum + i, probabilities + i * KEYS);
            if (rescale != 1) {
                for (long j = 0; j < dim; j++) sum[i * dim + j] *= rescale;
            }
        }
        for (long key = keys_start; key < keys_end; key += STRIP) {
            for (long row = start, next; row < end; row = next) {
                long strip = strip_or_none(c, row, key, kv_head);
                next = rows_of_strip(c, row, end, key, kv_head, strip);
                if (strip < 0) continue;
                if (next == row + 1) {
                    long next_strip = strip_or_none(c, row, key + KEYS, kv_head);
                    if (next_strip >= 0) prefetch(c->k_cache + next_strip, STRIP * dim);
                }
                long i = (row - start) * heads;
                for (long j = 0; j < dim; j += STRIP)
                    strip_tile((next - row) * heads, probabilities + i * KEYS + key - keys_start,
                               KEYS, c->v_cache + strip + j * PAIR, dim * PAIR, sum + i * dim + j,
                               dim, STRIP / PAIR, 1);
            }
        }
    }
    for (long i = 0; i < queries; i++) {
        element *out = c->model->attended + ((start + i / heads) * m->heads + head + i % heads) * dim;
        float total = 0;
        for (int j = 0; j < LANES; j++) total += running_sum[i][j];
        for (long j = 0; j < dim; j++) out[j] = to_element(sum[i * dim + j] / total);
    }
}

// Attention of all rows. A tile has as many heads of a group as fit and divide it, and then rows.
static void attend(const context *c) {
    long group = c->model->heads / c->model->kv_heads, heads = min(group, TILE);
    while (group % heads) heads--;
    long rows = TILE / heads, tiles = (c->rows + rows - 1) / rows;
    SHARED_LOOP(c->current, item, c->model->heads / heads * tiles) {
        long tile = tiles - 1 - item % tiles;  // the longest first
        long end = min(c->rows, (tile + 1) * rows);
        attend_tile(c, tile * rows, end, item / tiles * heads, heads);
    }
}

// gate_up [rows, 2 * inner], gate first -> silu(gate) * up.
static void swiglu(const context *c) {
    long inner = c->model->inner;
    SHARED_LOOP(c->current, row, c->rows) {
        for (long i = 0; i < inner; i += LANES) {
            const float *gate = c->model->gate_up + row * 2 * inner + i;
            floats x = *(floats *)gate, up = *(floats *)(gate + inner);
            floats negated = all(0) - max_of_each(x, all(-88));
            store(c->model->gated + row * inner + i, x * up / (1 + exponential(negated)));
        }
    }
}

// A layer: ROWS_AT_ONCE rows go through it, and their residual stream takes its results. It has
// LAYER_PHASES shared loops.
enum { LAYER_PHASES = 9 };
static void compute_layer(const context *c) {
    const decoder *m = c->model;
    const layer *w = c->weights;
    const phase *first = *c->current;
    long hidden = m->hidden, inner = m->inner, attended = m->heads * m->dim;
    long qkv = attended + 2 * m->kv_heads * m->dim;
    normalise(c, c->stream, NULL, c->rows, w->input_norm);
    product(c->current, m->normed, c->rows, hidden, w->qkv, qkv, m->qkv, 0);
    norm_rope_store(c);
    attend(c);
    product(c->current, m->attended, c->rows, attended, w->o, hidden, c->stream, 1);
    normalise(c, c->stream, NULL, c->rows, w->post_attention_norm);
    product(c->current, m->normed, c->rows, hidden, w->gate_up, 2 * inner, m->gate_up, 0);
    swiglu(c);
    product(c->current, m->gated, c->rows, inner, w->down, hidden, c->stream, 1);
    assert(*c->current - first == LAYER_PHASES);
}

// The logits of ROWS_AT_ONCE output rows, from `start` on. It has OUTPUT_PHASES shared loops.
enum { OUTPUT_PHASES = 2 };
static void compute_logits(const context *c, long start) {
    const decoder *m = c->model;
    const step *s = c->step;
    const phase *first = *c->current;
    long rows = min(ROWS_AT_ONCE, s->output_count - start);
    normalise(c, s->stream, s->output_rows + start, rows, m->norm);
    product(c->current, m->normed, rows, m->hidden, m->output, m->outputs,
            s->logits + start * m->outputs, 0);
    assert(*c->current - first == OUTPUT_PHASES);
}

// Computes a step. Rows go through a layer ROWS_AT_ONCE at a time; a row sees no key of a later row.
// Returns 0, or -1 if there is no memory.
int forward(const decoder *m, const step *s, int threads) {
    long attended = m->heads * m->dim, qkv = attended + 2 * m->kv_heads * m->dim;
    long cache = m->pages * m->kv_heads * m->page_size * m->dim;  // of a layer
    long parts = (s->rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    long output_parts = (s->output_count + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    long count = 1 + parts * m->depth * LAYER_PHASES + output_parts * OUTPUT_PHASES;
    phase *phases = calloc(count, sizeof(phase));
    if (!phases) return -1;
    if (s->rows * m->depth * m->hidden * (qkv + attended + 3 * m->inner) < FEW) threads = 1;
#pragma omp parallel num_threads(threads)
    {
        phase *current = phases;
        context c = {.model = m, .step = s, .current = &current};
        embed(&c, s->rows);
        for (long i = 0; i < m->depth; i++) {
            c.weights = m->layers + i;
            c.k_cache = m->k_cache + i * cache;
            c.v_cache = m->v_cache + i * cache;
            for (long start = 0; start < s->rows; start += ROWS_AT_ONCE) {
                c.rows = min(ROWS_AT_ONCE, s->rows - start);
                c.positions = s->positions + start;
                c.table_starts = s->table_starts + start;
                c.stream = s->stream + start * m->hidden;
                c.rotations = s->rotations + start * m->dim;
                compute_layer(&c);
            }
        }
        for (long i = 0; i < s->output_count; i += ROWS_AT_ONCE) compute_logits(&c, i);
    }
    free(phases);
    return 0;
}
