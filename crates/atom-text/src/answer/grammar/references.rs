//! References within the schema of a tool, once that stands within another one.
//!
//! A reference is a JSON pointer from the root of its document. Those into definitions stay what they are when the
//! definitions move to the new root. For any other one the whole schema moves there, as a definition itself, and
//! references are rewritten to lead into it.

use serde_json::{Map, Value};

/// The schema as it can stand anywhere within another one, and the definitions that this must have then.
pub(super) fn moved(mut schema: Value) -> (Value, Map<String, Value>) {
    let members = schema.as_object();
    let taken =
        DEFINITIONS.iter().filter_map(|word| Some(((*word).to_owned(), members?.get(*word)?.clone())));
    let mut definitions: Map<String, Value> = taken.collect();
    if leads_elsewhere(&schema) {
        rewrite(&mut schema);
        definitions = Map::from_iter([(
            DEFINITIONS[0].to_owned(),
            Value::from(Map::from_iter([(WHOLE.to_owned(), schema.clone())])),
        )]);
    }
    (schema, definitions)
}

pub(super) fn with_definitions(mut schema: Value, definitions: Map<String, Value>) -> Value {
    if let Some(object) = schema.as_object_mut() {
        object.extend(definitions);
    }
    schema
}

/// A reference within the document that leads to no definition at its root.
fn leads_elsewhere(schema: &Value) -> bool {
    match schema {
        Value::Array(items) => items.iter().any(leads_elsewhere),
        Value::Object(members) => {
            let leads_in = |to: &str| DEFINITIONS.iter().any(|word| to.starts_with(&format!("#/{word}/")));
            let reference = members.get("$ref").and_then(Value::as_str);
            reference.is_some_and(|to| to.starts_with('#') && !leads_in(to))
                || members.iter().any(|(word, member)| !is_data(word) && leads_elsewhere(member))
        }
        _ => false,
    }
}

/// Leads all references into the definition that the whole schema becomes.
fn rewrite(schema: &mut Value) {
    match schema {
        Value::Array(items) => items.iter_mut().for_each(rewrite),
        Value::Object(members) => {
            if let Some(Value::String(reference)) = members.get_mut("$ref")
                && let Some(pointer) =
                    reference.strip_prefix('#').filter(|to| to.is_empty() || to.starts_with('/'))
            {
                *reference =
                    format!("#/{}/{WHOLE}{}", DEFINITIONS[0], pointer.strip_suffix('/').unwrap_or(pointer));
            }
            for (word, member) in members.iter_mut().filter(|(word, _)| !is_data(word)) {
                _ = word;
                rewrite(member);
            }
        }
        _ => {}
    }
}

/// Keywords whose values are no schemas, whatever they look like.
fn is_data(keyword: &str) -> bool {
    matches!(keyword, "const" | "enum" | "default" | "examples")
}

/// Where definitions stand, in younger drafts and in older ones.
pub(super) const DEFINITIONS: [&str; 2] = ["$defs", "definitions"];

/// The definition that the whole schema becomes.
const WHOLE: &str = "arguments";
