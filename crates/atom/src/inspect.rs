//! `atom inspect`: what is in a checkpoint, and which layouts it allows.

use crate::args::InspectArgs;
use crate::models;
use crate::output::say;
use crate::text::Text;
use anyhow::{Context, Result};
use atom_weights::Checkpoint;
use std::fmt::Write;

/// Prints it.
pub(crate) fn run(args: &InspectArgs) -> Result<()> {
    let model = models::resolve(&args.model, &args.source)?;
    let checkpoint = Checkpoint::open(&model.path).context("opening the model")?;
    let config = checkpoint.config();
    let mut out = String::new();
    writeln!(out, "model      {}", model.served_name)?;
    writeln!(out, "path       {}", model.path.display())?;
    writeln!(out, "contents   {}", checkpoint.description())?;
    writeln!(out, "bytes      {}", checkpoint.total_bytes())?;
    if let Some(scales) = config.fp8 {
        writeln!(out, "FP8        e4m3, {scales}; expanded to the computing type when it is loaded")?;
        if checkpoint.unused_scales() > 0 {
            writeln!(out, "unused     {}", crate::launch::unused_scales(&checkpoint))?;
        }
    }
    writeln!(out, "context    {} tokens", config.max_position)?;
    writeln!(
        out,
        "hidden     {}, MLP {}, vocabulary {}",
        config.hidden_size, config.intermediate_size, config.vocab_size
    )?;
    writeln!(
        out,
        "attention  {} query heads, {} key/value heads of {}",
        config.q_heads, config.kv_heads, config.head_dim
    )?;
    writeln!(out, "ends at    tokens {:?}", config.eos)?;
    match Text::load(&checkpoint, None) {
        Ok(text) if text.template.is_present() => {
            writeln!(out, "tokenizer  {} tokens, with chat template", text.tokenizer.vocab_size())?
        }
        Ok(text) => writeln!(out, "tokenizer  {} tokens, no chat template", text.tokenizer.vocab_size())?,
        Err(error) => writeln!(out, "tokenizer  unusable: {error:#}")?,
    }
    for name in checkpoint.unused() {
        writeln!(out, "unused     {name}")?;
    }
    if args.tensors {
        for name in checkpoint.names() {
            let tensor = checkpoint.tensor(name)?;
            write!(out, "{name:60} {:?} {:?}", tensor.dtype, tensor.shape)?;
            match tensor.scales() {
                Some(scales) => writeln!(out, ", scales {:?} {:?}", scales.dtype, scales.shape)?,
                None => writeln!(out)?,
            }
        }
    }
    say(out)
}
