"""What lm-eval must measure at a server of SmolLM2-135M-Instruct: run by scripts/clients.

    python lm_eval_client.py URL TOKENIZER_FOLDER SCRATCH

lm-eval runs as its users run it, as a program with the address of a server. Its tasks are made here, from numbers that
transformers computed in float32 (tests-data/golden/smollm2), since no hub can be reached; what it wrote down for every
sample is compared with them.
"""

import json
import math
import os
import pathlib
import struct
import subprocess
import sys
import urllib.request
from importlib.metadata import version

url, tokenizer, scratch = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])
golden = pathlib.Path(__file__).parents[2] / "tests-data/golden/smollm2"
EOS = "<|im_end|>"
# Quantised weights are multiplied with 16-bit activations, and keys and values are f16, where transformers has f32.
LOGPROB_DIFFERENCE_MAX = 0.03
WINDOWS = 12
# Of the sum over 255 tokens: differences of both signs.
SUM_DIFFERENCE_MAX = 0.2


def post(path: str, body: dict) -> dict:
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def get(path: str) -> dict:
    with urllib.request.urlopen(url + path) as response:
        return json.load(response)


def tokens(text: str) -> list[int]:
    return post("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]


def text(ids: list[int]) -> str:
    return post("/detokenize", {"tokens": ids})["prompt"]


def splits(context: list[int], continuation: list[int]) -> bool:
    """Whether lm-eval, which sends texts to the tokenizer, finds these very tokens: it moves blanks to the continuation."""
    before = text(context)
    if before != before.rstrip():
        return False
    return tokens(before) == context and tokens(before + text(continuation)) == context + continuation


def make_task(name: str, documents: list[dict], **task) -> None:
    (scratch / f"{name}.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(scratch / f"{name}.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{context}}",
        "target_delimiter": "",
        **task,
    }
    # JSON is YAML.
    (scratch / f"{name}.yaml").write_text(json.dumps(task))


def evaluate(run: str, model: str, path: str, tasks: list[str], *options: str, **arguments) -> dict[str, list[dict]]:
    """Runs lm-eval with the address of the server, `options` and `arguments` of the model: samples of each task, in order."""
    arguments = {"model": served, "base_url": f"{url}{path}", **arguments}
    command = [sys.executable, "-m", "lm_eval", "run", "--model", model, "--tasks", *tasks, "--include_path", str(scratch)]
    command += ["--model_args", *(f"{name}={value}" for name, value in arguments.items())]
    command += ["--output_path", str(scratch / run), "--log_samples", *options]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(scratch / "hf"), "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, env={**os.environ, **offline}, capture_output=True, text=True)
    complaints = [line for line in done.stderr.splitlines() if "API request failed" in line or "ERROR" in line]
    assert done.returncode == 0 and not complaints, f"{command}\n{done.stdout}{done.stderr}"
    samples = {}
    for task in tasks:
        (file,) = (scratch / run).rglob(f"samples_{task}_*.jsonl")
        found = [json.loads(line) for line in file.read_text().splitlines()]
        samples[task] = sorted(found, key=lambda sample: sample["doc_id"])
    return samples


def likelihoods(sample: dict) -> list[tuple[float, bool]]:
    return [(float(score), greedy in (True, "True")) for ((score, greedy),) in sample["resps"]]


def close(found: float, expected: float, most: float, what: object) -> float:
    assert abs(found - expected) <= most, f"{found} where {expected} is expected, at the most {most} off: {what}"
    return abs(found - expected)


served = get("/v1/models")["data"][0]["id"]
scratch.mkdir(parents=True)
prompts = json.loads((golden / "greedy.json").read_text())["prompts"]

# The two likeliest tokens of every row of the greedy references, as the choices of a question.
rows = []
for prompt in prompts:
    for at, top in enumerate(prompt["top_ids"]):
        context = prompt["ids"] + prompt["greedy"][:at]
        if all(splits(context, [id]) for id in top):
            logprobs = [logit - prompt["log_sum_exp"][at] for logit in prompt["top_logits"][at]]
            rows.append({"context": text(context), "choices": [text([id]) for id in top], "logprobs": logprobs})
assert len(rows) > 80 and any(row["choices"][0] == EOS for row in rows), f"{len(rows)} rows"
make_task(
    "golden_choices",
    rows,
    output_type="multiple_choice",
    doc_to_choice="choices",
    doc_to_target=0,
    metric_list=[{"metric": "acc"}],
)

# Halves of windows of Shakespeare, whose second one was scored for the perplexity.
book = [id for (id,) in struct.iter_unpack("<H", (golden / "shakespeare.ids.u16").read_bytes())]
perplexity = json.loads((golden / "perplexity.json").read_text())
size, half = perplexity["chunk"], perplexity["chunk"] // 2 + 1
windows = []
for at, nll in enumerate(perplexity["chunk_nll"]):
    window = book[size * at : size * (at + 1)]
    if len(windows) < WINDOWS and splits(window[:half], window[half:]):
        windows.append({"context": text(window[:half]), "continuation": text(window[half:]), "nll": nll})
assert len(windows) == WINDOWS, f"{len(windows)} windows"
make_task(
    "golden_windows",
    windows,
    output_type="loglikelihood",
    doc_to_target="{{continuation}}",
    metric_list=[{"metric": "acc"}],
)

# A text as a whole, behind the token that begins one.
speech = (golden / "shakespeare.txt").read_text(encoding="ascii")[:4000]
make_task(
    "rolling",
    [{"context": speech}],
    output_type="loglikelihood_rolling",
    doc_to_text="",
    doc_to_target="{{context}}",
    metric_list=[{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}],
)

# Greedy texts up to what ends them.
ENDS = {"france": EOS, "fibonacci": "\n```", "gravity": EOS}
GENERATION = {"do_sample": False, "temperature": 0, "max_gen_toks": 64}
written = [
    {"context": prompt["text"], "answer": prompt["greedy_text"].split(ENDS[prompt["name"]])[0]} for prompt in prompts
]
make_task(
    "golden_texts",
    written,
    output_type="generate_until",
    doc_to_target="{{answer}}",
    generation_kwargs={**GENERATION, "until": ["\n```"]},
    metric_list=[{"metric": "exact_match"}],
)

# The same as a conversation, and some whose answers are those of a stream.
(gravity,) = (prompt for prompt in prompts if prompt["name"] == "gravity")
asked = gravity["text"].split("<|im_start|>user\n")[1].split(EOS)[0]
questions = [asked, "What is the capital of France?", "Write a haiku about the sea.", "1, 2, 3, 4, and then?"]


def streamed(question: str) -> str:
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 64, "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        events = response.read().decode().strip().split("\n\n")
    assert events.pop() == "data: [DONE]"
    choices = [choice for event in events for choice in json.loads(event.removeprefix("data: "))["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


answers = [streamed(question) for question in questions]
assert answers[0] == gravity["greedy_text"].split(EOS)[0], answers[0]
make_task(
    "conversations",
    [{"context": question, "answer": answer} for question, answer in zip(questions, answers)],
    output_type="generate_until",
    doc_to_target="{{answer}}",
    generation_kwargs={**GENERATION, "until": []},
    metric_list=[{"metric": "exact_match"}],
)

print(f"  lm-eval {version('lm_eval')}, datasets {version('datasets')}, transformers {version('transformers')}")

# Nothing but the address: lm-eval finds the server's tokenizer by itself.
scored = ["golden_choices", "golden_windows", "rolling"]
found = evaluate("one-by-one", "local-completions", "/v1/completions", scored + ["golden_texts"])
most = 0.0
for row, sample in zip(rows, found["golden_choices"], strict=True):
    first, second = likelihoods(sample)
    for (score, _), expected in zip((first, second), row["logprobs"]):
        most = max(most, close(score, expected, LOGPROB_DIFFERENCE_MAX, row))
    margin = row["logprobs"][0] - row["logprobs"][1]
    assert (first[1], second[1]) == (True, False) and sample["acc"] == 1.0 or margin < 2 * LOGPROB_DIFFERENCE_MAX, row
print(f"  local-completions, {len(rows)} questions of two tokens: log-probabilities within {most:.4f} of transformers' in f32")
most, sums = 0.0, [0.0, 0.0]
for window, sample in zip(windows, found["golden_windows"], strict=True):
    ((score, _),) = likelihoods(sample)
    most = max(most, close(-score, window["nll"], SUM_DIFFERENCE_MAX, window["context"]))
    sums = [sums[0] - score, sums[1] + window["nll"]]
scored_tokens = len(windows) * (size - half)
here, there = (math.exp(total / scored_tokens) for total in sums)
print(f"  local-completions, {len(windows)} texts of 255 tokens: sums within {most:.3f}, perplexity {here:.3f} for {there:.3f}")
begin = get("/tokenizer_info")["bos_token"]
echo = {"prompt": begin + speech, "max_tokens": 0, "echo": True, "logprobs": 0, "temperature": 0}
own = sum(post("/v1/completions", echo)["choices"][0]["logprobs"]["token_logprobs"][1:])
(rolling,) = found["rolling"]
close(float(rolling["resps"][0][0]), own, 1e-3, "a text as a whole")
print(f"  local-completions, a text of {len(tokens(speech))} tokens as a whole: {own:.3f}, as the server says without lm-eval")
for document, sample in zip(written, found["golden_texts"], strict=True):
    assert sample["filtered_resps"] == [document["answer"]] and sample["exact_match"] == 1.0, (document, sample)
print(f"  local-completions, {len(written)} texts: those of transformers, to the letter")

# Some of them in parallel, in batches, and with transformers' tokenizer in place of the server's: the same figures.
own_tokenizer = {"tokenizer_backend": "huggingface", "tokenizer": tokenizer}
for run, options, arguments in (
    ("eight at once", [], {"num_concurrent": 8}),
    ("batches of 16", ["--batch_size", "16"], {}),
    ("texts in place of tokens", [], {"tokenized_requests": False}),
    ("transformers' tokenizer", [], own_tokenizer),
):
    again = evaluate(
        run.replace(" ", "-"), "local-completions", "/v1/completions", scored, "--limit", "24", *options, **arguments
    )
    for task in scored:
        said = [[sample["resps"] for sample in samples[task][:24]] for samples in (found, again)]
        assert said[0] == said[1], f"{run}, {task}: {said}"
    print(f"  local-completions, {run}: the same, to the last digit")

# Conversations: as messages, and as the tokens of a template that was filled in by transformers.
talk = evaluate("chat", "local-chat-completions", "/v1/chat/completions", ["conversations"], "--apply_chat_template")
rendered = evaluate(
    "template", "local-completions", "/v1/completions", ["conversations"], "--apply_chat_template", **own_tokenizer
)
for answer, *samples in zip(answers, talk["conversations"], rendered["conversations"], strict=True):
    for sample in samples:
        assert sample["filtered_resps"] == [answer] and sample["exact_match"] == 1.0, (answer, sample)
print(f"  local-chat-completions, {len(questions)} answers: those of a stream, and of a template filled in by transformers")
print(f"lm-eval {version('lm_eval')}: all held")
