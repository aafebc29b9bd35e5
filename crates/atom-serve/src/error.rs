//! Everything that is answered with an error, in the shape of the OpenAI API.

use crate::report::ProfileRefusal;
use atom_base::limits::{HEAD_BYTES_MAX, HEADERS_MAX, URI_BYTES_MAX};
use atom_base::{LaneId, MaskFault, SamplingError};
use atom_engine::{EngineError, Refusal};
use atom_text::TextError;
use axum::body::Body;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use std::time::Duration;
use thiserror::Error;

/// Why a request has no answer. The words go to the client as they are.
#[derive(Debug, Error)]
pub(crate) enum ApiError {
    /// The client's fault: no route has this path.
    #[error("there is no {path}; this server has {known}")]
    NoSuchPath { path: String, known: &'static str },
    /// The client's fault.
    #[error("{method} is not allowed on {path}")]
    MethodNotAllowed { method: String, path: String },
    /// The client's fault. `presented`: it sent a key, but none of ours.
    #[error(
        "{}; send 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
        if *presented { "the API key is not valid" } else { "this server wants an API key" }
    )]
    InvalidKey { presented: bool },
    /// The client's fault, or the operator's.
    #[error(
        "'{named}' is no name of this machine, and this server has no API keys: it answers who comes by localhost or \
         an address only; start it with --allowed-host NAME, or with keys"
    )]
    HostNotAllowed { named: String },
    /// The client's fault: no HTTP/1.x, or TLS where none is spoken.
    #[error("this is not an HTTP/1.1 request: {reason}")]
    NotHttp { reason: String },
    /// The client's fault: a cookie jar, or a flood.
    #[error(
        "the request's head is too large; at most {HEAD_BYTES_MAX} bytes and {HEADERS_MAX} headers are taken"
    )]
    HeadTooLarge,
    /// The client's fault.
    #[error("the URI is too long; at most {URI_BYTES_MAX} bytes are taken")]
    UriTooLong,
    /// The client stopped sending, or sends a byte now and then.
    #[error("the request's head did not come to its end within {} seconds", waited.as_secs())]
    HeadSlow { waited: Duration },
    /// The client's fault, or an attack on a proxy in front of us that takes the other of the two.
    #[error("the request has both Content-Length and Transfer-Encoding; send one of them")]
    TwoLengths,
    /// The client's fault, or an attack on a proxy in front of us that looks at the other of them (RFC 9112, 3.2).
    #[error("the request has {count} Host headers; send one of them")]
    Hosts { count: usize },
    /// The client's fault: a browser form, or curl without a header.
    #[error("the content type is {found}; send JSON with 'Content-Type: application/json'")]
    ContentType { found: String },
    /// The client's fault: JSON has one encoding.
    #[error("the body's charset is '{found}'; send JSON in UTF-8, with 'charset=utf-8' or none")]
    Charset { found: String },
    /// The client's fault: what a small body becomes is not bounded, so nothing is unpacked.
    #[error("the body's {} is '{found}'; send it as it is, without that header", spelled(name))]
    Encoded { name: HeaderName, found: String },
    /// The client's fault. `whole`: `size` is all of it; otherwise reading stopped there.
    #[error("the body has {}{size} bytes; at most {max} are taken", if *whole { "" } else { "at least " })]
    BodyTooLarge { size: u64, whole: bool, max: usize },
    /// The client's or the network's fault.
    #[error("the body did not arrive: {reason}")]
    BodyLost { reason: String },
    /// The client stopped sending.
    #[error("no byte of the body arrived for {} seconds", waited.as_secs())]
    BodySlow { waited: Duration },
    /// The client sends a byte now and then.
    #[error(
        "{size} bytes of the body arrived in {} seconds; at least {rate} a second are expected",
        waited.as_secs()
    )]
    BodyTrickles { size: u64, waited: Duration, rate: u64 },
    /// The client's fault.
    #[error(
        "the body is not complete after {} seconds, the most that a body may take; {size} bytes of it arrived",
        max.as_secs()
    )]
    BodyLate { size: u64, max: Duration },
    /// Too many clients send at once.
    #[error(
        "the bodies of all requests have more than {max} bytes together, the most that are held; try again later"
    )]
    BodiesFull { max: usize },
    /// The client's fault.
    #[error("the body is not valid UTF-8: the byte at offset {offset} does not continue a character")]
    NotUtf8 { offset: usize },
    /// The client's fault: syntax, numbers that no float can hold, nesting beyond 128.
    #[error("the body is not valid JSON: {reason}")]
    NotJson { reason: String },
    /// The client's fault: a list of requests, or one that was made into a text twice.
    #[error("the body is {found}; it must be a JSON object")]
    NotObject { found: String },
    /// The client's fault: parsers in front of us may have taken the other one.
    #[error("field '{name}' comes twice; send it once")]
    DuplicateField { name: String },
    /// The client's fault: the field is absent.
    #[error("'{name}' is missing; {expected}")]
    Missing { name: String, expected: &'static str },
    /// The client's fault: wrong type or out of range.
    #[error("'{name}' is {found}; it must be {expected}")]
    BadField { name: String, found: String, expected: String },
    /// Our gap: a grammar with rules of its own does not stand within the grammar of an answer that may call.
    #[error(
        "'{name}' is a grammar of the whole answer, so that it could call no tool; leave out one of '{name}' and 'tools', or send \
         a JSON schema, a regular expression or a list of choices"
    )]
    FormatBesideTools { name: String },
    /// The client's fault: thoughts would have to follow the grammar, and the answer be empty.
    #[error(
        "'{name}' is a grammar of the whole answer, but the prompt leaves this model thinking; switch that off (reasoning_effort \
         \"none\" or chat_template_kwargs), or send a JSON schema, a regular expression or a list of choices"
    )]
    ThinksFirst { name: String },
    /// The client's fault, or our gap: the field would change the answer and this server can't do it.
    #[error("'{name}' is not supported by this server ({reason}); leave it out")]
    Unsupported { name: String, reason: &'static str },
    /// The same of what an object says of itself.
    #[error("'{name}' is {kind:?}, which this server doesn't support ({reason}); leave it out")]
    UnsupportedKind { name: String, kind: String, reason: &'static str },
    /// The client's fault: nobody would act on it, so nobody may believe that it acts.
    #[error("unknown field '{name}'")]
    UnknownField { name: String },
    /// The client's fault: the user speaks before every call has its answer.
    #[error(
        "'{name}' comes before the answers to all calls of the assistant; missing: {missing}; send a message of \
         role \"tool\" for each"
    )]
    CallsUnanswered { name: String, missing: String },
    /// The client's fault.
    #[error("model '{asked}' is not served here; the name is {served}")]
    ModelNotFound { asked: String, served: String },
    /// The client's fault, known without making tokens of it.
    #[error(
        "the prompt has {bytes} bytes, which can't be fewer than {tokens_min} tokens, but this server's context \
         holds {context}; shorten the prompt"
    )]
    PromptTooLong { bytes: usize, tokens_min: usize, context: usize },
    /// The client's fault: more continuations in one body than can ever wait.
    #[error(
        "this request asks for {asked} continuations (prompts times n), but at most {max} can run and wait here; send \
         fewer at once"
    )]
    TooManyJobs { asked: usize, max: usize },
    /// A sampling parameter out of its range.
    #[error("'{}' is {}; it must be {}", .0.name, .0.got, .0.expected)]
    Sampling(#[from] SamplingError),
    /// The tokenizer or the chat template.
    #[error(transparent)]
    Text(#[from] TextError),
    /// What the output shall be held to can't be compiled; mostly the client's fault.
    #[error("'{name}': {error}")]
    Grammar { name: String, error: TextError },
    /// Too many clients: the lane's queue is full. `asked`: the lane that the request named.
    #[error(
        "{waiting} requests are waiting for {}, the most that a lane queues; try again later",
        asked.map_or_else(|| "the lane that this one was given to".into(), |lane| format!("lane {}", lane.0))
    )]
    LaneFull { waiting: usize, asked: Option<LaneId> },
    /// Too many pages: their looks would be felt.
    #[error("{max} streams of steps are open, the most at once; close a page, or try again later")]
    TooManyViewers { max: usize },
    /// The engine doesn't take the request.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The engine took the request and failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The engine gave up a request that the client still wanted.
    #[error("the engine aborted this request")]
    Aborted,
    /// The operator set a time for requests, and it is over.
    #[error("the request was not finished within {} seconds, the most that this server gives one", after.as_secs_f64())]
    Deadline { after: Duration },
    /// Nobody's fault: shutting down. New requests get it at once, running ones at the drain's deadline.
    #[error("the server is shutting down")]
    Draining,
    /// A pause was ordered, and lanes still compute: a step takes longer than any should.
    #[error("the engine is told to pause but still computes after {waited:?}; see /health")]
    NotAtRest { waited: Duration },
    /// Another operator's doing: what was ordered last holds.
    #[error("the pause was overtaken: a resume or an exit came meanwhile, from another client or host")]
    PauseOvertaken,
    /// Recording a profile.
    #[error(transparent)]
    Profile(#[from] ProfileRefusal),
    /// A panic in a text thread: our bug.
    #[error("internal error: {0}")]
    Internal(String),
}

/// An error's message, kept beside its response for APIs that put it in another shape.
#[derive(Clone, Debug)]
pub(crate) struct Words(pub(crate) String);

impl Words {
    fn of(error: &ApiError) -> Self {
        // Agents of the Anthropic API look for these words to know that they have to shorten a conversation.
        let too_long =
            |tokens: usize, max: usize| format!("prompt is too long: {tokens} tokens > {max} maximum");
        Self(bounded(match *error {
            ApiError::PromptTooLong { tokens_min, context, .. } => {
                format!("{} (at the least: {error})", too_long(tokens_min, context))
            }
            ApiError::Refused(Refusal::TooLong { prompt, max, .. }) if prompt >= max => too_long(prompt, max),
            ApiError::Refused(Refusal::NeverFits { needed, cache }) => {
                format!("{} ({error})", too_long(needed, cache))
            }
            _ => error.to_string(),
        }))
    }
}

/// What kind of error a client sees: status, `type`, `code`, `param`.
struct Class {
    status: StatusCode,
    kind: &'static str,
    code: Option<&'static str>,
    param: Option<String>,
}

impl ApiError {
    /// The object whose type is at `name` is of a kind that this server can't act on.
    pub(crate) fn unsupported_kind(name: String, kind: &str, reason: &'static str) -> Self {
        Self::UnsupportedKind { name, kind: kind.chars().take(KIND_CHARS_MAX).collect(), reason }
    }

    /// The error's JSON body: `{"error": {..}}`.
    pub(crate) fn body(&self) -> Value {
        let Class { kind, code, param, .. } = self.class();
        let message = bounded(self.to_string());
        json!({"error": {"message": message, "type": kind, "param": param.map(bounded), "code": code}})
    }

    /// The status of its response.
    pub(crate) fn status(&self) -> StatusCode {
        self.class().status
    }

    fn class(&self) -> Class {
        match self {
            Self::NoSuchPath { .. } => invalid(StatusCode::NOT_FOUND).code("unknown_url"),
            Self::MethodNotAllowed { .. } => {
                invalid(StatusCode::METHOD_NOT_ALLOWED).code("method_not_allowed")
            }
            Self::InvalidKey { .. } => invalid(StatusCode::UNAUTHORIZED).code("invalid_api_key"),
            Self::HostNotAllowed { .. } => invalid(StatusCode::FORBIDDEN).code("host_not_allowed"),
            Self::NotHttp { .. } => invalid(StatusCode::BAD_REQUEST).code("invalid_http"),
            Self::HeadTooLarge => {
                invalid(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE).code("headers_too_large")
            }
            Self::UriTooLong => invalid(StatusCode::URI_TOO_LONG).code("uri_too_long"),
            Self::HeadSlow { .. } => invalid(StatusCode::REQUEST_TIMEOUT).code("headers_timeout"),
            Self::TwoLengths | Self::Hosts { .. } => invalid(StatusCode::BAD_REQUEST).code("invalid_http"),
            Self::ContentType { .. } | Self::Charset { .. } | Self::Encoded { .. } => {
                invalid(StatusCode::UNSUPPORTED_MEDIA_TYPE).code("unsupported_media_type")
            }
            Self::BodyTooLarge { .. } => invalid(StatusCode::PAYLOAD_TOO_LARGE).code("body_too_large"),
            Self::BodySlow { .. } | Self::BodyTrickles { .. } | Self::BodyLate { .. } => {
                invalid(StatusCode::REQUEST_TIMEOUT).code("body_timeout")
            }
            Self::BodyLost { .. } => invalid(StatusCode::BAD_REQUEST),
            Self::NotUtf8 { .. } | Self::NotJson { .. } | Self::NotObject { .. } => {
                invalid(StatusCode::BAD_REQUEST).code("invalid_json")
            }
            Self::DuplicateField { name } => {
                invalid(StatusCode::BAD_REQUEST).code("duplicate_field").param(name.clone())
            }
            Self::Missing { name, .. } => {
                invalid(StatusCode::BAD_REQUEST).code("missing_field").param(name.clone())
            }
            Self::BadField { name, .. } | Self::CallsUnanswered { name, .. } => {
                invalid(StatusCode::BAD_REQUEST).code("invalid_value").param(name.clone())
            }
            Self::Sampling(SamplingError { name, .. }) => {
                invalid(StatusCode::BAD_REQUEST).code("invalid_value").param(*name)
            }
            Self::Unsupported { name, .. }
            | Self::UnsupportedKind { name, .. }
            | Self::FormatBesideTools { name }
            | Self::ThinksFirst { name } => {
                invalid(StatusCode::BAD_REQUEST).code("unsupported_field").param(name.clone())
            }
            Self::UnknownField { name } => {
                invalid(StatusCode::BAD_REQUEST).code("unknown_field").param(name.clone())
            }
            Self::ModelNotFound { .. } => {
                invalid(StatusCode::NOT_FOUND).code("model_not_found").param("model")
            }
            Self::PromptTooLong { .. } => invalid(StatusCode::BAD_REQUEST).code("context_length_exceeded"),
            Self::TooManyJobs { .. } => invalid(StatusCode::BAD_REQUEST).code("invalid_value").param("n"),
            Self::Text(error) if error.is_clients_fault() => {
                let class = invalid(StatusCode::BAD_REQUEST);
                match error {
                    TextError::Request { field, .. } => class.code("invalid_value").param(field.clone()),
                    TextError::Encode { .. } => class.param("prompt"),
                    _ => class.param("messages"),
                }
            }
            Self::Grammar { name, error } if error.is_clients_fault() => {
                invalid(StatusCode::BAD_REQUEST).code("invalid_value").param(name.clone())
            }
            Self::Grammar { error: TextError::GrammarBusy { .. }, .. } => {
                ours(StatusCode::SERVICE_UNAVAILABLE).code("busy")
            }
            // Its own grammar has led it where nothing can follow.
            Self::Engine(EngineError::Grammar { fault: MaskFault::Failed(_), .. }) => {
                invalid(StatusCode::BAD_REQUEST).code("constraint_failed")
            }
            Self::Engine(EngineError::Grammar { fault: MaskFault::Busy { .. }, .. }) => {
                ours(StatusCode::SERVICE_UNAVAILABLE).code("busy")
            }
            Self::Engine(EngineError::Grammar { fault: MaskFault::Late { .. }, .. }) => {
                ours(StatusCode::SERVICE_UNAVAILABLE).code("constraint_late")
            }
            Self::LaneFull { .. } => queue_full(),
            Self::TooManyViewers { .. } => Class { code: Some("too_many_viewers"), ..queue_full() },
            Self::Refused(refusal) => refusal_class(refusal),
            Self::BodiesFull { .. } => ours(StatusCode::SERVICE_UNAVAILABLE).code("overloaded"),
            Self::Deadline { .. } => ours(StatusCode::GATEWAY_TIMEOUT).code("request_timeout"),
            Self::Draining => ours(StatusCode::SERVICE_UNAVAILABLE).code("shutting_down"),
            Self::NotAtRest { .. } => ours(StatusCode::GATEWAY_TIMEOUT).code("not_at_rest"),
            Self::PauseOvertaken => invalid(StatusCode::CONFLICT).code("pause_overtaken"),
            Self::Profile(refusal) => profile_class(refusal),
            Self::Aborted => ours(StatusCode::SERVICE_UNAVAILABLE).code("aborted"),
            Self::Text(_) | Self::Engine(_) | Self::Grammar { .. } | Self::Internal(_) => {
                ours(StatusCode::INTERNAL_SERVER_ERROR)
            }
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let class = self.class();
        if class.status.is_server_error() {
            tracing::warn!(status = class.status.as_u16(), "{self}");
        }
        let mut response = Response::new(Body::from(self.body().to_string()));
        *response.status_mut() = class.status;
        response.extensions_mut().insert(Words::of(&self));
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if class.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if let Self::Encoded { name: header::CONTENT_ENCODING, .. } = self {
            headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        }
        if matches!(class.status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static(RETRY_AFTER_S));
        }
        response
    }
}

/// An error is no place for a client's megabytes: names of fields, models and tools are in it.
fn bounded(text: String) -> String {
    match text.char_indices().nth(MESSAGE_CHARS_MAX) {
        Some((end, _)) => format!("{}.. ({} bytes)", &text[..end], text.len()),
        None => text,
    }
}

/// A header as people write it.
fn spelled(name: &HeaderName) -> &'static str {
    if *name == header::TRANSFER_ENCODING { "Transfer-Encoding" } else { "Content-Encoding" }
}

fn refusal_class(refusal: &Refusal) -> Class {
    let bad = invalid(StatusCode::BAD_REQUEST);
    match refusal {
        Refusal::EmptyPrompt => bad.code("invalid_value").param("prompt"),
        Refusal::TooLong { .. } | Refusal::NeverFits { .. } => bad.code("context_length_exceeded"),
        Refusal::UnknownToken { .. } => bad.code("invalid_value").param("prompt"),
        Refusal::NoSuchLane { .. } => bad.code("invalid_value").param("data_parallel_rank"),
        Refusal::NoGrammars => bad.code("unsupported_field").param("response_format"),
        Refusal::QueueFull { .. } => queue_full(),
        Refusal::Closed(_) => ours(StatusCode::SERVICE_UNAVAILABLE).code("closed"),
    }
}

fn profile_class(refusal: &ProfileRefusal) -> Class {
    match refusal {
        ProfileRefusal::Off => invalid(StatusCode::FORBIDDEN).code("profiling_off"),
        ProfileRefusal::Running => invalid(StatusCode::CONFLICT).code("profile_running"),
        ProfileRefusal::NotRunning => invalid(StatusCode::CONFLICT).code("no_profile"),
        ProfileRefusal::Unwritten { .. } => ours(StatusCode::INTERNAL_SERVER_ERROR).code("profile_unwritten"),
    }
}

fn queue_full() -> Class {
    Class {
        status: StatusCode::TOO_MANY_REQUESTS,
        kind: "rate_limit_error",
        code: Some("queue_full"),
        param: None,
    }
}

fn invalid(status: StatusCode) -> Class {
    Class { status, kind: "invalid_request_error", code: None, param: None }
}

fn ours(status: StatusCode) -> Class {
    Class { status, kind: "server_error", code: None, param: None }
}

impl Class {
    fn code(self, code: &'static str) -> Self {
        Self { code: Some(code), ..self }
    }

    fn param(self, param: impl Into<String>) -> Self {
        Self { param: Some(param.into()), ..self }
    }
}

/// Characters of a type that an error repeats: no type is longer.
const KIND_CHARS_MAX: usize = 64;

/// The longest that we say by ourselves, the list of all paths, is half of it.
const MESSAGE_CHARS_MAX: usize = 1000;

/// A queue of short requests moves within a second; clients back off on their own after that.
const RETRY_AFTER_S: &str = "1";
