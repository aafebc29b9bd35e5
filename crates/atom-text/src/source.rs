//! Where a tokenizer and its chat template come from.

use atom_base::TokenId;
use std::path::PathBuf;

/// The two homes of a tokenizer.
#[derive(Clone, Debug, PartialEq)]
pub enum TokenizerSource {
    /// The metadata of a GGUF file.
    Gguf(GgufVocabulary),
    /// A folder as published on a model hub: `tokenizer.json`, and where present
    /// `tokenizer_config.json`, `special_tokens_map.json` and `chat_template.jinja`.
    Folder(PathBuf),
}

/// The `tokenizer.*` keys of a GGUF file, as they stand there.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GgufVocabulary {
    /// `tokenizer.ggml.model`: the algorithm. `gpt2` is byte-level BPE.
    pub model: String,
    /// `tokenizer.ggml.pre`: how text is cut before BPE. Empty when the file doesn't say.
    pub pre: String,
    /// `tokenizer.ggml.tokens`: the text of every token, in order of id.
    pub tokens: Vec<String>,
    /// `tokenizer.ggml.merges`: `"left right"`, the earliest merge first.
    pub merges: Vec<String>,
    /// `tokenizer.ggml.token_type`: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte.
    /// Empty when the file has none: all tokens are normal then.
    pub token_types: Vec<i32>,
    /// `tokenizer.ggml.bos_token_id`.
    pub bos: Option<TokenId>,
    /// `tokenizer.ggml.eos_token_id`.
    pub eos: Option<TokenId>,
    /// `tokenizer.ggml.eot_token_id`: ends a turn, where that differs from the end of a text.
    pub eot: Option<TokenId>,
    /// `tokenizer.ggml.eom_token_id`: ends a message that waits for a tool.
    pub eom: Option<TokenId>,
    /// `tokenizer.ggml.unknown_token_id`.
    pub unknown: Option<TokenId>,
    /// `tokenizer.ggml.padding_token_id`.
    pub padding: Option<TokenId>,
    /// `tokenizer.ggml.add_bos_token`. Where the file doesn't say, the kind of `pre` decides.
    pub add_bos: Option<bool>,
    /// `tokenizer.ggml.add_eos_token`. False where the file doesn't say.
    pub add_eos: Option<bool>,
    /// `tokenizer.chat_template`.
    pub chat_template: Option<String>,
}
