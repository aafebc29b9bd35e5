// e4m3 of the KV cache, of weights and of their inputs, as the Open Compute Project defines it ("8-bit floating point
// specification", 2023): a sign, four bits of exponent with a bias of 7, three of fraction. 448 is the most; 0x7f and 0xff are
// NaN; nothing is infinite.
#pragma once

struct e4m3 {
    u8 bits;
};

/// Two codes, each in the upper byte of a half (0 below), as two halves; exact, NaN stays NaN. For GPUs without the
/// instruction.
__device__ __forceinline__ u32 halves_by_bits(u32 codes) {
    // A half's exponent has a bias of 15, so what stands there is 2^8 too small.
    const u32 magnitude = (codes & 0x7f007f00u) >> 1;
    const u32 nan = ((magnitude + 0x00800080u) >> 14 & 0x00010001u) * 0x7c00u;
    u32 halves = (codes & 0x80008000u) | magnitude;
    asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(halves) : "r"(0x5c005c00u));  // 256
    return halves | nan;
}

/// Four codes as four halves, two a word, the lowest first in memory; exact, NaN stays NaN.
__device__ __forceinline__ uint2 to_halves(u32 codes) {
    uint2 halves;
#if __CUDA_ARCH__ >= 890
    // The instruction takes either half of a register as it is.
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}"
        : "=r"(halves.x), "=r"(halves.y)
        : "r"(codes));
#else
    halves.x = halves_by_bits(__byte_perm(codes, 0, 0x1404));
    halves.y = halves_by_bits(__byte_perm(codes, 0, 0x3424));
#endif
    return halves;
}

__device__ __forceinline__ float to_float(e4m3 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"((u16)halves_by_bits((u32)x.bits << 8)));
    return y;
}

/// The code of the nearest number, ties to even; beyond 448 that of 448. By bits alone, see `pack_e4m3`.
__device__ __forceinline__ u32 code_by_bits(float x) {
    const u32 sign = __float_as_uint(x) >> 24 & 0x80;
    const float magnitude = fabsf(x);
    if (magnitude != magnitude) return 0x7f;
    if (magnitude >= 448.0f) return sign | 0x7e;
    // Multiples of 2^-9 below the smallest number with a full fraction; eight of them are that number's code.
    if (magnitude < 0.015625f) return sign | (u32)rintf(magnitude * 512.0f);
    u32 bits = __float_as_uint(magnitude);
    bits += 0x7ffff + (bits >> 20 & 1);
    return sign | ((bits >> 20) - (120 << 3));
}

/// Two floats as two codes, `low` in the lowest byte: nearest, ties to even, at most 448.
__device__ __forceinline__ u32 pack_e4m3(float low, float high) {
#if __CUDA_ARCH__ >= 890
    u16 codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    return codes;
#else
    return code_by_bits(low) | code_by_bits(high) << 8;
#endif
}

template <> struct From<e4m3> {
    static __device__ __forceinline__ e4m3 of(float x) { return {(u8)pack_e4m3(x, 0.0f)}; }
};

/// Two floats as two halves in one word, `low` first in memory.
__device__ __forceinline__ u32 pack_halves(float low, float high) {
    u32 y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

/// A power of two that brings numbers of up to `most` below 2^15, so that none is too large for a half, and what goes
/// back. Halves have three bits more than bf16; only what is 2^-28 of `most` or less loses any.
struct Shift {
    float there, back;
    __device__ __forceinline__ explicit Shift(float most) {
        const int exponent = max((int)(__float_as_uint(most) >> 23 & 0xff) - 127, -100);
        there = __int_as_float((127 + 14 - exponent) << 23);
        back = __int_as_float((127 + exponent - 14) << 23);
    }
    /// Two bf16 as two halves.
    __device__ __forceinline__ u32 halves(u32 pair) const {
        return pack_halves(low_float(pair) * there, high_float(pair) * there);
    }
};
