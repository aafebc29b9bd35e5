"""Golden references for tiny models of every dense family, computed by Hugging Face transformers.

    python make_golden.py --out ../../tests-data/golden [--only llama,qwen3]

Weights come from `synthetic.py` and are not stored: a reader makes them again from the salt in reference.json.
One folder a model, described in the README of the output folder. All numbers are float32, eager attention, one thread.

The salt is the first for which greedy decoding of every prompt has a top1 - top2 margin of at least MARGIN_MIN, is
varied, meets no special token, and is the same with and without transformers' KV cache. So an engine must give the
greedy ids exactly, whatever its order of summation.
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
SALTS = range(200)

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
}
PUBLISHED_SPELLING = {"llama"}


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
    for salt in SALTS:
        fill(model, salt)
        arrays, prompts = references(model)
        if all(is_clear(p) for p in prompts.values()):
            break
    else:
        raise SystemExit(f"{name}: no salt in {SALTS} gives greedy text without near-ties")
    tensors = {n: p.detach().numpy() for n, p in model.named_parameters()}
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
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(config).float().eval()


@torch.no_grad()
def fill(model: torch.nn.Module, salt: int) -> None:
    tied = model.config.tie_word_embeddings
    for name, parameter in model.named_parameters():
        parameter.copy_(torch.from_numpy(synthetic.tensor(name, tuple(parameter.shape), salt, tied)))


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
    print(
        f"{name}: salt {reference['salt']}, {bytes_total} bytes, cached differs by {noise:.1e}; {prompts}", flush=True
    )


if __name__ == "__main__":
    main()
