// Numbers, and products with packed matrices. native.py describes the build.

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
enum { PANEL = LANES * WIDE };

typedef float floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

// A product adds up PAIR neighbouring elements at a time: what one instruction multiplies.
#ifdef BF16
#include <immintrin.h>
enum { PAIR = 2 };
typedef uint16_t element;
typedef union { uint32_t bits; float value; } word;

static inline float get(element x) { return ((word){(uint32_t)x << 16}).value; }
static inline element put(float x) {  // rounds to nearest, ties to even
    uint32_t bits = ((word){.value = x}).bits;
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

static inline long least(long a, long b) { return a < b ? a : b; }

// out [rows, LANES * wide] = x [rows, steps * PAIR] w, added to what it holds if `add`.
static inline __attribute__((always_inline)) void sum_tile(
    int rows, int wide, const element *x, long x_stride, const element *w, long w_stride,
    float *out, long out_stride, long steps, int add) {
    floats sum[8 * WIDE];
#pragma GCC unroll 16
    for (int i = 0; i < rows * wide; i++)
        sum[i] = add ? *(floats *)(out + i / wide * out_stride + i % wide * LANES) : (floats){0};
    for (long step = 0; step < steps; step++)
#pragma GCC unroll 16
        for (int i = 0; i < rows * wide; i++)
            sum[i] = multiply_add(sum[i], x + i / wide * x_stride + step * PAIR,
                                  *(ints *)(w + step * w_stride + i % wide * LANES * PAIR));
#pragma GCC unroll 16
    for (int i = 0; i < rows * wide; i++)
        *(floats *)(out + i / wide * out_stride + i % wide * LANES) = sum[i];
}

#define CASE(n) case n: sum_tile(n, wide, x, xs, w, ws, out, os, steps, add); break;
#define TILES(name, columns)                                                              \
    static void name(int rows, const element *x, long xs, const element *w, long ws,      \
                     float *out, long os, long steps, int add) {                          \
        enum { wide = columns };                                                          \
        switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) } \
    }
TILES(wide_tile, WIDE)
TILES(narrow_tile, 16 / LANES)  // 16 columns

// out [rows, n] = x [rows, k] W^T, added to what it holds if `add`. n is whole panels of PANEL
// outputs, and w has for each [k / PAIR, PANEL, PAIR].
static void product(const element *x, long rows, long k, const element *w, long n, float *out,
                    int add) {
#pragma omp for collapse(2) schedule(static)
    for (long block = 0; block < rows; block += 8 * TILE)
        for (long first = 0; first < n; first += PANEL)
            for (long row = block; row < least(rows, block + 8 * TILE); row += TILE) {
                long count = least(TILE, rows - row);
                wide_tile(count, x + row * k, k, w + first * k, PANEL * PAIR,
                          out + row * n + first, n, k / PAIR, add);
            }
}
