"""Files of weights: what is in one, and dummies of a shape, for speed alone. A dummy has random weights of about the size
that real ones have, and the tokenizer of a file that has one; its kernels run as they do with real weights.
"""

import array
import mmap
import pathlib
import random
import struct

ALIGNMENT = 32
STRING, ARRAY = 8, 9
WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
# Name, number in files, elements and bytes of a block.
TYPES = {
    "F32": (0, 1, 4), "F16": (1, 1, 2), "Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20), "Q5_0": (6, 32, 22), "Q5_1": (7, 32, 24),
    "Q8_0": (8, 32, 34), "Q2_K": (10, 256, 84), "Q3_K": (11, 256, 110), "Q4_K": (12, 256, 144), "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210), "BF16": (30, 1, 2),
}
BLOCKS = {number: (elements, size) for number, elements, size in TYPES.values()}

# The models' shapes. `vocab` is the donor's; heads, key heads and experts as in the keys of a file.
SHAPES = {
    "smollm2": dict(arch="llama", layers=30, hidden=576, ffn=1536, heads=9, kv_heads=3, head=64),
    # TinyLlama's layers with a small tied vocabulary: 1.07 B parameters.
    "1b": dict(arch="llama", layers=22, hidden=2048, ffn=5632, heads=32, kv_heads=4, head=64),
    # Qwen3-MoE's layers in small: 1.7 B parameters, 0.29 B of them for a token.
    "moe": dict(arch="qwen3moe", layers=16, hidden=1024, ffn=512, heads=16, kv_heads=4, head=64, experts=64, used=8),
}


class Gguf:
    """The head of a file: `keys` (raw values too, for copying) and `tensors` (name, shape innermost first, type)."""

    def __init__(self, path):
        self.path = pathlib.Path(path)
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            self._data, self._at = data, 0
            if data[:4] != b"GGUF" or struct.unpack_from("<I", data, 4)[0] not in (2, 3):
                raise ValueError(f"{path} is no GGUF file of version 2 or 3")
            self._at = 8
            tensors, keys = self._take("<QQ")
            self.keys, self.raw = {}, {}
            for _ in range(keys):
                name, begin = self._string(), self._at
                self.keys[name] = self._value(self._take("<I")[0])
                self.raw[name] = data[begin:self._at]
            self.tensors = [self._tensor() for _ in range(tensors)]
            del self._data

    def _take(self, form):
        values = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return values

    def _string(self):
        length = self._take("<Q")[0]
        self._at += length
        return self._data[self._at - length:self._at].decode(errors="replace")

    def _value(self, kind):
        """Numbers and strings; of lists only how long they are."""
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            inner, count = self._take("<IQ")
            if inner in WIDTHS:
                self._at += WIDTHS[inner] * count
            else:
                for _ in range(count):
                    self._value(inner)
            return count
        forms = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
        return self._take("<" + forms[kind])[0]

    def _tensor(self):
        name, axes = self._string(), self._take("<I")[0]
        shape = self._take(f"<{axes}Q")
        kind, _ = self._take("<IQ")
        return name, shape, kind

    def of(self, key, otherwise=None):
        """A key that begins with the architecture's name."""
        return self.keys.get(f"{self.keys['general.architecture']}.{key}", otherwise)

    def is_quantised(self):
        """Whether matrices are stored in blocks."""
        return any(BLOCKS[kind][0] > 1 for _, _, kind in self.tensors)

    def read_by_step(self, rows):
        """Bytes of weights that a step of decode with so many rows reads: all but rows of an embedding that is no head,
        and of experts as many as rows that choose evenly meet."""
        names = {name for name, _, _ in self.tensors}
        met = 1.0
        if experts := self.of("expert_count"):
            met = 1 - (1 - self.of("expert_used_count") / experts) ** rows
        total = 0.0
        for name, shape, kind in self.tensors:
            if name == "token_embd.weight" and "output.weight" in names:
                continue
            total += size_of(shape, kind) * (met if "_exps" in name else 1.0)
        return total

    def products_of_row(self):
        """Multiplications with weights that a row of a prompt needs: all but the head's, which only last rows need."""
        used = self.of("expert_used_count", 1) / (self.of("expert_count") or 1)
        total = 0.0
        for name, shape, _ in self.tensors:
            if len(shape) > 1 and not name.startswith(("token_embd", "output.")):
                total += elements(shape) * (used if "_exps" in name else 1.0)
        return total


def elements(shape):
    count = 1
    for axis in shape:
        count *= axis
    return count


def size_of(shape, kind):
    if kind not in BLOCKS:
        raise ValueError(f"type {kind} isn't known here")
    per_block, size = BLOCKS[kind]
    return elements(shape) // per_block * size


def write_dummy(path, shape, kind, donor):
    """A file of SHAPES[shape] with weights of a type; `donor` gives vocabulary and tokenizer. Q4_K_M mixes Q4_K and Q6_K
    as llama.cpp's tool does."""
    like = Gguf(donor)
    what = SHAPES[shape]
    vocab = like.keys["tokenizer.ggml.tokens"]
    tensors = [(name, axes, TYPES[type_of(name, kind, what)][0]) for name, axes in layout(what, vocab)]
    keys = [string_key("general.architecture", what["arch"]), string_key("general.name", f"{shape} {kind} dummy")]
    keys += [u32_key("general.alignment", ALIGNMENT)]
    keys += [u32_key(f"{what['arch']}.{key}", value) for key, value in numbers(what, vocab).items()]
    keys += [f32_key(f"{what['arch']}.attention.layer_norm_rms_epsilon", 1e-5), f32_key(f"{what['arch']}.rope.freq_base", 1e5)]
    # A chat template may ask for what a dummy isn't; prompts are sent as they are.
    keys += [text(name) + raw for name, raw in like.raw.items() if name.startswith("tokenizer.ggml.")]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)) + b"".join(keys)
    at = 0
    for name, axes, number in tensors:
        head += text(name) + struct.pack(f"<I{len(axes)}QIQ", len(axes), *axes, number, at)
        at += padded(size_of(axes, number))
    partial, dice = pathlib.Path(f"{path}.part"), random.Random(7)
    with open(partial, "wb") as out:
        out.write(head.ljust(padded(len(head)), b"\0"))
        for name, axes, number in tensors:
            written = fill(out, name, axes, number, dice)
            out.write(bytes(padded(written) - written))
    partial.rename(path)


def layout(what, vocab):
    """Tensors' names and shapes; the head is the embedding."""
    hidden, ffn, head = what["hidden"], what["ffn"], what["head"]
    queries, values = what["heads"] * head, what["kv_heads"] * head
    yield "token_embd.weight", (hidden, vocab)
    yield "output_norm.weight", (hidden,)
    for i in range(what["layers"]):
        block = {"attn_norm": (hidden,), "attn_q": (hidden, queries), "attn_k": (hidden, values),
                 "attn_v": (hidden, values), "attn_output": (queries, hidden), "ffn_norm": (hidden,)}
        if experts := what.get("experts"):
            block.update(attn_q_norm=(head,), attn_k_norm=(head,), ffn_gate_inp=(hidden, experts),
                         ffn_gate_exps=(hidden, ffn, experts), ffn_up_exps=(hidden, ffn, experts),
                         ffn_down_exps=(ffn, hidden, experts))
        else:
            block.update(ffn_gate=(hidden, ffn), ffn_up=(hidden, ffn), ffn_down=(ffn, hidden))
        for name, axes in block.items():
            yield f"blk.{i}.{name}.weight", axes


def numbers(what, vocab):
    keys = {"block_count": what["layers"], "context_length": 8192, "embedding_length": what["hidden"],
            "feed_forward_length": what["ffn"], "attention.head_count": what["heads"],
            "attention.head_count_kv": what["kv_heads"], "rope.dimension_count": what["head"], "vocab_size": vocab,
            "attention.key_length": what["head"], "attention.value_length": what["head"]}
    if experts := what.get("experts"):
        keys.update({"expert_count": experts, "expert_used_count": what["used"], "expert_feed_forward_length": what["ffn"]})
    return keys


def type_of(name, kind, what):
    if "norm" in name or "ffn_gate_inp" in name:
        return "F32"
    if kind != "Q4_K_M":
        # Quantised files keep their embedding, which is the head here, in a finer type.
        return "Q8_0" if name == "token_embd.weight" and kind.startswith("Q4_") and kind != "Q4_K" else kind
    if name == "token_embd.weight":
        return "Q6_K"
    i, layers = int(name.split(".")[1]), what["layers"]
    more = i < layers // 8 or i >= 7 * layers // 8 or (i - layers // 8) % 3 == 2
    return "Q6_K" if more and ("attn_v" in name or "ffn_down" in name) else "Q4_K"


def fill(out, name, axes, number, dice):
    """Writes a tensor's elements; gives their bytes."""
    count = elements(axes)
    if number == 0:
        ones = "norm" in name
        array.array("f", [1.0 if ones else dice.gauss(0, 0.5) for _ in range(count)]).tofile(out)
        return 4 * count
    per_block, size = BLOCKS[number]
    # Embeddings are large and what is added to them is small, so that rows differ and choose experts evenly.
    larger = 16 if name == "token_embd.weight" else 1 / 16 if "attn_output" in name or "ffn_down" in name else 1
    left, most = count // per_block, (1 << 20) // size
    while left:
        blocks = min(left, most)
        data = bytearray(dice.randbytes(blocks * size))
        for at, value in SCALES[number]:
            for i, byte in enumerate(struct.pack("<e", value * larger)):
                data[at + i::size] = bytes([byte]) * blocks
        if number == 30:  # 0.008 to 0.03, of both signs
            high = {1 / 16: 0x3a, 1: 0x3c, 16: 0x3e}[larger]
            data[1::2] = bytes(data[1::2]).translate(bytes(high | (i & 0x80) for i in range(256)))
        out.write(data)
        left -= blocks
    return count // per_block * size


# (place in a block, value) of the f16 scales, so that weights are about 0.02; what is between them is random.
SCALES = {
    30: [],
    2: [(0, 0.005)],
    3: [(0, 0.005), (2, -0.0375)],
    8: [(0, 0.0003)],
    12: [(0, 0.0002), (2, 0.0015)],
    14: [(208, 0.000015)],
}

DUMMY_TYPES = [name for name, (number, _, _) in TYPES.items() if number in SCALES]


def padded(size):
    return -size % ALIGNMENT + size


def text(string):
    return struct.pack("<Q", len(string.encode())) + string.encode()


def string_key(name, value):
    return text(name) + struct.pack("<I", STRING) + text(value)


def u32_key(name, value):
    return text(name) + struct.pack("<II", 4, value)


def f32_key(name, value):
    return text(name) + struct.pack("<If", 6, value)
