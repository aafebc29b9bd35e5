// How ranks of one process meet inside a kernel: windows, flags, and pieces of rows.
//
// A communicator has a window on every member's GPU, all of one layout (window.rs): a line of its own use, a table of all
// members' windows, a flag for every member and block, and two sets of room for what the others bring. A collective is one
// kernel on every member, all in the same grid. It pushes: each block stores its part of what the others need into the
// set of its round in their windows, then its round into its flag there; it waits until the same block of every member has done so
// here; and it makes the result of what lies in its own window. What a block takes is a share of each lane's real rows in
// the grid, so that it depends on nothing but the block of that number elsewhere.
//
// Two sets are enough. A member that writes into set `r & 1` in round r has ended the kernel of round r - 1, so it has
// seen everybody's flags of it, and these are stored when everybody has ended the kernel of round r - 2: that set was read.
// For that a kernel touches nothing before `wait_for_inputs`. The next kernel may start only when all members have come:
// on a GPU that ranks share it must not take the room of a kernel that others wait for.
#pragma once
#include "rows.cuh"

constexpr u32 EXCHANGE_THREADS = 512;
/// The next four as in window.rs.
constexpr u32 MEMBERS_MAX = 64;
constexpr u32 BLOCKS_MAX = 128;
constexpr u32 LINE = 128;
/// Bytes into a window: the round in which this member gave up, and the table.
constexpr u32 GAVE_UP = 0, TABLE = LINE;
/// What stands there, and in flags, before there is a round: a number that no round is near for long.
constexpr u32 NEVER = 0x80808080u;
/// Looks at a flag between two at the host's word and the clock, and looks without a pause.
constexpr u32 LOOKS = 64, LOOKS_EAGER = 256;

/// What a launcher knows of a collective.
struct Meeting {
    u8* window; // this member's
    const u32* header;
    u32* distress; // in the host's memory: see Distress
    u64 set_bytes;
    u32 flags, sets; // bytes into a window
    u32 members, me;
    u32 round_word; // of the header
    u32 index;      // of the collective among those of the recording and the communicator
};

/// Words by which host and kernels tell each other that something is wrong.
enum Distress {
    ABORT = 0,   // by the host: wait no longer
    WHY = 1,     // by a kernel, behind the others: one of those below, 0 while all is well
    INDEX = 2,   // of the collective
    MISSING = 3, // the member that did not come, and 1
    OF = 4,      // word of the header: which communicator
};
enum Why { BY_TIME = 1, BY_HOST = 2 };

/// A collective that is under way. In shared memory.
struct Exchange {
    u8* windows[MEMBERS_MAX];

    /// Where a member keeps what it is brought in this round.
    __device__ __forceinline__ uint4* set(const Meeting& m, u32 round, u32 member) const {
        return (uint4*)(windows[member] + m.sets + (round & 1) * m.set_bytes);
    }
};

__device__ __forceinline__ void store_release(u32* at, u32 value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

__device__ __forceinline__ u32 load_acquire(const u32* at) {
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}

__device__ __forceinline__ u32 load_relaxed(const u32* at) {
    u32 value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}

/// What a member brought. Never from a cache that doesn't see other GPUs' stores.
__device__ __forceinline__ uint4 load_brought(const uint4* at) {
    uint4 v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at)
                 : "memory");
    return v;
}

/// Flag of a member's block in a window.
__device__ __forceinline__ u32* flag_of(const Meeting& m, u8* window, u32 member) {
    return (u32*)(window + m.flags + (u64)(member * BLOCKS_MAX + blockIdx.x) * LINE);
}

/// Begins a collective and returns its round. All threads call it; then inputs may be read.
__device__ __forceinline__ u32 begin(const Meeting& m, Exchange& exchange) {
    const u64* table = (const u64*)(m.window + TABLE);
    for (u32 member = threadIdx.x; member < m.members; member += blockDim.x)
        exchange.windows[member] = member == m.me ? m.window : (u8*)table[member];
    u32 round = m.header[m.round_word] + m.index;
    wait_for_inputs();
    __syncthreads();
    return round;
}

/// Tells the host, once, why this member went on without another one.
__device__ __noinline__ void give_up(const Meeting& m, u32 round, u32 missing, Why why) {
    if (atomicExch((u32*)(m.window + GAVE_UP), round) == round) return;
    m.distress[INDEX] = m.index;
    m.distress[MISSING] = missing + 1;
    m.distress[OF] = m.round_word;
    store_release(m.distress + WHY, why);
}

/// Waits for a member's block. A member is one round ahead at the most: it waits for this one in the next. A flag that is
/// anything else was stored long ago, or by a member that went on without this one.
__device__ __forceinline__ void wait_for(const Meeting& m, u32 round, u32 member) {
    const u32* flag = flag_of(m, m.window, member);
    u64 since = 0;
    for (u32 looks = 1; load_acquire(flag) - round > 1; looks++) {
        if (looks % LOOKS == 0) {
            // Someone has given up before, in this collective or an earlier one: none waits again.
            if (load_relaxed(m.distress + WHY) != 0) return;
            if (load_relaxed(m.distress + ABORT) != 0) return give_up(m, round, member, BY_HOST);
            u64 now = now_ns();
            if (since == 0) since = now;
            if (now - since > (u64)m.header[PATIENCE_MS] * 1000000) return give_up(m, round, member, BY_TIME);
        }
        if (looks > LOOKS_EAGER) __nanosleep(100);
    }
}

/// Says to all members that this block's part is in their windows, and waits for theirs. All threads call it. Who has given
/// up says nothing more: what it brings since then is worth nothing, and the others must not take it.
__device__ __forceinline__ void meet(const Meeting& m, const Exchange& exchange, u32 round) {
    u32 member = threadIdx.x;
    bool speaks = member < m.members && member != m.me;
    u32 gave_up = speaks ? load_relaxed((const u32*)(m.window + GAVE_UP)) : NEVER;
    __syncthreads();
    if (speaks) {
        // Behind a barrier it releases what the block's other threads stored as well.
        if (gave_up == NEVER) store_release(flag_of(m, exchange.windows[member], m.me), round);
        wait_for(m, round, member);
    }
    __syncthreads();
    let_next_start();
}

/// Calls `body(member)` for all others, each member beginning with another one.
template <typename Body> __device__ __forceinline__ void each_other(const Meeting& m, Body body) {
    for (u32 i = 1; i < m.members; i++) body(m.me + i < m.members ? m.me + i : m.me + i - m.members);
}

// Rows travel in pieces of 16 bytes, the last one filled up: so a row in a window begins on 16 bytes, whatever its width.

template <typename T> constexpr u32 EACH = 16 / sizeof(T);

template <typename T> __device__ __forceinline__ u32 pieces_of(u32 width) { return (width + EACH<T> - 1) / EACH<T>; }

__device__ __forceinline__ u32 bits_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ u32 bits_of(bf16 x) { return x.bits; }
__device__ __forceinline__ void set_bits(float& x, u32 bits) { x = __uint_as_float(bits); }
__device__ __forceinline__ void set_bits(bf16& x, u32 bits) { x.bits = (u16)bits; }

/// Whether so many bytes from there can be taken at once.
__device__ __forceinline__ bool is_whole(const void* at, u32 bytes, bool has_all) {
    return has_all && (u64)at % bytes == 0;
}

/// A piece of a row as it lies; zeros behind the row's end.
template <typename T> __device__ __forceinline__ uint4 read_piece(const T* row, u32 piece, u32 width) {
    u32 column = piece * EACH<T>;
    if (is_whole(row + column, 16, column + EACH<T> <= width)) return *(const uint4*)(row + column);
    u32 words[4] = {};
#pragma unroll
    for (u32 i = 0; i < EACH<T>; i++)
        if (column + i < width) words[i * sizeof(T) / 4] |= bits_of(row[column + i]) << i * sizeof(T) % 4 * 8;
    return make_uint4(words[0], words[1], words[2], words[3]);
}

template <typename T> __device__ __forceinline__ void write_piece(T* row, u32 piece, u32 width, uint4 v) {
    u32 column = piece * EACH<T>;
    if (is_whole(row + column, 16, column + EACH<T> <= width)) {
        *(uint4*)(row + column) = v;
        return;
    }
    u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (u32 i = 0; i < EACH<T>; i++)
        if (column + i < width) set_bits(row[column + i], words[i * sizeof(T) / 4] >> i * sizeof(T) % 4 * 8);
}

__device__ __forceinline__ void spread(uint4 v, float (&to)[4]) {
    to[0] = __uint_as_float(v.x), to[1] = __uint_as_float(v.y), to[2] = __uint_as_float(v.z), to[3] = __uint_as_float(v.w);
}

__device__ __forceinline__ void spread(uint4 v, float (&to)[8]) {
    to[0] = low_float(v.x), to[1] = high_float(v.x), to[2] = low_float(v.y), to[3] = high_float(v.y);
    to[4] = low_float(v.z), to[5] = high_float(v.z), to[6] = low_float(v.w), to[7] = high_float(v.w);
}

/// Rounds a piece's numbers and writes them to a row of maybe another type, of `width`.
template <typename Out, u32 N>
__device__ __forceinline__ void write_numbers(Out* row, u32 column, u32 width, const float (&x)[N]) {
    constexpr u32 BYTES = N * sizeof(Out) < 16 ? N * sizeof(Out) : 16;
    Out* to = row + column;
    if (!is_whole(to, BYTES, column + N <= width)) {
#pragma unroll
        for (u32 i = 0; i < N; i++)
            if (column + i < width) to[i] = From<Out>::of(x[i]);
    } else if constexpr (sizeof(Out) == 4) {
#pragma unroll
        for (u32 i = 0; i < N; i += 4) *(float4*)(to + i) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
    } else if constexpr (N == 4) {
        *(uint2*)to = make_uint2(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]));
    } else {
        *(uint4*)to = make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
    }
}

/// Loads that a thread has on the way together.
constexpr u32 BATCH = 4;

/// Those of `items` pieces that are this thread's: `use(item, load(item))`.
template <typename Load, typename Use> __device__ __forceinline__ void each_piece(u32 items, Load load, Use use) {
    u32 step = gridDim.x * blockDim.x;
    for (u32 first = blockIdx.x * blockDim.x + threadIdx.x; first < items; first += BATCH * step) {
        uint4 held[BATCH];
#pragma unroll
        for (u32 j = 0; j < BATCH; j++)
            if (first + j * step < items) held[j] = load(first + j * step);
#pragma unroll
        for (u32 j = 0; j < BATCH; j++)
            if (first + j * step < items) use(first + j * step, held[j]);
    }
}

/// Pieces of a row that a warp takes at a time.
constexpr u32 SEGMENT = 32 * BATCH;

/// Segments of so many rows that are this warp's: `body(row, first piece)`. Its lanes come together.
template <typename Body> __device__ __forceinline__ void each_segment(u32 rows, u32 pieces, Body body) {
    u32 segments = (pieces + SEGMENT - 1) / SEGMENT, warps = blockDim.x / 32;
    for (u32 i = blockIdx.x * warps + threadIdx.x / 32; i < rows * segments; i += gridDim.x * warps)
        body(i / segments, i % segments * SEGMENT);
}

/// A lane's pieces of a segment.
struct Held {
    uint4 v[BATCH];
};

/// `load(piece)` for those of a row's `pieces` that are this lane's.
template <typename Load> __device__ __forceinline__ Held load_segment(u32 from, u32 pieces, Load load) {
    Held held;
#pragma unroll
    for (u32 j = 0; j < BATCH; j++) {
        u32 piece = from + j * 32 + threadIdx.x % 32;
        if (piece < pieces) held.v[j] = load(piece);
    }
    return held;
}

/// `store(piece, value)` likewise.
template <typename Store>
__device__ __forceinline__ void store_segment(u32 from, u32 pieces, const Held& held, Store store) {
#pragma unroll
    for (u32 j = 0; j < BATCH; j++) {
        u32 piece = from + j * 32 + threadIdx.x % 32;
        if (piece < pieces) store(piece, held.v[j]);
    }
}

/// Members, or choices, whose numbers are on the way together.
constexpr u32 TERMS = 8;

/// Sum in the order of members, from the first one's numbers.
template <u32 N, typename Load>
__device__ __forceinline__ void sum_of_members(u32 members, Load load, float (&sum)[N]) {
    for (u32 first = 0; first < members; first += TERMS) {
        uint4 held[TERMS];
#pragma unroll
        for (u32 j = 0; j < TERMS; j++)
            if (first + j < members) held[j] = load(first + j);
#pragma unroll
        for (u32 j = 0; j < TERMS; j++) {
            if (first + j >= members) continue;
            float x[N];
            spread(held[j], x);
#pragma unroll
            for (u32 i = 0; i < N; i++) sum[i] = first + j == 0 ? x[i] : sum[i] + x[i];
        }
    }
}
