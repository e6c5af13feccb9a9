// Numbers, loops that threads share, and products of tiles, for the files of C here.

#include <math.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

// A tile of TILE rows and WIDE * LANES columns is summed in registers of LANES numbers.
#if defined(__AVX512F__)
enum { LANES = 16, WIDE = 2, TILE = 8 };
#elif defined(__AVX2__)
enum { LANES = 8, WIDE = 2, TILE = 6 };
#else
enum { LANES = 4, WIDE = 4, TILE = 4 };
#endif
enum { PANEL = LANES * WIDE };  // outputs of a matrix that lie together
enum { STRIP = 16 };            // columns of a narrow tile; keys of a page that lie together
enum { MAX_DIM = 256 };         // of a head

typedef float floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

// Weights, KV and what a product reads are of type `element`, the model's. A product adds up PAIR
// neighbouring elements at a time: what one instruction multiplies.
#ifdef BF16
#include <immintrin.h>
enum { PAIR = 2 };
typedef uint16_t element;
typedef union { uint32_t bits; float value; } word;

static inline float to_float(element x) { return ((word){(uint32_t)x << 16}).value; }
static inline element to_element(float x) {  // rounds to nearest, ties to even
    uint32_t bits = ((word){.value = x}).bits;
    return x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0;
}
static inline void store(element *to, floats x) {
    __m256bh rounded = _mm512_cvtneps_pbh((__m512)x);
    memcpy(to, &rounded, sizeof rounded);
}
static inline floats multiply_add(floats sum, const element *x, ints w) {
    int32_t pair;
    memcpy(&pair, x, 4);
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)w);
}
#else
enum { PAIR = 1 };
typedef float element;
static inline float to_float(element x) { return x; }
static inline element to_element(float x) { return x; }
static inline void store(element *to, floats x) { *(floats *)to = x; }
static inline floats multiply_add(floats sum, const element *x, ints w) {
    return sum + *x * (floats)w;
}
#endif

static inline long min(long a, long b) { return a < b ? a : b; }
static inline long max(long a, long b) { return a > b ? a : b; }

static inline floats all(float x) { return (floats){0} + x; }

static inline floats max_of_each(floats a, floats b) {
    ints greater = a > b;
    return (floats)(((ints)a & greater) | ((ints)b & ~greater));
}

static inline float inverse_rms(const float *x, long n, float eps) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (long i = 0; i < n; i++) sum += x[i] * x[i];
    return 1 / sqrtf(sum / n + eps);
}

// exp(x) for x <= 88, 0 below -87, NaN for NaN. It is 2^n e^r, with |r| <= ln(2) / 2 and a
// polynomial for e^r.
static inline floats exponential(floats x) {
    const float shift = 12582912;  // 1.5 * 2^23: adding it leaves n in the low bits
    floats clipped = max_of_each(x, all(-87));
    floats shifted = clipped * 1.442695041f + shift;
    floats n = shifted - shift;
    floats r = clipped - n * 0.693145752f - n * 1.42860677e-6f;
    floats p = 1.0f / 720 + r * (1.0f / 5040);
    p = 1.0f / 120 + r * p;
    p = 1.0f / 24 + r * p;
    p = 1.0f / 6 + r * p;
    p = 1.0f / 2 + r * p;
    p = 1 + r * (1 + r * p);
    ints result = (ints)p + ((ints)shifted << 23);  // n is added to the exponent of p
    return (floats)((result & (x > -87)) | ((ints)x & (x != x)));
}

// Asks memory for elements that are read later: one request a cache line of 64 bytes. A processor
// does this alone for addresses in a row, and cannot know which page comes next.
static inline void prefetch(const element *from, long count) {
    for (long i = 0; i < count; i += 64 / sizeof(element)) __builtin_prefetch(from + i);
}

// The i-th LANES numbers of a tile that is `wide` times LANES columns wide, row by row.
static inline floats *tile_at(float *tile, long stride, int wide, int i) {
    return (floats *)(tile + i / wide * stride + i % wide * LANES);
}

// out [rows, LANES * wide] = x [rows, steps * PAIR] w, added to what it holds if `add`. If `across`,
// x lies as [steps, rows], of single elements.
static inline __attribute__((always_inline)) void sum_tile(
    int rows, int wide, int across, const element *x, long x_stride, const element *w,
    long w_stride, float *out, long out_stride, long steps, int add) {
    floats sum[8 * WIDE];
#pragma GCC unroll 16
    for (int i = 0; i < rows * wide; i++)
        sum[i] = add ? *tile_at(out, out_stride, wide, i) : all(0);
    for (long step = 0; step < steps; step++) {
#pragma GCC unroll 16
        for (int i = 0; i < rows * wide; i++) {
            long row = i / wide;
            long at = across ? step * x_stride + row : row * x_stride + step * PAIR;
            const element *w_pairs = w + step * w_stride + i % wide * LANES * PAIR;
            sum[i] = multiply_add(sum[i], x + at, *(ints *)w_pairs);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < rows * wide; i++) *tile_at(out, out_stride, wide, i) = sum[i];
}

// A function for each shape of a tile, so that its sums stay in registers.
#define CASE(n) case n: sum_tile(n, wide, across, x, xs, w, ws, out, os, steps, add); break;
#define TILES(name, columns, turned)                                                      \
    static void name(int rows, const element *x, long xs, const element *w, long ws,      \
                     float *out, long os, long steps, int add) {                          \
        enum { wide = columns, across = turned };                                         \
        switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) } \
    }
TILES(panel_tile, WIDE, 0)
TILES(strip_tile, STRIP / LANES, 0)

// Threads share a computation in phases, in the same order each. A thread takes the next item of a
// phase until none is left, and goes on once all are done. It waits for work, not for threads: one
// that the system has put aside holds up its item and no other.
typedef struct { _Atomic int64_t taken, done; } phase;

// Counts the item `finished`, unless it is -1, and returns the next item; -1 at the phase's end.
static inline long next_item(phase **current, long finished, long items) {
    phase *shared = *current;
    if (finished >= 0) shared->done++;
    long item = shared->taken++;
    if (item < items) return item;
    for (long polls = 0; shared->done < items; polls++) {
        if (polls > 1000) sched_yield();
    }
    ++*current;
    return -1;
}

// A loop over 0 .. items - 1 that the threads share, as one phase.
#define SHARED_LOOP(current, item, items) \
    for (long item = -1; (item = next_item(current, item, items)) >= 0;)

// out [rows, outputs] = x [rows, inputs] W^T, added to what it holds if `add`. W lies in whole
// panels: [outputs / PANEL, inputs / PAIR, PANEL, PAIR].
static void product(phase **current, const element *x, long rows, long inputs, const element *w,
                    long outputs, float *out, int add) {
    long panels = outputs / PANEL;
    long rows_of_item = 8 * TILE;  // they read a panel while it is in the cache
    long row_items = (rows + rows_of_item - 1) / rows_of_item;
    SHARED_LOOP(current, item, row_items * panels) {
        long start = item / panels * rows_of_item;
        long end = min(rows, start + rows_of_item);
        long output = item % panels * PANEL;
        for (long row = start; row < end; row += TILE)
            panel_tile(min(TILE, rows - row), x + row * inputs, inputs, w + output * inputs,
                       PANEL * PAIR, out + row * outputs + output, outputs, inputs / PAIR, add);
    }
}
