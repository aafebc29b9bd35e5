// Hopper's own instructions (sm_90a): mbarriers, the tensor memory accelerator, wgmma.
#pragma once

/// A CUtensorMap as cuTensorMapEncodeTiled writes it; passed by value as a __grid_constant__ parameter.
struct alignas(64) TensorMap {
    u64 words[16];
};

__device__ __forceinline__ u32 smem(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void barrier_expect(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
/// One arrival once this thread's cp.async so far have landed.
__device__ __forceinline__ void barrier_arrive_after_cp_async(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra finish;\nbra again;\nfinish:\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

/// This block's number in its cluster.
__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
/// All threads of the cluster meet.
__device__ __forceinline__ void cluster_meet() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
/// Where another block of the cluster has what lies here at `at`.
__device__ __forceinline__ u32 cluster_address(u32 at, u32 rank) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
    return there;
}
/// Orders nothing but what this block's threads see: a release for the whole cluster is a fence of the GPU's memory, which
/// took longer than the stage it was for. Enough where only reads of shared memory come before it.
__device__ __forceinline__ void barrier_arrive_there(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/// Ordinary writes to shared memory before this are seen by wgmma and bulk copies after it.
__device__ __forceinline__ void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

template <int THREADS> __device__ __forceinline__ void named_barrier(int id) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

__device__ __forceinline__ void tma_load_2d(u32 to, const TensorMap& map, u32 barrier, int c0, int c1) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
                 "l"(&map), "r"(barrier), "r"(c0), "r"(c1)
                 : "memory");
}
/// To the same place of every block of a cluster of BLOCKS; each one's barrier hears of it.
template <int BLOCKS>
__device__ __forceinline__ void tma_load_3d(u32 to, const TensorMap& map, u32 barrier, int c0, int c1, int c2) {
    if (BLOCKS == 1)
        asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
                     "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2)
                     : "memory");
    else
        asm volatile(
            "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%4, %5, %6}], "
            "[%2], %3;" ::"r"(to),
            "l"(&map), "r"(barrier), "h"((u16)((1 << BLOCKS) - 1)), "r"(c0), "r"(c1), "r"(c2)
            : "memory");
}
template <int BLOCKS>
__device__ __forceinline__ void tma_load_5d(u32 to, const TensorMap& map, u32 barrier, int c0, int c1, int c2, int c3, int c4) {
    if (BLOCKS == 1)
        asm volatile(
            "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(to),
            "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
            : "memory");
    else
        asm volatile(
            "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%4, %5, %6, %7, "
            "%8}], [%2], %3;" ::"r"(to),
            "l"(&map), "r"(barrier), "h"((u16)((1 << BLOCKS) - 1)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
            : "memory");
}
__device__ __forceinline__ void tma_prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/// Four 8x8 matrices of 16-bit values, transposed: lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void store_transposed_x4(u32 to, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
/// The same as they are.
__device__ __forceinline__ void store_x4(u32 to, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
template <int N> __device__ __forceinline__ void registers_more() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> __device__ __forceinline__ void registers_less() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }

/// A tile of rows of 64 bf16 along K, 128-byte swizzled, 1024-byte aligned: what TMA writes with SWIZZLE_128B. Inside it,
/// 16 values along K further are 32 bytes further.
__device__ __forceinline__ u64 wgmma_tile(u32 at) {
    return (u64)((at & 0x3ffff) >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }

/// d[64, N] (+)= a[64, 16] b[N, 16]^T in bf16 with f32 sums; a and b in shared memory. d[4 j + i] of a lane is column
/// 8 j + lane % 4 * 2 + i % 2 of row warp * 16 + lane / 4 + i / 2 * 8. `add` = 0 starts from zero.
/// N is a multiple of 8 up to 160, or 256.
template <int N> struct Wgmma;
constexpr int WGMMA_REGISTERS = 80;

#define WGMMA_R0 "%0, %1, %2, %3"
#define WGMMA_R1 "%4, %5, %6, %7"
#define WGMMA_R2 "%8, %9, %10, %11"
#define WGMMA_R3 "%12, %13, %14, %15"
#define WGMMA_R4 "%16, %17, %18, %19"
#define WGMMA_R5 "%20, %21, %22, %23"
#define WGMMA_R6 "%24, %25, %26, %27"
#define WGMMA_R7 "%28, %29, %30, %31"
#define WGMMA_R8 "%32, %33, %34, %35"
#define WGMMA_R9 "%36, %37, %38, %39"
#define WGMMA_R10 "%40, %41, %42, %43"
#define WGMMA_R11 "%44, %45, %46, %47"
#define WGMMA_R12 "%48, %49, %50, %51"
#define WGMMA_R13 "%52, %53, %54, %55"
#define WGMMA_R14 "%56, %57, %58, %59"
#define WGMMA_R15 "%60, %61, %62, %63"
#define WGMMA_R16 "%64, %65, %66, %67"
#define WGMMA_R17 "%68, %69, %70, %71"
#define WGMMA_R18 "%72, %73, %74, %75"
#define WGMMA_R19 "%76, %77, %78, %79"
#define WGMMA_R20 "%80, %81, %82, %83"
#define WGMMA_R21 "%84, %85, %86, %87"
#define WGMMA_R22 "%88, %89, %90, %91"
#define WGMMA_R23 "%92, %93, %94, %95"
#define WGMMA_R24 "%96, %97, %98, %99"
#define WGMMA_R25 "%100, %101, %102, %103"
#define WGMMA_R26 "%104, %105, %106, %107"
#define WGMMA_R27 "%108, %109, %110, %111"
#define WGMMA_R28 "%112, %113, %114, %115"
#define WGMMA_R29 "%116, %117, %118, %119"
#define WGMMA_R30 "%120, %121, %122, %123"
#define WGMMA_R31 "%124, %125, %126, %127"
#define WGMMA_D(i) "+f"(d[4 * i]), "+f"(d[4 * i + 1]), "+f"(d[4 * i + 2]), "+f"(d[4 * i + 3])
#define WGMMA_S1 WGMMA_R0
#define WGMMA_S2 WGMMA_S1 ", " WGMMA_R1
#define WGMMA_S3 WGMMA_S2 ", " WGMMA_R2
#define WGMMA_S4 WGMMA_S3 ", " WGMMA_R3
#define WGMMA_S5 WGMMA_S4 ", " WGMMA_R4
#define WGMMA_S6 WGMMA_S5 ", " WGMMA_R5
#define WGMMA_S7 WGMMA_S6 ", " WGMMA_R6
#define WGMMA_S8 WGMMA_S7 ", " WGMMA_R7
#define WGMMA_S9 WGMMA_S8 ", " WGMMA_R8
#define WGMMA_S10 WGMMA_S9 ", " WGMMA_R9
#define WGMMA_S11 WGMMA_S10 ", " WGMMA_R10
#define WGMMA_S12 WGMMA_S11 ", " WGMMA_R11
#define WGMMA_S13 WGMMA_S12 ", " WGMMA_R12
#define WGMMA_S14 WGMMA_S13 ", " WGMMA_R13
#define WGMMA_S15 WGMMA_S14 ", " WGMMA_R14
#define WGMMA_S16 WGMMA_S15 ", " WGMMA_R15
#define WGMMA_S17 WGMMA_S16 ", " WGMMA_R16
#define WGMMA_S18 WGMMA_S17 ", " WGMMA_R17
#define WGMMA_S19 WGMMA_S18 ", " WGMMA_R18
#define WGMMA_S20 WGMMA_S19 ", " WGMMA_R19
#define WGMMA_S21 WGMMA_S20 ", " WGMMA_R20
#define WGMMA_S22 WGMMA_S21 ", " WGMMA_R21
#define WGMMA_S23 WGMMA_S22 ", " WGMMA_R22
#define WGMMA_S24 WGMMA_S23 ", " WGMMA_R23
#define WGMMA_S25 WGMMA_S24 ", " WGMMA_R24
#define WGMMA_S26 WGMMA_S25 ", " WGMMA_R25
#define WGMMA_S27 WGMMA_S26 ", " WGMMA_R26
#define WGMMA_S28 WGMMA_S27 ", " WGMMA_R27
#define WGMMA_S29 WGMMA_S28 ", " WGMMA_R28
#define WGMMA_S30 WGMMA_S29 ", " WGMMA_R29
#define WGMMA_S31 WGMMA_S30 ", " WGMMA_R30
#define WGMMA_S32 WGMMA_S31 ", " WGMMA_R31
#define WGMMA_O1 WGMMA_D(0)
#define WGMMA_O2 WGMMA_O1, WGMMA_D(1)
#define WGMMA_O3 WGMMA_O2, WGMMA_D(2)
#define WGMMA_O4 WGMMA_O3, WGMMA_D(3)
#define WGMMA_O5 WGMMA_O4, WGMMA_D(4)
#define WGMMA_O6 WGMMA_O5, WGMMA_D(5)
#define WGMMA_O7 WGMMA_O6, WGMMA_D(6)
#define WGMMA_O8 WGMMA_O7, WGMMA_D(7)
#define WGMMA_O9 WGMMA_O8, WGMMA_D(8)
#define WGMMA_O10 WGMMA_O9, WGMMA_D(9)
#define WGMMA_O11 WGMMA_O10, WGMMA_D(10)
#define WGMMA_O12 WGMMA_O11, WGMMA_D(11)
#define WGMMA_O13 WGMMA_O12, WGMMA_D(12)
#define WGMMA_O14 WGMMA_O13, WGMMA_D(13)
#define WGMMA_O15 WGMMA_O14, WGMMA_D(14)
#define WGMMA_O16 WGMMA_O15, WGMMA_D(15)
#define WGMMA_O17 WGMMA_O16, WGMMA_D(16)
#define WGMMA_O18 WGMMA_O17, WGMMA_D(17)
#define WGMMA_O19 WGMMA_O18, WGMMA_D(18)
#define WGMMA_O20 WGMMA_O19, WGMMA_D(19)
#define WGMMA_O21 WGMMA_O20, WGMMA_D(20)
#define WGMMA_O22 WGMMA_O21, WGMMA_D(21)
#define WGMMA_O23 WGMMA_O22, WGMMA_D(22)
#define WGMMA_O24 WGMMA_O23, WGMMA_D(23)
#define WGMMA_O25 WGMMA_O24, WGMMA_D(24)
#define WGMMA_O26 WGMMA_O25, WGMMA_D(25)
#define WGMMA_O27 WGMMA_O26, WGMMA_D(26)
#define WGMMA_O28 WGMMA_O27, WGMMA_D(27)
#define WGMMA_O29 WGMMA_O28, WGMMA_D(28)
#define WGMMA_O30 WGMMA_O29, WGMMA_D(29)
#define WGMMA_O31 WGMMA_O30, WGMMA_D(30)
#define WGMMA_O32 WGMMA_O31, WGMMA_D(31)
#define WGMMA(N, REGS, A, B, ADD, ...)                                                                                      \
    template <> struct Wgmma<N> {                                                                                           \
        template <int SIZE> static __device__ __forceinline__ void run(float (&d)[SIZE], u64 a, u64 b, int add) {           \
            static_assert(SIZE >= N / 2);                                                                                   \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ADD ", 0;\n"                                                   \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" REGS "}, " A ", " B ", p, 1, 1, 0, 0;\n}" \
                         : __VA_ARGS__                                                                                      \
                         : "l"(a), "l"(b), "r"(add));                                                                       \
        }                                                                                                                   \
    };
WGMMA(8, WGMMA_S1, "%4", "%5", "%6", WGMMA_O1)
WGMMA(16, WGMMA_S2, "%8", "%9", "%10", WGMMA_O2)
WGMMA(24, WGMMA_S3, "%12", "%13", "%14", WGMMA_O3)
WGMMA(32, WGMMA_S4, "%16", "%17", "%18", WGMMA_O4)
WGMMA(40, WGMMA_S5, "%20", "%21", "%22", WGMMA_O5)
WGMMA(48, WGMMA_S6, "%24", "%25", "%26", WGMMA_O6)
WGMMA(56, WGMMA_S7, "%28", "%29", "%30", WGMMA_O7)
WGMMA(64, WGMMA_S8, "%32", "%33", "%34", WGMMA_O8)
WGMMA(72, WGMMA_S9, "%36", "%37", "%38", WGMMA_O9)
WGMMA(80, WGMMA_S10, "%40", "%41", "%42", WGMMA_O10)
WGMMA(88, WGMMA_S11, "%44", "%45", "%46", WGMMA_O11)
WGMMA(96, WGMMA_S12, "%48", "%49", "%50", WGMMA_O12)
WGMMA(104, WGMMA_S13, "%52", "%53", "%54", WGMMA_O13)
WGMMA(112, WGMMA_S14, "%56", "%57", "%58", WGMMA_O14)
WGMMA(120, WGMMA_S15, "%60", "%61", "%62", WGMMA_O15)
WGMMA(128, WGMMA_S16, "%64", "%65", "%66", WGMMA_O16)
WGMMA(136, WGMMA_S17, "%68", "%69", "%70", WGMMA_O17)
WGMMA(144, WGMMA_S18, "%72", "%73", "%74", WGMMA_O18)
WGMMA(152, WGMMA_S19, "%76", "%77", "%78", WGMMA_O19)
WGMMA(160, WGMMA_S20, "%80", "%81", "%82", WGMMA_O20)
WGMMA(256, WGMMA_S32, "%128", "%129", "%130", WGMMA_O32)
