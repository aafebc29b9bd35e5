// FP8 (e4m3) experts: conversions, and where scales lie.
//
// Definition: SCALE_BLOCKS. 0: a scale for each weight row, and for each input row. 1: a scale for each 128 x 128 block of
// weights, and for each 128 inputs of an input row.
//   weights' scales  SCALE_BLOCKS 0: gate_up [held, 2 width], down [held, hidden]
//                    SCALE_BLOCKS 1: gate_up [held, 2 width / 128, S(hidden)], down [held, ceil(hidden / 128), S(width)]
//                    with S(inputs) = ceil(inputs / 128) rounded up to 4; width a multiple of 128
//   inputs' scales   SCALE_BLOCKS 0: [rows]; SCALE_BLOCKS 1: [ceil(inputs / 128), row capacity rounded up to 4]
// A weight is code * scale. An input is quantised when it is there: see quantise_row. Sums are f32: each 128 inputs are summed by
// the tensor cores, multiplied by both scales and added to the others in order.
#pragma once
#include "dependent.cuh"
#include "experts_choices.cuh"

constexpr int GROUP = 128;
constexpr float E4M3_MAX = 448.0f;

__device__ __forceinline__ constexpr int groups_of(int inputs) { return (inputs + GROUP - 1) / GROUP; }
/// From the scales of a row of weight blocks to the next.
__device__ __forceinline__ constexpr int scale_stride(int inputs) { return (groups_of(inputs) + 3) / 4 * 4; }
/// From the inputs' scales of a group to those of the next.
__device__ __forceinline__ constexpr int group_stride(int rows) { return SCALE_BLOCKS ? (rows + 3) / 4 * 4 : 0; }

/// Two codes as two f16, exactly; the low byte is first.
__device__ __forceinline__ u32 halves_of(u16 codes) {
    u32 halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
    return halves;
}
__device__ __forceinline__ u32 low_halves(u32 codes) { return halves_of((u16)codes); }
__device__ __forceinline__ u32 high_halves(u32 codes) { return halves_of((u16)(codes >> 16)); }

/// Four codes, to nearest even, at most 448 in size.
__device__ __forceinline__ u32 codes_of(float a, float b, float c, float d) {
    u16 low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
    return (u32)low | (u32)high << 16;
}
