/* One AdamW step over several tensors: fp32 parameters, or fp32 masters stored as a bf16 high half and a 16-bit low half.

   Each state is read once and written once. The arithmetic is that of the vectorised body of torch's fused AdamW on
   the CPU, operation by operation, so that the bits are the same; it is built without contraction, so that only
   `fmaf` fuses. All tensors are one loop over pieces: to wake threads takes longer than to update a small tensor.

   `tensors` has for each tensor: the address of its values or high half, that of its low half (0 where it is whole),
   its gradient's, whether the gradient is bf16, the addresses of both moments, and the number of elements, a multiple
   of 16: torch rounds the rest of a tensor otherwise, and does it itself. `scalars` has for each tensor: gradient scale,
   1 - lr * weight_decay, lerp weight (1 - beta1), beta2, 1 - beta2, sqrt(1 - beta2^t), eps, -lr / (1 - beta1^t). */

#include <math.h>
#include <stdint.h>
#include <string.h>

static inline float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t as_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

enum { NUMBERS = 7, SCALARS = 8, PIECE = 1 << 16 };

#define INLINE static inline
#include "adamw_step.h"

#define UPDATE(LOAD, GRADIENT, STORE)                                                                          \
    _Pragma("omp simd") for (int64_t i = start; i < end; i++) { STEP(LOAD, GRADIENT, STORE) }

static void piece_of(const int64_t *tensor, const float *scalars, int64_t start, int64_t end) {
    float *restrict values = (float *)(intptr_t)tensor[0];
    uint16_t *restrict high = (uint16_t *)(intptr_t)tensor[0];
    int16_t *restrict low = (int16_t *)(intptr_t)tensor[1];
    const float *restrict wide = (const float *)(intptr_t)tensor[2];
    const uint16_t *restrict narrow = (const uint16_t *)(intptr_t)tensor[2];
    float *restrict mean = (float *)(intptr_t)tensor[4];
    float *restrict square = (float *)(intptr_t)tensor[5];
    const float scale = scalars[0], decay = scalars[1], weight = scalars[2], beta2 = scalars[3];
    const float rest2 = scalars[4], correction = scalars[5], eps = scalars[6], size = scalars[7];
    const int is_near = weight < 0.5f;
    /* Not in the loop: gcc makes no vectors of a choice in which an operation could trap. */
    const float toward = is_near ? weight : weight - 1.0f;
    if (low && tensor[3]) {
        UPDATE(JOIN, NARROW, SPLIT)
    } else if (low) {
        UPDATE(JOIN, WIDE, SPLIT)
    } else if (tensor[3]) {
        UPDATE(values[i], NARROW, KEEP)
    } else {
        UPDATE(values[i], WIDE, KEEP)
    }
}

void adamw(const int64_t *restrict tensors, const float *restrict scalars, int64_t number, int threads) {
    int64_t pieces = 0;
    for (int64_t t = 0; t < number; t++) pieces += (tensors[NUMBERS * t + 6] + PIECE - 1) / PIECE;
    _Pragma("omp parallel for schedule(static) num_threads(threads)") for (int64_t at = 0; at < pieces; at++) {
        int64_t t = 0, index = at, n = tensors[6];
        while (index >= (n + PIECE - 1) / PIECE) {
            index -= (n + PIECE - 1) / PIECE;
            n = tensors[NUMBERS * ++t + 6];
        }
        const int64_t start = index * PIECE, end = start + PIECE < n ? start + PIECE : n;
        piece_of(tensors + NUMBERS * t, scalars + SCALARS * t, start, end);
    }
}
