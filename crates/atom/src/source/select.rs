//! Which files of a repository make a model.

use super::cache::is_plain_name;
use super::catalog::PinnedFile;
use super::hub::HubFile;

/// The files to fetch, and which of them to open (none: the folder they lie in).
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Selection {
    pub(super) files: Vec<HubFile>,
    pub(super) opens: Option<String>,
}

/// Fetched with safetensors when they are there: the first must be, the others may.
const BESIDE_SAFETENSORS: [&str; 7] = [
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    INDEX,
];
const INDEX: &str = "model.safetensors.index.json";
/// GGUF formats that can be served, as file names have them, best first: eight bits lose nothing that shows,
/// fewer lose more from one to the next, the rest are large.
const GGUF_FORMATS: [&str; 17] = [
    "Q8_0", "Q6_K", "Q6_K_L", "Q5_K_M", "Q5_K_L", "Q5_K_S", "Q5_1", "Q5_0", "Q4_K_M", "Q4_K_L", "Q4_K_S",
    "Q4_K", "Q4_1", "Q4_0", "BF16", "F16", "F32",
];
/// File names shown in an error before it says "..".
const NAMES_SHOWN: usize = 8;

impl Selection {
    pub(super) fn of_pinned(pinned: &PinnedFile) -> Self {
        let file = HubFile {
            name: pinned.name.into(),
            size_bytes: Some(pinned.size_bytes),
            sha256: Some(pinned.sha256.into()),
        };
        Self::one(file)
    }

    fn one(file: HubFile) -> Self {
        Self { opens: Some(file.name.clone()), files: vec![file] }
    }
}

/// Chooses among the files of `repo`: the named one; else config and safetensors; else the best `.gguf`.
///
/// Only files at the top of the repository count: folders hold other formats and older weights.
/// The error is one line.
pub(super) fn select(repo: &str, files: Vec<HubFile>, named: Option<&str>) -> Result<Selection, String> {
    let top: Vec<HubFile> = files.into_iter().filter(|file| is_plain_name(&file.name)).collect();
    if let Some(named) = named {
        return match top.iter().find(|file| file.name == named) {
            Some(file) => Ok(Selection::one(file.clone())),
            None => Err(format!("{repo} has no file {named}{}", gguf_names(&top))),
        };
    }
    let has_config = top.iter().any(|file| file.name == BESIDE_SAFETENSORS[0]);
    let weights = safetensors(&top);
    if has_config && !weights.is_empty() {
        let beside = top.iter().filter(|file| BESIDE_SAFETENSORS.contains(&file.name.as_str()));
        let files = beside.chain(weights).cloned().collect();
        return Ok(Selection { files, opens: None });
    }
    best_gguf(&top).cloned().map(Selection::one).ok_or_else(|| {
        format!(
            "{repo} has neither config.json with .safetensors nor a .gguf in a format that can be served ({}){}",
            GGUF_FORMATS.join(", "),
            gguf_names(&top)
        )
    })
}

/// `model.safetensors`, or its shards. Repositories also carry the weights again under other names
/// (`consolidated.safetensors`), so others count only when there is no file of that name.
fn safetensors(top: &[HubFile]) -> Vec<&HubFile> {
    let all = || top.iter().filter(|file| file.name.ends_with(".safetensors"));
    if top.iter().any(|file| file.name == INDEX) {
        return all().filter(|file| file.name.starts_with("model-")).collect();
    }
    match all().find(|file| file.name == "model.safetensors") {
        Some(whole) => vec![whole],
        None => all().collect(),
    }
}

fn best_gguf(top: &[HubFile]) -> Option<&HubFile> {
    GGUF_FORMATS.iter().find_map(|format| {
        top.iter().find(|file| is_whole_model(&file.name) && is_in_format(&file.name, format))
    })
}

/// True for a `.gguf` that is no part of a split and no companion of a model.
fn is_whole_model(name: &str) -> bool {
    let lower = name.to_ascii_lowercase();
    lower.ends_with(".gguf") && !lower.contains("-of-") && !lower.contains("mmproj")
}

/// True when the name says the format: `x.Q8_0.gguf`, `x-q8_0.gguf`, `x-fp16.gguf`.
fn is_in_format(name: &str, format: &str) -> bool {
    let words = name.split(['-', '.']).map(|word| word.to_ascii_uppercase());
    words.into_iter().any(|word| {
        word == format || word.strip_prefix("FP").is_some_and(|bits| format == format!("F{bits}"))
    })
}

fn gguf_names(top: &[HubFile]) -> String {
    let names: Vec<&str> =
        top.iter().map(|file| file.name.as_str()).filter(|name| name.ends_with(".gguf")).collect();
    if names.is_empty() {
        return "; it has no .gguf at all".into();
    }
    let more = if names.len() > NAMES_SHOWN { ", .." } else { "" };
    format!("; it has {}{more}", names[..names.len().min(NAMES_SHOWN)].join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(names: &[&str]) -> Vec<HubFile> {
        names.iter().map(|&name| HubFile { name: name.into(), size_bytes: Some(1), sha256: None }).collect()
    }

    fn chosen(names: &[&str], named: Option<&str>) -> Result<String, String> {
        let selection = select("org/name", files(names), named)?;
        let list = selection.files.iter().map(|file| file.name.as_str()).collect::<Vec<_>>().join(" ");
        Ok(format!("{list} -> {}", selection.opens.as_deref().unwrap_or("folder")))
    }

    #[test]
    fn the_files_that_make_a_model_are_chosen() {
        let qwen = [
            "README.md",
            "config.json",
            "generation_config.json",
            "merges.txt",
            "model.safetensors",
            "tokenizer.json",
        ];
        assert_eq!(
            chosen(&qwen, None).unwrap(),
            "config.json generation_config.json tokenizer.json model.safetensors -> folder"
        );
        let sharded = [
            "config.json",
            "consolidated.safetensors",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "original/model.safetensors",
        ];
        assert_eq!(
            chosen(&sharded, None).unwrap(),
            "config.json model.safetensors.index.json model-00001-of-00002.safetensors \
             model-00002-of-00002.safetensors -> folder"
        );
        let quantised =
            ["config.json", "M-Q4_K_M.gguf", "M-Q4_0.gguf", "M-Q8_0.gguf", "M-f16.gguf", "mmproj-Q8_0.gguf"];
        assert_eq!(chosen(&quantised, None).unwrap(), "M-Q8_0.gguf -> M-Q8_0.gguf");
        assert_eq!(chosen(&quantised, Some("M-Q4_0.gguf")).unwrap(), "M-Q4_0.gguf -> M-Q4_0.gguf");
        for (names, best) in [
            (&["m.q4_0.gguf", "m.q4_1.gguf"][..], "m.q4_1.gguf"),
            (
                &["M-IQ4_XS.gguf", "M-Q3_K_L.gguf", "M-Q4_K_S.gguf", "M-Q4_K_M.gguf", "M-Q4_0.gguf"],
                "M-Q4_K_M.gguf",
            ),
            (&["m-q4_k_m.gguf", "m-q5_k_m.gguf", "m-q6_k.gguf", "m-f16.gguf"], "m-q6_k.gguf"),
            (&["m-fp16.gguf", "m-bf16.gguf"], "m-bf16.gguf"),
            (&["m-fp16.gguf", "m-f32.gguf"], "m-fp16.gguf"),
            (&["m-q8_0-00001-of-00002.gguf", "m-q4_0.gguf"], "m-q4_0.gguf"),
        ] {
            assert_eq!(chosen(names, None).unwrap(), format!("{best} -> {best}"));
        }
    }

    #[test]
    fn what_can_t_be_served_is_named() {
        let others = chosen(&["M-Q2_K.gguf", "M-Q3_K_M.gguf", "M-IQ4_XS.gguf"], None).unwrap_err();
        assert!(others.contains("Q4_1, Q4_0") && others.contains("M-Q3_K_M.gguf"), "{others}");
        let absent = chosen(&["M-Q8_0.gguf"], Some("M-Q4_0.gguf")).unwrap_err();
        assert!(absent.contains("no file M-Q4_0.gguf; it has M-Q8_0.gguf"), "{absent}");
        assert!(chosen(&["model.safetensors"], None).unwrap_err().contains("config.json"));
        assert!(chosen(&[], None).unwrap_err().contains("no .gguf at all"));
    }
}
