//! What is known of one request, gathered on its way for the request log.

use crate::kept::{ContentRoom, Kept};
use crate::request_log::RequestLog;
use crate::server::Server;
use atom_telemetry::{Endpoint, Outcome};
use axum::body::Body;
use axum::http::StatusCode;
use bytes::Bytes;
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use serde_json::{Map, Value};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant, SystemTime};

/// A request in progress. An extension of it, where a log is kept.
#[derive(Debug)]
pub(crate) struct Record {
    head: Head,
    started: Instant,
    facts: Mutex<Facts>,
}

/// What is known at once.
#[derive(Clone, Debug)]
pub(crate) struct Head {
    pub(crate) id: String,
    pub(crate) peer: Option<SocketAddr>,
    pub(crate) endpoint: Endpoint,
    /// Method and path, cut to a bounded length.
    pub(crate) method: String,
    pub(crate) path: String,
}

#[derive(Debug, Default)]
struct Facts {
    /// `None` until the body was understood.
    asked: Option<Asked>,
    prompt_tokens: usize,
    cached_tokens: usize,
    generated_tokens: usize,
    first_token: Option<Duration>,
    /// By choice.
    outcomes: Vec<(u32, Outcome)>,
    /// Where bodies are wanted.
    body: Option<Kept>,
}

/// What a generation request wants.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked {
    pub(crate) stream: bool,
    /// Choices per prompt.
    pub(crate) n: u32,
    pub(crate) lane: Option<u16>,
}

/// A request that is over.
#[derive(Debug)]
pub(crate) struct Entry {
    head: Head,
    time: SystemTime,
    /// `None`: the client left before there was one.
    status: Option<StatusCode>,
    /// All of the answer was handed to the connection.
    is_complete: bool,
    total: Duration,
    facts: Facts,
    /// Where bodies are wanted.
    answer: Option<Kept>,
}

/// Writes a request's entry when it is dropped: with its answer, or because nobody waits for one.
pub(crate) struct Logged {
    server: Arc<Server>,
    record: Arc<Record>,
    status: Option<StatusCode>,
    is_complete: bool,
    answer: Option<Kept>,
}

/// An answer's body that takes its entry along.
pub(crate) struct LoggedBody {
    body: Body,
    logged: Logged,
}

impl Record {
    pub(crate) fn new(head: Head, log: &RequestLog) -> Arc<Self> {
        let body = log.content().map(ContentRoom::keep);
        Arc::new(Self {
            head,
            started: Instant::now(),
            facts: Mutex::new(Facts { body, ..Facts::default() }),
        })
    }

    fn facts(&self) -> MutexGuard<'_, Facts> {
        // Nothing under the lock can panic short of memory.
        self.facts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The request's body arrived.
    pub(crate) fn body(&self, body: &Bytes) {
        // A copy: the original has its place in the room for bodies that are being read.
        if let Some(kept) = &mut self.facts().body {
            kept.push(body);
        }
    }

    /// The request was understood.
    pub(crate) fn asked(&self, asked: Asked) {
        self.facts().asked = Some(asked);
    }

    /// A choice was admitted. The prompt counts once, however many choices continue it.
    pub(crate) fn admitted(&self, choice: u32, prompt: usize, cached: usize) {
        let mut facts = self.facts();
        if facts.asked.is_none_or(|asked| choice.is_multiple_of(asked.n)) {
            facts.prompt_tokens += prompt;
            facts.cached_tokens += cached;
        }
    }

    /// Tokens came, `after` the request did.
    pub(crate) fn tokens(&self, count: usize, after: Duration) {
        let mut facts = self.facts();
        facts.generated_tokens += count;
        facts.first_token.get_or_insert(after);
    }

    /// A choice ended.
    pub(crate) fn ended(&self, choice: u32, outcome: Outcome) {
        self.facts().outcomes.push((choice, outcome));
    }
}

impl Entry {
    /// A request that never became one: not HTTP, or beyond what a head may be.
    pub(crate) fn refused(head: Head, status: StatusCode) -> Self {
        Self {
            head,
            time: SystemTime::now(),
            status: Some(status),
            is_complete: true,
            total: Duration::ZERO,
            facts: Facts::default(),
            answer: None,
        }
    }

    /// True if the answer was asked for as a stream.
    pub(crate) fn is_stream(&self) -> bool {
        self.facts.asked.is_some_and(|asked| asked.stream)
    }

    pub(crate) fn into_json(mut self) -> Value {
        let ms = |duration: Duration| (duration.as_secs_f64() * 1e6).round() / 1e3;
        let mut map = Map::new();
        let mut put = |name: &str, value: Value| {
            map.insert(name.to_owned(), value);
        };
        put("time", humantime::format_rfc3339_millis(self.time).to_string().into());
        put("id", self.head.id.into());
        put("client", self.head.peer.map(|peer| peer.to_string()).into());
        put("endpoint", self.head.endpoint.as_str().into());
        put("method", self.head.method.into());
        put("path", self.head.path.into());
        put("status", self.status.map(|status| status.as_u16()).into());
        put("complete", self.is_complete.into());
        put("total_ms", ms(self.total).into());
        if let Some(asked) = self.facts.asked {
            self.facts.outcomes.sort_by_key(|(choice, _)| *choice);
            let reasons: Vec<&str> =
                self.facts.outcomes.iter().map(|(_, outcome)| outcome.as_str()).collect();
            put("stream", asked.stream.into());
            put("n", asked.n.into());
            put("lane", asked.lane.into());
            put("prompt_tokens", self.facts.prompt_tokens.into());
            put("cached_tokens", self.facts.cached_tokens.into());
            put("generated_tokens", self.facts.generated_tokens.into());
            put("finish_reasons", reasons.into());
            put("ttft_ms", self.facts.first_token.map(ms).into());
        }
        if let (Some(body), Some(answer)) = (&self.facts.body, &self.answer) {
            put("request", body.shown());
            put(RESPONSE, answer.shown());
        }
        Value::Object(map)
    }
}

impl Logged {
    pub(crate) fn new(server: Arc<Server>, record: Arc<Record>) -> Self {
        let answer = server.request_log.as_ref().and_then(RequestLog::content).map(ContentRoom::keep);
        Self { server, record, status: None, is_complete: false, answer }
    }

    /// The entry is written when `body` is done with.
    pub(crate) fn with(mut self, status: StatusCode, body: Body) -> Body {
        self.status = Some(status);
        Body::new(LoggedBody { body, logged: self })
    }
}

impl Drop for Logged {
    fn drop(&mut self) {
        let Some(log) = &self.server.request_log else { return };
        let total = self.record.started.elapsed();
        let facts = std::mem::take(&mut *self.record.facts());
        log.write(Entry {
            head: self.record.head.clone(),
            time: SystemTime::now() - total,
            status: self.status,
            is_complete: self.is_complete,
            total,
            facts,
            answer: self.answer.take(),
        });
    }
}

impl HttpBody for LoggedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let this = self.get_mut();
        let frame = Pin::new(&mut this.body).poll_frame(cx);
        match &frame {
            Poll::Ready(None) => this.logged.is_complete = true,
            Poll::Ready(Some(Ok(frame))) => {
                if let (Some(answer), Some(data)) = (&mut this.logged.answer, frame.data_ref()) {
                    answer.push(data);
                }
            }
            _ => {}
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

impl Drop for LoggedBody {
    fn drop(&mut self) {
        self.logged.is_complete |= self.body.is_end_stream();
    }
}

/// The field with an answer's text.
pub(crate) const RESPONSE: &str = "response";
