// What the sampler computes row by row on a CPU, for sampler.py. A row of weights is whole buckets
// of BUCKET ids. No row depends on others, or on how threads share them.

#include "native.h"

// weights [rows, stride] = exp(x - peak) for x = logits * inverse, with the peak of each row; 0 for
// x below peak - 87, for ids that are not allowed, and from `vocab` on. allowed[row] is [vocab], or
// NULL if all are. peak_ids: the first id of each peak, NULL if nobody asks.
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
        peaks[row] = peak;
        if (peak_ids) {
            long id = 0;
            while (id < vocab - 1 && x[id] != peak) id++;
            peak_ids[row] = id;
        }
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

// The target, or what is just below the sum in which it is looked for, so that rounding never leads
// to an id without weight. NaN stays: no sum is below it, so it leads to the first id.
static inline double inside(double target, double sum) {
    double most = sum * (1 - 1e-12);
    return target > most ? most : target;
}

// The id of each row at which the running sum of its weights exceeds noise * total, and the total.
void invert(const float *weights, long stride, const double *noise, int64_t *ids, double *totals,
            long rows, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long row = 0; row < rows; row++) {
        const float *first = weights + row * stride, *last = first + stride - BUCKET;
        double total = 0;
        for (const float *bucket = first; bucket <= last; bucket += BUCKET)
            total += sum_of_bucket(bucket);
        totals[row] = total;

        double target = inside(noise[row] * total, total), before = 0;
        const float *bucket = first;
        while (bucket < last && before + sum_of_bucket(bucket) <= target) {
            before += sum_of_bucket(bucket);
            bucket += BUCKET;
        }

        double within = 0, sum = bucket[0];
        for (int i = 0; i < BUCKET; i++) within += bucket[i];
        double rest = inside(target - before, within);
        int i = 0;
        while (i < BUCKET - 1 && sum <= rest) sum += bucket[++i];
        ids[row] = bucket - first + i;
    }
}
