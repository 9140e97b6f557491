/* One element of an AdamW step, the same source for the host (`adamw.c`) and for CUDA: each operation rounds as IEEE says,
   and only `fmaf` fuses, so that the bits don't depend on where it runs. Who includes it has `as_float`, `as_bits` and
   types of exact width, and names tensors and numbers as below. */

#define NARROW as_float((uint32_t)narrow[i] << 16)
#define WIDE wide[i]

/* LOAD is an expression for the parameter, STORE a statement that takes `p`. */
#define STEP(LOAD, GRADIENT, STORE)                                                                            \
    float g = (GRADIENT) * scale;                                                                              \
    float p = (LOAD) * decay;                                                                                  \
    float m = fmaf(toward, g - mean[i], is_near ? mean[i] : g);                                                \
    float v = fmaf(rest2 * g, g, square[i] * beta2);                                                           \
    float denominator = sqrtf(v) / correction + eps;                                                           \
    p = p + size * m / denominator;                                                                            \
    mean[i] = m;                                                                                               \
    square[i] = v;                                                                                             \
    STORE

/* Where something else wrote the high half, the low one may not belong to it: next to a zero the sum would be NaN. */
INLINE float join(uint16_t high, int16_t low) {
    uint32_t upper = (uint32_t)high << 16, bits = upper + (uint32_t)(int32_t)low;
    return as_float((bits & 0x7fffffffu) > 0x7f800000u ? upper : bits);
}

#define JOIN join(high[i], low[i])
#define SPLIT                                                                                                  \
    uint32_t bits = as_bits(p);                                                                                \
    int is_nan = (bits & 0x7fffffffu) > 0x7f800000u;                                                           \
    bits = is_nan ? ((bits | 0x400000u) & 0xffff0000u) : bits;                                                 \
    high[i] = (uint16_t)((is_nan ? bits : bits + 0x8000u) >> 16);                                              \
    low[i] = (int16_t)(uint16_t)bits;

#define KEEP values[i] = p;
