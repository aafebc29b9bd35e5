//! From a checkpoint to its tokenizer and chat template.

use anyhow::{Context, Result};
use atom_text::{ChatTemplate, GgufVocabulary, Tokenizer, TokenizerSource};
use atom_weights::{Checkpoint, Gguf, WeightsError};
use std::path::Path;
use std::sync::Arc;

/// Everything that turns text into tokens and back.
pub(crate) struct Text {
    pub(crate) tokenizer: Arc<Tokenizer>,
    pub(crate) template: ChatTemplate,
}

impl Text {
    /// Loads them; `template` is the user's own Jinja file.
    pub(crate) fn load(checkpoint: &Checkpoint, template: Option<&Path>) -> Result<Self> {
        let source = source(checkpoint)?;
        let tokenizer = Tokenizer::load(&source).context("loading the tokenizer")?;
        let own = template.map(|path| {
            std::fs::read_to_string(path)
                .with_context(|| format!("reading the chat template {}", path.display()))
        });
        let template = ChatTemplate::load(&source, &tokenizer, own.transpose()?.as_deref())
            .context("loading the chat template")?;
        Ok(Self { tokenizer: Arc::new(tokenizer), template })
    }
}

fn source(checkpoint: &Checkpoint) -> Result<TokenizerSource> {
    match (checkpoint.gguf(), checkpoint.folder()) {
        (Some(gguf), _) => Ok(TokenizerSource::Gguf(vocabulary(gguf)?)),
        (None, Some(folder)) => Ok(TokenizerSource::Folder(folder.to_owned())),
        (None, None) => anyhow::bail!("this checkpoint has no tokenizer"),
    }
}

fn vocabulary(gguf: &Gguf) -> Result<GgufVocabulary, WeightsError> {
    let string = |key| Ok::<_, WeightsError>(gguf.string(key)?.unwrap_or_default().to_owned());
    let strings = |key| {
        let list = gguf.strings(key)?.unwrap_or_default();
        Ok::<_, WeightsError>(list.into_iter().map(str::to_owned).collect())
    };
    Ok(GgufVocabulary {
        model: string("tokenizer.ggml.model")?,
        pre: string("tokenizer.ggml.pre")?,
        tokens: strings("tokenizer.ggml.tokens")?,
        merges: strings("tokenizer.ggml.merges")?,
        token_types: gguf.i32s("tokenizer.ggml.token_type")?.unwrap_or_default(),
        bos: gguf.u32("tokenizer.ggml.bos_token_id")?,
        eos: gguf.u32("tokenizer.ggml.eos_token_id")?,
        eot: gguf.u32("tokenizer.ggml.eot_token_id")?,
        eom: gguf.u32("tokenizer.ggml.eom_token_id")?,
        unknown: gguf.u32("tokenizer.ggml.unknown_token_id")?,
        padding: gguf.u32("tokenizer.ggml.padding_token_id")?,
        add_bos: gguf.bool("tokenizer.ggml.add_bos_token")?,
        add_eos: gguf.bool("tokenizer.ggml.add_eos_token")?,
        chat_template: gguf.string("tokenizer.chat_template")?.map(str::to_owned),
    })
}
