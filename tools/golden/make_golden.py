"""Golden references for tiny models of every family, computed by Hugging Face transformers.

    python make_golden.py --out ../../tests-data/golden [--only llama,qwen3]

Weights come from `synthetic.py` and are not stored: a reader makes them again from the salt in reference.json.
One folder a model, described in the README of the output folder. All numbers are float32, eager attention, one thread.

The salt is the first for which greedy decoding of every prompt has a top1 - top2 margin of at least MARGIN_MIN, is
varied, meets no special token, and is the same with and without transformers' KV cache. So an engine must give the
greedy ids exactly, whatever its order of summation. With experts, no choice of any position may be a near-tie either,
and every expert of every layer must be chosen somewhere: see `Routing`.
"""

import argparse
import json
import os
import pathlib
import shutil
import zlib

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")

import numpy as np
import safetensors.numpy
import torch
import transformers

import synthetic

VOCAB = 512
SPECIAL_FIRST = 504  # ids from here on are special: in no prompt, never generated
SPECIAL = dict(bos_token_id=506, eos_token_id=507, pad_token_id=510)
PROMPT_TOKENS = {"short": 5, "chat": 40, "long": 300}
GREEDY_TOKENS = 24
LAST_POSITIONS = 4  # whose logits are stored in full
TOP = 8  # largest logits stored of every position
MARGIN_MIN = 0.02
SALTS = range(5000)
# Smallest difference that a token's choice of experts may hang on, in the unit of what is compared: router logits
# for softmax scores, sigmoid scores with their bias (whose range is 1) otherwise. Float32 moves them by 1e-5 and 1e-6.
ROUTING_MARGIN_MIN = dict(softmax=1e-3, sigmoid=1e-4)

LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,  # small, so that the long prompt passes it
)


def rope(theta: float) -> dict:
    return dict(rope_type="default", rope_theta=theta)


# Three layers each. Where a family has two models or more, one has a norm epsilon so large that a wrong one shows.
EPS_VISIBLE = 1e-2
BASE = dict(hidden_size=64, intermediate_size=160, num_attention_heads=4, num_key_value_heads=2)
EIGHT_HEADS = dict(BASE, num_attention_heads=8, num_key_value_heads=4, head_dim=16)
MODELS = {
    "llama": ("Llama", dict(BASE, head_dim=16, rms_norm_eps=1e-5, rope_parameters=LLAMA3_ROPE)),
    "llama_tied": (
        "Llama",
        dict(
            hidden_size=72,
            intermediate_size=192,
            num_attention_heads=9,
            num_key_value_heads=3,
            head_dim=8,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            rope_parameters=rope(100000.0),
        ),
    ),
    "llama_bias": (
        "Llama",
        dict(
            BASE,
            head_dim=16,
            attention_bias=True,
            mlp_bias=True,
            rms_norm_eps=EPS_VISIBLE,
            rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=2.0),
        ),
    ),
    "qwen2": ("Qwen2", dict(BASE, tie_word_embeddings=True, rope_parameters=rope(1e6))),
    "qwen2_untied": ("Qwen2", dict(BASE, rms_norm_eps=EPS_VISIBLE, rope_parameters=rope(1e6))),
    "qwen3": ("Qwen3", dict(BASE, head_dim=32, rope_parameters=rope(1e6))),
    "qwen3_tied": (
        "Qwen3",
        dict(BASE, head_dim=32, tie_word_embeddings=True, rms_norm_eps=EPS_VISIBLE, rope_parameters=rope(1e6)),
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        dict(
            BASE,
            head_dim=32,
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            mlp_only_layers=[1],
            norm_topk_prob=True,
            rope_parameters=rope(1e6),
        ),
    ),
    "qwen3_moe_unnormalised": (
        "Qwen3Moe",
        dict(
            BASE,
            head_dim=32,
            num_experts=16,
            num_experts_per_tok=4,
            moe_intermediate_size=32,
            norm_topk_prob=False,
            rms_norm_eps=EPS_VISIBLE,
            rope_parameters=rope(1e6),
        ),
    ),
    "mixtral": (
        "Mixtral",
        dict(
            BASE,
            head_dim=16,
            intermediate_size=64,
            num_local_experts=8,
            num_experts_per_tok=2,
            rope_parameters=rope(1e6),
        ),
    ),
    "glm4_moe": (
        "Glm4Moe",
        dict(
            EIGHT_HEADS,
            attention_bias=True,
            use_qk_norm=True,
            n_routed_experts=16,
            num_experts_per_tok=4,
            n_group=4,
            topk_group=2,
            n_shared_experts=1,
            moe_intermediate_size=32,
            first_k_dense_replace=1,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
            num_nextn_predict_layers=0,
            rope_parameters=dict(rope(1e6), partial_rotary_factor=0.5),
        ),
    ),
    "minimax_m2": (
        "MiniMaxM2",
        dict(
            EIGHT_HEADS,
            intermediate_size=32,
            num_local_experts=16,
            num_experts_per_tok=4,
            rotary_dim=8,
            rms_norm_eps=EPS_VISIBLE,
            rope_parameters=rope(5e6),
        ),
    ),
}
PUBLISHED_SPELLING = {"llama"}
SIGMOID = {"Glm4Moe", "MiniMaxM2"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder that gets one folder a model")
    parser.add_argument("--only", help="comma-separated names; all if left out")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    synthetic.self_test()
    for name in args.only.split(",") if args.only else MODELS:
        make(name, args.out / name)


def make(name: str, folder: pathlib.Path) -> None:
    """Finds the salt, computes the references and writes the folder."""
    model = build(name)
    tied = model.config.tie_word_embeddings
    routing = Routing(name, model) if has_experts(name) else None
    for salt in SALTS:
        fill(model, salt)
        if routing and not all(routing.is_clear(model, prompt_ids(n, c)) for n, c in PROMPT_TOKENS.items()):
            continue
        arrays, prompts = references(model)
        if all(is_clear(p) for p in prompts.values()) and (not routing or routing.describe(model, prompts)):
            break
    else:
        raise SystemExit(f"{name}: no salt in {SALTS} gives greedy text without near-ties")
    tensors = {n: v.detach().numpy() for n, v in weights(model).items()}
    for tensor_name, values in tensors.items():
        synthetic.check_against_rule(tensor_name, values, salt, tied)
    arrays["short.hidden"] = hidden_states(model, prompts["short"]["ids"])

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_config(name, model, folder)
    safetensors.numpy.save_file(arrays, folder / "reference.safetensors")
    reference = dict(
        model=name,
        salt=salt,
        arithmetic="float32, eager attention, 1 thread",
        versions={m.__name__: m.__version__ for m in (torch, transformers, np)},
        min_margin=min(p["min_margin"] for p in prompts.values()),
        cached_logit_difference_max=max(p["cached_logit_difference_max"] for p in prompts.values()),
        **(routing.summary(prompts) if routing else {}),
        prompts=prompts,
        tensors={n: checksum(v) for n, v in tensors.items()},
    )
    (folder / "reference.json").write_text(one_line_each(reference, ("prompts", "tensors")))
    report(name, folder, reference)


def build(name: str) -> torch.nn.Module:
    family, settings = MODELS[name]
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCAB, num_hidden_layers=3, max_position_embeddings=4096, **SPECIAL, **settings
    )
    config._attn_implementation = "eager"
    if has_experts(name):
        config._experts_implementation = "eager"
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(config).float().eval()


@torch.no_grad()
def fill(model: torch.nn.Module, salt: int) -> None:
    tied = model.config.tie_word_embeddings
    for name, values in weights(model).items():
        values.copy_(torch.from_numpy(synthetic.tensor(name, tuple(values.shape), salt, tied)))


def has_experts(name: str) -> bool:
    return any("num_experts_per_tok" in key for key in MODELS[name][1])


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Views of the model's weights by the names that atom has for them: one matrix of one expert a tensor."""
    buffers = [(n, b) for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")]
    views = {}
    for name, values in [*model.named_parameters(), *buffers]:
        if name.endswith(".mlp.experts.gate_up_proj"):
            prefix, width = name.removesuffix("gate_up_proj"), values.shape[1] // 2
            for expert in range(values.shape[0]):
                views[f"{prefix}{expert}.gate_proj.weight"] = values[expert, :width]
                views[f"{prefix}{expert}.up_proj.weight"] = values[expert, width:]
        elif name.endswith(".mlp.experts.down_proj"):
            prefix = name.removesuffix("down_proj")
            views |= {f"{prefix}{expert}.down_proj.weight": values[expert] for expert in range(values.shape[0])}
        else:
            views[name.replace(".mlp.e_score_correction_bias", ".mlp.gate.e_score_correction_bias")] = values
    return views


class Routing:
    """Every position's choice of experts: checked against a second reading of the rule, and for near-ties.

    The second reading, in float64 from the router's logits: scores are the logits themselves where the model takes
    their softmax (the order is the same), their sigmoids plus the bias otherwise. Groups are rated by the sum of their
    two best scores; experts outside of the best groups are out (minus infinity). transformers has filled them with 0
    in some versions, which is the same as long as every chosen score is above 0: that is asserted too.
    """

    def __init__(self, name: str, model: torch.nn.Module) -> None:
        family, settings = MODELS[name]
        self.sigmoid = family in SIGMOID
        self.top_k = settings["num_experts_per_tok"]
        self.groups, self.groups_kept = settings.get("n_group", 1), settings.get("topk_group", 1)
        self.margin_min = ROUTING_MARGIN_MIN["sigmoid" if self.sigmoid else "softmax"]
        self.layers = {n: m for n, m in model.named_modules() if type(m).__name__.lower().endswith("topkrouter")}
        assert self.layers, name

    def is_clear(self, model: torch.nn.Module, ids: list[int]) -> bool:
        return self.run(model, ids)[0] >= self.margin_min

    def describe(self, model: torch.nn.Module, prompts: dict[str, dict]) -> bool:
        """Adds what is seen over prompt and greedy text to `prompts`; whether all of it will do."""
        used = {name: set() for name in self.layers}
        for prompt in prompts.values():
            margin, chosen, changed = self.run(model, prompt["ids"] + prompt["greedy"][:-1])
            prompt["routing_margin"] = round(margin, 6)
            prompt["routing_changed_by_bias"] = changed
            for name, mask in chosen.items():
                used[name] |= set(np.flatnonzero(mask.any(axis=0)).tolist())
        every = all(len(experts) == mask.shape[1] for (_, mask), experts in zip(chosen.items(), used.values()))
        bias_shows = not self.sigmoid or any(p["routing_changed_by_bias"] for p in prompts.values())
        return every and bias_shows and min(p["routing_margin"] for p in prompts.values()) >= self.margin_min

    def summary(self, prompts: dict[str, dict]) -> dict:
        return dict(min_routing_margin=min(p["routing_margin"] for p in prompts.values()))

    def run(self, model: torch.nn.Module, ids: list[int]) -> tuple[float, dict[str, np.ndarray], int]:
        """The smallest margin, the chosen experts of each layer [T, experts], and choices that the bias changed."""
        seen = {}
        hooks = [
            m.register_forward_hook(lambda _m, _i, out, name=n: seen.update({name: out}))
            for n, m in self.layers.items()
        ]
        forward(model, ids)
        for hook in hooks:
            hook.remove()
        biases = {n: v.double().numpy() for n, v in weights(model).items() if n.endswith("e_score_correction_bias")}
        smallest, masks, changed = np.inf, {}, 0
        for name, (logits, _, indices) in seen.items():
            logits = logits.double().numpy()
            scores = 1.0 / (1.0 + np.exp(-logits)) if self.sigmoid else logits
            biased = scores + biases[f"{name}.e_score_correction_bias"] if self.sigmoid else scores
            mask, margin = self.choose(biased)
            theirs = np.zeros_like(mask)
            np.put_along_axis(theirs, indices.numpy(), True, axis=1)
            smallest = min(smallest, margin)
            if margin >= self.margin_min:
                assert (mask == theirs).all(), f"{name}: transformers chooses otherwise"
                assert not self.sigmoid or biased[mask].min() > 0, f"{name}: a chosen score is not above 0"
            changed += int((self.choose(scores)[0] != mask).any(axis=1).sum())
            masks[name] = mask
        return float(smallest), masks, changed

    def choose(self, scores: np.ndarray) -> tuple[np.ndarray, float]:
        """The chosen experts of each row [T, experts], and the smallest difference that a choice hangs on."""
        margin = np.inf
        if self.groups > 1:
            grouped = scores.reshape(len(scores), self.groups, -1)
            kept, margin = largest(np.sort(grouped, axis=2)[:, :, -2:].sum(axis=2), self.groups_kept)
            scores = np.where(np.repeat(kept, grouped.shape[2], axis=1), scores, -np.inf)
        chosen, own = largest(scores, self.top_k)
        return chosen, min(margin, own)


def largest(values: np.ndarray, count: int) -> tuple[np.ndarray, float]:
    """Which are the `count` largest of each row, and the smallest distance between the last of them and the next."""
    ordered = np.sort(values, axis=1)
    last, following = ordered[:, -count], ordered[:, -count - 1]
    return values >= last[:, None], float((last - following).min())


def prompt_ids(name: str, count: int) -> list[int]:
    """Plain token ids, uniform, from the same generator as the weights: 1 .. SPECIAL_FIRST."""
    position = np.arange(count, dtype=np.uint64)
    words = synthetic.philox([position, 0 * position, 0 * position, 0 * position], (synthetic.crc(name, 0), 0))
    return (1 + words[0] % (SPECIAL_FIRST - 1)).tolist()


def references(model: torch.nn.Module) -> tuple[dict[str, np.ndarray], dict[str, dict]]:
    """Arrays for reference.safetensors and the prompts' part of reference.json."""
    arrays, prompts = {}, {}
    for name, count in PROMPT_TOKENS.items():
        ids = prompt_ids(name, count)
        logits = forward(model, ids)
        greedy, rows = greedy_uncached(model, ids)
        cached, cached_rows = greedy_cached(model, ids)
        two = np.sort(rows, axis=1)[:, -2:]
        arrays[f"{name}.last_logits"] = logits[-LAST_POSITIONS:].copy()
        arrays[f"{name}.top_ids"], arrays[f"{name}.top_logits"] = top(logits)
        arrays[f"{name}.greedy_top_ids"], arrays[f"{name}.greedy_top_logits"] = top(rows)
        prompts[name] = dict(
            min_margin=round(float((two[:, 1] - two[:, 0]).min()), 5),
            cached_is_same=cached == greedy,
            cached_logit_difference_max=float(np.abs(cached_rows - rows).max()) if cached == greedy else None,
            logits_std=round(float(logits.std()), 3),
            ids=ids,
            greedy=greedy,
        )
    return arrays, prompts


def is_clear(prompt: dict) -> bool:
    greedy = prompt["greedy"]
    varied, plain = len(set(greedy)) >= GREEDY_TOKENS // 2, max(greedy) < SPECIAL_FIRST
    return prompt["min_margin"] >= MARGIN_MIN and prompt["cached_is_same"] and varied and plain


@torch.no_grad()
def forward(model: torch.nn.Module, ids: list[int]) -> np.ndarray:
    """Logits of every position, [positions, vocabulary]."""
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].numpy()


def greedy_uncached(model: torch.nn.Module, ids: list[int]) -> tuple[list[int], np.ndarray]:
    """The definition: the whole prefix is computed again for every token. Rows are those the tokens were taken from."""
    sequence, rows = list(ids), []
    for _ in range(GREEDY_TOKENS):
        rows.append(forward(model, sequence)[-1])
        sequence.append(int(rows[-1].argmax()))
    return sequence[len(ids) :], np.stack(rows)


@torch.no_grad()
def greedy_cached(model: torch.nn.Module, ids: list[int]) -> tuple[list[int], np.ndarray]:
    """The same with transformers' KV cache: another order of the same sums, so it shows the noise to expect."""
    cache, feed, greedy, rows = transformers.DynamicCache(config=model.config), list(ids), [], []
    for _ in range(GREEDY_TOKENS):
        rows.append(model(input_ids=torch.tensor([feed]), cache=cache, use_cache=True).logits[0, -1].numpy())
        feed = [int(rows[-1].argmax())]
        greedy += feed
    return greedy, np.stack(rows)


@torch.no_grad()
def hidden_states(model: torch.nn.Module, ids: list[int]) -> np.ndarray:
    """The residual stream: after the embedding, after each layer, and after the final norm. [layers + 2, T, H]"""
    seen = []
    inner = model.model
    taps = [inner.embed_tokens, *inner.layers, inner.norm]
    hooks = [
        m.register_forward_hook(lambda _m, _i, out: seen.append((out[0] if isinstance(out, tuple) else out)[0].numpy()))
        for m in taps
    ]
    forward(model, ids)
    for hook in hooks:
        hook.remove()
    assert len(seen) == len(taps)
    return np.stack(seen)


def top(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ids (as f32, exact) and values of the TOP largest logits of every row, largest first."""
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :TOP]
    return ids.astype(np.float32), np.take_along_axis(logits, ids, axis=1).astype(np.float32)


def checksum(values: np.ndarray) -> dict:
    """Lets a second implementation of the weights be checked apart from the model. CRC-32 of the little-endian bytes."""
    flat = values.reshape(-1)
    return dict(shape=list(values.shape), crc32=zlib.crc32(flat.astype("<f4").tobytes()), first=flat[:4].tolist())


def write_config(name: str, model: torch.nn.Module, folder: pathlib.Path) -> None:
    """config.json as save_pretrained writes it, and where asked for the spelling that published checkpoints have."""
    model.config.architectures = [type(model).__name__]
    model.config.dtype = "float32"
    model.config.save_pretrained(folder)
    if name in PUBLISHED_SPELLING:
        config = json.loads((folder / "config.json").read_text())
        scaling = config.pop("rope_parameters")
        config["rope_theta"] = scaling.pop("rope_theta")
        config["rope_scaling"] = scaling
        config["torch_dtype"] = config.pop("dtype")
        (folder / "config.published.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def one_line_each(value: dict, nested: tuple[str, ...]) -> str:
    """JSON with one line for each key, and for each entry of the keys in `nested`."""
    lines = []
    for key, item in value.items():
        if key in nested:
            entries = ",\n".join(f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in item.items())
            lines.append(f"  {json.dumps(key)}: {{\n{entries}\n  }}")
        else:
            lines.append(f"  {json.dumps(key)}: {json.dumps(item)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def report(name: str, folder: pathlib.Path, reference: dict) -> None:
    bytes_total = sum(f.stat().st_size for f in folder.iterdir())
    prompts = "  ".join(
        f"{n}: margin {p['min_margin']} std {p['logits_std']} distinct {len(set(p['greedy']))}"
        for n, p in reference["prompts"].items()
    )
    noise = reference["cached_logit_difference_max"]
    if "min_routing_margin" in reference:
        changed = sum(p["routing_changed_by_bias"] for p in reference["prompts"].values())
        prompts += f"  routing margin {reference['min_routing_margin']}, {changed} choices changed by the bias"
    print(
        f"{name}: salt {reference['salt']}, {bytes_total} bytes, cached differs by {noise:.1e}; {prompts}", flush=True
    )


if __name__ == "__main__":
    main()
