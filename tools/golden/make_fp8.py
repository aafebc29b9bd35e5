"""FP8 checkpoints of tiny Qwen3 and Qwen3-MoE models, and the logits of what they hold.

    python make_fp8.py --out ../../tests-data/golden [--only qwen3_fp8_block] [--checkpoints FOLDER]

Needs numpy and nothing else. Weights are those of `synthetic.py`, quantised to e4m3 as the Open Compute Project's
"8-bit floating point specification" (2023) defines it, with scales for a tensor, a channel or a block of 128 x 128. The
references are the logits of the dequantised float32 weights, by a forward pass in float64 that is written here and first
compared with the stored references of `qwen3` and `qwen3_moe`, which transformers computed.

Codes are not stored: a reader makes them again, and compares shapes, types and CRC-32 of every tensor's bytes with
`reference.json`. `--checkpoints` writes the folders with their `model.safetensors` too, for other programs.
"""

import argparse
import json
import math
import pathlib
import struct
import zlib

import numpy as np

import synthetic

VOCAB = 512
SPECIAL_FIRST = 504  # as in make_golden.py: ids from here on are in no prompt and never generated
PROMPT_TOKENS = {"short": 5, "chat": 40, "long": 300}
GREEDY_TOKENS = 24
LAST_POSITIONS = 4
TOP = 8
MARGIN_MIN = 0.02
ROUTING_MARGIN_MIN = 1e-3  # of router logits, as in make_golden.py
DISTINCT_MIN = 8  # different tokens among the greedy ones
SALTS = range(5000)
E4M3_MAX = 448.0
BLOCK = 128

# No width is a multiple of a block's, and halves of heads, columns and experts' columns cut blocks.
BASE = dict(
    hidden_act="silu",
    hidden_size=192,
    intermediate_size=320,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=VOCAB,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    max_position_embeddings=4096,
    attention_bias=False,
    tie_word_embeddings=False,
    bos_token_id=506,
    eos_token_id=507,
    torch_dtype="bfloat16",
)
DENSE = dict(BASE, architectures=["Qwen3ForCausalLM"], model_type="qwen3")
MOE = dict(
    BASE,
    architectures=["Qwen3MoeForCausalLM"],
    model_type="qwen3_moe",
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=160,
    mlp_only_layers=[1],
    decoder_sparse_step=1,
    norm_topk_prob=True,
)


def compressed_tensors(strategy: str) -> dict:
    """`quantization_config` as llm-compressor writes it."""
    weights = dict(num_bits=8, type="float", strategy=strategy, symmetric=True, dynamic=False, group_size=None)
    inputs = dict(num_bits=8, type="float", strategy="token", symmetric=True, dynamic=True)
    group = dict(targets=["Linear"], weights=weights, input_activations=inputs, output_activations=None)
    return dict(
        quant_method="compressed-tensors",
        format="float-quantized",
        quantization_status="compressed",
        config_groups=dict(group_0=group),
        ignore=["lm_head", "re:.*mlp.gate$"],
        kv_cache_scheme=None,
    )


FINE_GRAINED = dict(
    quant_method="fp8",
    fmt="e4m3",
    activation_scheme="dynamic",
    weight_block_size=[BLOCK, BLOCK],
    modules_to_not_convert=["lm_head"],
)
# Of each model: configuration, quantization_config, which weights share a scale, how scales are named and stored.
MODELS = {
    "qwen3_fp8_tensor": (DENSE, dict(quant_method="fp8", activation_scheme="static"), "tensor", "weight_scale", "F32"),
    "qwen3_fp8_channel": (DENSE, compressed_tensors("channel"), "channel", "weight_scale", "BF16"),
    "qwen3_fp8_block": (DENSE, FINE_GRAINED, "block", "weight_scale_inv", "BF16"),
    "qwen3_moe_fp8_tensor": (
        MOE,
        dict(quant_method="modelopt", quant_algo="FP8", kv_cache_quant_algo=None, exclude_modules=["lm_head"]),
        "tensor",
        "weight_scale",
        "F32",
    ),
    "qwen3_moe_fp8_channel": (
        MOE,
        dict(quant_method="fbgemm_fp8", activation_scale_ub=1200.0, modules_to_not_convert=["lm_head"]),
        "channel",
        "weight_scale",
        "F32",
    ),
    "qwen3_moe_fp8_block": (MOE, FINE_GRAINED, "block", "weight_scale_inv", "F32"),
}
# Of the models whose activations have a static scale. Any number will do: nobody may use it.
INPUT_SCALE = {"qwen3_fp8_tensor": 0.0625, "qwen3_moe_fp8_tensor": 0.03125}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the folder of golden references")
    parser.add_argument("--only", help="comma-separated names; all if left out")
    parser.add_argument("--checkpoints", type=pathlib.Path, help="writes whole checkpoints here too")
    args = parser.parse_args()
    synthetic.self_test()
    e4m3_self_test()
    for name in ("qwen3", "qwen3_moe"):
        compare_with_transformers(args.out / name)
    (args.out / "e4m3.json").write_text(json.dumps([float_bits(decode(np.uint8(c))) for c in range(256)]) + "\n")
    for name in args.only.split(",") if args.only else MODELS:
        make(name, args.out / name, args.checkpoints and args.checkpoints / name)


# e4m3: sign, 4 bits of exponent with a bias of 7, 3 bits of mantissa; no infinities, the codes of all ones are NaN.


def e4m3_magnitudes() -> np.ndarray:
    """The values of codes 0 to 0x7e, in order."""
    values = []
    for exponent in range(16):
        for mantissa in range(8):
            if exponent == 0:
                values.append(mantissa / 8 * 2.0**-6)
            else:
                values.append((1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return np.array(values[:-1])


MAGNITUDES = e4m3_magnitudes()
MIDPOINTS = (MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2


def decode(codes: np.ndarray) -> np.ndarray:
    table = np.concatenate([MAGNITUDES, [np.nan]])
    magnitude = table[np.asarray(codes) & 0x7F]
    return np.where(np.asarray(codes) & 0x80, -magnitude, magnitude).astype(np.float32)


def encode(values: np.ndarray) -> np.ndarray:
    """The nearest code, ties to the even one, beyond the largest value that one."""
    magnitude = np.abs(values.astype(np.float64))
    code = np.searchsorted(MIDPOINTS, magnitude, side="left")
    tie = (code < len(MIDPOINTS)) & (MIDPOINTS[np.minimum(code, len(MIDPOINTS) - 1)] == magnitude)
    code = np.where(tie & (code % 2 == 1), code + 1, code)
    return (code | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)


def e4m3_self_test() -> None:
    """Numbers that the specification states, and that every code is its own nearest."""
    assert decode(np.uint8(0x7E)) == 448 and decode(np.uint8(0x08)) == 2.0**-6 and decode(np.uint8(1)) == 2.0**-9
    assert np.isnan(decode(np.array([0x7F, 0xFF], np.uint8))).all()
    codes = np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8)
    assert (encode(decode(codes)) == codes).all()
    assert encode(np.array([1e6, -449.0, 17.0, 19.0])).tolist() == [0x7E, 0xFE, 0x58, 0x5A]


def float_bits(value: np.ndarray) -> int:
    return int(np.float32(value).view(np.uint32))


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Rounded to the nearest bfloat16, ties to even, as its 16 bits."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def largest_of(weights: np.ndarray, form: str) -> np.ndarray:
    """Largest magnitude of what shares a scale; its shape is the scales'."""
    magnitude = np.abs(weights)
    if form == "tensor":
        return magnitude.max()
    if form == "channel":
        return magnitude.max(axis=1, keepdims=True)
    rows, cols = (range(0, n, BLOCK) for n in weights.shape)
    return np.array([[magnitude[r : r + BLOCK, c : c + BLOCK].max() for c in cols] for r in rows])


def quantised(weights: np.ndarray, form: str, dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scales as stored, and the float32 weights that both mean."""
    scales = (largest_of(weights, form).astype(np.float32) / np.float32(E4M3_MAX)).astype(np.float32)
    stored = scales if dtype == "F32" else to_bf16(scales)
    scales = stored if dtype == "F32" else from_bf16(stored)
    spread = scales
    if form == "block":
        spread = np.repeat(np.repeat(scales, BLOCK, axis=0), BLOCK, axis=1)[: weights.shape[0], : weights.shape[1]]
    codes = encode(weights / spread)
    return codes, stored, decode(codes) * spread


def shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Every tensor of a model."""
    hidden, dim = config["hidden_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    experts = config.get("num_experts", config.get("num_local_experts"))
    found = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    found["lm_head.weight"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{prefix}.{norm}.weight"] = (hidden,)
        for norm in ("q_norm", "k_norm"):
            found[f"{prefix}.self_attn.{norm}.weight"] = (dim,)
        for name, shape in dict(q=(q, hidden), k=(kv, hidden), v=(kv, hidden), o=(hidden, q)).items():
            found[f"{prefix}.self_attn.{name}_proj.weight"] = shape
        mlps = {f"{prefix}.mlp": config["intermediate_size"]}
        if is_mixture(config, layer):
            found[f"{prefix}.mlp.gate.weight"] = (experts, hidden)
            mlps = {f"{prefix}.mlp.experts.{e}": config["moe_intermediate_size"] for e in range(experts)}
        for mlp, width in mlps.items():
            for name, shape in dict(gate=(width, hidden), up=(width, hidden), down=(hidden, width)).items():
                found[f"{mlp}.{name}_proj.weight"] = shape
    return found


def is_mixture(config: dict, layer: int) -> bool:
    return config["model_type"] == "qwen3_moe" and layer not in config["mlp_only_layers"]


def is_quantised(name: str) -> bool:
    return name.endswith("_proj.weight")


class Model:
    """Weights as they are stored, and the forward pass of what they mean."""

    def __init__(self, config: dict, weights: dict[str, np.ndarray]) -> None:
        self.config = config
        self.w = {name: values.astype(np.float64) for name, values in weights.items()}
        self.routing_margin = math.inf
        self.used: dict[int, set[int]] = {}

    def logits(self, ids: list[int]) -> np.ndarray:
        """Of every position, [T, vocabulary]."""
        config, w = self.config, self.w
        x = w["model.embed_tokens.weight"][ids]
        for layer in range(config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}"
            x = x + self.attention(prefix, self.norm(x, f"{prefix}.input_layernorm"))
            h = self.norm(x, f"{prefix}.post_attention_layernorm")
            x = x + (self.mixture(layer, h) if is_mixture(config, layer) else self.mlp(f"{prefix}.mlp", h))
        return self.norm(x, "model.norm") @ w["lm_head.weight"].T

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        mean = (x * x).mean(axis=-1, keepdims=True)
        return x / np.sqrt(mean + self.config["rms_norm_eps"]) * self.w[f"{name}.weight"]

    def heads(self, x: np.ndarray, name: str) -> np.ndarray:
        """[heads, T, head_dim]"""
        y = x @ self.w[f"{name}.weight"].T
        return y.reshape(len(x), -1, self.config["head_dim"]).transpose(1, 0, 2)

    def attention(self, prefix: str, x: np.ndarray) -> np.ndarray:
        dim, length = self.config["head_dim"], len(x)
        q = self.rotated(self.norm(self.heads(x, f"{prefix}.self_attn.q_proj"), f"{prefix}.self_attn.q_norm"))
        k = self.rotated(self.norm(self.heads(x, f"{prefix}.self_attn.k_proj"), f"{prefix}.self_attn.k_norm"))
        v = self.heads(x, f"{prefix}.self_attn.v_proj")
        group = len(q) // len(k)
        future = np.triu(np.ones((length, length), bool), 1)
        out = []
        for head, query in enumerate(q):
            scores = query @ k[head // group].T / math.sqrt(dim)
            scores[future] = -np.inf
            out.append(softmax(scores) @ v[head // group])
        return np.concatenate(out, axis=1) @ self.w[f"{prefix}.self_attn.o_proj.weight"].T

    def rotated(self, x: np.ndarray) -> np.ndarray:
        half = self.config["head_dim"] // 2
        angles = np.outer(np.arange(x.shape[1]), self.theta() ** (-np.arange(half) / half))
        cos, sin = np.cos(angles), np.sin(angles)
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def theta(self) -> float:
        return self.config["rope_theta"] if "rope_theta" in self.config else self.config["rope_parameters"]["rope_theta"]

    def mlp(self, prefix: str, x: np.ndarray) -> np.ndarray:
        gate = x @ self.w[f"{prefix}.gate_proj.weight"].T
        up = x @ self.w[f"{prefix}.up_proj.weight"].T
        return (gate / (1 + np.exp(-gate)) * up) @ self.w[f"{prefix}.down_proj.weight"].T

    def mixture(self, layer: int, x: np.ndarray) -> np.ndarray:
        prefix, count = f"model.layers.{layer}.mlp", self.config["num_experts_per_tok"]
        scores = x @ self.w[f"{prefix}.gate.weight"].T
        order = np.argsort(-scores, axis=1)
        ranked = np.take_along_axis(scores, order, axis=1)
        self.routing_margin = min(self.routing_margin, float((ranked[:, count - 1] - ranked[:, count]).min()))
        chosen = order[:, :count]
        self.used.setdefault(layer, set()).update(chosen.reshape(-1).tolist())
        weights = np.take_along_axis(softmax(scores), chosen, axis=1)
        if self.config["norm_topk_prob"]:
            weights = weights / weights.sum(axis=1, keepdims=True)
        out = np.zeros_like(x)
        for expert in np.unique(chosen):
            rows, place = np.nonzero(chosen == expert)
            y = self.mlp(f"{prefix}.experts.{expert}", x[rows])
            out[rows] += weights[rows, place][:, None] * y
        return out


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def compare_with_transformers(folder: pathlib.Path) -> None:
    """The forward pass of this file on an unquantised model, against references that are stored already."""
    config = json.loads((folder / "config.json").read_text())
    reference = json.loads((folder / "reference.json").read_text())
    stored = read_safetensors(folder / "reference.safetensors")
    model = Model(config, original(config, reference["salt"]))
    for name, prompt in reference["prompts"].items():
        logits = model.logits(prompt["ids"])
        off = np.abs(logits[-LAST_POSITIONS:] - stored[f"{name}.last_logits"]).max()
        assert off < 1e-4, f"{folder.name} {name}: {off} from transformers' logits"
        print(f"{folder.name} {name}: within {off:.1e} of transformers")


def original(config: dict, salt: int) -> dict[str, np.ndarray]:
    tied = config["tie_word_embeddings"]
    return {name: synthetic.tensor(name, shape, salt, tied) for name, shape in shapes(config).items()}


def stored_tensors(name: str, salt: int) -> tuple[dict[str, tuple[str, np.ndarray]], dict[str, np.ndarray]]:
    """What is in the file, as (type, array), and the float32 weights that it means."""
    config, _, form, scale_name, scale_dtype = MODELS[name]
    file, meant = {}, {}
    for tensor, values in original(config, salt).items():
        if not is_quantised(tensor):
            bits = to_bf16(values)
            file[tensor], meant[tensor] = ("BF16", bits), from_bf16(bits)
            continue
        codes, scales, meant[tensor] = quantised(values, form, scale_dtype)
        module = tensor.removesuffix("weight")
        file[tensor] = ("F8_E4M3", codes)
        file[module + scale_name] = (scale_dtype, np.asarray(scales))
        if name in INPUT_SCALE:
            file[module + "input_scale"] = ("F32", np.asarray(INPUT_SCALE[name], np.float32))
    return file, meant


def make(name: str, folder: pathlib.Path, checkpoint: pathlib.Path | None) -> None:
    config, quantization, form, scale_name, scale_dtype = MODELS[name]
    for salt in SALTS:
        file, meant = stored_tensors(name, salt)
        model = Model(config, meant)
        found = references(model)
        if found and all(len(used) == config["num_experts"] for used in model.used.values()):
            break
    else:
        raise SystemExit(f"{name}: no salt gives greedy text without near-ties")
    arrays, prompts = found
    folder.mkdir(parents=True, exist_ok=True)
    config = dict(config, quantization_config=quantization)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    write_safetensors(folder / "reference.safetensors", {n: ("F32", a) for n, a in arrays.items()})
    reference = dict(
        model=name,
        salt=salt,
        arithmetic="float64, of the dequantised float32 weights",
        versions={"numpy": np.__version__},
        min_margin=min(p["min_margin"] for p in prompts.values()),
        **({"min_routing_margin": round(model.routing_margin, 6)} if model.used else {}),
        form=form,
        scale_name=scale_name,
        scale_dtype=scale_dtype,
        input_scale=INPUT_SCALE.get(name),
        prompts=prompts,
        tensors={n: [d, list(a.shape), zlib.crc32(a.tobytes())] for n, (d, a) in sorted(file.items())},
    )
    (folder / "reference.json").write_text(one_line_each(reference, ("prompts", "tensors")))
    print(f"{name}: salt {salt}, margin {reference['min_margin']}")
    if checkpoint:
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint / "config.json").write_text((folder / "config.json").read_text())
        write_safetensors(checkpoint / "model.safetensors", file)


def references(model: Model) -> tuple[dict, dict] | None:
    """Logits and greedy text of every prompt; None at the first near-tie."""
    arrays, prompts = {}, {}
    for name, count in PROMPT_TOKENS.items():
        ids = np.random.default_rng(zlib.crc32(name.encode())).integers(0, SPECIAL_FIRST, count).tolist()
        logits, greedy, rows = model.logits(ids), [], []
        if model.routing_margin < ROUTING_MARGIN_MIN:
            return None
        last, margin = logits[-1], math.inf
        while True:
            best = np.sort(last)
            margin = min(margin, float(best[-1] - best[-2]))
            token = int(last.argmax())
            if margin < MARGIN_MIN or token >= SPECIAL_FIRST:
                return None
            greedy.append(token)
            rows.append(last)
            if len(greedy) == GREEDY_TOKENS:
                break
            last = model.logits(ids + greedy)[-1]
            if model.routing_margin < ROUTING_MARGIN_MIN:
                return None
        if len(set(greedy)) < DISTINCT_MIN:
            return None
        arrays[f"{name}.last_logits"] = logits[-LAST_POSITIONS:]
        for kind, values in (("top", logits), ("greedy_top", np.stack(rows))):
            order = np.argsort(-values, axis=1, kind="stable")[:, :TOP]
            arrays[f"{name}.{kind}_ids"] = order
            arrays[f"{name}.{kind}_logits"] = np.take_along_axis(values, order, axis=1)
        prompts[name] = dict(min_margin=round(margin, 5), logits_std=round(float(logits.std()), 3), ids=ids, greedy=greedy)
    return {name: array.astype(np.float32) for name, array in arrays.items()}, prompts


def one_line_each(reference: dict, keys: tuple[str, ...]) -> str:
    """JSON with one line for every entry of the objects under `keys`."""
    lines = []
    for key, value in reference.items():
        text = json.dumps(value)
        if key in keys:
            text = "{\n" + ",\n".join(f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items()) + "\n  }"
        lines.append(f"  {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def write_safetensors(path: pathlib.Path, tensors: dict[str, tuple[str, np.ndarray]]) -> None:
    header, at = {}, 0
    for name, (dtype, array) in tensors.items():
        header[name] = dict(dtype=dtype, shape=list(array.shape), data_offsets=[at, at + array.nbytes])
        at += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join(np.ascontiguousarray(array).tobytes() for _, array in tensors.values())
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def read_safetensors(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Of float32 tensors."""
    file = path.read_bytes()
    (length,) = struct.unpack("<Q", file[:8])
    header = json.loads(file[8 : 8 + length])
    found = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            found[name] = np.frombuffer(file[begin:end], np.float32).reshape(entry["shape"])
    return found


if __name__ == "__main__":
    main()
