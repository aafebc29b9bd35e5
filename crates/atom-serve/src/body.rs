//! The bytes of a request, with bounds on their number and on patience.

use crate::declare::NOTHING;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::hosts::SEC_FETCH_SITE;
use crate::server::Server;
use atom_base::limits::BODY_BYTES_MAX;
use axum::body::Body;
use axum::http::{HeaderMap, HeaderName, Request, header};
use bytes::Bytes;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::time::Instant;
use tokio_stream::StreamExt;

/// Reads a JSON body.
///
/// The content type must say JSON: a web page can make a browser post anything else to a server on the
/// user's own machine, without asking it first. It is checked last: a body that was not read costs the
/// client its connection.
///
/// What was read counts against the server's room for bodies until the last of the bytes is dropped.
pub(crate) async fn read(server: &Server, request: Request<Body>) -> Result<Bytes, ApiError> {
    let (head, body) = request.into_parts();
    let held = hold(server, &head.headers, body).await?;
    check_content(&head.headers)?;
    Ok(Bytes::from_owner(held))
}

/// Reads the body of an order, which has no fields: `{}`, or nothing.
///
/// Nothing needs no content type, but from a browser: a page can make it post nothing, too, without asking.
/// Browsers say by `Origin` who posts, whatever it is.
pub(crate) async fn read_order(server: &Server, request: Request<Body>) -> Result<(), ApiError> {
    let (head, body) = request.into_parts();
    let held = hold(server, &head.headers, body).await?;
    let says_nothing = held.bytes.is_empty() && !head.headers.contains_key(header::CONTENT_TYPE);
    let is_of_a_page = BROWSERS_OWN.iter().any(|name| head.headers.contains_key(name));
    if says_nothing && !is_of_a_page {
        return Ok(());
    }
    check_content(&head.headers)?;
    if held.bytes.is_empty() { Ok(()) } else { Fields::parse(&held.bytes, &NOTHING)?.refuse_all() }
}

/// Takes all of a body, within bounds.
async fn hold(server: &Server, headers: &HeaderMap, body: Body) -> Result<Held, ApiError> {
    let too_large = |size, whole| Err(ApiError::BodyTooLarge { size, whole, max: BODY_BYTES_MAX });
    if let Some(size) = declared_length(headers).filter(|&size| size > DRAINED_BYTES_MAX) {
        return too_large(size, true);
    }
    let mut chunks = body.into_data_stream();
    let mut held = server.body_room.hold();
    let mut size: u64 = 0;
    let patience = PATIENCE.min(server.options.idle_timeout);
    let began = Instant::now();
    let end = began + BODY_TIME_MAX;
    loop {
        let until = end.min(Instant::now() + patience);
        let next = tokio::time::timeout_at(until, chunks.next()).await;
        let late = |_| {
            if until == end {
                ApiError::BodyLate { size, max: BODY_TIME_MAX }
            } else {
                ApiError::BodySlow { waited: patience }
            }
        };
        match next.map_err(late)? {
            None if size > BODY_BYTES_MAX as u64 => return too_large(size, true),
            None => break,
            Some(Err(error)) => return Err(ApiError::BodyLost { reason: error.to_string() }),
            Some(Ok(chunk)) => {
                size += chunk.len() as u64;
                let waited = began.elapsed();
                if size < RATE_MIN * waited.saturating_sub(PATIENCE).as_secs() {
                    return Err(ApiError::BodyTrickles { size, waited, rate: RATE_MIN });
                }
                if size > DRAINED_BYTES_MAX {
                    return too_large(size, false);
                }
                if size <= BODY_BYTES_MAX as u64 {
                    held.push(&chunk)?;
                } else {
                    // Too large already; the rest is thrown away as it comes.
                    held.clear();
                }
            }
        }
    }
    Ok(held)
}

/// How many bytes of bodies may be held at once, by all connections together.
#[derive(Debug)]
pub(crate) struct Room {
    taken: Arc<AtomicUsize>,
    max: usize,
}

/// A body in memory.
struct Held {
    bytes: Vec<u8>,
    taken: Arc<AtomicUsize>,
    max: usize,
}

impl Room {
    pub(crate) fn new(max: usize) -> Self {
        Self { taken: Arc::default(), max }
    }

    fn hold(&self) -> Held {
        Held { bytes: Vec::new(), taken: self.taken.clone(), max: self.max }
    }
}

impl Held {
    fn push(&mut self, chunk: &[u8]) -> Result<(), ApiError> {
        let taken = self.taken.fetch_add(chunk.len(), Ordering::Relaxed) + chunk.len();
        self.bytes.extend_from_slice(chunk);
        if taken > self.max {
            return Err(ApiError::BodiesFull { max: self.max });
        }
        Ok(())
    }

    fn clear(&mut self) {
        self.taken.fetch_sub(self.bytes.len(), Ordering::Relaxed);
        self.bytes = Vec::new();
    }
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.clear();
    }
}

/// See [`read`]. What is said twice must fit both times: another parser may have taken the other one.
fn check_content(headers: &HeaderMap) -> Result<(), ApiError> {
    let texts = |name: HeaderName| {
        let values = headers.get_all(name).iter();
        values.map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned()).collect::<Vec<_>>()
    };
    let kinds = texts(header::CONTENT_TYPE);
    if kinds.is_empty() {
        return Err(ApiError::ContentType { found: "absent".into() });
    }
    for kind in kinds {
        check_kind(&kind)?;
    }
    for (name, plain) in [(header::CONTENT_ENCODING, "identity"), (header::TRANSFER_ENCODING, "chunked")] {
        let codings = texts(name.clone()).join(",");
        let mut codings = codings.split(',').map(str::trim).filter(|coding| !coding.is_empty());
        if let Some(found) = codings.find(|coding| !coding.eq_ignore_ascii_case(plain)) {
            return Err(ApiError::Encoded { name, found: found.to_owned() });
        }
    }
    Ok(())
}

/// JSON, in UTF-8 if it says in what: there is no other (RFC 8259, 8.1).
fn check_kind(kind: &str) -> Result<(), ApiError> {
    let mut parts = kind.split(';').map(str::trim);
    if !parts.next().unwrap_or_default().eq_ignore_ascii_case("application/json") {
        return Err(ApiError::ContentType { found: format!("'{kind}'") });
    }
    let values = parts.filter_map(|part| part.split_once('='));
    let charsets = values.filter(|(name, _)| name.trim().eq_ignore_ascii_case("charset"));
    let mut charsets = charsets.map(|(_, charset)| charset.trim().trim_matches('"'));
    match charsets.find(|charset| !is_utf8(charset)) {
        None => Ok(()),
        Some(charset) => Err(ApiError::Charset { found: charset.to_owned() }),
    }
}

fn is_utf8(charset: &str) -> bool {
    ["utf-8", "utf8"].iter().any(|name| charset.eq_ignore_ascii_case(name))
}

/// Headers that every browser sends and nothing else does: pages can neither set nor leave them out.
const BROWSERS_OWN: [HeaderName; 2] = [header::ORIGIN, SEC_FETCH_SITE];

fn declared_length(headers: &HeaderMap) -> Option<u64> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

/// A body that is too large is read to its end nevertheless, up to here: most clients look for an answer
/// only after they have sent everything, and would see a broken connection instead of the reason.
const DRAINED_BYTES_MAX: u64 = 8 * BODY_BYTES_MAX as u64;

/// Longest wait for the next byte of a body.
const PATIENCE: Duration = Duration::from_secs(30);

/// Bytes of a body that must come in a second, once it has taken longer than [`PATIENCE`]: a modem of the last
/// century is faster, and a client that sends a byte now and then would hold a place for days.
pub(crate) const RATE_MIN: u64 = 1024;

/// Longest time for all of a body: what is large and came fast may not trickle at its end, since it holds its
/// place in the room. The largest body needs 110 kB a second.
const BODY_TIME_MAX: Duration = Duration::from_secs(300);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_share_a_room_and_leave_it_when_they_are_dropped() {
        let room = Room::new(100);
        let (mut one, mut two) = (room.hold(), room.hold());
        one.push(&[1; 60]).unwrap();
        two.push(&[2; 40]).unwrap();
        assert!(matches!(one.push(&[1]), Err(ApiError::BodiesFull { max: 100 })));
        drop(one);
        two.push(&[2; 60]).unwrap();
        let bytes = Bytes::from_owner(two);
        let copy = bytes.slice(10..20);
        drop(bytes);
        assert!(room.hold().push(&[3]).is_err(), "a part of it is alive");
        assert_eq!(copy, [2; 10].as_slice());
        drop(copy);
        let mut three = room.hold();
        three.push(&[3; 100]).unwrap();
        three.clear();
        assert_eq!(room.taken.load(Ordering::Relaxed), 0);
    }
}
