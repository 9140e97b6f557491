/* One AdamW step with moments of 8 bits: see megatrain/optim/adamw_8bit.py for the codes.

   Moments are decoded in registers, updated, and encoded again; each state is read once and written once. Every
   operation is rounded by itself, so that the bits are those of torch's operations one after the other. `tensors` has for each tensor: the address of its values or high half, that of its low half (0 where it is
   whole), its gradient's, whether the gradient is bf16, the addresses of the codes of both moments, of their scales
   (bf16 and fp32), and the number of elements, a multiple of 32. `scalars` are those of `adamw.c`. */

#include "adamw.c"

enum { GROUP = 32, BATCH = 8, NUMBERS_8BIT = 9, GROUPS_OF_A_PIECE = 1 << 11 };

static const float PER_SQUARE = 0x1.040c2p-14f, PER_ROOT = 0x1.00804p-8f; /* 1 / 127^2 and 1 / 255.5, rounded */

/* The bf16 value that is as large or the next larger one; zero instead of values whose inverse may be infinite. */
static inline uint16_t raised(uint32_t bits) {
    return bits > 0x7f800000u ? 0x7fc0 : bits < 0x00800000u ? 0 : (uint16_t)((bits + 0xffffu) >> 16);
}

/* What isn't a number, or has no bound, is in the scale: then all codes are 0, and all elements of a group NaN. */
static inline float inverse(uint32_t bits) { return bits == 0 || bits >= 0x7f800000u ? 0.0f : 1.0f / as_float(bits); }

/* The low byte of the nearest whole number, an even one at a tie: the sum has no bits below one. */
static inline uint8_t rounded(float value) { return (uint8_t)as_bits(value + 0x1.8p23f); }

/* Some groups at a time: while one waits for its largest element, the others go on. */
#define UPDATE_8BIT(LOAD, GRADIENT, STORE)                                                                            \
    for (int64_t batch = first; batch < last; batch += BATCH) {                                                       \
        const int groups = last - batch < BATCH ? (int)(last - batch) : BATCH;                                        \
        const int64_t start = batch * GROUP;                                                                          \
        float means[BATCH * GROUP], roots[BATCH * GROUP];                                                             \
        for (int k = 0; k < groups; k++) {                                                                            \
            const float mean_step = as_float((uint32_t)mean_scales[batch + k] << 16) * PER_SQUARE;                    \
            const float root_step = root_scales[batch + k] * PER_ROOT;                                                \
            _Pragma("omp simd") for (int j = GROUP * k; j < GROUP * (k + 1); j++) {                                   \
                const int64_t i = start + j;                                                                          \
                float code = (float)mean[i];                                                                          \
                float old = code * fabsf(code) * mean_step;                                                           \
                float root = ((float)square[i] + 0.5f) * root_step;                                                   \
                float g = (GRADIENT) * scale;                                                                         \
                float p = (LOAD) * decay;                                                                             \
                float m = old + (g - old) * weight;                                                                   \
                root = sqrtf(root * root * beta2 + g * g * rest2);                                                    \
                p = p + m * size / (root + eps);                                                                      \
                means[j] = m;                                                                                         \
                roots[j] = root;                                                                                      \
                STORE                                                                                                 \
            }                                                                                                         \
        }                                                                                                             \
        for (int k = 0; k < groups; k++) {                                                                            \
            uint32_t largest_mean = 0, largest_root = 0;                                                              \
            _Pragma("omp simd reduction(max : largest_mean, largest_root)")                                           \
            for (int j = GROUP * k; j < GROUP * (k + 1); j++) {                                                       \
                uint32_t mean_bits = as_bits(means[j]) & 0x7fffffffu, root_bits = as_bits(roots[j]) & 0x7fffffffu;    \
                largest_mean = mean_bits > largest_mean ? mean_bits : largest_mean;                                   \
                largest_root = root_bits > largest_root ? root_bits : largest_root;                                   \
            }                                                                                                         \
            mean_scales[batch + k] = raised(largest_mean);                                                            \
            root_scales[batch + k] = as_float(largest_root);                                                          \
        }                                                                                                             \
        for (int k = 0; k < groups; k++) {                                                                            \
            const float per_mean = inverse((uint32_t)mean_scales[batch + k] << 16);                                   \
            const float per_root = inverse(as_bits(root_scales[batch + k])) * 255.5f;                                 \
            if (per_mean == 0.0f) memset(means + GROUP * k, 0, GROUP * sizeof *means);                                \
            if (per_root == 0.0f) memset(roots + GROUP * k, 0, GROUP * sizeof *roots);                                \
            _Pragma("omp simd") for (int j = GROUP * k; j < GROUP * (k + 1); j++) {                                   \
                float code = sqrtf(fabsf(means[j]) * per_mean) * 127.0f;                                              \
                mean[start + j] = (int8_t)rounded(copysignf(code, means[j]));                                         \
                square[start + j] = (uint8_t)rounded(roots[j] * per_root - 0.5f);                                     \
            }                                                                                                         \
        }                                                                                                             \
    }

static void groups_of(const int64_t *tensor, const float *scalars, int64_t first, int64_t last) {
    float *restrict values = (float *)(intptr_t)tensor[0];
    uint16_t *restrict high = (uint16_t *)(intptr_t)tensor[0];
    int16_t *restrict low = (int16_t *)(intptr_t)tensor[1];
    const float *restrict wide = (const float *)(intptr_t)tensor[2];
    const uint16_t *restrict narrow = (const uint16_t *)(intptr_t)tensor[2];
    int8_t *restrict mean = (int8_t *)(intptr_t)tensor[4];
    uint8_t *restrict square = (uint8_t *)(intptr_t)tensor[5];
    uint16_t *restrict mean_scales = (uint16_t *)(intptr_t)tensor[6];
    float *restrict root_scales = (float *)(intptr_t)tensor[7];
    const float scale = scalars[0], decay = scalars[1], weight = scalars[2], beta2 = scalars[3];
    /* p - lr m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps), with one division. */
    const float rest2 = scalars[4], eps = scalars[6] * scalars[5], size = scalars[7] * scalars[5];
    if (low && tensor[3]) {
        UPDATE_8BIT(JOIN, NARROW, SPLIT)
    } else if (low) {
        UPDATE_8BIT(JOIN, WIDE, SPLIT)
    } else if (tensor[3]) {
        UPDATE_8BIT(values[i], NARROW, KEEP)
    } else {
        UPDATE_8BIT(values[i], WIDE, KEEP)
    }
}

void adamw_8bit(const int64_t *restrict tensors, const float *restrict scalars, int64_t number, int threads) {
    int64_t pieces = 0;
    for (int64_t t = 0; t < number; t++)
        pieces += (tensors[NUMBERS_8BIT * t + 8] / GROUP + GROUPS_OF_A_PIECE - 1) / GROUPS_OF_A_PIECE;
    _Pragma("omp parallel for schedule(static) num_threads(threads)") for (int64_t at = 0; at < pieces; at++) {
        int64_t t = 0, index = at, groups = tensors[8] / GROUP;
        while (index >= (groups + GROUPS_OF_A_PIECE - 1) / GROUPS_OF_A_PIECE) {
            index -= (groups + GROUPS_OF_A_PIECE - 1) / GROUPS_OF_A_PIECE;
            groups = tensors[NUMBERS_8BIT * ++t + 8] / GROUP;
        }
        const int64_t first = index * GROUPS_OF_A_PIECE;
        const int64_t end = first + GROUPS_OF_A_PIECE;
        groups_of(tensors + NUMBERS_8BIT * t, scalars + SCALARS * t, first, end < groups ? end : groups);
    }
}
