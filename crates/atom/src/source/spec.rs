//! What the user typed, as one of the four forms.

use super::ResolvedModel;
use super::catalog::{self, Entry};
use super::error::SourceError;
use std::path::{Path, PathBuf};

/// A parsed `--model`.
#[derive(Debug)]
pub(super) enum Spec {
    /// A name of the catalog. It wins over a folder of that name; `./name` is the folder.
    Known(&'static Entry),
    /// A repository of the hub.
    Hub {
        /// `org/name`.
        repo: String,
        /// The `.gguf` after the colon.
        file: Option<String>,
    },
    /// A path that exists.
    Local(PathBuf),
}

/// Tells the four forms apart. Reads the file system only to see whether a path exists.
pub(super) fn parse(spec: &str) -> Result<Spec, SourceError> {
    if let Some(entry) = catalog::find(spec) {
        return Ok(Spec::Known(entry));
    }
    let path = Path::new(spec);
    if !spec.is_empty() && path.exists() {
        return Ok(Spec::Local(path.into()));
    }
    if let Some((repo, file)) = hub_id(spec) {
        return Ok(Spec::Hub { repo, file });
    }
    if path.is_absolute() || spec.starts_with('.') || has_gguf_ending(spec) {
        return Err(SourceError::PathMissing { path: path.into() });
    }
    Err(SourceError::Unknown { spec: spec.into(), known: catalog::names() })
}

/// The model at a path: a `.gguf` file, a folder with `config.json`, or a folder with one `.gguf`.
pub(super) fn open_local(path: &Path) -> Result<ResolvedModel, SourceError> {
    let refuse = |why: String| Err(SourceError::NotAModel { path: path.into(), why });
    if path.is_file() {
        if !has_gguf_ending(&path.to_string_lossy()) {
            return refuse(
                "it is a file and does not end in .gguf; for safetensors give their folder".into(),
            );
        }
        return Ok(ResolvedModel { path: path.into(), served_name: own_name(path) });
    }
    if path.join("config.json").is_file() {
        return Ok(ResolvedModel { path: path.into(), served_name: own_name(path) });
    }
    let entries = std::fs::read_dir(path).map_err(|error| SourceError::cache("read", path, error))?;
    let mut found: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|file| file.is_file() && has_gguf_ending(&file.to_string_lossy()))
        .collect();
    found.sort();
    match found.as_slice() {
        [] => refuse("the folder has neither config.json nor a .gguf file".into()),
        [file] => Ok(ResolvedModel { path: file.clone(), served_name: own_name(file) }),
        [first, ..] => refuse(format!(
            "the folder has {} .gguf files; name one of them, for example {}",
            found.len(),
            first.display()
        )),
    }
}

/// `org/name` or `org/name:FILE.gguf`, as the hub spells them.
fn hub_id(spec: &str) -> Option<(String, Option<String>)> {
    let (repo, file) = match spec.split_once(':') {
        Some((repo, file)) => (repo, Some(file)),
        None => (spec, None),
    };
    let (org, name) = repo.split_once('/')?;
    if !is_hub_word(org) || !is_hub_word(name) || file.is_some_and(|file| !is_hub_file(file)) {
        return None;
    }
    // `folder/model.gguf` is a path that was mistyped, not a repository.
    if file.is_none() && has_gguf_ending(name) {
        return None;
    }
    Some((repo.into(), file.map(Into::into)))
}

/// The hub allows letters, digits, `-`, `_` and `.`; not `--` nor `..`, and no `-` or `.` at the ends.
fn is_hub_word(word: &str) -> bool {
    (1..=96).contains(&word.len())
        && word.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
        && !word.contains("--")
        && !word.contains("..")
        && !word.starts_with(['-', '.'])
        && !word.ends_with(['-', '.'])
}

/// A file at the top of a repository: its name becomes a file name in the cache.
fn is_hub_file(file: &str) -> bool {
    has_gguf_ending(file) && super::cache::is_plain_name(file)
}

fn has_gguf_ending(name: &str) -> bool {
    name.len() > ".gguf".len() && name.to_ascii_lowercase().ends_with(".gguf")
}

/// `model.gguf` is `model`, a folder is its own name, `.` is the name of the current folder.
fn own_name(path: &Path) -> String {
    let whole = path.canonicalize().unwrap_or_else(|_| path.into());
    let name = if whole.is_dir() { whole.file_name() } else { whole.file_stem() };
    name.map_or_else(|| "model".into(), |name| name.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn form(spec: &str) -> String {
        match parse(spec) {
            Ok(Spec::Known(entry)) => format!("known {}", entry.name),
            Ok(Spec::Hub { repo, file }) => format!("hub {repo} {}", file.unwrap_or_else(|| "-".into())),
            Ok(Spec::Local(path)) => format!("local {}", path.display()),
            Err(SourceError::PathMissing { path }) => format!("missing {}", path.display()),
            Err(SourceError::Unknown { spec, .. }) => format!("unknown {spec}"),
            Err(error) => panic!("{spec}: {error}"),
        }
    }

    #[test]
    fn the_forms_are_told_apart() {
        for (spec, expected) in [
            ("smollm2-135m", "known smollm2-135m"),
            ("SmolLM2-135M", "known smollm2-135m"),
            ("Qwen/Qwen3-0.6B", "hub Qwen/Qwen3-0.6B -"),
            ("org/name_x.y:some-model.Q8_0.gguf", "hub org/name_x.y some-model.Q8_0.gguf"),
            ("/", "local /"),
            (".", "local ."),
            ("./no/such", "missing ./no/such"),
            ("/no/such/folder", "missing /no/such/folder"),
            ("model-that-is-not-here.gguf", "missing model-that-is-not-here.gguf"),
            ("folder/model.gguf", "missing folder/model.gguf"),
            ("gpt-9", "unknown gpt-9"),
            ("", "unknown "),
            ("a/b/c", "unknown a/b/c"),
            ("org/na--me", "unknown org/na--me"),
            ("org/name:model.bin", "unknown org/name:model.bin"),
            ("org/name:../x.gguf", "missing org/name:../x.gguf"),
            ("org/..", "unknown org/.."),
        ] {
            assert_eq!(form(spec), expected, "{spec:?}");
        }
    }

    #[test]
    fn an_unknown_name_lists_the_known_ones_and_the_other_forms() {
        let message = parse("gpt-9").unwrap_err().to_string();
        for part in ["`gpt-9`", "smollm2-135m", "qwen3-0.6b", "org/name:FILE.gguf", ".safetensors"] {
            assert!(message.contains(part), "{part} is not in {message}");
        }
    }
}
