"""Synthetic weights: every element of a tensor is a pure function of (salt, tensor name, index).

The same rule is implemented in Rust, so golden references can be stored without the weights they belong to.

The rule, for element i (row-major) of the tensor called `name` in a model with salt `salt`:

    key     = [crc32("{salt}/{name}"), salt mod 2^32]
    words   = philox4x32-10(counter = [j mod 2^32, j >> 32, 0, 0], key)    with j = i // 2
    u1, u2  = ((words[0] >> 8) + 1) / 2^24, (words[1] >> 8) / 2^24         u1 in (0, 1], u2 in [0, 1)
    radius  = sqrt(-2 ln u1)
    x       = f32(radius cos(2 pi u2)) for even i, f32(radius sin(2 pi u2)) for odd i
    element = f32(offset + scale * x)                                      arithmetic in f64

`scale_and_offset` says which scale and offset a tensor has. All arithmetic is f64 but for the two roundings named
f32. Philox is from Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

    python synthetic.py        runs the self-test: known answers, and the array code against a scalar reading of the rule
"""

import math
import zlib

import numpy as np

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10


def tensor(name: str, shape: tuple[int, ...], salt: int, tied: bool) -> np.ndarray:
    """The f32 tensor `name`; `tied` says whether the embedding table is also the output matrix."""
    scale, offset = scale_and_offset(name, shape, tied)
    x = normal(crc(name, salt), salt, math.prod(shape))
    return (offset + scale * x.astype(np.float64)).astype(np.float32).reshape(shape)


def scale_and_offset(name: str, shape: tuple[int, ...], tied: bool) -> tuple[float, float]:
    """Gains that keep a random model's logits varied and well apart, so that greedy text has no near-ties.

    A router's logits get a standard deviation of about 1.5: experts differ in weight, and all of them are used.
    """
    if name.endswith("bias"):  # of a matrix, and e_score_correction_bias
        return 0.1, 0.0
    if len(shape) == 1:  # a norm's weight
        return 0.1, 1.0
    if "embed_tokens" in name:
        return (0.3 if tied else 1.0), 0.0
    root = math.sqrt(shape[-1])  # inputs of the matrix
    if "lm_head" in name:
        return 3.0 / root, 0.0
    if "o_proj" in name or "down_proj" in name:
        return 2.0 / root, 0.0
    if name.endswith("mlp.gate.weight"):
        return 1.5 / root, 0.0
    return 1.2 / root, 0.0


def crc(name: str, salt: int) -> int:
    """The first key word."""
    return zlib.crc32(f"{salt}/{name}".encode())


def normal(key: int, salt: int, count: int) -> np.ndarray:
    """`count` standard normal f32 numbers (Box-Muller)."""
    pair = np.arange((count + 1) // 2, dtype=np.uint64)
    words = philox([pair & MASK, pair >> 32, 0 * pair, 0 * pair], (key, salt & MASK))
    u1 = ((words[0] >> 8).astype(np.float64) + 1.0) / 2.0**24
    u2 = (words[1] >> 8).astype(np.float64) / 2.0**24
    radius, angle = np.sqrt(-2.0 * np.log(u1)), 2.0 * math.pi * u2
    both = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return both.astype(np.float32).reshape(-1)[:count]


def philox(counter: list[np.ndarray], key: tuple[int, int]) -> list[np.ndarray]:
    """The Philox 4x32-10 block function on arrays of u32 held in u64, where the 32x32-bit products fit."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        left, right = c0 * np.uint64(MULTIPLIERS[0]), c2 * np.uint64(MULTIPLIERS[1])
        c0, c1, c2, c3 = (
            (right >> 32) ^ c1 ^ np.uint64(k0),
            right & MASK,
            (left >> 32) ^ c3 ^ np.uint64(k1),
            left & MASK,
        )
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return [c0, c1, c2, c3]


def scalar_philox(c: list[int], k: list[int]) -> list[int]:
    """The block function in plain integers, written apart from `philox`."""
    for r in range(ROUNDS):
        k0, k1 = (k[0] + r * WEYL[0]) % 2**32, (k[1] + r * WEYL[1]) % 2**32
        high0, low0 = divmod(MULTIPLIERS[0] * c[0], 2**32)
        high1, low1 = divmod(MULTIPLIERS[1] * c[2], 2**32)
        c = [high1 ^ c[1] ^ k0, low1, high0 ^ c[3] ^ k1, low0]
    return c


def scalar_element(name: str, shape: tuple[int, ...], salt: int, tied: bool, index: int) -> np.float32:
    """One element, read off the rule with the C library's ln, cos and sin instead of numpy's."""
    j = index // 2
    words = scalar_philox([j % 2**32, j // 2**32, 0, 0], [crc(name, salt), salt % 2**32])
    u1, u2 = (words[0] // 256 + 1) / 2**24, (words[1] // 256) / 2**24
    wave = math.sin if index % 2 else math.cos
    x = np.float32(math.sqrt(-2 * math.log(u1)) * wave(2 * math.pi * u2))
    scale, offset = scale_and_offset(name, shape, tied)
    return np.float32(offset + scale * float(x))


def check_against_rule(name: str, values: np.ndarray, salt: int, tied: bool) -> None:
    """Asserts that `values` equals the scalar rule bit for bit, element by element."""
    want = np.array([scalar_element(name, values.shape, salt, tied, i) for i in range(values.size)], np.float32)
    wrong = np.flatnonzero(want.view(np.uint32) != values.reshape(-1).view(np.uint32))
    assert wrong.size == 0, f"{name}, salt {salt}: {wrong.size} of {values.size} differ, first at {wrong[0]}"


def self_test() -> None:
    """Known answers of Philox (the authors' `kat_vectors`), then arrays against scalars."""
    known = [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([MASK] * 4, [MASK] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ]
    for counter, key, want in known:
        assert scalar_philox(counter, key) == want, counter
        words = philox([np.array([c], np.uint64) for c in counter], (key[0], key[1]))
        assert [int(w[0]) for w in words] == want, counter
    for name, shape, tied in [
        ("model.embed_tokens.weight", (64, 8), False),
        ("model.embed_tokens.weight", (64, 8), True),
        ("lm_head.weight", (64, 8), False),
        ("model.norm.weight", (7,), False),
        ("model.layers.0.self_attn.q_proj.bias", (5,), False),
        ("model.layers.0.self_attn.o_proj.weight", (16, 24), True),
        ("model.layers.1.mlp.up_proj.weight", (3, 33), False),
        ("model.layers.1.mlp.gate.weight", (8, 16), False),
        ("model.layers.1.mlp.gate.e_score_correction_bias", (8,), False),
        ("model.layers.1.mlp.experts.7.down_proj.weight", (16, 8), False),
    ]:
        check_against_rule(name, tensor(name, shape, 11, tied), 11, tied)


if __name__ == "__main__":
    self_test()
    print("synthetic weights: philox known answers and the scalar rule agree")
