"""Runs schemathesis against a server, by the server's own OpenAPI document.

    python schemathesis_client.py URL [EXAMPLES]

Sends what the document allows and what it forbids, some hundred bodies for each operation, and looks for 5xx, for
answers that the document doesn't know (status, content type, headers, schema), for forbidden bodies that are taken and
allowed ones that are refused. Answers are kept short. The file is also the module of schemathesis' hooks.

Left out: orders to the whole server, since they end the run, and the page, which has no bodies.
"""

import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile

import schemathesis

# A schema says which type a field has, not what makes sense beside the others, nor what this model's template knows.
# A body that fits may be refused with these codes, and no others; `invalid_value` with these words only.
CODES_OF_MEANING = {
    "context_length_exceeded",  # more tokens than the model takes
    "constraint_failed",  # a grammar that led nowhere
    "unsupported_field",  # what this model's template does not know
}
WORDS_OF_MEANING = [
    "the only constraint",  # two constraints of the output
    "absent unless",  # stream_options without stream, top_logprobs without logprobs
    "absent: the request has no 'tools'",
    "name of one of the",  # a tool that is not there
    "one of the tools",
    "\"none\" or \"auto\" without 'tools'",
    "a name that no tool before it has",
    "less than max_tokens",
    "absent: the younger field says it",  # a format of messages by both of its names
    "can run and wait here",  # prompts times n
    "no lane",  # data_parallel_rank
    "lane",
    "which another field of the request asks for",
    "false beside",  # ignore_eos with a constraint
    "can't be compiled",
    "grammar",
    "schema",
    "regular expression",
    "choice",
    "JSON",  # a schema or tags as a text that is none
    "bytes",  # the document counts characters
    "template",
    "signature",
    "the call",
    "triggers",  # structures that begin with none of them
    "a call that waits for its answer",
    "before the answers to all calls",
    "one of the two is enough",  # reasoning by both of its names
    "text alone",
    "says nothing",  # an object whose fields are all null
    "or 'tool_calls'",  # a message of the assistant that says nothing
    "at least one message is needed",  # nothing is left of an empty beginning of an answer
    "scor",  # max_tokens 0 without echo and logprobs
    "for tokens below",  # logit_bias: keys are beyond JSON schema
    "not empty",
    "prompt is empty",
]
TOKENS_MAX = 4
U32_MAX = 2**32 - 1


def shorten(body):
    """The same body, allowed or not, with a bounded answer and the served model."""
    if not isinstance(body, dict):
        return body
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        value = body.get(name)
        if type(value) is int and TOKENS_MAX < value <= U32_MAX:
            body[name] = TOKENS_MAX
    for name in ("n", "best_of"):
        if type(body.get(name)) is int and 1 <= body[name] <= 128:
            body[name] = 1 + body[name] % 2
    if type(body.get("n")) is int and type(body.get("best_of")) is int:
        body["best_of"] = body["n"]
    if isinstance(body.get("model"), str):
        body.pop("model")
    return body


CONSTRAINTS = [
    "response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs",
]  # fmt: skip


def agree(body):
    """An allowed body without fields that contradict each other, so that more of them reach the model."""
    given = [name for name in CONSTRAINTS if body.get(name) is not None]
    for name in given[1:]:
        del body[name]
    if body.get("best_of") is not None:
        body["best_of"] = body["n"] = body.get("n") or 1
    if not body.get("stream") and "stream_options" in body:
        del body["stream_options"]
    if body.get("top_logprobs") and not body.get("logprobs"):
        body["logprobs"] = True
    if given and body.get("ignore_eos"):
        del body["ignore_eos"]
    for name in ("max_tokens", "max_completion_tokens"):
        if body.get(name) == 0:  # scores a prompt, with echo and logprobs only
            body[name] = 1
    if body.get("data_parallel_rank"):
        body["data_parallel_rank"] = 0
    return body


@schemathesis.hook
def before_call(context, case, **kwargs):
    """Of every phase, whoever made the body."""
    body = case.body = shorten(case.body)
    if isinstance(body, dict):
        if case.meta is not None and case.meta.generation.mode.is_positive:
            agree(body)
        if case.path == "/v1/chat/completions" and body.get("max_completion_tokens") is None:
            body.setdefault("max_tokens", TOKENS_MAX)
        if case.path == "/v1/responses":
            body.setdefault("max_output_tokens", TOKENS_MAX)


@schemathesis.check
def allowed_is_taken(context, response, case):
    if case.meta is None or not case.meta.generation.mode.is_positive or response.status_code != 400:
        return
    error = response.json().get("error", {})
    code, message = error.get("code"), error.get("message", "")
    is_meaning = any(words in message for words in WORDS_OF_MEANING)
    if code in CODES_OF_MEANING or (code in (None, "invalid_value", "missing_field") and is_meaning):
        return
    raise AssertionError(f"a body that fits the document is refused: {code}: {message}")


CHECKS = [
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "missing_required_header",
    "unsupported_method",
    "ignored_auth",
    "allowed_is_taken",
]


def main():
    url = sys.argv[1].rstrip("/")
    examples = sys.argv[2] if len(sys.argv) > 2 else "100"
    here = os.path.dirname(os.path.abspath(__file__))
    hooks = os.path.splitext(os.path.basename(__file__))[0]
    environment = os.environ | {"SCHEMATHESIS_HOOKS": hooks, "PYTHONPATH": here, "PYTHONDONTWRITEBYTECODE": "1"}
    arguments = [
        sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", f"--url={url}",
        "--checks", ",".join(CHECKS), "--exclude-tag", "page", "--exclude-path-regex", "^/admin/",
        "--phases", "examples,coverage,fuzzing", "--max-examples", examples, "--seed", "1",
        "--continue-on-failure", "--request-timeout", "120", "--suppress-health-check", "all",
        "--generation-database", "none",
    ]  # fmt: skip
    if key := os.environ.get("ATOM_API_KEY"):
        arguments += ["--header", f"Authorization: Bearer {key}"]
    # It keeps what it found in the folder that it runs in.
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.run(arguments, cwd=folder, env=environment, check=False, capture_output=True, text=True)
    counts = [re.search(words, run.stdout) for words in (r"Test cases:\s+(\d+) generated", r"Tested: (\d+)")]
    if run.returncode != 0 or None in counts:
        sys.exit(run.stdout + run.stderr)
    cases, operations = (int(count[1]) for count in counts)
    print(f"  {cases} requests to {operations} operations: refused or taken, and answered, as the document says")
    print(f"schemathesis {importlib.metadata.version('schemathesis')}: all held")


if __name__ == "__main__":
    main()
