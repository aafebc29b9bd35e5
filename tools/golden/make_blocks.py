"""What ggml's Python package makes of the blocks that crates/atom-weights/src/quant/tests.rs draws.

    python make_blocks.py

prints a digest of the elements for each format, and bytes of the formats that the package can quantise.
"""

import gguf
import numpy as np

BLOCKS = 64
# Where a block has halves; one bit of their exponents is cleared.
HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0],
          "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}


def generator(state):
    while True:
        state = (state * 1_664_525 + 1_013_904_223) % 2**32
        yield state


def blocks(name):
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][1]
    states = generator(11)
    made = np.array([next(states) >> 24 for _ in range(BLOCKS * size)], dtype=np.uint8).reshape(BLOCKS, size)
    for at in HALVES[name]:
        made[:, at + 1] &= 0xBF
    return made


def digest(data):
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value


def values(count):
    states = generator(7)
    return np.array([((next(states) >> 8) - (1 << 23)) / (1 << 21) for _ in range(count)], dtype=np.float32)


def main():
    for name in HALVES:
        kind = gguf.GGMLQuantizationType[name]
        elements = gguf.quants.dequantize(blocks(name), kind).astype("<f4")
        last = ", ".join(repr(float(value)) for value in elements[0, -3:])
        number = f"{digest(elements.tobytes()):016x}"
        grouped = "_".join(number[i:i + 4] for i in range(0, 16, 4))
        print(f"(DType::{name}, &{HALVES[name]}, [{last}], 0x{grouped}),")
    for name in ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]:
        made = gguf.quants.quantize(values(64), gguf.GGMLQuantizationType[name])
        print(name, made.tobytes().hex())


main()
