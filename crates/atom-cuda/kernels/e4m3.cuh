// e4m3: sign, 4 bits of exponent with a bias of 7, 3 bits of mantissa; no infinities, codes of all ones are NaN. Compute
// capability 8.9 and later. Includes nothing; prelude.cuh stands in front.
#pragma once

struct e4m3 {
    u8 bits;
};

/// Two floats as two codes, `low` in the lower byte: to nearest even; beyond the largest value that one; NaN stays NaN.
__device__ __forceinline__ u16 pack_e4m3(float low, float high) {
    u16 y;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(high), "f"(low));
    return y;
}

__device__ __forceinline__ e4m3 to_e4m3(float x) { return {(u8)pack_e4m3(x, 0.0f)}; }

/// Two codes as two halves (f16 has all their values), the lower byte first.
__device__ __forceinline__ u32 unpack_e4m3(u16 codes) {
    u32 y;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"(codes));
    return y;
}
