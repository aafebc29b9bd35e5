//! The bytes of a request, with bounds on their number and on patience.

use crate::error::ApiError;
use atom_base::limits::BODY_BYTES_MAX;
use axum::body::Body;
use axum::http::{HeaderMap, Request, header};
use bytes::Bytes;
use std::time::Duration;
use tokio::time::Instant;
use tokio_stream::StreamExt;

/// Reads a JSON body.
///
/// The content type must say JSON: a web page can make a browser post anything else to a server on the
/// user's own machine, without asking it first. It is checked last: a body that was not read costs the
/// client its connection.
pub(crate) async fn read(request: Request<Body>, idle: Duration) -> Result<Bytes, ApiError> {
    let (head, body) = request.into_parts();
    let too_large = |size, whole| Err(ApiError::BodyTooLarge { size, whole, max: BODY_BYTES_MAX });
    if let Some(size) = declared_length(&head.headers).filter(|&size| size > DRAINED_BYTES_MAX) {
        return too_large(size, true);
    }
    let mut chunks = body.into_data_stream();
    let mut bytes = Vec::new();
    let mut size: u64 = 0;
    let patience = PATIENCE.min(idle);
    let began = Instant::now();
    loop {
        let next = tokio::time::timeout(patience, chunks.next()).await;
        match next.map_err(|_| ApiError::BodySlow { waited: patience })? {
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
                    bytes.extend_from_slice(&chunk);
                } else {
                    // Too large already; the rest is thrown away as it comes.
                    bytes = Vec::new();
                }
            }
        }
    }
    check_content_type(&head.headers)?;
    Ok(bytes.into())
}

/// See [`read`].
pub(crate) fn check_content_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let found = headers.get(header::CONTENT_TYPE).map(|value| String::from_utf8_lossy(value.as_bytes()));
    let essence = found.as_deref().unwrap_or_default().split(';').next().unwrap_or_default().trim();
    if essence.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    Err(ApiError::ContentType { found: found.map_or_else(|| "absent".into(), |found| format!("'{found}'")) })
}

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
const RATE_MIN: u64 = 1024;
