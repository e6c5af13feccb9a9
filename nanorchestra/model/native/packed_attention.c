// Attention over a pack in float32, forward and backward: PackedAttention of attention.py on a CPU.
//
// QUERIES queries of a segment, a block, go through all keys that they see, KEYS at a time. Scores
// are kept as [keys, queries]: a vector has one key and LANES queries, so a softmax never adds up
// the parts of a vector. They are computed again in the backward pass, from the log-sum-exps
// (FlashAttention-2, arXiv 2307.08691).
// q, out and their gradients are [tokens, heads, dim], k and v [tokens, kv_heads, dim]; dim is a
// multiple of 16. No sum depends on how threads share the work.

#include "native.h"

enum { QUERIES = 64 };   // of a block
enum { KEYS = 32 };      // whose scores are in the cache together

int queries_of_block(void) { return QUERIES; }
int keys_of_piece(void) { return KEYS; }

// KEYS keys at most of a prefix, or of the segment of the queries, its own: of these a query sees
// the keys up to itself.
typedef struct { int64_t start, count, own; } piece;

// QUERIES queries at most of one segment, which see the pieces first_piece .. last_piece - 1.
typedef struct { int64_t start, count, first_piece, last_piece; } block;

typedef struct {
    const float *q, *k, *v;
    float *out, *lse;                  // lse [tokens, heads]: log-sum-exps of the scores
    const float *grad;                 // that of out
    float *grad_q, *grad_k, *grad_v;   // grad_k and grad_v are by query head: [heads, tokens, dim]
    const block *blocks;
    const piece *pieces;
    int64_t tokens, block_count, heads, kv_heads, dim;
} packed;

TILES(strip_tile_across, STRIP / LANES, 1)

// The queries of a block in whole strips: as many columns of scores are computed.
static inline long columns_of(const block *b) { return (b->count + STRIP - 1) / STRIP * STRIP; }

// out [keys, columns] = rows [keys, dim] x, with x [dim, columns]; a row of either has QUERIES.
static void scores_of(const float *rows, long stride, long keys, const float *x, long dim,
                      long columns, float *out) {
    for (long key = 0; key < keys; key += TILE)
        for (long i = 0; i < columns; i += PANEL) {
            const float *from = rows + key * stride;
            float *to = out + key * QUERIES + i;
            long count = min(TILE, keys - key);
            if (columns - i < PANEL)
                strip_tile(count, from, stride, x + i, QUERIES, to, QUERIES, dim, 0);
            else
                panel_tile(count, from, stride, x + i, QUERIES, to, QUERIES, dim, 0);
        }
}

// out [keys, dim] += weights [keys, QUERIES] rows, with rows [queries, dim].
static void add_by_key(const float *weights, long keys, const float *rows, long stride,
                       long queries, long dim, float *out) {
    for (long key = 0; key < keys; key += TILE)
        for (long i = 0; i < dim; i += STRIP)
            strip_tile(min(TILE, keys - key), weights + key * QUERIES, QUERIES, rows + i, stride,
                       out + key * dim + i, dim, queries, 1);
}

// out [queries, dim] += weights^T rows, with weights [keys, QUERIES] and rows [keys, dim].
static void add_by_query(const float *weights, long queries, const float *rows, long stride,
                         long keys, long dim, float *out, long out_stride) {
    for (long query = 0; query < queries; query += TILE)
        for (long i = 0; i < dim; i += STRIP)
            strip_tile_across(min(TILE, queries - query), weights + query, QUERIES, rows + i,
                              stride, out + query * out_stride + i, out_stride, keys, 1);
}

// out [dim, columns] = rows [count, dim]^T times scale; 0 beyond count.
static void transpose(const float *rows, long stride, long count, long columns, long dim,
                      float scale, float *out) {
    for (long i = 0; i < dim; i++)
        for (long j = 0; j < columns; j++)
            out[i * QUERIES + j] = j < count ? rows[j * stride + i] * scale : 0;
}

// Masks the scores [keys, QUERIES] of keys behind their query: keys are those from first_key on,
// queries those from first_query on.
static void mask_future(float *scores, long first_key, long keys, long first_query) {
    for (long key = 0; key < keys; key++)
        for (long i = 0; i < min(QUERIES, first_key + key - first_query); i++)
            scores[key * QUERIES + i] = -1e30f;
}

static void forward_block(const packed *p, const block *b, long head) {
    long dim = p->dim, stride = p->heads * dim, kv_stride = p->kv_heads * dim;
    long columns = columns_of(b);
    long kv_head = head / (p->heads / p->kv_heads);
    float query[MAX_DIM * QUERIES], scores[KEYS * QUERIES], rescale[QUERIES];
    float running_max[QUERIES], running_sum[QUERIES];
    float *out = p->out + b->start * stride + head * dim;
    transpose(p->q + b->start * stride + head * dim, stride, b->count, columns, dim,
              1 / sqrtf(dim), query);
    for (long i = 0; i < QUERIES; i++) {
        running_max[i] = -1e30f;
        running_sum[i] = 0;
    }
    for (long i = 0; i < b->count; i++) memset(out + i * stride, 0, dim * sizeof(float));
    for (const piece *c = p->pieces + b->first_piece; c < p->pieces + b->last_piece; c++) {
        long keys = c->count;
        long at = c->start * kv_stride + kv_head * dim;
        scores_of(p->k + at, kv_stride, keys, query, dim, columns, scores);
        if (c->own) mask_future(scores, c->start, keys, b->start);
        for (long i = 0; i < columns; i += LANES) {
            floats *old_max = (floats *)(running_max + i), new_max = *old_max;
            for (long key = 0; key < keys; key++)
                new_max = max_of_each(*(floats *)(scores + key * QUERIES + i), new_max);
            floats shrink = exponential(*old_max - new_max), sum = all(0);
            for (long key = 0; key < keys; key++) {
                floats *score = (floats *)(scores + key * QUERIES + i);
                *score = exponential(*score - new_max);
                sum += *score;
            }
            *old_max = new_max;
            *(floats *)(running_sum + i) = *(floats *)(running_sum + i) * shrink + sum;
            *(floats *)(rescale + i) = shrink;
        }
        for (long i = 0; i < b->count; i++) {
            if (rescale[i] == 1) continue;
            for (long j = 0; j < dim; j++) out[i * stride + j] *= rescale[i];
        }
        add_by_query(scores, b->count, p->v + at, kv_stride, keys, dim, out, stride);
    }
    for (long i = 0; i < b->count; i++) {
        p->lse[(b->start + i) * p->heads + head] = running_max[i] + logf(running_sum[i]);
        for (long j = 0; j < dim; j++) out[i * stride + j] /= running_sum[i];
    }
}

// With p = exp(score - lse) and s = q . k / sqrt(dim):
//     grad_v = p^T grad,  grad_s = p (grad v^T - sum(grad out)),
//     grad_q = grad_s k / sqrt(dim),  grad_k = grad_s^T q / sqrt(dim)
static void backward_block(const packed *p, const block *b, long head) {
    long dim = p->dim, stride = p->heads * dim, kv_stride = p->kv_heads * dim;
    long columns = columns_of(b);
    long kv_head = head / (p->heads / p->kv_heads);
    long rows_at = b->start * stride + head * dim;
    float query[MAX_DIM * QUERIES], grad[MAX_DIM * QUERIES];
    float weights[KEYS * QUERIES], grads[KEYS * QUERIES], lse[QUERIES] = {0}, delta[QUERIES] = {0};
    float scale = 1 / sqrtf(dim);
    transpose(p->q + rows_at, stride, b->count, columns, dim, scale, query);
    transpose(p->grad + rows_at, stride, b->count, columns, dim, 1, grad);
    for (long i = 0; i < b->count; i++) {
        const float *of_out = p->grad + rows_at + i * stride, *out = p->out + rows_at + i * stride;
        lse[i] = p->lse[(b->start + i) * p->heads + head];
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (long j = 0; j < dim; j++) sum += of_out[j] * out[j];
        delta[i] = sum;
        memset(p->grad_q + rows_at + i * stride, 0, dim * sizeof(float));
    }
    for (const piece *c = p->pieces + b->first_piece; c < p->pieces + b->last_piece; c++) {
        long keys = c->count;
        long at = c->start * kv_stride + kv_head * dim;
        long grad_at = (head * p->tokens + c->start) * dim;
        scores_of(p->k + at, kv_stride, keys, query, dim, columns, weights);
        if (c->own) mask_future(weights, c->start, keys, b->start);
        scores_of(p->v + at, kv_stride, keys, grad, dim, columns, grads);
        for (long key = 0; key < keys; key++)
            for (long i = 0; i < columns; i += LANES) {
                floats *weight = (floats *)(weights + key * QUERIES + i);
                floats *of_score = (floats *)(grads + key * QUERIES + i);
                *weight = exponential(*weight - *(floats *)(lse + i));
                *of_score = *weight * (*of_score - *(floats *)(delta + i)) * scale;
            }
        add_by_key(weights, keys, p->grad + rows_at, stride, b->count, dim, p->grad_v + grad_at);
        add_by_key(grads, keys, p->q + rows_at, stride, b->count, dim, p->grad_k + grad_at);
        add_by_query(grads, b->count, p->k + at, kv_stride, keys, dim, p->grad_q + rows_at, stride);
    }
}

void attention_forward(const packed *p, int threads) {
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (long item = 0; item < p->block_count * p->heads; item++)
        forward_block(p, p->blocks + item / p->heads, item % p->heads);
}

// A thread computes a whole head, whose gradients of keys and values no other adds to.
void attention_backward(const packed *p, int threads) {
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (long head = 0; head < p->heads; head++) {
        long size = p->tokens * p->dim;
        memset(p->grad_k + head * size, 0, size * sizeof(float));
        memset(p->grad_v + head * size, 0, size * sizeof(float));
        for (long i = 0; i < p->block_count; i++) backward_block(p, p->blocks + i, head);
    }
}
