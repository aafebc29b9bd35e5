//! `atom inspect`: what is in a checkpoint, and which layouts it allows.

use crate::args::InspectArgs;
use crate::models;
use crate::text::Text;
use anyhow::{Context, Result};
use atom_weights::Checkpoint;

/// Prints it.
pub(crate) fn run(args: &InspectArgs) -> Result<()> {
    let model = models::resolve(&args.model, &args.source)?;
    let checkpoint = Checkpoint::open(&model.path).context("opening the model")?;
    let config = checkpoint.config();
    println!("model      {}", model.served_name);
    println!("path       {}", model.path.display());
    println!("contents   {}", checkpoint.description());
    println!("bytes      {}", checkpoint.total_bytes());
    println!("context    {} tokens", config.max_position);
    println!(
        "hidden     {}, MLP {}, vocabulary {}",
        config.hidden_size, config.intermediate_size, config.vocab_size
    );
    println!(
        "attention  {} query heads, {} key/value heads of {}",
        config.q_heads, config.kv_heads, config.head_dim
    );
    println!("ends at    tokens {:?}", config.eos);
    match Text::load(&checkpoint, None) {
        Ok(text) if text.template.is_present() => {
            println!("tokenizer  {} tokens, with chat template", text.tokenizer.vocab_size())
        }
        Ok(text) => println!("tokenizer  {} tokens, no chat template", text.tokenizer.vocab_size()),
        Err(error) => println!("tokenizer  unusable: {error:#}"),
    }
    for name in checkpoint.unused() {
        println!("unused     {name}");
    }
    if args.tensors {
        for name in checkpoint.names() {
            let tensor = checkpoint.tensor(name)?;
            println!("{name:60} {:?} {:?}", tensor.dtype, tensor.shape);
        }
    }
    Ok(())
}
