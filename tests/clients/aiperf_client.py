"""What aiperf must see of a server of SmolLM2-135M-Instruct: run by scripts/clients.

    python aiperf_client.py URL TOKENIZER_FOLDER SCRATCH

Not how fast the server is, but that aiperf understands it: every endpoint, streamed and whole, with aiperf's own count of
tokens beside the server's usage, and the server's metrics beside both.
"""

import json
import os
import pathlib
import subprocess
import sys
from importlib.metadata import version

os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # It would say that it has no torch.
from transformers import AutoTokenizer  # noqa: E402

url, tokenizer, scratch = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])
book = pathlib.Path(__file__).parents[2] / "tests-data/golden/smollm2/shakespeare.txt"
# Endpoint types of aiperf, and how the server's metrics call them.
ENDPOINTS = {"chat": "chat_completions", "completions": "completions", "responses": "responses", "messages": "messages"}
# Beside beginnings of a play: what has a short answer, so that some answers end by themselves. None is empty, as a text
# or as a conversation: an answer of nothing is an error to aiperf.
QUESTIONS = ["What is the capital of Italy? One word.", "Name a colour.", "2 + 2 ="]
PROMPTS = 12
TOKENS = 24


def profile(endpoint: str, streaming: bool, *options: str) -> tuple[list[dict], dict]:
    """The record of every request in order of the prompts, with its text; and the server's metrics."""
    folder = scratch / f"{endpoint}-{'streamed' if streaming else 'whole'}{''.join(options)}"
    command = [sys.executable, "-m", "aiperf", "profile", "--model", "smollm2-135m", "--url", url]
    command += ["--endpoint-type", endpoint, "--tokenizer", tokenizer, "--artifact-dir", str(folder)]
    command += ["--input-file", str(scratch / "prompts.jsonl"), "--custom-dataset-type", "single_turn"]
    command += ["--dataset-sampling-strategy", "sequential", "--request-count", str(PROMPTS), "--concurrency", "4"]
    command += ["--extra-inputs", "temperature:0", "--osl", str(TOKENS), "--export-outputs-json", "--export-level", "raw"]
    command += ["--ui", "none", "--no-gpu-telemetry", *options]
    command += ["--streaming"] if streaming else []
    done = subprocess.run(command, env={**os.environ, "HF_HUB_DISABLE_TELEMETRY": "1"}, capture_output=True, text=True)
    log = f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    assert done.returncode == 0 and " ERROR " not in log, log

    summary = json.loads((folder / "profile_export_aiperf.json").read_text())
    assert summary["is_complete"] and not summary["error_summary"], summary
    assert summary["request_count"]["avg"] == PROMPTS and summary["request_error_rate"]["avg"] == 0, summary
    texts = {
        entry["x_request_id"]: entry["response_text"]
        for entry in json.loads((folder / "outputs.json").read_text())["data"]
    }
    records = []
    for line in (folder / "profile_export.jsonl").read_text().splitlines():
        record = json.loads(line)
        figures = {name: metric["value"] for name, metric in record["metrics"].items()}
        text = texts[record["metadata"]["x_request_id"]]
        records.append({**figures, "place": record["metadata"]["session_num"], "text": text})
    metrics = json.loads((folder / "server_metrics_export.json").read_text())["metrics"]
    return sorted(records, key=lambda record: record["place"]), metrics


def total(metrics: dict, name: str, **labels: str) -> float:
    series = [one for one in metrics[name]["series"] if labels.items() <= one.get("labels", {}).items()]
    return sum(one["stats"]["total"] for one in series)


scratch.mkdir(parents=True)
words = book.read_text(encoding="ascii").split()
prompts = [" ".join(words[100 * at : 100 * at + 10 + 7 * at]) for at in range(PROMPTS - len(QUESTIONS))] + QUESTIONS
(scratch / "prompts.jsonl").write_text("".join(json.dumps({"text": prompt}) + "\n" for prompt in prompts))
own = AutoTokenizer.from_pretrained(tokenizer)
# What the prompts have: the texts alone, and as conversations of the template.
lengths = [len(own.encode(prompt)) for prompt in prompts]
conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
templated = [len(own.apply_chat_template(talk, add_generation_prompt=True, return_dict=False)) for talk in conversations]
print(f"  aiperf {version('aiperf')}, transformers {version('transformers')}")

texts, ended = {}, {}
for endpoint, label in ENDPOINTS.items():
    both = []
    for streaming in (True, False):
        records, metrics = profile(endpoint, streaming)
        what = f"{endpoint}, {'streamed' if streaming else 'whole'}"
        assert len(records) == PROMPTS and all(record["text"] for record in records), (what, records)
        assert [record["input_sequence_length"] for record in records] == lengths, (what, lengths, records)
        expected = lengths if endpoint == "completions" else templated
        generated, itself = 0, 0
        for prompt_tokens, record in zip(expected, records, strict=True):
            if "usage_prompt_tokens" not in record and endpoint == "responses" and streaming:
                # Of a streamed response that is cut aiperf reads no usage: it looks for `response.completed` alone.
                generated += TOKENS
                continue
            assert record["usage_prompt_tokens"] == prompt_tokens, (what, prompt_tokens, record)
            completion = record["usage_completion_tokens"]
            generated += completion
            itself += completion < TOKENS
            # The token that ends an answer is not counted. aiperf has the text alone, which may be written with a token less
            # than it was made of.
            assert 0 <= completion - record["output_sequence_length"] <= 1 and completion <= TOKENS, (what, record)
            assert not streaming or record["time_to_first_token"] <= record["request_latency"], (what, record)
        assert total(metrics, "atom_http_requests", endpoint=label, status="200") == PROMPTS, (what, metrics)
        assert total(metrics, "atom_generation_tokens") == generated, (what, generated, metrics)
        both.append([record["text"] for record in records])
        print(f"  {what}: {PROMPTS} requests, {sum(expected)} + {generated} tokens, {itself} answers ended by themselves")
    assert both[0] == both[1], (endpoint, both)
    texts[endpoint], ended[endpoint] = both[0], itself
    # What the server counts is what aiperf reports, if it is told to.
    records, metrics = profile(endpoint, True, "--use-server-token-count")
    counted = [record for record in records if "usage_completion_tokens" in record]
    assert len(counted) == (itself if endpoint == "responses" else PROMPTS), (endpoint, records)
    for record in counted:
        figures = [record["input_sequence_length"], record["output_sequence_length"]]
        assert figures == [record["usage_prompt_tokens"], record["usage_completion_tokens"]], (endpoint, record)
# A conversation is the same one in every API.
assert texts["chat"] == texts["responses"] == texts["messages"] and ended["chat"] > 0, (texts, ended)
print("  the same with --use-server-token-count, as the server counts")
print(f"  {PROMPTS} texts: the same streamed and whole, and in chat, responses and messages")
print(f"aiperf {version('aiperf')}: all held")
