/* Sums of the squares of fp32 or bf16 elements, one for each piece of them, in fp64.

   The product of two fp32 numbers is exact in fp64. Each piece has sixteen sums, added up in order at its end, so that
   the bits are the same for any number of threads. `sums` has a place for each piece of `piece` elements. */

#include <stdint.h>
#include <string.h>

enum { LANES = 16 };

static inline double widened(uint16_t bits) {
    uint32_t upper = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &upper, sizeof value);
    return value;
}

#define NARROW widened(narrow[i + lane])
#define WIDE (double)wide[i + lane]

#define SQUARES(ELEMENT)                                                                                       \
    _Pragma("omp parallel for schedule(static) num_threads(threads)") for (int64_t at = 0; at < pieces; at++) { \
        double lanes[LANES] = {0};                                                                             \
        int64_t end = (at + 1) * piece < n ? (at + 1) * piece : n, i = at * piece;                             \
        for (; i + LANES <= end; i += LANES)                                                                   \
            for (int lane = 0; lane < LANES; lane++) lanes[lane] += (ELEMENT) * (ELEMENT);                     \
        for (int lane = 0; i + lane < end; lane++) lanes[lane] += (ELEMENT) * (ELEMENT);                       \
        double sum = 0;                                                                                        \
        for (int lane = 0; lane < LANES; lane++) sum += lanes[lane];                                           \
        sums[at] = sum;                                                                                        \
    }

void squares(const void *restrict elements, int is_narrow, double *restrict sums, int64_t n, int64_t piece,
             int threads) {
    const uint16_t *restrict narrow = (const uint16_t *)elements;
    const float *restrict wide = (const float *)elements;
    const int64_t pieces = (n + piece - 1) / piece;
    if (is_narrow) {
        SQUARES(NARROW)
    } else {
        SQUARES(WIDE)
    }
}
