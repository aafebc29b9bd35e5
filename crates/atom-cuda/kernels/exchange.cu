// Collectives of the ranks of one process by peer memory: what exchange.cuh says of them holds for all.
//
// Launch contract. block.x = 512; grid.x = 1 ..= 128 blocks, the same on every member and of capacities only. All members'
// blocks must be able to run at the same time. `_f32`, `_bf16` name the type of the payload, and a second one that of the
// result. Arrays begin on 16 bytes. `granted` is the extent of a group's rows: lane l is member l, its rows are at
// `l * lane_rows`, and `granted.counts[l]` of them are real. Others are neither read nor written.
// A set has room for what launch/exchange.rs says: a member's slot, or a choice's, in the order of members, or of rows.
#include "exchange.cuh"

/// Column or expert at which each member begins, and where the last one ends.
struct Edges {
    u32 at[MEMBERS_MAX + 1];

    __device__ __forceinline__ u32 width(u32 member) const { return at[member + 1] - at[member]; }

    /// Whether a member holds the expert of a choice. NO_EXPERT and NaN are nobody's.
    __device__ __forceinline__ bool has(u32 member, float expert) const {
        return expert >= (float)at[member] && expert < (float)at[member + 1];
    }
};

/// Choices of all lanes' rows.
struct Choosing {
    const float* routes; // [group rows, 2 top_k]
    u32 top_k;           // at most 32

    /// The expert of the choice that has this lane of a warp's number.
    __device__ __forceinline__ float expert(u64 row) const {
        u32 lane = threadIdx.x % 32;
        return lane < top_k ? routes[row * 2 * top_k + lane] : -1.0f;
    }

    __device__ __forceinline__ float weight(u64 row) const {
        u32 lane = threadIdx.x % 32;
        return lane < top_k ? routes[row * 2 * top_k + top_k + lane] : 0.0f;
    }
};

/// Choices of a warp's row as bits.
__device__ __forceinline__ u32 bits_where(bool holds) { return __ballot_sync(0xffffffffu, holds); }

/// `out[l] = x of lane l`
template <typename T>
__device__ __forceinline__ void gather_rows(const Meeting& m, const T* x, u32 width, T* out, Extent granted) {
    __shared__ Exchange exchange;
    u32 round = begin(m, exchange), pieces = pieces_of<T>(width);
    u64 slot = (u64)granted.lane_rows * pieces;
    auto place = [&](u32 lane, u32 i, uint4 v) {
        write_piece(out + ((u64)lane * granted.lane_rows + i / pieces) * width, i % pieces, width, v);
    };
    each_piece(
        granted.counts[m.me] * pieces, [&](u32 i) { return read_piece(x + (u64)(i / pieces) * width, i % pieces, width); },
        [&](u32 i, uint4 v) {
            place(m.me, i, v);
            each_other(m, [&](u32 to) { exchange.set(m, round, to)[m.me * slot + i] = v; });
        });
    meet(m, exchange, round);
    const uint4* set = exchange.set(m, round, m.me);
    each_other(m, [&](u32 from) {
        each_piece(
            granted.counts[from] * pieces, [&](u32 i) { return load_brought(set + from * slot + i); },
            [&](u32 i, uint4 v) { place(from, i, v); });
    });
}

/// `out[r] = sum over members of (x on it)[me * lane_rows + r]`
template <typename T, typename Out>
__device__ __forceinline__ void scatter_sum(const Meeting& m, const T* x, u32 width, Out* out, Extent granted) {
    __shared__ Exchange exchange;
    u32 round = begin(m, exchange), pieces = pieces_of<T>(width);
    u64 slot = (u64)granted.lane_rows * pieces;
    auto read = [&](u32 lane, u32 i) {
        return read_piece(x + ((u64)lane * granted.lane_rows + i / pieces) * width, i % pieces, width);
    };
    each_other(m, [&](u32 to) {
        uint4* set = exchange.set(m, round, to) + m.me * slot;
        each_piece(granted.counts[to] * pieces, [&](u32 i) { return read(to, i); }, [&](u32 i, uint4 v) { set[i] = v; });
    });
    meet(m, exchange, round);
    const uint4* set = exchange.set(m, round, m.me);
    u32 items = granted.counts[m.me] * pieces;
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < items; i += gridDim.x * blockDim.x) {
        float sum[EACH<T>];
        auto of = [&](u32 member) { return member == m.me ? read(member, i) : load_brought(set + member * slot + i); };
        sum_of_members(m.members, of, sum);
        write_numbers(out + (u64)(i / pieces) * width, i % pieces * EACH<T>, width, sum);
    }
}

/// `x = sum over members of x`
template <typename T>
__device__ __forceinline__ void all_reduce(const Meeting& m, T* x, u32 width, Extent extent) {
    __shared__ Exchange exchange;
    u32 round = begin(m, exchange), pieces = pieces_of<T>(width);
    u64 block = (u64)extent.lane_rows * pieces, slot = extent.lanes * block;
    for (u32 lane = 0; lane < extent.lanes; lane++) {
        const T* rows = x + (u64)lane * extent.lane_rows * width;
        each_piece(
            extent.counts[lane] * pieces,
            [&](u32 i) { return read_piece(rows + (u64)(i / pieces) * width, i % pieces, width); },
            [&](u32 i, uint4 v) {
                each_other(m, [&](u32 to) { exchange.set(m, round, to)[m.me * slot + lane * block + i] = v; });
            });
    }
    meet(m, exchange, round);
    for (u32 lane = 0; lane < extent.lanes; lane++) {
        T* rows = x + (u64)lane * extent.lane_rows * width;
        const uint4* set = exchange.set(m, round, m.me) + lane * block;
        u32 items = extent.counts[lane] * pieces;
        for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < items; i += gridDim.x * blockDim.x) {
            T* row = rows + (u64)(i / pieces) * width;
            float sum[EACH<T>];
            auto of = [&](u32 member) {
                return member == m.me ? read_piece(row, i % pieces, width) : load_brought(set + member * slot + i);
            };
            sum_of_members(m.members, of, sum);
            write_numbers(row, i % pieces * EACH<T>, width, sum);
        }
    }
}

/// `out[r] = x of member 0 [r] ++ x of member 1 [r] ++ ..`; a slot has `slot_pieces` for each row.
template <typename T>
__device__ __forceinline__ void gather_columns(const Meeting& m, const T* x, const Edges& edges, u32 slot_pieces, T* out,
                                               Extent extent) {
    __shared__ Exchange exchange;
    u32 round = begin(m, exchange), rows = extent.counts[0], total = edges.at[m.members];
    u64 slot = (u64)extent.lane_rows * slot_pieces;
    u32 mine = edges.width(m.me), pieces = pieces_of<T>(mine);
    auto place = [&](u32 member, u32 row, u32 piece, uint4 v) {
        write_piece(out + (u64)row * total + edges.at[member], piece, edges.width(member), v);
    };
    each_piece(
        rows * pieces, [&](u32 i) { return read_piece(x + (u64)(i / pieces) * mine, i % pieces, mine); },
        [&](u32 i, uint4 v) {
            place(m.me, i / pieces, i % pieces, v);
            each_other(m, [&](u32 to) { exchange.set(m, round, to)[m.me * slot + i] = v; });
        });
    meet(m, exchange, round);
    const uint4* set = exchange.set(m, round, m.me);
    each_other(m, [&](u32 from) {
        u32 theirs = pieces_of<T>(edges.width(from));
        each_piece(
            rows * theirs, [&](u32 i) { return load_brought(set + from * slot + i); },
            [&](u32 i, uint4 v) { place(from, i / theirs, i % theirs, v); });
    });
}

/// Rows come to `out` where an expert of theirs is held.
template <typename T>
__device__ __forceinline__ void dispatch_rows(const Meeting& m, const T* x, u32 width, const Choosing& choosing,
                                              const Edges& owners, T* out, Extent granted) {
    __shared__ Exchange exchange;
    u32 round = begin(m, exchange), pieces = pieces_of<T>(width);
    u64 slot = (u64)granted.lane_rows * pieces;
    auto goes = [&](u32 member, float expert) { return bits_where(owners.has(member, expert)) != 0; };
    auto place = [&](u64 row, u32 from, const Held& held) {
        store_segment(from, pieces, held, [&](u32 piece, uint4 v) { write_piece(out + row * width, piece, width, v); });
    };
    each_segment(granted.counts[m.me], pieces, [&](u32 row, u32 from) {
        u64 group_row = (u64)m.me * granted.lane_rows + row;
        float expert = choosing.expert(group_row);
        auto load = [&](u32 piece) { return read_piece(x + (u64)row * width, piece, width); };
        Held held = load_segment(from, pieces, load);
        if (goes(m.me, expert)) place(group_row, from, held);
        each_other(m, [&](u32 to) {
            if (!goes(to, expert)) return;
            uint4* there = exchange.set(m, round, to) + m.me * slot + (u64)row * pieces;
            store_segment(from, pieces, held, [&](u32 piece, uint4 v) { there[piece] = v; });
        });
    });
    meet(m, exchange, round);
    const uint4* set = exchange.set(m, round, m.me);
    each_other(m, [&](u32 lane) {
        each_segment(granted.counts[lane], pieces, [&](u32 row, u32 from) {
            u64 group_row = (u64)lane * granted.lane_rows + row;
            if (!goes(m.me, choosing.expert(group_row))) return;
            const uint4* here = set + lane * slot + (u64)row * pieces;
            place(group_row, from, load_segment(from, pieces, [&](u32 piece) { return load_brought(here + piece); }));
        });
    });
}

/// Outputs of experts as this rank computed them: a row has a slot for each of its choices, filled for those held here.
template <typename T> struct Outputs {
    const T* y; // [group rows, top_k * width]
    u32 top_k, width;

    __device__ __forceinline__ uint4 piece(u64 row, u32 choice, u32 piece) const {
        return read_piece(y + (row * top_k + choice) * width, piece, width);
    }
};

/// `out[r] = sum of weight * y` over the choices of this lane's rows in order, from 0. In a set a row has a slot for each of
/// its `top_k` choices.
template <typename T, typename Out>
__device__ __forceinline__ void combine_rows(const Meeting& m, const Outputs<T>& outputs, const Choosing& choosing,
                                             const Edges& owners, Out* out, Extent granted) {
    __shared__ Exchange exchange;
    u32 round = begin(m, exchange), width = outputs.width, pieces = pieces_of<T>(width), top_k = choosing.top_k;
    each_other(m, [&](u32 lane) {
        uint4* set = exchange.set(m, round, lane);
        each_segment(granted.counts[lane], pieces, [&](u32 row, u32 from) {
            u64 group_row = (u64)lane * granted.lane_rows + row;
            for (u32 left = bits_where(owners.has(m.me, choosing.expert(group_row))); left; left &= left - 1) {
                u32 choice = __ffs(left) - 1;
                uint4* there = set + ((u64)row * top_k + choice) * pieces;
                auto load = [&](u32 piece) { return outputs.piece(group_row, choice, piece); };
                Held held = load_segment(from, pieces, load);
                store_segment(from, pieces, held, [&](u32 piece, uint4 v) { there[piece] = v; });
            }
        });
    });
    meet(m, exchange, round);
    const uint4* set = exchange.set(m, round, m.me);
    each_segment(granted.counts[m.me], pieces, [&](u32 row, u32 from) {
        u64 group_row = (u64)m.me * granted.lane_rows + row;
        float expert = choosing.expert(group_row), weight = choosing.weight(group_row);
        u32 own = bits_where(owners.has(m.me, expert));
        // Of the others, those that anyone holds.
        u32 brought = bits_where(expert >= 0.0f && expert < (float)owners.at[m.members]) & ~own;
        for (u32 at = from; at < min(from + SEGMENT, pieces); at += 32) {
            u32 piece = at + threadIdx.x % 32;
            float sum[EACH<T>] = {};
            for (u32 first = 0; first < top_k; first += TERMS) {
                uint4 held[TERMS];
                bool counts[TERMS];
#pragma unroll
                for (u32 j = 0; j < TERMS; j++) {
                    u32 choice = first + j;
                    bool is_own = choice < top_k && own >> choice & 1;
                    counts[j] = piece < pieces && (is_own || (choice < top_k && brought >> choice & 1));
                    if (!counts[j]) continue;
                    held[j] = is_own ? outputs.piece(group_row, choice, piece)
                                     : load_brought(set + ((u64)row * top_k + choice) * pieces + piece);
                }
#pragma unroll
                for (u32 j = 0; j < TERMS; j++) {
                    float of_choice = __shfl_sync(0xffffffffu, weight, first + j);
                    if (!counts[j]) continue;
                    float y[EACH<T>];
                    spread(held[j], y);
#pragma unroll
                    for (u32 i = 0; i < EACH<T>; i++) sum[i] = fmaf(of_choice, y[i], sum[i]);
                }
            }
            if (piece < pieces) write_numbers(out + (u64)row * width, piece * EACH<T>, width, sum);
        }
    });
}

#define KERNEL extern "C" __global__ void __launch_bounds__(EXCHANGE_THREADS)
#define MEETING const __grid_constant__ Meeting m
#define EDGES const __grid_constant__ Edges

#define OF_PAYLOAD(NAME, T)                                                                                                \
    KERNEL gather_rows_##NAME(MEETING, const T* x, u32 width, T* out, Extent granted) {                                    \
        gather_rows<T>(m, x, width, out, granted);                                                                         \
    }                                                                                                                      \
    KERNEL all_reduce_##NAME(MEETING, T* x, u32 width, Extent extent) { all_reduce<T>(m, x, width, extent); }              \
    KERNEL gather_columns_##NAME(MEETING, const T* x, EDGES edges, u32 slot_pieces, T* out, Extent extent) {               \
        gather_columns<T>(m, x, edges, slot_pieces, out, extent);                                                          \
    }                                                                                                                      \
    KERNEL dispatch_rows_##NAME(MEETING, const T* x, u32 width, const float* routes, u32 top_k, EDGES owners, T* out,      \
                                Extent granted) {                                                                          \
        dispatch_rows<T>(m, x, width, {routes, top_k}, owners, out, granted);                                              \
    }
OF_PAYLOAD(f32, float)
OF_PAYLOAD(bf16, bf16)

#define OF_SUM(NAME, T, OUT)                                                                                               \
    KERNEL scatter_sum_##NAME(MEETING, const T* x, u32 width, OUT* out, Extent granted) {                                  \
        scatter_sum<T, OUT>(m, x, width, out, granted);                                                                    \
    }                                                                                                                      \
    KERNEL combine_rows_##NAME(MEETING, const T* y, u32 width, const float* routes, u32 top_k, EDGES owners, OUT* out,     \
                               Extent granted) {                                                                           \
        combine_rows<T, OUT>(m, {y, top_k, width}, {routes, top_k}, owners, out, granted);                                 \
    }
OF_SUM(f32_f32, float, float)
OF_SUM(f32_bf16, float, bf16)
OF_SUM(bf16_f32, bf16, float)
OF_SUM(bf16_bf16, bf16, bf16)
