/* One AdamW step over one tensor, on CUDA: a thread for each element. Built without contraction, as `adamw.c` is.

   `values` is fp32, or the bf16 high half of masters whose low half is `low`. Numbers are those of `adamw.c`: rounded to
   fp32 here, from Python's. */

typedef unsigned int uint32_t;
typedef int int32_t;
typedef unsigned short uint16_t;
typedef short int16_t;

#define INLINE static __device__ __forceinline__

INLINE float as_float(uint32_t bits) { return __uint_as_float(bits); }

INLINE uint32_t as_bits(float value) { return __float_as_uint(value); }

#include "adamw_step.h"

extern "C" __global__ void adamw(void *first, int16_t *low, const void *gradient, float *mean, float *square, int n,
                                 int is_split, int is_narrow, double scale_, double decay_, double weight_,
                                 double beta2_, double rest2_, double correction_, double eps_, double size_) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float *values = (float *)first;
    uint16_t *high = (uint16_t *)first;
    const float *wide = (const float *)gradient;
    const uint16_t *narrow = (const uint16_t *)gradient;
    const float scale = (float)scale_, decay = (float)decay_, weight = (float)weight_, beta2 = (float)beta2_;
    const float rest2 = (float)rest2_, correction = (float)correction_, eps = (float)eps_, size = (float)size_;
    const int is_near = weight < 0.5f;
    const float toward = is_near ? weight : weight - 1.0f;
    if (is_split && is_narrow) {
        STEP(JOIN, NARROW, SPLIT)
    } else if (is_split) {
        STEP(JOIN, WIDE, SPLIT)
    } else if (is_narrow) {
        STEP(values[i], NARROW, KEEP)
    } else {
        STEP(values[i], WIDE, KEEP)
    }
}
