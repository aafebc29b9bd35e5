//! Where a connection stands between a request and its answer: what [`Wire`](crate::wire::Wire) has to know of
//! what goes on above it.

use crate::connection::FLUSH;
use atom_base::limits::HEAD_BYTES_MAX;
use axum::body::Body;
use axum::http::{HeaderName, Request, Response, StatusCode, Version, header};
use bytes::Bytes;
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use tokio::time::Instant;

/// Shared by the wire, the service and the bodies of one connection, all of which run in its task.
#[derive(Debug, Default)]
pub(crate) struct Exchange {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// How many requests there were.
    opened: u64,
    /// From a request's head until the last of its answer was handed over.
    is_open: bool,
    /// The request's body came to its end.
    is_read: bool,
    /// Interim responses may be sent: the peer knows them, and the answer has not begun.
    may_interim: bool,
    /// When the answer has to have left.
    due: Option<Instant>,
    /// The answer is an event stream, into which a comment may go.
    is_stream: bool,
    /// The next poll of the stream gives a comment.
    wants_comment: bool,
    /// The head that is being read, as it came: hyper shows a request only after it has chosen between two lengths.
    head: Vec<u8>,
    /// hyper wanted to answer on its own.
    refused: Option<StatusCode>,
}

/// An extension of an answer: when its request's time is over, see
/// [`ServerOptions::request_timeout`](crate::ServerOptions).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Due(pub(crate) Instant);

/// An answer of hyper's own, at the end of what it writes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct AutomaticAnswer {
    pub(crate) at: usize,
    pub(crate) status: StatusCode,
}

/// A request's body, watched for its end.
pub(crate) struct Upload {
    body: Incoming,
    exchange: Arc<Exchange>,
}

/// An answer's body, watched for its end.
pub(crate) struct Download {
    body: Body,
    exchange: Arc<Exchange>,
}

impl Exchange {
    fn state(&self) -> MutexGuard<'_, State> {
        // A panic under the lock is impossible short of memory: nothing in here calls out.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A request's head was read. False when it says in two ways how long its body is.
    pub(crate) fn open(self: &Arc<Self>, request: Request<Incoming>) -> (Request<Upload>, bool) {
        let mut state = self.state();
        let head = std::mem::take(&mut state.head);
        let is_chunked = request.headers().contains_key(header::TRANSFER_ENCODING);
        let is_clear = !(is_chunked && has_content_length(&head));
        state.opened += 1;
        state.is_open = true;
        state.is_read = request.body().is_end_stream();
        state.may_interim = request.version() == Version::HTTP_11;
        state.is_stream = false;
        state.due = None;
        drop(state);
        (request.map(|body| Upload { body, exchange: self.clone() }), is_clear)
    }

    /// The answer begins.
    pub(crate) fn answer(self: &Arc<Self>, response: Response<Body>) -> Response<Download> {
        let mut state = self.state();
        state.may_interim = false;
        state.due = response.extensions().get().map(|Due(due)| *due + FLUSH);
        state.is_stream = response
            .headers()
            .get(header::CONTENT_TYPE)
            .is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"));
        drop(state);
        response.map(|body| Download { body, exchange: self.clone() })
    }

    /// The request that has no complete answer, by its number, and whether all of it was read.
    pub(crate) fn now(&self) -> Option<(u64, bool)> {
        let state = self.state();
        state.is_open.then_some((state.opened, state.is_read))
    }

    /// When the answer has to have left: what it says when its time is over included; until the last of
    /// it was passed on.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.state().due
    }

    /// All bytes that there were have been passed on.
    pub(crate) fn flushed(&self) {
        let mut state = self.state();
        if !state.is_open {
            state.due = None;
        }
    }

    /// An answer was given before its request was read.
    pub(crate) fn has_unread(&self) -> bool {
        let state = self.state();
        state.opened > 0 && !state.is_read
    }

    /// Bytes of the peer.
    pub(crate) fn saw(&self, bytes: &[u8]) {
        let mut state = self.state();
        if !state.is_open && state.head.len() < HEAD_BYTES_MAX {
            state.head.extend_from_slice(bytes);
        }
    }

    /// Lets the stream that goes on ask whether the peer is there. True when there is none, and an interim
    /// response can do so.
    pub(crate) fn ask_in_stream(&self) -> bool {
        let mut state = self.state();
        state.wants_comment = state.is_stream;
        state.may_interim
    }

    /// hyper answers what it can't read as HTTP on its own, with no body and without an id. Such an answer is the
    /// last that it writes, between exchanges.
    pub(crate) fn automatic_answer(&self, written: &[u8]) -> Option<AutomaticAnswer> {
        if !written.ends_with(b"\r\n\r\n") || self.state().is_open {
            return None;
        }
        let from = written.len().saturating_sub(AUTOMATIC_BYTES_MAX);
        let at = from + written[from..].windows(VERSION.len()).rposition(|window| window == VERSION)?;
        let head = std::str::from_utf8(&written[at..]).ok()?;
        let mut lines = head.split("\r\n").filter(|line| !line.is_empty());
        let status = lines.next()?.split(' ').nth(1)?.parse().ok()?;
        let is_bare = lines.all(|line| {
            let name = line.split(':').next().unwrap_or_default();
            AUTOMATIC_HEADERS.iter().any(|known| name.eq_ignore_ascii_case(known.as_str()))
        });
        let is_error = AUTOMATIC_STATUSES.contains(&status);
        (is_bare && is_error).then_some(AutomaticAnswer { at, status })
    }

    pub(crate) fn refuse(&self, status: StatusCode) {
        self.state().refused = Some(status);
    }

    pub(crate) fn is_refused(&self) -> bool {
        self.state().refused.is_some()
    }

    /// The status that hyper's own answer would have had.
    pub(crate) fn refusal(&self) -> Option<StatusCode> {
        self.state().refused
    }
}

impl HttpBody for Upload {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let this = self.get_mut();
        let frame = Pin::new(&mut this.body).poll_frame(cx);
        if matches!(frame, Poll::Ready(None)) || this.body.is_end_stream() {
            this.exchange.state().is_read = true;
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl HttpBody for Download {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let this = self.get_mut();
        let frame = Pin::new(&mut this.body).poll_frame(cx);
        if std::mem::take(&mut this.exchange.state().wants_comment) && frame.is_pending() {
            // Frames are whole events, so this stands between two of them.
            return Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(COMMENT)))));
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Download {
    fn drop(&mut self) {
        self.exchange.state().is_open = false;
    }
}

fn has_content_length(head: &[u8]) -> bool {
    // Empty lines before the first one are no part of a request.
    let lines = head.split(|&byte| byte == b'\n').map(<[u8]>::trim_ascii);
    let lines = lines.skip_while(|line| line.is_empty()).skip(1);
    // What follows the head is a body, where anything may stand.
    lines.take_while(|line| !line.is_empty()).any(|line| {
        let name = line.split(|&byte| byte == b':').next().unwrap_or_default();
        name.eq_ignore_ascii_case(header::CONTENT_LENGTH.as_str().as_bytes())
    })
}

const COMMENT: &[u8] = b": still here\n\n";
const VERSION: &[u8] = b"HTTP/1.";
/// A status line and three short headers.
const AUTOMATIC_BYTES_MAX: usize = 256;
const AUTOMATIC_HEADERS: [HeaderName; 3] = [header::CONTENT_LENGTH, header::CONNECTION, header::DATE];
const AUTOMATIC_STATUSES: [StatusCode; 3] =
    [StatusCode::BAD_REQUEST, StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, StatusCode::URI_TOO_LONG];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_of_hypers_own_is_told_from_ours() {
        let exchange = Exchange::default();
        let own = "HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\
                   date: Tue, 01 Dec 2026 00:00:00 GMT\r\n\r\n";
        let status = StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE;
        assert_eq!(exchange.automatic_answer(own.as_bytes()), Some(AutomaticAnswer { at: 0, status }));
        let before = "HTTP/1.1 200 OK\r\nx-request-id: a\r\ncontent-length: 2\r\n\r\n{}";
        let both = format!("{before}{own}");
        let at = before.len();
        assert_eq!(exchange.automatic_answer(both.as_bytes()), Some(AutomaticAnswer { at, status }));
        for ours in [
            before,
            "0\r\n\r\n",
            "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
            "HTTP/1.1 400 Bad Request\r\nx-request-id: a\r\ncontent-length: 0\r\n\r\n",
            "HTTP/1.1 400 Bad Request\r\ncontent-length: 2\r\n\r\n{}",
            "HTTP/1.1 400\r\n\r\n tail \r\n\r\n",
        ] {
            assert_eq!(exchange.automatic_answer(ours.as_bytes()), None, "{ours}");
        }
        exchange.state().is_open = true;
        assert_eq!(exchange.automatic_answer(own.as_bytes()), None, "an answer may quote it");
    }

    #[test]
    fn a_length_is_looked_for_in_the_head_alone() {
        assert!(has_content_length(b"POST / HTTP/1.1\r\nhost: x\r\nContent-Length: 5\r\n\r\n"));
        assert!(has_content_length(b"POST / HTTP/1.1\ncontent-length:5\n\n"));
        assert!(!has_content_length(b"content-length: 5 HTTP/1.1\r\nhost: x\r\n\r\n"));
        assert!(!has_content_length(b"POST / HTTP/1.1\r\nhost: x\r\n\r\ncontent-length: 5"));
        assert!(!has_content_length(b"POST / HTTP/1.1\r\nx-content-length: 5\r\n\r\n"));
    }
}
