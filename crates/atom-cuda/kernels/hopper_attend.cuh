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
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
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
__device__ __forceinline__ void tma_load_3d(u32 to, const TensorMap& map, u32 barrier, int c0, int c1, int c2) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
                 "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2)
                 : "memory");
}
__device__ __forceinline__ void tma_load_5d(u32 to, const TensorMap& map, u32 barrier, int c0, int c1, int c2, int c3, int c4) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
        : "memory");
}
__device__ __forceinline__ void tma_prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/// Four 8x8 matrices of 16-bit values, transposed: lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void store_transposed_x4(u32 to, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
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
template <int N> struct Wgmma;

#define WGMMA_R0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define WGMMA_R1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_R2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define WGMMA_R3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_R4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define WGMMA_R5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_R6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define WGMMA_R7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_R8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define WGMMA_R9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define WGMMA_R10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define WGMMA_R11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_R12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define WGMMA_R13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define WGMMA_R14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define WGMMA_R15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define WGMMA_D(i) "+f"(d[8 * i]), "+f"(d[8 * i + 1]), "+f"(d[8 * i + 2]), "+f"(d[8 * i + 3]), "+f"(d[8 * i + 4]), \
                   "+f"(d[8 * i + 5]), "+f"(d[8 * i + 6]), "+f"(d[8 * i + 7])
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
#define WGMMA(N, REGS, A, B, ADD, ...)                                                                                      \
    template <> struct Wgmma<N> {                                                                                           \
        static __device__ __forceinline__ void run(float (&d)[128], u64 a, u64 b, int add) {                                \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ADD ", 0;\n"                                                   \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" REGS "}, " A ", " B ", p, 1, 1, 0, 0;\n}" \
                         : __VA_ARGS__                                                                                      \
                         : "l"(a), "l"(b), "r"(add));                                                                       \
        }                                                                                                                   \
    };
WGMMA(16, WGMMA_S1, "%8", "%9", "%10", WGMMA_O1)
WGMMA(32, WGMMA_S2, "%16", "%17", "%18", WGMMA_O2)
WGMMA(48, WGMMA_S3, "%24", "%25", "%26", WGMMA_O3)
WGMMA(64, WGMMA_S4, "%32", "%33", "%34", WGMMA_O4)
WGMMA(80, WGMMA_S5, "%40", "%41", "%42", WGMMA_O5)
WGMMA(96, WGMMA_S6, "%48", "%49", "%50", WGMMA_O6)
WGMMA(112, WGMMA_S7, "%56", "%57", "%58", WGMMA_O7)
WGMMA(128, WGMMA_S8, "%64", "%65", "%66", WGMMA_O8)
WGMMA(144, WGMMA_S9, "%72", "%73", "%74", WGMMA_O9)
WGMMA(160, WGMMA_S10, "%80", "%81", "%82", WGMMA_O10)
WGMMA(176, WGMMA_S11, "%88", "%89", "%90", WGMMA_O11)
WGMMA(192, WGMMA_S12, "%96", "%97", "%98", WGMMA_O12)
WGMMA(208, WGMMA_S13, "%104", "%105", "%106", WGMMA_O13)
WGMMA(224, WGMMA_S14, "%112", "%113", "%114", WGMMA_O14)
WGMMA(240, WGMMA_S15, "%120", "%121", "%122", WGMMA_O15)
WGMMA(256, WGMMA_S16, "%128", "%129", "%130", WGMMA_O16)
