// What a choice is, for every kernel of the experts.
//
// A choice is a row and a place among its top_k; `row * top_k + place` is its slot. Expert numbers are f32 in
// the routes; a number that is no expert's (NO_EXPERT = -1, or a NaN) belongs to nobody.

constexpr float NO_EXPERT = -1.0f;

/// Which rows of the buffers are real, and which experts are held here: the same for every kernel.
///
/// Rows of a buffer lie in `lanes` blocks of `lane_rows`; block l holds `real_rows[l]` real ones, at its start.
/// Extent::Rows is lanes = 1, lane_rows = shape.rows, real_rows = header + ROWS; Extent::GroupRows is
/// lanes = shape.lanes, lane_rows = shape.rows, real_rows = the granted rows of each lane.
struct Choosers {
    const u32* real_rows;
    int lanes;
    int lane_rows;
    int top_k;
    int first;
    int held;
};

__device__ __forceinline__ bool is_real(const Choosers& who, int row) {
    int lane = row / who.lane_rows;
    return lane < who.lanes && row - lane * who.lane_rows < (int)who.real_rows[lane];
}

/// Index of a chosen expert among those held here, or -1.
__device__ __forceinline__ int held_expert(const Choosers& who, float number) {
    float local = number - (float)who.first;
    return local >= 0.0f && local < (float)who.held ? (int)local : -1;
}

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }
