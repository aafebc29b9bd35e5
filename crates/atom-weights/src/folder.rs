//! A folder as the Hugging Face hub has it: config.json, generation_config.json, safetensors in one
//! file or in shards that an index lists.

use crate::checkpoint::{Entries, Entry};
use crate::config::{ModelConfig, from_json, modelopt_scales, token_ids};
use crate::error::WeightsError;
use crate::experts;
use crate::fp8;
use crate::map::map;
use crate::safetensors;
use serde_json::Value;
use std::collections::{BTreeMap, HashMap, btree_map};
use std::path::{Path, PathBuf};

/// What a folder holds.
pub(crate) enum Contents {
    /// The single GGUF file, to be opened as such.
    Gguf(PathBuf),
    /// config.json and safetensors.
    Safetensors(Box<Folder>),
}

pub(crate) struct Folder {
    pub(crate) config: ModelConfig,
    pub(crate) raw_config: Value,
    pub(crate) entries: Entries,
    /// Tensors that a shard has and the index does not list.
    pub(crate) unlisted: Vec<String>,
    /// Scales of activations and of an FP8 KV cache.
    pub(crate) unused_scales: usize,
}

/// Looks for `model.safetensors`, then for an index, then for a single file of either format.
pub(crate) fn open(path: &Path) -> Result<Contents, WeightsError> {
    let names = file_names(path)?;
    let has = |name: &str| names.iter().any(|other| other == name);
    let single_name = match weights(&names) {
        Ok(Weights::Gguf(name)) => return Ok(Contents::Gguf(path.join(name))),
        Ok(Weights::Single(name)) if has(CONFIG) => Some(name),
        Ok(Weights::Index) if has(CONFIG) => None,
        Ok(Weights::Single(_) | Weights::Index) => {
            return Err(no_checkpoint(path, format!("it has .safetensors but no {CONFIG}")));
        }
        Err(found) => return Err(no_checkpoint(path, found)),
    };
    // The configuration first: "this family is not supported" says more than what follows from it.
    let (raw_config, config) = configuration(path)?;
    let Shards { entries, unlisted } = match single_name {
        Some(name) => single(path, name)?,
        None => listed(path)?,
    };
    // Before experts get other names: a scale is found by its weight's.
    let (entries, unused_scales) = fp8::pair(entries, config.fp8);
    let entries = experts::unify(entries, &config, path)?;
    Ok(Contents::Safetensors(Box::new(Folder { config, raw_config, entries, unlisted, unused_scales })))
}

/// config.json as it is and as it is understood, with the end tokens of generation_config.json.
pub(crate) fn configuration(path: &Path) -> Result<(Value, ModelConfig), WeightsError> {
    let raw_config = json(&path.join(CONFIG))?;
    let mut config = from_json(&path.join(CONFIG), &raw_config)?;
    if config.fp8.is_none() && path.join(MODELOPT_CONFIG).exists() {
        config.fp8 = modelopt_scales(&path.join(MODELOPT_CONFIG), &json(&path.join(MODELOPT_CONFIG))?)?;
    }
    if path.join(GENERATION_CONFIG).exists() {
        add_end_tokens(&mut config, &path.join(GENERATION_CONFIG))?;
    }
    Ok((raw_config, config))
}

/// Which of a folder's files hold the weights.
enum Weights<'a> {
    Single(&'a str),
    Index,
    Gguf(&'a str),
}

/// `Err` says what is there instead.
fn weights(names: &[String]) -> Result<Weights<'_>, String> {
    let has = |name: &str| names.iter().any(|other| other == name);
    if has(SINGLE) {
        return Ok(Weights::Single(SINGLE));
    }
    if has(INDEX) {
        return Ok(Weights::Index);
    }
    let ending = |end: &str| names.iter().filter(|name| name.ends_with(end)).collect::<Vec<_>>();
    match (ending(".safetensors").as_slice(), ending(".gguf").as_slice()) {
        ([one], _) => Ok(Weights::Single(one)),
        ([], [one]) => Ok(Weights::Gguf(one)),
        ([], []) if has("pytorch_model.bin") || has("pytorch_model.bin.index.json") => {
            Err("its weights are a PyTorch pickle, which is not read; convert it to safetensors".into())
        }
        ([], []) => Err(format!("none of its {} entries is a .safetensors or .gguf file", names.len())),
        ([], many) => Err(format!("it has {} .gguf files ({}); name one of them", many.len(), list(many))),
        (many, _) => Err(format!("it has {} .safetensors files ({}) and no {INDEX}", many.len(), list(many))),
    }
}

fn no_checkpoint(path: &Path, found: String) -> WeightsError {
    WeightsError::NoCheckpoint { path: path.to_owned(), found }
}

struct Shards {
    entries: Entries,
    unlisted: Vec<String>,
}

fn single(folder: &Path, name: &str) -> Result<Shards, WeightsError> {
    let path = folder.join(name);
    let entries = safetensors::read(&map(&path)?, &path)?.into_iter().collect();
    Ok(Shards { entries, unlisted: Vec::new() })
}

/// Reads the index, then every shard it names; each listed tensor must be in its shard.
fn listed(folder: &Path) -> Result<Shards, WeightsError> {
    let index = folder.join(INDEX);
    let raw = json(&index)?;
    let Some(weight_map) = raw.get("weight_map").and_then(Value::as_object) else {
        return Err(WeightsError::damaged(&index, "it has no object \"weight_map\""));
    };
    let mut shards: BTreeMap<&str, HashMap<String, Entry>> = BTreeMap::new();
    let mut entries = Entries::new();
    for (name, shard) in weight_map {
        let file = shard.as_str().filter(|file| is_plain_file_name(file));
        let Some(file) = file else {
            let problem =
                format!("it maps {name} to {shard}; the name of a .safetensors file beside it is expected");
            return Err(WeightsError::damaged(&index, problem));
        };
        let in_shard = match shards.entry(file) {
            btree_map::Entry::Occupied(shard) => shard.into_mut(),
            btree_map::Entry::Vacant(place) => place.insert(shard_entries(&index, &folder.join(file))?),
        };
        let entry = in_shard.remove(name).ok_or_else(|| {
            WeightsError::damaged(&index, format!("it maps {name} to {file}, which has no such tensor"))
        })?;
        entries.insert(name.clone(), entry);
    }
    let unlisted = shards.into_values().flat_map(HashMap::into_keys).collect();
    Ok(Shards { entries, unlisted })
}

fn shard_entries(index: &Path, path: &Path) -> Result<HashMap<String, Entry>, WeightsError> {
    if !path.exists() {
        let problem = format!("it lists {}, which is not there", path.display());
        return Err(WeightsError::damaged(index, problem));
    }
    Ok(safetensors::read(&map(path)?, path)?.into_iter().collect())
}

/// No folders, and so no way out of this one.
fn is_plain_file_name(name: &str) -> bool {
    name.ends_with(".safetensors") && !name.contains(['/', '\\', '\0']) && !name.starts_with('.')
}

/// End tokens of generation_config.json count as well: chat models end turns with another token.
fn add_end_tokens(config: &mut ModelConfig, path: &Path) -> Result<(), WeightsError> {
    const KEY: &str = "eos_token_id";
    let raw = json(path)?;
    for token in token_ids(path, KEY, raw.get(KEY))? {
        if token as usize >= config.vocab_size {
            let problem = format!("is {token}, but the vocabulary has {} entries", config.vocab_size);
            return Err(WeightsError::config(path, KEY, problem));
        }
        if !config.eos.contains(&token) {
            config.eos.push(token);
        }
    }
    Ok(())
}

fn json(path: &Path) -> Result<Value, WeightsError> {
    let io = |source| WeightsError::Io { path: path.to_owned(), source };
    let kind = std::fs::metadata(path).map_err(io)?;
    if !kind.is_file() || kind.len() > JSON_BYTES_MAX {
        let problem = format!("a file of at most {JSON_BYTES_MAX} bytes is expected, not {}", kind.len());
        return Err(WeightsError::damaged(path, problem));
    }
    let bytes = std::fs::read(path).map_err(io)?;
    serde_json::from_slice(&bytes).map_err(|source| WeightsError::Json { path: path.to_owned(), source })
}

/// Sorted; names that are no UTF-8 are none that we look for.
fn file_names(folder: &Path) -> Result<Vec<String>, WeightsError> {
    let io = |source| WeightsError::Io { path: folder.to_owned(), source };
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(io)? {
        if let Ok(name) = entry.map_err(io)?.file_name().into_string() {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}

/// The first few names, for a message.
fn list(names: &[&String]) -> String {
    const SHOWN: usize = 4;
    let shown: Vec<&str> = names.iter().take(SHOWN).map(|name| name.as_str()).collect();
    let more = if names.len() > SHOWN { ", .." } else { "" };
    format!("{}{more}", shown.join(", "))
}

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const CONFIG: &str = "config.json";
const GENERATION_CONFIG: &str = "generation_config.json";
/// What ModelOpt writes beside a config.json that says nothing.
const MODELOPT_CONFIG: &str = "hf_quant_config.json";
/// The index of a model of a thousand shards has about 10 MB.
const JSON_BYTES_MAX: u64 = 64 << 20;
