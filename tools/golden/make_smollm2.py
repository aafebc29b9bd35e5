"""Golden references for SmolLM2-135M-Instruct (the Q4_1 GGUF), computed by Hugging Face transformers.

    python make_smollm2.py --gguf SmolLM2-135M-Instruct.Q4_1.gguf --out ../../tests-data/golden/smollm2

The weights are the file's, dequantised to float32; activations are float32, eager attention, one thread. So these
are the numbers that an exact engine would give for this file: one that rounds activations or keys differs a little.

The output folder must hold shakespeare.txt (public domain), which is read, never written. Its README.md says what
each file is and how perplexity is defined.
"""

import argparse
import json
import math
import os
import pathlib

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")

import numpy as np
import tokenizers
import torch
import transformers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

import tokenizer_texts

GREEDY_TOKENS = 64
GREEDY_TOP = 2
CHUNK = 512  # tokens of text a perplexity window holds; the second half is scored
CONTEXT = 4000  # tokens of the long prompt
CONTEXT_POSITIONS = (999, 1999, 2999, 3999)
CONTEXT_TOP = 8
VERSIONS = {m.__name__: m.__version__ for m in (torch, transformers, tokenizers, np)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=pathlib.Path, required=True, help="SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder with shakespeare.txt")
    parser.add_argument("--threads", type=int, default=1, help="torch threads; the stored files were made with 1")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    book = (args.out / "shakespeare.txt").read_text(encoding="ascii")
    source = dict(gguf_file=args.gguf.name, local_files_only=True)
    wrapped = transformers.AutoTokenizer.from_pretrained(args.gguf.parent, **source)
    tokenizer = repair(wrapped.backend_tokenizer)
    ids = encode(tokenizer, book)

    save(args.out / "tokenizer_cases.json", "texts", tokenizer_cases(tokenizer, book))
    np.array(ids, "<u2").tofile(args.out / "shakespeare.ids.u16")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.gguf.parent, dtype=torch.float32, attn_implementation="eager", **source
    ).eval()
    save(args.out / "greedy.json", "prompts", greedy_references(model, tokenizer, wrapped))
    save(args.out / "context.json", "positions", context_references(model, ids[:CONTEXT]))
    save(args.out / "perplexity.json", "chunk_nll", perplexity(model, ids))


def repair(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The GGUF says `pre = smollm`: every numeric character is a piece of its own. The conversion drops that."""
    tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    return tokenizer


def encode(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    """Ids of a text: no token is added (the GGUF says add_bos_token = false); special tokens in it are recognised."""
    return tokenizer.encode(text, add_special_tokens=False).ids


def tokenizer_cases(tokenizer: tokenizers.Tokenizer, book: str) -> dict:
    """Ids of many texts; `plain` where reading special tokens as ordinary text gives other ids."""
    texts = tokenizer_texts.everything(book)
    recognised = [encode(tokenizer, t) for t in texts]
    tokenizer.encode_special_tokens = True
    plain = [encode(tokenizer, t) for t in texts]
    tokenizer.encode_special_tokens = False
    cases = []
    for text, ids, plain_ids in zip(texts, recognised, plain):
        for some in (ids, plain_ids):
            assert tokenizer.decode(some, skip_special_tokens=False) == text, text
        cases.append(dict(text=text, ids=ids) | (dict(plain=plain_ids) if plain_ids != ids else {}))
    return dict(versions=VERSIONS, texts=cases)


@torch.no_grad()
def logits_at(model: torch.nn.Module, ids: list[int], positions: slice | list[int]) -> np.ndarray:
    """Logits of some positions of one forward pass without a cache, [positions, vocabulary], f64 copies of f32 values."""
    hidden = model.model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]
    return model.lm_head(hidden[positions]).numpy().astype(np.float64)


def log_sum_exp(logits: np.ndarray) -> np.ndarray:
    """Of every row: a logit minus this is a log-probability."""
    peak = logits.max(axis=1)
    return peak + np.log(np.exp(logits - peak[:, None]).sum(axis=1))


def top(logits: np.ndarray, count: int) -> tuple[list, list]:
    """Ids and logits of the `count` largest of every row, largest first."""
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :count]
    return ids.tolist(), np.take_along_axis(logits, ids, axis=1).round(5).tolist()


def greedy_references(model: torch.nn.Module, tokenizer: tokenizers.Tokenizer, wrapped) -> dict:
    """Greedy text past any end token, then its rows from ONE pass over prompt and text (teacher-forced, no cache)."""
    question = [dict(role="user", content="What is gravity? Answer in one sentence.")]
    texts = {
        "france": "The capital of France is",
        "fibonacci": "def fibonacci(n):\n",
        "gravity": wrapped.apply_chat_template(question, tokenize=False, add_generation_prompt=True),
    }
    prompts = []
    for name, text in texts.items():
        ids = encode(tokenizer, text)
        greedy = generate(model, ids)
        rows = logits_at(model, ids + greedy[:-1], slice(len(ids) - 1, None))
        assert rows.argmax(axis=1).tolist() == greedy, f"{name}: cached and teacher-forced greedy ids differ"
        top_ids, top_logits = top(rows, GREEDY_TOP)
        margins = [round(first - second, 5) for first, second in top_logits]
        prompts.append(
            dict(
                name=name,
                text=text,
                ids=ids,
                greedy=greedy,
                greedy_text=tokenizer.decode(greedy, skip_special_tokens=False),
                min_margin=min(margins),
                margins=margins,
                top_ids=top_ids,
                top_logits=top_logits,
                log_sum_exp=log_sum_exp(rows).round(5).tolist(),
            )
        )
    return dict(versions=VERSIONS, prompts=prompts)


@torch.no_grad()
def generate(model: torch.nn.Module, ids: list[int]) -> list[int]:
    cache, feed, greedy = transformers.DynamicCache(config=model.config), list(ids), []
    for _ in range(GREEDY_TOKENS):
        logits = model(input_ids=torch.tensor([feed]), cache=cache, use_cache=True, logits_to_keep=1).logits
        feed = [int(logits[0, -1].argmax())]
        greedy += feed
    return greedy


def context_references(model: torch.nn.Module, ids: list[int]) -> dict:
    """Next-token logits deep inside one long prompt."""
    rows = logits_at(model, ids, list(CONTEXT_POSITIONS))
    columns = zip(CONTEXT_POSITIONS, *top(rows, CONTEXT_TOP), log_sum_exp(rows).round(5).tolist())
    keys = ("position", "top_ids", "top_logits", "log_sum_exp")
    return dict(versions=VERSIONS, prompt_tokens=len(ids), positions=[dict(zip(keys, c)) for c in columns])


def perplexity(model: torch.nn.Module, ids: list[int]) -> dict:
    """Windows of CHUNK tokens without a BOS; the tokens CHUNK/2 + 1 .. CHUNK of each (by index, end excluded) are scored."""
    chunk_nll = []
    for chunk in range(len(ids) // CHUNK):
        window = ids[chunk * CHUNK : (chunk + 1) * CHUNK]
        targets = window[CHUNK // 2 + 1 :]
        rows = logits_at(model, window, slice(CHUNK // 2, CHUNK - 1))
        chunk_nll.append(float((log_sum_exp(rows) - rows[np.arange(len(targets)), targets]).sum()))
    scored = len(chunk_nll) * (CHUNK // 2 - 1)
    return dict(
        versions=VERSIONS,
        tokens=len(ids),
        chunk=CHUNK,
        chunks=len(chunk_nll),
        scored=scored,
        nll=round(sum(chunk_nll), 6),
        perplexity=round(math.exp(sum(chunk_nll) / scored), 6),
        chunk_nll=[round(n, 6) for n in chunk_nll],
    )


def save(path: pathlib.Path, listed: str, value: dict) -> None:
    """JSON, a line for every key and for every entry of the list `listed`."""
    entries = ",\n".join("    " + json.dumps(v) for v in value.pop(listed))
    head = "".join(f"  {json.dumps(k)}: {json.dumps(v)},\n" for k, v in value.items())
    path.write_text(f"{{\n{head}  {json.dumps(listed)}: [\n{entries}\n  ]\n}}\n", encoding="ascii")
    print(f"{path.name}: {path.stat().st_size} bytes; {head.replace(chr(10), ' ')}", flush=True)


if __name__ == "__main__":
    main()
