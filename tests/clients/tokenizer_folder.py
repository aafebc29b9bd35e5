"""The tokenizer of a GGUF file as a folder that transformers opens, for clients that count tokens themselves.

    python tokenizer_folder.py SmolLM2-135M-Instruct.Q4_1.gguf FOLDER

transformers reads a GGUF's tokenizer too, but wants torch for it. The result is held against the ids in
tests-data/golden/smollm2/tokenizer_cases.json, which are an independent implementation's.
"""

import json
import pathlib
import sys

import gguf
from tokenizers import AddedToken, Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

CASES = pathlib.Path(__file__).parents[2] / "tests-data/golden/smollm2/tokenizer_cases.json"
CONTROL = 3  # token_type of special tokens


def main(path: str, folder: pathlib.Path) -> None:
    fields = gguf.GGUFReader(path).fields
    field = {name.removeprefix("tokenizer."): value.contents() for name, value in fields.items() if "tokenizer." in name}
    assert (field["ggml.model"], field["ggml.pre"]) == ("gpt2", "smollm"), "the cut below is SmolLM2's"
    texts = field["ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in field["ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({text: id for id, text in enumerate(texts)}, merges))
    tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    special = [text for text, kind in zip(texts, field["ggml.token_type"]) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])

    cases = json.loads(CASES.read_text())["texts"]
    for case in cases:
        assert tokenizer.encode(case["text"], add_special_tokens=False).ids == case["ids"], case

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": texts[field["ggml.bos_token_id"]],
        "eos_token": texts[field["ggml.eos_token_id"]],
        "clean_up_tokenization_spaces": False,
        "chat_template": field["chat_template"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    # Clients look for the architecture of what they take for a model.
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    print(f"  the tokenizer as a folder: {len(texts)} tokens, {len(cases)} texts as in the golden reference")


main(sys.argv[1], pathlib.Path(sys.argv[2]))
