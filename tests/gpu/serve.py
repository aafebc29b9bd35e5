"""What scripts/gpu-serve-check asks of a server: serve.py BINARY FOLDER SMOLLM2. Ends in `N passed, N failed`."""
import concurrent.futures, json, os, pathlib, re, signal, subprocess, sys, time, urllib.error, urllib.request

binary, work, smollm2 = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3]
port, model = 8131, work / "model"
url = f"http://127.0.0.1:{port}"
END = 256
golden = pathlib.Path(os.environ.get("ATOM_TESTS_DATA", "tests-data")) / "golden" / "smollm2" / "greedy.json"
# Between logits of bf16 and of f32. Seen on an H200: see docs/cuda.md.
MARGIN = 0.3


def write_model():
    """A small shape for dummy weights, and a tokenizer of bytes with a token that ends a text."""
    config = dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3", hidden_size=256, intermediate_size=512,
                  num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64, vocab_size=512,
                  rms_norm_eps=1e-6, rope_theta=1e6, max_position_embeddings=8192, tie_word_embeddings=True,
                  eos_token_id=END)
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    letters = {(chr(b) if b in printable else chr(next(others))): b for b in range(256)}
    level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
    end = dict(id=END, content="<end>", single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    tokenizer = dict(version="1.0", added_tokens=[end], normalizer=None, post_processor=None, pre_tokenizer=level,
                     decoder=level, model=dict(type="BPE", vocab=letters, merges=[]))
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))


DUMMY = ["--model", str(model), "--load-dummy", "--device", "cuda", "--gpu-memory-utilization", "0.05"]


def start(flags=DUMMY, **variables):
    log = open(work / "log", "w")
    command = [binary, "serve", *flags, "--port", str(port), "--max-model-len", "8192"]
    server = subprocess.Popen(command, stderr=log, stdout=log, env=dict(os.environ, **variables))
    until = time.time() + 120
    while health() != 200:
        if server.poll() is not None or time.time() > until:
            sys.exit(f"the server did not start:\n{(work / 'log').read_text()}")
        time.sleep(0.05)
    return server


def health():
    try:
        return urllib.request.urlopen(f"{url}/health", timeout=5).status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


def complete(**body):
    """Status and body of an answer."""
    body = dict(dict(prompt="Say it: ", max_tokens=300), **body)
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")
    except OSError as error:
        return None, str(error)


passed = failed = 0


def check(name, holds, detail=""):
    global passed, failed
    passed, failed = passed + bool(holds), failed + (not holds)
    print(f"{'ok' if holds else 'FAILED'}: {name}{'' if holds else f': {str(detail)[:500]}'}", flush=True)


def is_person(text):
    try:
        person = json.loads(text)
    except ValueError:
        return False
    return set(person) == {"name", "age", "tags"} and isinstance(person["age"], int) and len(person["name"]) <= 12


def structured():
    server = start()
    schema = dict(type="object", additionalProperties=False, required=["name", "age", "tags"], properties=dict(
        name=dict(type="string", maxLength=12), age=dict(type="integer", minimum=0, maximum=150),
        tags=dict(type="array", maxItems=3, items=dict(enum=["red", "green"]))))
    choices = ["yes", "no", "yes, but later"]
    cases = [
        ("a choice", dict(guided_choice=choices), lambda text: text in choices),
        ("an expression", dict(guided_regex="[0-9]{3}-(ab|cd){2,5}x"), re.compile("[0-9]{3}-(ab|cd){2,5}x").fullmatch),
        # A model that knows nothing writes as many blanks as it may.
        ("a schema", dict(guided_json=schema, max_tokens=3000), is_person),
    ]
    bodies = [(name, holds, dict(body, temperature=t, seed=seed, n=2, logprobs=2, presence_penalty=p))
              for name, body, holds in cases for seed, (t, p) in enumerate([(0, 0), (1, 0), (1.5, 0.4), (0.8, -0.5)])]
    free = dict(temperature=1.0, seed=3, max_tokens=200)
    alone = complete(**free)
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        neighbour = pool.submit(complete, **free)
        answers = list(pool.map(lambda case: complete(**case[2]), bodies))
        neighbour = neighbour.result()
    for (name, holds, body), (status, answer) in zip(bodies, answers):
        texts = [choice["text"] for choice in answer["choices"]] if status == 200 else []
        check(f"{name}, temperature {body['temperature']}", len(texts) == 2 and all(map(holds, texts)),
              f"{status} {answer}")
    check("a neighbour is answered", neighbour[0] == alone[0] == 200, f"{neighbour} {alone}")
    stop(server)


def stop(server):
    server.send_signal(signal.SIGTERM)
    check("a server that is told to stop ends with 0", server.wait(60) == 0, server.returncode)


def real_weights():
    """SmolLM2 on the GPU and on the CPU, beside what transformers computed in f32: log-probabilities of known texts, and
    greedy tokens, which may part where the two likeliest are closer than the margin.
    """
    cuda = ["--device", "cuda", "--gpu-memory-utilization", "0.1"]
    places = {
        "cuda": cuda,
        "two ranks that share a GPU": [*cuda, "--gpus", "0,0", "-tp", "2", "--enable-dp-attention"],
        "the CPU": ["--device", "cpu", "--kv-cache-memory", "512MiB"],
    }
    prompts, found = json.loads(golden.read_text())["prompts"], {}
    for place, flags in places.items():
        server = start(["--model", smollm2, *flags])
        found[place] = [(ask(known["ids"] + known["greedy"], echo=True, max_tokens=1),
                         ask(known["ids"], max_tokens=len(known["greedy"]))) for known in prompts]
        stop(server)
    for at, known in enumerate(prompts):
        first, count = len(known["ids"]), len(known["greedy"])
        exact = [logits[0] - total for logits, total in zip(known["top_logits"], known["log_sum_exp"])]
        for place, answers in found.items():
            scores = answers[at][0]["token_logprobs"][first : first + count]
            apart = max(abs(a - b) for a, b in zip(scores, exact))
            check(f"SmolLM2, {known['name']}: log-probabilities on {place}, {apart:.3f} apart at the most", apart < MARGIN, scores)
        others = {"transformers": found["cuda"][at][0]["tokens"][first : first + count], "the CPU": found["the CPU"][at][1]["tokens"]}
        for place in ("cuda", "two ranks that share a GPU"):
            tokens = found[place][at][1]["tokens"]
            for other, theirs in others.items():
                part = next((i for i in range(count) if tokens[i] != theirs[i]), count)
                allowed = part == count or known["margins"][part] < 2 * MARGIN
                check(f"SmolLM2, {known['name']} on {place}: {part} of {count} tokens as {other}", allowed, tokens)


def ask(prompt, **body):
    """Tokens and log-probabilities of a greedy completion."""
    status, answer = complete(prompt=prompt, temperature=0, logprobs=1, ignore_eos=True, **body)
    if status != 200:
        sys.exit(f"a completion of SmolLM2 is refused: {status} {answer}")
    return answer["choices"][0]["logprobs"]


def fault(kind, within):
    server = start(ATOM_CUDA_DRIVER=str(work / "fault_driver.so"), FAULT=kind, FAULT_AFTER="200")
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        pending = [pool.submit(complete, max_tokens=4000, ignore_eos=True, temperature=0) for _ in range(4)]
        since = time.time()
        red = None
        while server.poll() is None and time.time() - since < 60:
            status = health()
            red = red or (status if status not in (200, None) else None)
            time.sleep(0.02)
        ended = time.time() - since
        answers = [one.result() for one in pending]
    if server.poll() is None:
        server.kill()
    log = (work / "log").read_text()
    check(f"{kind}: every request is answered with an error", all((s or 0) >= 500 for s, _ in answers), answers)
    check(f"{kind}: health is red", red == 503, red)
    check(f"{kind}: the process ends by itself, not with 0", server.wait() == 1, server.returncode)
    check(f"{kind}: the error names what failed", within in log, log[-2000:])
    print(f"  {kind}: {ended:.1f} s from the first request to the end; {log.strip().splitlines()[-1]}")


write_model()
structured()
real_weights()
fault("trap", "(719)")
fault("hang", "did not end in")
print(f"{passed} passed, {failed} failed")
sys.exit(failed > 0)
