//! Where a checkpoint keeps its chat templates, and their text before it is compiled.

use crate::folder::{read_json, read_text};
use crate::{TextError, TokenizerSource};
use serde_json::Value;
use std::path::Path;

/// The template of ordinary requests.
pub(super) const DEFAULT: &str = "default";
/// The template of requests with tools, where a checkpoint has one.
pub(super) const TOOL_USE: &str = "tool_use";

/// Bytes of one template. The longest published ones have some 30 kB.
const TEMPLATE_BYTES_MAX: usize = 256 << 10;

/// The templates that rendering may use, by name. Empty for a checkpoint without any.
pub(super) fn find(source: &TokenizerSource) -> Result<Vec<(&'static str, String)>, TextError> {
    match source {
        TokenizerSource::Gguf(vocabulary) => {
            Ok(vocabulary.chat_template.iter().map(|text| (DEFAULT, text.clone())).collect())
        }
        TokenizerSource::Folder(folder) => match read_text(&folder.join("chat_template.jinja"))? {
            Some(text) => Ok(vec![(DEFAULT, text)]),
            None => in_config(folder),
        },
    }
}

fn in_config(folder: &Path) -> Result<Vec<(&'static str, String)>, TextError> {
    let path = folder.join("tokenizer_config.json");
    let config = read_json(&path)?.unwrap_or_default();
    match &config["chat_template"] {
        Value::Null => Ok(Vec::new()),
        Value::String(text) => Ok(vec![(DEFAULT, text.clone())]),
        Value::Array(entries) => Ok(entries.iter().filter_map(named).collect()),
        _ => Err(TextError::Read {
            path,
            reason: "chat_template must be a string or a list of {name, template}".into(),
        }),
    }
}

/// One of several templates, if its name is one that is used.
fn named(entry: &Value) -> Option<(&'static str, String)> {
    let text = entry["template"].as_str()?.to_owned();
    let name = entry["name"].as_str()?;
    [DEFAULT, TOOL_USE].into_iter().find(|known| *known == name).map(|name| (name, text))
}

/// Refuses a template of absurd length before it is compiled.
pub(super) fn check_size(text: &str) -> Result<(), TextError> {
    if text.len() > TEMPLATE_BYTES_MAX {
        return Err(TextError::TemplateSyntax {
            reason: format!("it has {} bytes; at most {TEMPLATE_BYTES_MAX} are read", text.len()),
        });
    }
    Ok(())
}

/// Training code marks the assistant's text with `{% generation %} .. {% endgeneration %}`, which renders
/// as what is between. The engine has no such tag; `if true` renders the same.
pub(super) fn without_generation_marks(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at + 2);
        out.push_str(before);
        rest = tag;
        let body = tag.trim_start_matches(['-', '+']).trim_start();
        for (mark, instead) in [("generation", "if true"), ("endgeneration", "endif")] {
            let Some(after) = body.strip_prefix(mark) else { continue };
            if after.trim_start().trim_start_matches(['-', '+']).starts_with("%}") {
                out.push_str(&tag[..tag.len() - body.len()]);
                out.push_str(instead);
                rest = after;
            }
        }
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generation_marks_become_a_condition_that_holds() {
        let cases = [
            ("a{% generation %}b{% endgeneration %}c", "a{% if true %}b{% endif %}c"),
            ("{%- generation -%}b{%+endgeneration%}", "{%- if true -%}b{%+endif%}"),
            (
                "{% generation_count %}{% set generation = 1 %}",
                "{% generation_count %}{% set generation = 1 %}",
            ),
            ("{%", "{%"),
            ("no tags", "no tags"),
        ];
        for (text, expected) in cases {
            assert_eq!(without_generation_marks(text), expected);
        }
    }
}
