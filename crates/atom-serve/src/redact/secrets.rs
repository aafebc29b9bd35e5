//! Where secrets stand in a text: what is recognised, as tables, and one pass over the text for each kind.
//!
//! Every finder goes on behind what it has found, and looks ahead without end only for what it then takes. So the
//! time is that of the text's length, whatever stands in it.

use super::REDACTED;
use crate::auth::ApiKeys;
use std::ops::Range;

/// A key that says by its beginning what it is.
pub(crate) struct Shape {
    pub(crate) begins: &'static str,
    /// Bytes that may follow.
    of: fn(u8) -> bool,
    /// How many of them there must be: fewer are a word, like sk-learn or hf_transfer.
    bytes_min: usize,
    /// How many if one is a digit.
    with_digit_min: usize,
}

/// Keys that stand by themselves. In front of one is no letter and no digit.
pub(crate) const SHAPES: [Shape; 23] = [
    shape("sk-", word, 8, 4),
    shape("sk_live_", word, 8, 8),
    shape("sk_test_", word, 8, 8),
    shape("rk_live_", word, 8, 8),
    shape("hf_", letter, 16, 8),
    shape("ghp_", letter, 16, 8),
    shape("gho_", letter, 16, 8),
    shape("ghu_", letter, 16, 8),
    shape("ghs_", letter, 16, 8),
    shape("ghr_", letter, 16, 8),
    shape("github_pat_", word, 16, 8),
    shape("glpat-", word, 16, 8),
    shape("xoxa-", word, 8, 8),
    shape("xoxb-", word, 8, 8),
    shape("xoxe-", word, 8, 8),
    shape("xoxo-", word, 8, 8),
    shape("xoxp-", word, 8, 8),
    shape("xoxr-", word, 8, 8),
    shape("xoxs-", word, 8, 8),
    shape("AKIA", capital, 16, 16),
    shape("ASIA", capital, 16, 16),
    shape("AIza", word, 30, 30),
    // A JSON Web Token: the beginning of {" in base64.
    shape("eyJ", dotted, 32, 32),
];

/// How names of fields end whose values are secret, in any case and without dashes, underscores and dots.
pub(crate) const NAMES: [&str; 11] = [
    "authorization",
    "apikey",
    "token",
    "secret",
    "password",
    "passwd",
    "passphrase",
    "pwd",
    "privatekey",
    "secretkey",
    "accesskey",
];

/// Names that are words of prose and code, too, where they stand alone.
const WORDS: [&str; 2] = ["token", "secret"];

/// True for a name whose value is a secret: `password`, `client_secret`, `X-Api-Key`, `accessToken`.
pub(crate) fn is_secret_name(name: &str) -> bool {
    rest_of_name(name.as_bytes()).is_some()
}

/// Where secrets stand in a text: in order, none within another.
pub(crate) fn secrets(text: &str, keys: &ApiKeys) -> Vec<Range<usize>> {
    let mut found = keys.find(text);
    for find in [shapes, bearers, named, logins, blocks] {
        found.extend(find(text));
    }
    found.sort_by_key(|range| range.start);
    found.dedup_by(|next, last| {
        let overlaps = next.start < last.end;
        if overlaps {
            last.end = last.end.max(next.end);
        }
        overlaps
    });
    found
}

const fn shape(begins: &'static str, of: fn(u8) -> bool, bytes_min: usize, with_digit_min: usize) -> Shape {
    Shape { begins, of, bytes_min, with_digit_min }
}

fn letter(byte: u8) -> bool {
    byte.is_ascii_alphanumeric()
}

fn capital(byte: u8) -> bool {
    byte.is_ascii_uppercase() || byte.is_ascii_digit()
}

fn word(byte: u8) -> bool {
    letter(byte) || matches!(byte, b'-' | b'_')
}

fn dotted(byte: u8) -> bool {
    word(byte) || byte == b'.'
}

/// Keys that are known by their beginning.
fn shapes(text: &str) -> Vec<Range<usize>> {
    let bytes = text.as_bytes();
    let (mut found, mut at) = (Vec::new(), 0);
    while at < bytes.len() {
        let end = if is_beginning(bytes, at) { end_of_shape(&bytes[at..]) } else { None };
        if let Some(end) = end {
            found.push(at..at + end);
        }
        at += end.unwrap_or(1);
    }
    found
}

fn end_of_shape(bytes: &[u8]) -> Option<usize> {
    SHAPES.iter().find_map(|shape| {
        let rest = bytes.strip_prefix(shape.begins.as_bytes())?;
        let length = count(rest, shape.of);
        let has_digit = rest[..length].iter().any(u8::is_ascii_digit);
        let min = if has_digit { shape.with_digit_min } else { shape.bytes_min };
        (length >= min).then_some(shape.begins.len() + length)
    })
}

/// True where no word goes on: what is in front is no letter, or one that JSON spells a line break by.
fn is_beginning(bytes: &[u8], at: usize) -> bool {
    match bytes[..at] {
        [.., b'\\', before] => matches!(before, b'n' | b'r' | b't' | b'b' | b'f') || !letter(before),
        [.., before] => !letter(before),
        [] => true,
    }
}

/// The word behind every `Bearer `, whoever's key it is. A short one of small letters can be prose ("the bearer of
/// news"): it is a key if the two are all that is said.
fn bearers(text: &str) -> Vec<Range<usize>> {
    let bytes = text.as_bytes();
    let (mut found, mut at) = (Vec::new(), 0);
    while let Some(window) = bytes.get(at..at + BEARER.len()) {
        if !window.eq_ignore_ascii_case(BEARER) {
            at += 1;
            continue;
        }
        let start = at + BEARER.len() + count(&bytes[at + BEARER.len()..], |byte| byte == b' ');
        let end = start + count(&bytes[start..], |byte| byte.is_ascii_graphic() && byte != b'"');
        // A quote within JSON within a text.
        let is_quoted = bytes.get(end) == Some(&b'"');
        let end = if is_quoted { start + text[start..end].trim_end_matches('\\').len() } else { end };
        let key = &bytes[start..end];
        let is_short = key.len() < BEARER_BYTES_MIN && key.iter().all(u8::is_ascii_lowercase);
        let ends_there = matches!(bytes.get(end), None | Some(b'"' | b'\\' | b'\n'));
        let is_all =
            ends_there && !bytes[..at].last().is_some_and(|&before| before == b' ' || letter(before));
        if !key.is_empty() && (!is_short || is_all) && !text[start..].starts_with(REDACTED) {
            found.push(start..end);
        }
        at += BEARER.len();
    }
    found
}

/// Values of fields with a secret's name: in JSON that is part of the text, however deep in further texts, in
/// headers, in queries and forms, and where variables are set.
fn named(text: &str) -> Vec<Range<usize>> {
    let bytes = text.as_bytes();
    let (mut found, mut at) = (Vec::new(), 0);
    while let Some(next) = bytes[at..].iter().position(|byte| matches!(byte, b':' | b'=')) {
        let value = Named::at(bytes, at, at + next).and_then(|named| named.value(bytes));
        at = value.as_ref().map_or(at + next + 1, |value| value.end);
        found.extend(value);
    }
    found
}

/// A secret's name, and what stands between it and its value.
struct Named {
    /// The name stands in quotes.
    is_quoted: bool,
    /// Its value goes to the end of the line.
    is_header: bool,
    /// Where the value may begin.
    behind: usize,
}

impl Named {
    /// The name in front of the `:` or `=` at `mark`; what is before `from` was read.
    fn at(bytes: &[u8], from: usize, mark: usize) -> Option<Self> {
        let marks = &bytes[mark..];
        let length = match marks {
            [b':', b':', ..] | [b'=', b'=', ..] => return None,
            [b'=', b'>', ..] | [b':', b'=', ..] => 2,
            _ => 1,
        };
        let before = bytes[from..mark].trim_ascii_end();
        let has_space = before.len() < mark - from;
        let (is_quoted, name) = match before {
            [name @ .., b'"' | b'\''] => (true, trim_backslashes(name)),
            name => (false, name),
        };
        let name = &name[name.len().saturating_sub(NAME_BYTES_MAX)..];
        let begins = name.iter().rposition(|&byte| !dotted(byte)).map_or(0, |at| at + 1);
        let name = &name[begins..];
        let (ending, rest) = rest_of_name(name)?;
        let is_tight =
            marks[0] == b'=' && !has_space && !marks.get(length).is_some_and(u8::is_ascii_whitespace);
        if !is_quoted && !is_tight && rest.is_empty() && WORDS.contains(&ending) {
            return None;
        }
        let is_header = !is_quoted && ending == AUTHORIZATION && marks[0] == b':';
        Some(Self { is_quoted, is_header, behind: mark + length })
    }

    fn value(&self, bytes: &[u8]) -> Option<Range<usize>> {
        // JSON may break the line behind a name.
        let blank = |byte| matches!(byte, b' ' | b'\t') || self.is_quoted && matches!(byte, b'\r' | b'\n');
        let start = self.behind + count(&bytes[self.behind..], blank);
        let backslashes = count(&bytes[start..], |byte| byte == b'\\');
        let (start, quote) = match bytes[start + backslashes..] {
            [quote @ (b'"' | b'\''), ..] => (start + backslashes + 1, Some(quote)),
            _ => (start, None),
        };
        let rest = &bytes[start..];
        // Before its end is looked for: there may be as many of these as there is room for.
        if rest.starts_with(REDACTED.as_bytes()) {
            return None;
        }
        let length = match (quote, rest) {
            (Some(quote), _) => self.end_of_text(rest, quote, backslashes),
            (None, [b'{' | b'[', ..]) if self.is_quoted => end_of_nest(rest),
            (None, _) => self.end_of_bare(rest),
        };
        let value = &rest[..length];
        let says_nothing = value.is_empty() || NO_SECRETS.contains(&value);
        (!says_nothing).then_some(start..start + length)
    }

    /// How long a text is until the quote that ends it, which has as many texts around it as the one that began it,
    /// behind so many backslashes. All there is, if it is cut.
    fn end_of_text(&self, bytes: &[u8], quote: u8, backslashes: usize) -> usize {
        let mut run = 0;
        for (at, &byte) in bytes.iter().enumerate() {
            if byte == quote && ends_text(run, backslashes) {
                return at - run.min(backslashes);
            }
            if byte == b'\n' && !self.is_quoted {
                // It was an apostrophe.
                return at;
            }
            run = if byte == b'\\' { run + 1 } else { 0 };
        }
        bytes.len()
    }

    /// How long a value without quotes is.
    fn end_of_bare(&self, bytes: &[u8]) -> usize {
        let is_over = |byte: u8| match byte {
            b'\n' | b'\r' | b'"' => true,
            _ if self.is_header => matches!(byte, b'\'' | b'\\'),
            b',' | b'}' | b']' => self.is_quoted,
            _ => {
                !self.is_quoted && (matches!(byte, b'&' | b'\'' | b'\\' | b'`') || byte.is_ascii_whitespace())
            }
        };
        bytes[..count(bytes, |byte| !is_over(byte))].trim_ascii_end().len()
    }
}

/// How a secret's name ends, and what is in front of that.
fn rest_of_name(name: &[u8]) -> Option<(&'static str, &[u8])> {
    NAMES.iter().find_map(|ending| {
        let mut rest = name;
        for wanted in ending.bytes().rev() {
            rest = &rest[..rest.iter().rposition(|&byte| letter(byte) || !byte.is_ascii())? + 1];
            let (found, before) = rest.split_last()?;
            if !found.eq_ignore_ascii_case(&wanted) {
                return None;
            }
            rest = before;
        }
        Some((*ending, rest))
    })
}

fn trim_backslashes(bytes: &[u8]) -> &[u8] {
    &bytes[..bytes.iter().rposition(|&byte| byte != b'\\').map_or(0, |at| at + 1)]
}

/// True if a quote behind `run` backslashes ends a text that one behind `began` of them began: each text around
/// them spells a backslash by two, and a quote by a backslash more.
fn ends_text(mut run: usize, mut began: usize) -> bool {
    while began > 0 {
        if run.is_multiple_of(2) {
            return true;
        }
        (run, began) = (run / 2, began / 2);
    }
    run.is_multiple_of(2)
}

/// How long a list or an object is. Brackets in texts count as well: taken for more than it is, nothing is told.
fn end_of_nest(bytes: &[u8]) -> usize {
    let mut depth = 0_usize;
    for (at, byte) in bytes.iter().enumerate() {
        match byte {
            b'{' | b'[' => depth += 1,
            b'}' | b']' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return at + 1;
        }
    }
    bytes.len()
}

/// Names and passwords in the addresses of `scheme://name:password@host`.
fn logins(text: &str) -> Vec<Range<usize>> {
    let (mut found, mut at) = (Vec::new(), 0);
    while let Some(next) = text[at..].find("://") {
        let start = at + next + 3;
        let ends =
            |byte: u8| byte.is_ascii_graphic() && !matches!(byte, b'/' | b'"' | b'\'' | b'\\' | b'<' | b'>');
        at = start + count(&text.as_bytes()[start..], |byte| ends(byte) || !byte.is_ascii());
        let login = text[start..at].rsplit_once('@').map_or("", |(login, _)| login);
        if login.contains(':') {
            found.push(start..start + login.len());
        }
    }
    found
}

/// PEM, keys and certificates alike.
fn blocks(text: &str) -> Vec<Range<usize>> {
    let (mut found, mut at) = (Vec::new(), 0);
    while let Some(next) = text[at..].find(PEM_BEGIN) {
        let start = at + next;
        at = start + PEM_BEGIN.len();
        let Some(label) = end_of_label(&text[at..]) else { continue };
        at += label;
        at = match text[at..].find(PEM_END) {
            Some(end) => {
                let behind = at + end + PEM_END.len();
                behind + end_of_label(&text[behind..]).unwrap_or(0)
            }
            None => text.len(),
        };
        found.push(start..at);
    }
    found
}

/// Where the dashes end behind a label of PEM.
fn end_of_label(text: &str) -> Option<usize> {
    let label = count(text.as_bytes(), |byte| capital(byte) || byte == b' ');
    let is_whole = label <= NAME_BYTES_MAX && text[label..].starts_with(PEM_DASHES);
    is_whole.then_some(label + PEM_DASHES.len())
}

fn count(bytes: &[u8], is_one: impl Fn(u8) -> bool) -> usize {
    bytes.iter().position(|&byte| !is_one(byte)).unwrap_or(bytes.len())
}

const BEARER: &[u8] = b"Bearer ";
const BEARER_BYTES_MIN: usize = 8;
const AUTHORIZATION: &str = "authorization";
const NAME_BYTES_MAX: usize = 64;
/// Values that say nothing.
const NO_SECRETS: [&[u8]; 6] = [b"null", b"true", b"false", b"None", b"True", b"False"];
const PEM_BEGIN: &str = "-----BEGIN ";
const PEM_END: &str = "-----END ";
const PEM_DASHES: &str = "-----";

#[cfg(test)]
#[path = "secrets_tests.rs"]
mod tests;
