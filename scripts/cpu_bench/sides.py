"""The programs that are compared: how each is asked for the same figure. Every function ends what it starts."""

import contextlib
import http.client
import json
import pathlib
import signal
import socket
import statistics
import subprocess
import tempfile
import time

START_S_MAX = 300
PROMPT_TOKENS, ANSWER_TOKENS = 128, 64
# Requests in flight, and requests in all.
LEVELS = {1: 8, 8: 32, 32: 96}
PREFILL, DECODED = 512, 128
MIXTURE_ROWS = 8
# Ours decodes behind a short prompt, theirs behind none; both make as many tokens.
CONTEXT = 16


class Failed(Exception):
    """A program that ended with an error, and what it said."""


class Side:
    """A program with its flags. `steps(model, is_mixture, repeats)` gives figures by name, `serve(..)` a server's command."""

    def __init__(self, name, threads, flags):
        self.name, self.threads, self.flags = name, threads, flags


class Atom(Side):
    def __init__(self, name, binary, threads, flags=()):
        super().__init__(name, threads, list(flags))
        self.binary = str(binary)
        self.version = output([binary, "--version"]).strip()

    def engine(self, model):
        return ["--model", model, "--device", "cpu", "--threads", self.threads, "--log", "warn", *self.flags]

    def steps(self, model, is_mixture, repeats):
        rows = MIXTURE_ROWS if is_mixture else 1
        with tempfile.TemporaryDirectory() as work:
            out = pathlib.Path(work) / "figures.json"
            output([self.binary, "bench", "step", *self.engine(model), "--only", "prefill,decode",
                    "--prefill", f"1x{PREFILL}", "--prefill-repeats", repeats, "--decode", rows, "--context", CONTEXT,
                    "--steps", DECODED, "--json", out])
            figures = {figure["unit"]: figure["median"] for figure in json.loads(out.read_text())["figures"]}
        return {"prefill": figures["tokens/s"], "decode": 1000 * rows / figures["ms"]}

    def serve(self, model, port, _level, _variant):
        return [self.binary, "serve", *self.engine(model), "--port", port]

    variants = ("",)

    def load(self, url, level, seed):
        """The client of both sides."""
        with tempfile.TemporaryDirectory() as work:
            out = pathlib.Path(work) / "level.json"
            output([self.binary, "bench", "serve", "--url", url, "--concurrency", level, "--requests", LEVELS[level],
                    "--input-len", PROMPT_TOKENS, "--output-len", ANSWER_TOKENS, "--ignore-eos", "--warmup", 1,
                    "--seed", seed, "--json", out])
            report = json.loads(out.read_text())["levels"][0]
        if report["failed"] or report["unsent"] or report["output_tokens"] != LEVELS[level] * ANSWER_TOKENS:
            raise Failed(f"{level} in flight: not every answer came whole: {json.dumps(report)}")
        return {"out": report["output_tokens_per_s"], "ttft": report["ttft_ms"]["p50"]}


class Llama(Side):
    """Binaries of llama.cpp in a folder."""

    # What servers are tried with; the better one of the first round counts. No prompt comes twice, so nothing is lost
    # without its store of prompts.
    variants = ("-fa on", "-fa off")

    def __init__(self, folder, threads, flags=()):
        super().__init__("llama.cpp", threads, list(flags))
        self.folder = pathlib.Path(folder)
        said = subprocess.run([self.folder / "llama-server", "--version"], capture_output=True, text=True, check=True)
        self.version = (said.stdout + said.stderr).strip().replace("\n", "; ")

    def steps(self, model, is_mixture, repeats):
        common = ["-m", model, "-t", self.threads, *self.flags]
        decoded = 0 if is_mixture else DECODED
        text = output([self.folder / "llama-bench", *common, "-p", PREFILL, "-n", decoded, "-r", repeats, "-o", "json"])
        figures = {}
        for figure in json.loads(text):
            name = "decode" if figure["n_gen"] else "prefill"
            figures[name] = statistics.median(figure["samples_ts"])
        batched = self.folder / "llama-batched-bench"
        if is_mixture and batched.exists():
            text = output([batched, *common, "-c", 2048, "-npp", CONTEXT, "-ntg", DECODED, "-npl", MIXTURE_ROWS,
                           "--output-format", "jsonl"])
            lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
            figures["decode"] = lines[-1]["speed_tg"]
        return figures

    def serve(self, model, port, level, variant):
        return [self.folder / "llama-server", "-m", model, "-t", self.threads, "--host", "127.0.0.1", "--port", port,
                "--no-webui", "-np", level, "-c", 256 * level, "--cache-ram", 0, *variant.split(), *self.flags]


def ceilings(binary, threads):
    """What memory and multiplications reach on this processor."""
    return json.loads(output([binary, threads]))


def served(side, client, model, level, seed, variant):
    """A server's whole life at one level: start to first token in s, load, peak memory in MiB."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryFile("w+") as said:
        begin = time.monotonic()
        server = subprocess.Popen(words(side.serve(model, port, level, variant)), stdout=said, stderr=said)
        try:
            figures = {"start": first_token(server, port, begin)}
            figures.update(client.load(f"http://127.0.0.1:{port}", level, seed))
            figures["rss"] = peak_mib(server.pid)
        except Failed as failed:
            said.seek(0)
            raise Failed(f"{failed}\n{said.read()[-4000:]}") from None
        finally:
            server.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(60)
            server.kill()
            server.wait()
    return figures


def first_token(server, port, begin):
    """Asks until the server answers; s from `begin` to the first piece of text."""
    body = json.dumps(dict(prompt="The capital of France is", max_tokens=4, temperature=0, stream=True))
    while time.monotonic() - begin < START_S_MAX:
        if server.poll() is not None:
            raise Failed(f"the server ended before it was ready: {' '.join(server.args)}")
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_S_MAX)
            connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
            answer = connection.getresponse()
            if answer.status == 200:
                while line := answer.readline():
                    if line.startswith(b"data:"):
                        took = time.monotonic() - begin
                        answer.read()
                        return took
                raise Failed("the server's first answer had no text")
        except (OSError, http.client.HTTPException):
            pass
        finally:
            connection.close()
        time.sleep(0.005)
    raise Failed(f"the server was not ready after {START_S_MAX} s: {' '.join(server.args)}")


def peak_mib(pid):
    for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise Failed("no VmHWM in /proc/PID/status")


def words(command):
    return [str(part) for part in command]


def output(command):
    done = subprocess.run(words(command), capture_output=True, text=True)
    if done.returncode != 0:
        raise Failed(f"{' '.join(words(command))} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout
