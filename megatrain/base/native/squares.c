/* Sums of the squares of fp32 or bf16 elements of several tensors, one for each piece of a tensor.

   Sixteen sums in fp32 take up to `RUN` squares each before they are added to sixteen in fp64, which are added up in
   order at the end of a piece: so the bits are the same for any number of threads. All tensors are one loop: to wake
   threads takes longer than to read a small tensor. `tensors` has an address, a number of elements and whether they are
   bf16 for each tensor, `owners` and `starts` the tensor of each piece and its first element. */

#include <stdint.h>
#include <string.h>

enum { LANES = 16, RUN = 64 };

static inline float widened(uint16_t bits) {
    uint32_t upper = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &upper, sizeof value);
    return value;
}

#define NARROW widened(narrow[i + lane])
#define WIDE wide[i + lane]

#define SQUARES(ELEMENT)                                                                                       \
    while (i < end) {                                                                                          \
        float run[LANES] = {0};                                                                                \
        const int64_t until = i + RUN * LANES < end ? i + RUN * LANES : end;                                   \
        for (; i + LANES <= until; i += LANES)                                                                 \
            for (int lane = 0; lane < LANES; lane++) run[lane] += (ELEMENT) * (ELEMENT);                       \
        for (int lane = 0; i + lane < until; lane++) run[lane] += (ELEMENT) * (ELEMENT);                       \
        i = until;                                                                                             \
        for (int lane = 0; lane < LANES; lane++) lanes[lane] += run[lane];                                     \
    }

void squares(const int64_t *restrict tensors, const int64_t *restrict owners, const int64_t *restrict starts,
             double *restrict sums, int64_t pieces, int64_t piece, int threads) {
    _Pragma("omp parallel for schedule(static) num_threads(threads)") for (int64_t at = 0; at < pieces; at++) {
        const int64_t *of = tensors + 3 * owners[at];
        const uint16_t *narrow = (const uint16_t *)(intptr_t)of[0];
        const float *wide = (const float *)(intptr_t)of[0];
        int64_t i = starts[at], end = i + piece < of[1] ? i + piece : of[1];
        double lanes[LANES] = {0}, sum = 0;
        if (of[2]) {
            SQUARES(NARROW)
        } else {
            SQUARES(WIDE)
        }
        for (int lane = 0; lane < LANES; lane++) sum += lanes[lane];
        sums[at] = sum;
    }
}
