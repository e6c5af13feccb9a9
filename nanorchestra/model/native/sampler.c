// What the sampler computes row by row on a CPU, for sampler.py. A row of weights is whole buckets of
// ids. No row depends on others, or on how threads share them.

#include "native.h"

enum { BUCKET = 64 };  // ids, as in sampler.py

// weights [rows, stride] = exp(x - peak) for x = logits * inverse, with the peak of each row and
// its first id. Ids that are not allowed, or from `vocab` on, have weight 0. allowed[row] is
// [vocab], or NULL if all are.
void weigh(const float *logits, long logits_stride, long vocab, const float *inverse,
           const uint8_t *const *allowed, float *weights, long stride, float *peaks,
           int64_t *peak_ids, long rows, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long row = 0; row < rows; row++) {
        const float *from = logits + row * logits_stride;
        float *x = weights + row * stride, scale = inverse[row];
        for (long i = 0; i < vocab; i++) x[i] = from[i] * scale;
        for (long i = vocab; i < stride; i++) x[i] = -INFINITY;
        if (allowed[row])
            for (long i = 0; i < vocab; i++) x[i] = allowed[row][i] ? x[i] : -INFINITY;

        floats peak_of_lanes = all(-INFINITY);
        for (long i = 0; i < stride; i += LANES)
            peak_of_lanes = max_of_each(*(floats *)(x + i), peak_of_lanes);
        float peak = -INFINITY;
        for (int i = 0; i < LANES; i++) peak = fmaxf(peak, peak_of_lanes[i]);
        long id = 0;
        while (id < vocab - 1 && x[id] != peak) id++;
        peaks[row] = peak;
        peak_ids[row] = id;

        for (long i = 0; i < stride; i += LANES)
            *(floats *)(x + i) = exponential(*(floats *)(x + i) - peak);
    }
}

static double sum_of_bucket(const float *weights) {
    floats sums = all(0);
    for (int i = 0; i < BUCKET; i += LANES) sums += *(floats *)(weights + i);
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += sums[i];
    return sum;
}

// The id of each row at which the running sum of its weights exceeds noise * total, and the total.
// A target is kept below the sum that it is looked for in, so that rounding never leads to an id
// without weight; one of NaN leads to id 0.
void invert(const float *weights, long stride, const double *noise, int64_t *ids, double *totals,
            long rows, int threads) {
    const double inside = 1 - 1e-12;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long row = 0; row < rows; row++) {
        const float *at = weights + row * stride, *last = at + stride - BUCKET;
        double total = 0;
        for (const float *bucket = at; bucket <= last; bucket += BUCKET)
            total += sum_of_bucket(bucket);
        totals[row] = total;
        double target = fmin(noise[row], inside) * total, before = 0;
        for (double next; at < last && (next = before + sum_of_bucket(at)) <= target; at += BUCKET)
            before = next;

        double within = 0, sum = at[0];
        for (int i = 0; i < BUCKET; i++) within += at[i];
        double rest = fmin(target - before, within * inside);
        int i = 0;
        while (i < BUCKET - 1 && sum <= rest) sum += at[++i];
        ids[row] = at - (weights + row * stride) + i;
    }
}
