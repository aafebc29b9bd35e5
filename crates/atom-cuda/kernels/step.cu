// The beginning of a step: what the host changed since the last one.

/// tables[updates[2i]] = updates[2i + 1] for every i < header[TABLE_ENTRIES].
extern "C" __global__ void update_tables(const int* header, const u32* updates, u32* tables) {
    const int count = header[TABLE_ENTRIES];
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
        tables[updates[2 * i]] = updates[2 * i + 1];
    }
}
