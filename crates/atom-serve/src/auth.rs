//! Who may use the server: API keys.

use crate::error::ApiError;
use crate::server::Server;
use crate::ui;
use atom_base::limits::{API_KEY_BYTES_MAX, API_KEYS_MAX};
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderName, Request, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use sha2::{Digest, Sha256};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use subtle::{Choice, ConstantTimeEq};
use thiserror::Error;

/// The keys that open the server; without any, everybody may use it.
///
/// A key that is presented is hashed and compared with all of them, each to its end, so that the time says
/// nothing about how much of a key was right, nor which one. The keys themselves are kept only to be taken out
/// of the request log, and are never shown: not by `Debug`, not in an error.
#[derive(Default)]
pub struct ApiKeys {
    /// In the order of their texts.
    keys: Vec<Key>,
}

struct Key {
    text: Box<str>,
    digest: [u8; 32],
    /// The longest other key that this one begins with.
    within: Option<usize>,
}

/// Why keys can't be used: the operator's fault. The key is not told.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum KeyError {
    /// An empty variable or flag: taken as no key, the server would be open to everybody.
    #[error("API key {number} is empty; leave the flag or the variable out to serve everybody")]
    Empty {
        /// Counted from 1.
        number: usize,
    },
    /// It could not be sent in a header.
    #[error("API key {number} has a character that is not visible ASCII, at byte {offset}")]
    NotVisible {
        /// Counted from 1.
        number: usize,
        /// Where, from 0.
        offset: usize,
    },
    /// Most likely a file that holds something else.
    #[error("API key {number} has {bytes} bytes; at most {API_KEY_BYTES_MAX} are taken")]
    TooLong {
        /// Counted from 1.
        number: usize,
        /// Its length.
        bytes: usize,
    },
    /// Most likely a file that holds something else.
    #[error("there are {count} API keys; at most {API_KEYS_MAX} are taken")]
    TooMany {
        /// How many.
        count: usize,
    },
}

impl ApiKeys {
    /// Takes keys, at least one of which every request must bring.
    pub fn new<K: AsRef<str>>(keys: impl IntoIterator<Item = K>) -> Result<Self, KeyError> {
        let mut keys: Vec<Key> = keys
            .into_iter()
            .enumerate()
            .map(|(at, key)| Key::new(at + 1, key.as_ref()))
            .collect::<Result<_, _>>()?;
        if keys.len() > API_KEYS_MAX {
            return Err(KeyError::TooMany { count: keys.len() });
        }
        keys.sort_by(|one, other| one.text.cmp(&other.text));
        for at in 1..keys.len() {
            let mut before = Some(at - 1);
            while let Some(other) = before.filter(|&other| !keys[at].text.starts_with(&*keys[other].text)) {
                before = keys[other].within;
            }
            keys[at].within = before;
        }
        Ok(Self { keys })
    }

    /// The keys of a file: one a line, without the space around it; empty lines and those that begin with `#`
    /// are no keys.
    pub fn lines(text: &str) -> impl Iterator<Item = &str> {
        text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'))
    }

    /// True when everybody may use the server.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// True for headers with a key of ours, in either place where clients put it.
    fn admit(&self, headers: &HeaderMap) -> bool {
        let bearer =
            headers.get_all(header::AUTHORIZATION).iter().filter_map(|value| bearer(value.as_bytes()));
        let plain = headers.get_all(X_API_KEY).iter().map(|value| value.as_bytes());
        let known = bearer.chain(plain).map(|key| self.knows(key));
        known.fold(Choice::from(0), |any, one| any | one).into()
    }

    fn knows(&self, presented: &[u8]) -> Choice {
        let digest = Sha256::digest(presented);
        self.keys.iter().fold(Choice::from(0), |any, key| any | key.digest.ct_eq(digest.as_slice()))
    }

    /// Where keys stand in a text that is written down. However many there are, each place costs a search.
    pub(crate) fn find(&self, text: &str) -> Vec<Range<usize>> {
        let longest = |at: usize| self.at_beginning(&text.as_bytes()[at..]).map(|length| at..at + length);
        if self.keys.is_empty() { Vec::new() } else { (0..text.len()).filter_map(longest).collect() }
    }

    /// Bytes of the longest key that these begin with.
    fn at_beginning(&self, bytes: &[u8]) -> Option<usize> {
        // Whatever they begin with is the last key that isn't behind them, or within that.
        let mut key = self.keys.partition_point(|key| key.text.as_bytes() <= bytes).checked_sub(1);
        loop {
            let Key { text, within, .. } = &self.keys[key?];
            if bytes.starts_with(text.as_bytes()) {
                return Some(text.len());
            }
            key = *within;
        }
    }
}

impl Key {
    fn new(number: usize, text: &str) -> Result<Self, KeyError> {
        if text.is_empty() {
            return Err(KeyError::Empty { number });
        }
        if text.len() > API_KEY_BYTES_MAX {
            return Err(KeyError::TooLong { number, bytes: text.len() });
        }
        if let Some(offset) = text.bytes().position(|byte| !byte.is_ascii_graphic()) {
            return Err(KeyError::NotVisible { number, offset });
        }
        Ok(Self { text: text.into(), digest: Sha256::digest(text.as_bytes()).into(), within: None })
    }
}

impl fmt::Debug for ApiKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ApiKeys({} keys)", self.keys.len())
    }
}

/// Lets through who has a key, and everybody to the paths that say whether the server is well: a load balancer
/// has no key. Asked before a body is read.
pub(crate) async fn check(State(server): State<Arc<Server>>, request: Request<Body>, next: Next) -> Response {
    let keys = &server.options.api_keys;
    let path = request.uri().path();
    let is_open = is_open_path(path) || ui::is_asset(path);
    if keys.is_empty() || is_open || keys.admit(request.headers()) {
        return next.run(request).await;
    }
    let presented =
        [header::AUTHORIZATION, X_API_KEY].iter().any(|name| request.headers().contains_key(name));
    ApiError::InvalidKey { presented }.into_response()
}

/// True for paths that say whether the server is well, and nothing else.
pub(crate) fn is_open_path(path: &str) -> bool {
    OPEN_PATHS.contains(&path)
}

/// The key of an `Authorization` header, whose scheme may be spelled in any case.
fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, key) = value.split_at_checked(SCHEME.len())?;
    scheme.eq_ignore_ascii_case(SCHEME).then(|| key.trim_ascii())
}

const SCHEME: &[u8] = b"Bearer ";
const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// Paths that need no key. `/ping` is another name of `/health`.
const OPEN_PATHS: [&str; 4] = ["/health", "/health/live", "/health/ready", "/ping"];

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(HeaderName::from_static(name), value.parse().unwrap());
        }
        headers
    }

    #[test]
    fn a_key_is_found_in_either_header_and_nothing_else_is_one() {
        let keys = ApiKeys::new(["sk-one", "sk-two"]).unwrap();
        let cases: [(&[(&'static str, &str)], bool); 16] = [
            (&[("authorization", "Bearer sk-one")], true),
            (&[("authorization", "bearer sk-two")], true),
            (&[("authorization", "BEARER  sk-two")], true),
            (&[("x-api-key", "sk-one")], true),
            (&[("authorization", "Bearer wrong"), ("x-api-key", "sk-one")], true),
            (&[("authorization", "Bearer wrong"), ("authorization", "Bearer sk-one")], true),
            (&[], false),
            (&[("authorization", "sk-one")], false),
            (&[("authorization", "Basic sk-one")], false),
            (&[("authorization", "Bearer")], false),
            (&[("authorization", "Bearer ")], false),
            (&[("authorization", "Bearer sk-on")], false),
            (&[("authorization", "Bearer sk-one2")], false),
            (&[("authorization", "Bearer SK-ONE")], false),
            (&[("x-api-key", "")], false),
            (&[("x-api-key", "Bearer sk-one")], false),
        ];
        for (pairs, admitted) in cases {
            assert_eq!(keys.admit(&headers(pairs)), admitted, "{pairs:?}");
        }
    }

    #[test]
    fn a_key_that_can_not_be_used_is_refused_without_being_told() {
        assert_eq!(ApiKeys::new(["good", ""]).unwrap_err(), KeyError::Empty { number: 2 });
        assert_eq!(ApiKeys::new(["two words"]).unwrap_err(), KeyError::NotVisible { number: 1, offset: 3 });
        assert_eq!(ApiKeys::new(["schlüssel"]).unwrap_err(), KeyError::NotVisible { number: 1, offset: 4 });
        assert_eq!(ApiKeys::new(["x".repeat(513)]).unwrap_err(), KeyError::TooLong { number: 1, bytes: 513 });
        let many = (0..=API_KEYS_MAX).map(|n| format!("key-{n}"));
        assert_eq!(ApiKeys::new(many).unwrap_err(), KeyError::TooMany { count: API_KEYS_MAX + 1 });
        assert!(ApiKeys::new(Vec::<String>::new()).unwrap().is_empty());
    }

    #[test]
    fn keys_are_never_shown_and_are_found_in_what_is_written() {
        let keys = ApiKeys::new(["sk-secret"]).unwrap();
        assert_eq!(format!("{keys:?}"), "ApiKeys(1 keys)");
        assert_eq!(keys.find("a sk-secret, b sk-secret-not"), [2..11, 15..24]);
    }

    #[test]
    fn of_keys_within_one_another_the_longest_is_found_and_of_those_that_overlap_each() {
        let keys = ApiKeys::new(["abd", "a", "abc", "ab", "abcde", "cx", "ab"]).unwrap();
        for (text, found) in [
            ("ac", &[(0, 1)][..]),
            ("abz", &[(0, 2)][..]),
            ("abcd", &[(0, 3)][..]),
            ("abcdef", &[(0, 5)][..]),
            ("abcx", &[(0, 3), (2, 4)][..]),
            ("zz", &[][..]),
            ("é a", &[(3, 4)][..]),
        ] {
            let ranges = keys.find(text).into_iter().map(|range| (range.start, range.end));
            assert_eq!(ranges.collect::<Vec<_>>(), found, "{text}");
        }
    }

    #[test]
    fn a_file_has_a_key_a_line() {
        let text = "# ours\n\n sk-one \r\nsk-two\n  # gone: sk-three\n";
        assert_eq!(ApiKeys::lines(text).collect::<Vec<_>>(), ["sk-one", "sk-two"]);
    }
}
