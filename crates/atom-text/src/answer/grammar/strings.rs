//! What the schema of a string asks of a text that stands without quotes.

use crate::grammar::between_slashes;
use serde_json::Value;

/// Patterns that the whole text matches, as they stand between slashes: its length, and what it holds.
pub(super) fn patterns(schema: &Value) -> Vec<String> {
    let number = |word: &str| schema[word].as_f64().filter(|n| *n >= 0.0).map(|n| n as u64);
    let (least, most) = (number("minLength").unwrap_or(0), number("maxLength"));
    let mut patterns = Vec::new();
    match most {
        Some(most) => patterns.push(format!("(?s:.){{{least},{most}}}")),
        None if least > 0 => patterns.push(format!("(?s:.){{{least},}}")),
        None => {}
    }
    if let Some(pattern) = schema["pattern"].as_str() {
        // Classes are those of ASCII, as in strings of JSON.
        patterns.push(between_slashes(&found_in(&llguidance::regex_to_lark(pattern, "dw"))));
    }
    patterns
        .extend(schema["format"].as_str().and_then(format_pattern).map(|pattern| between_slashes(&pattern)));
    patterns
}

/// Refuses what [`patterns`] leaves out.
pub(super) fn check(schema: &Value) -> Result<(), String> {
    let has = |word: &&str| schema.get(*word).is_some();
    if let Some(word) = ["allOf", "anyOf", "oneOf", "not", "if"].iter().find(|word| has(word)) {
        return Err(format!(
            "'{word}' can't be held: where parameters are tags a string has no alternatives"
        ));
    }
    let listed = ["enum", "const"].iter().find(|word| has(word));
    let also = ["pattern", "format", "minLength", "maxLength"].iter().find(|word| has(word));
    if let (Some(listed), Some(also)) = (listed, also) {
        return Err(format!("'{also}' beside '{listed}' can't be held where parameters are tags"));
    }
    match schema["format"].as_str() {
        Some(format) if format_pattern(format).is_none() => Err(format!(
            "the format {format:?} can't be held where parameters are tags; known there: {FORMATS}"
        )),
        _ => Ok(()),
    }
}

/// Texts of a `format`. All of them are of it; not all that it allows are among them (RFC 3339, 9562, 5321, 3986).
fn format_pattern(name: &str) -> Option<String> {
    Some(match name {
        "date" => DATE.to_owned(),
        "time" => TIME.to_owned(),
        "date-time" => format!("({DATE})T{TIME}"),
        "uuid" => "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}".to_owned(),
        "email" => format!("[a-zA-Z0-9_+-]+(\\.[a-zA-Z0-9_+-]+)*@{HOST}"),
        "ipv4" => format!("({BYTE}\\.){{3}}{BYTE}"),
        "uri" => {
            format!("[a-z][a-z0-9+.-]*://{HOST}(:[0-9]+)?(/{URI_TEXT})?(\\?{URI_TEXT})?(#{URI_TEXT})?")
        }
        _ => return None,
    })
}

const FORMATS: &str = "date, time, date-time, uuid, email, ipv4, uri";
const DATE: &str = "[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))";
const TIME: &str =
    "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]+)?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])";
const HOST: &str =
    "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?(\\.[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?)*";
const BYTE: &str = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])";
const URI_TEXT: &str = "([a-zA-Z0-9._~!$&'()*+,;=:@/-]|%[0-9a-fA-F]{2})*";

/// A pattern of a whole text in which this one is found. Anchors stand at the ends of its options; elsewhere
/// whoever compiles it refuses them.
fn found_in(pattern: &str) -> String {
    let within = |option: &str| {
        let (before, option) = match option.strip_prefix('^') {
            Some(option) => ("", option),
            None => ("(?s:.*)", option),
        };
        let is_anchor = |rest: &str| rest.bytes().rev().take_while(|&byte| byte == b'\\').count() % 2 == 0;
        let (option, behind) = match option.strip_suffix('$') {
            Some(rest) if is_anchor(rest) => (rest, ""),
            _ => (option, "(?s:.*)"),
        };
        format!("{before}({option}){behind}")
    };
    options(pattern).into_iter().map(within).collect::<Vec<_>>().join("|")
}

/// What stands between bars that aren't within brackets.
fn options(pattern: &str) -> Vec<&str> {
    let (mut options, mut from, mut depth) = (Vec::new(), 0, 0_usize);
    let (mut is_escaped, mut is_class) = (false, false);
    for (at, c) in pattern.char_indices() {
        match c {
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            ']' => is_class = false,
            _ if is_class => {}
            '[' => is_class = true,
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            '|' if depth == 0 => {
                options.push(&pattern[from..at]);
                from = at + 1;
            }
            _ => {}
        }
    }
    options.push(&pattern[from..]);
    options
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_pattern_is_found_anywhere_but_for_its_anchors() {
        for (pattern, whole) in [
            ("a", "(?s:.*)(a)(?s:.*)"),
            ("^a$", "(a)"),
            ("^a|b$", "(a)(?s:.*)|(?s:.*)(b)"),
            ("^(a|b)[|$]\\$", "((a|b)[|$]\\$)(?s:.*)"),
            ("^a\\\\$", "(a\\\\)"),
        ] {
            assert_eq!(found_in(pattern), whole, "{pattern}");
        }
    }

    #[test]
    fn lengths_are_counted_in_characters() {
        assert_eq!(patterns(&json!({"type": "string"})), [""; 0]);
        assert_eq!(patterns(&json!({"minLength": 2})), ["(?s:.){2,}"]);
        assert_eq!(patterns(&json!({"maxLength": 5, "pattern": "^a/b"})), ["(?s:.){0,5}", "(a\\/b)(?s:.*)"]);
    }
}
