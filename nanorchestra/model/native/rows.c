// What a decoder layer computes row by row in training on a CPU, forward and backward, for rows.py.
// Numbers are of type `element`; arithmetic is in float32, and a result is rounded once. Sizes are
// multiples of LANES, of a head half its dim.
//
// Gradients of the weights are sums over rows: each block of ROWS rows has its own, which the
// caller adds up. So no sum depends on how threads share the work.

#include "native.h"

enum { ROWS = 32 };  // of a block

int rows_of_block(void) { return ROWS; }

// LANES elements as numbers.
static inline floats load(const element *from) {
    floats x;
    for (int i = 0; i < LANES; i++) x[i] = to_float(from[i]);
    return x;
}

static inline float sum_of_lanes(floats x) {
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
}

// Does what follows for each row; its `block` is computed by one of `threads` threads.
#define EACH_ROW(rows)                                                       \
    _Pragma("omp parallel for schedule(static) num_threads(threads)")        \
    for (long block = 0; block < ((rows) + ROWS - 1) / ROWS; block++)        \
        for (long row = block * ROWS; row < min(rows, (block + 1) * ROWS); row++)

// summed = x + residual, rounded, and out = summed * scale * weight, with the scale 1 / rms of a
// row. Without a residual x is normalised.
void norm_forward(const element *x, const element *residual, const element *weight,
                  element *summed, element *out, float *scales, long rows, long size, float eps,
                  int threads) {
    EACH_ROW(rows) {
        const element *from = (residual ? summed : x) + row * size;
        floats squares = all(0);
        for (long i = 0; i < size; i += LANES) {
            if (residual) {
                long at = row * size + i;
                store(summed + at, load(x + at) + load(residual + at));
            }
            floats value = load(from + i);
            squares += value * value;
        }
        float scale = scales[row] = 1 / sqrtf(sum_of_lanes(squares) / size + eps);
        for (long i = 0; i < size; i += LANES)
            store(out + row * size + i, load(from + i) * scale * load(weight + i));
    }
}

// The gradient of x: that of summed, if there is one, and
//     scale (g - x scale^2 mean(g x)) with g = grad * weight.
// grad_weight [blocks, size] is 0 at first.
void norm_backward(const element *grad, const element *grad_summed, const element *x,
                   const element *weight, const float *scales, element *grad_x,
                   float *grad_weight, long rows, long size, int threads) {
    EACH_ROW(rows) {
        const element *g = grad + row * size, *from = x + row * size;
        float *sums = grad_weight + block * size, scale = scales[row];
        floats products = all(0);
        for (long i = 0; i < size; i += LANES) {
            floats one = load(g + i) * load(from + i);
            products += one * load(weight + i);
            *(floats *)(sums + i) += one * scale;
        }
        float along = sum_of_lanes(products) / size * scale * scale;
        for (long i = 0; i < size; i += LANES) {
            floats result = scale * (load(g + i) * load(weight + i) - load(from + i) * along);
            if (grad_summed) result += load(grad_summed + row * size + i);
            store(grad_x + row * size + i, result);
        }
    }
}

static inline floats sigmoid(floats x) {
    return 1 / (1 + exponential(all(0) - max_of_each(x, all(-88))));
}

// gate_up [rows, 2 * size], gate first -> silu(gate) * up.
void swiglu_forward(const element *gate_up, element *out, long rows, long size, int threads) {
    EACH_ROW(rows) {
        for (long i = 0; i < size; i += LANES) {
            const element *at = gate_up + row * 2 * size + i;
            floats gate = load(at);
            store(out + row * size + i, gate * sigmoid(gate) * load(at + size));
        }
    }
}

void swiglu_backward(const element *grad, const element *gate_up, element *grad_gate_up, long rows,
                     long size, int threads) {
    EACH_ROW(rows) {
        for (long i = 0; i < size; i += LANES) {
            const element *at = gate_up + row * 2 * size + i;
            element *to = grad_gate_up + row * 2 * size + i;
            floats gate = load(at), g = load(grad + row * size + i), s = sigmoid(gate);
            store(to, g * load(at + size) * s * (1 + gate * (1 - s)));
            store(to + size, g * gate * s);
        }
    }
}

// Heads of queries, keys and values. Norms are NULL in a model without them; cos and sin are
// [rows, dim / 2]. q, k and v are results of the forward pass, gradients in the backward pass.
typedef struct {
    const element *qkv;  // [rows, heads + 2 kv_heads, dim]
    const element *q_norm, *k_norm;
    const float *cos, *sin;
    element *q, *k, *v;  // [rows, heads, dim], [rows, kv_heads, dim] twice
    element *grad_qkv;
    float *grad_norms;  // [blocks, 2, dim], 0 at first: of q_norm, then of k_norm
    int64_t rows, heads, kv_heads, dim;
    float eps;
} head_rows;

static inline element *head_of(const head_rows *h, long row, long head) {
    if (head < h->heads) return h->q + (row * h->heads + head) * h->dim;
    long key = head - h->heads, value = key - h->kv_heads;
    if (value < 0) return h->k + (row * h->kv_heads + key) * h->dim;
    return h->v + (row * h->kv_heads + value) * h->dim;
}

static float scale_of(const head_rows *h, const element *x) {
    floats squares = all(0);
    for (long i = 0; i < h->dim; i += LANES) squares += load(x + i) * load(x + i);
    return 1 / sqrtf(sum_of_lanes(squares) / h->dim + h->eps);
}

// Norm and rotation of queries and keys; values are copied.
void heads_forward(const head_rows *h, int threads) {
    long half = h->dim / 2, total = h->heads + 2 * h->kv_heads;
    EACH_ROW(h->rows) {
        const float *cos = h->cos + row * half, *sin = h->sin + row * half;
        for (long head = 0; head < total; head++) {
            const element *x = h->qkv + (row * total + head) * h->dim;
            element *out = head_of(h, row, head);
            if (head >= h->heads + h->kv_heads) {
                memcpy(out, x, h->dim * sizeof(element));
                continue;
            }
            const element *norm = head < h->heads ? h->q_norm : h->k_norm;
            float scale = norm ? scale_of(h, x) : 1;
            for (long i = 0; i < half; i += LANES) {
                floats a = load(x + i), b = load(x + i + half);
                if (norm) {
                    a *= scale * load(norm + i);
                    b *= scale * load(norm + i + half);
                }
                floats c = *(floats *)(cos + i), s = *(floats *)(sin + i);
                store(out + i, a * c - b * s);
                store(out + i + half, b * c + a * s);
            }
        }
    }
}

// A rotation's gradient is the rotation back; a norm's is as in norm_backward.
void heads_backward(const head_rows *h, int threads) {
    long half = h->dim / 2, total = h->heads + 2 * h->kv_heads;
    EACH_ROW(h->rows) {
        const float *cos = h->cos + row * half, *sin = h->sin + row * half;
        for (long head = 0; head < total; head++) {
            const element *grad = head_of(h, row, head);
            element *to = h->grad_qkv + (row * total + head) * h->dim;
            if (head >= h->heads + h->kv_heads) {
                memcpy(to, grad, h->dim * sizeof(element));
                continue;
            }
            float turned[MAX_DIM];
            for (long i = 0; i < half; i += LANES) {
                floats a = load(grad + i), b = load(grad + i + half);
                floats c = *(floats *)(cos + i), s = *(floats *)(sin + i);
                *(floats *)(turned + i) = a * c + b * s;
                *(floats *)(turned + i + half) = b * c - a * s;
            }
            const element *x = h->qkv + (row * total + head) * h->dim;
            const element *norm = head < h->heads ? h->q_norm : h->k_norm;
            float scale = 1, along = 0;
            if (norm) {
                float *sums = h->grad_norms + (2 * block + (head >= h->heads)) * h->dim;
                floats products = all(0);
                scale = scale_of(h, x);
                for (long i = 0; i < h->dim; i += LANES) {
                    floats *g = (floats *)(turned + i), one = *g * load(x + i);
                    *(floats *)(sums + i) += one * scale;
                    products += one * load(norm + i);
                    *g *= load(norm + i);
                }
                along = sum_of_lanes(products) / h->dim * scale * scale;
            }
            for (long i = 0; i < h->dim; i += LANES)
                store(to + i, scale * (*(floats *)(turned + i) - load(x + i) * along));
        }
    }
}
