//! Paths to work, and what every response carries.

use crate::error::ApiError;
use crate::generation::{Admission, Generation, Work};
use crate::phase::Phase;
use crate::server::Server;
use crate::shape::Shape;
use crate::stream::SseBody;
use crate::{admin, body, chat, completions, constraint, status};
use atom_telemetry::Endpoint;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Uri, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{Router, get, post};
use serde_json::Value;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Instant;

/// All routes of a server. [`serve`](crate::serve) runs them on a listener; a test may call them directly.
pub fn router(server: Arc<Server>) -> Router {
    let admin = if server.options.admin { admin::routes() } else { Router::new() };
    Router::new()
        .merge(admin)
        .route("/v1/chat/completions", post(chat_completions))
        .route("/v1/completions", post(plain_completions))
        .route("/v1/models", get(status::models))
        .route("/v1/models/{*name}", get(status::model))
        .route("/health", get(status::health))
        .route("/health/live", get(status::live))
        .route("/health/ready", get(status::ready))
        .route("/metrics", get(status::metrics))
        .route("/version", get(status::version))
        .route("/ping", get(status::health))
        .fallback(no_such_path)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(from_fn_with_state(server.clone(), observe))
        .with_state(server)
}

async fn chat_completions(State(server): State<Arc<Server>>, request: Request<Body>) -> Response {
    generate(server, request, chat::read).await.unwrap_or_else(IntoResponse::into_response)
}

async fn plain_completions(State(server): State<Arc<Server>>, request: Request<Body>) -> Response {
    generate(server, request, completions::read).await.unwrap_or_else(IntoResponse::into_response)
}

/// Bytes to work; runs on a text thread.
type ReadBody<S> = fn(&Server, &[u8]) -> Result<(Work, S), ApiError>;

/// The way of a generation request, whichever API it speaks. Dropping this future, as the connection does
/// when its client goes away, gives up what was begun.
async fn generate<S: Shape>(
    server: Arc<Server>,
    request: Request<Body>,
    read: ReadBody<S>,
) -> Result<Response, ApiError> {
    let in_flight = server.metrics.begin();
    let running = server.phases.begin().ok_or(ApiError::Draining)?;
    let cut = server.phases.reached(Phase::Cut);
    let session = session(request.headers());
    let answer = async {
        let bytes = body::read(request).await?;
        let arrived = Instant::now();
        let text_work = move |server: &Server| {
            let (mut work, shape) = read(server, &bytes)?;
            constraint::compile(server, &mut work)?;
            Ok::<_, ApiError>((work, shape))
        };
        let (mut work, shape) = server.on_text_thread(text_work).await?;
        work.session = session;
        let admission = Admission { running, in_flight, arrived };
        let generation = Generation::submit(&server, &work, admission)?;
        match work.params.stream {
            Some(options) => {
                let cut = server.phases.reached(Phase::Cut);
                Ok(event_stream(SseBody::new(generation, shape, options, cut)))
            }
            None => {
                let (pieces, usage) = generation.collect().await?;
                let mut whole = shape.whole(&pieces);
                whole.insert("usage".into(), usage);
                Ok(status::json(Value::Object(whole)))
            }
        }
    };
    tokio::select! {
        biased;
        answer = answer => answer,
        () = cut => Err(ApiError::Draining),
    }
}

fn event_stream<S: Shape>(body: SseBody<S>) -> Response {
    let mut response = Response::new(Body::from_stream(body));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // nginx would collect the frames otherwise.
    headers.insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
    response
}

async fn no_such_path(uri: Uri) -> ApiError {
    ApiError::NoSuchPath { path: shortened(uri.path()), known: KNOWN_PATHS }
}

async fn method_not_allowed(method: Method, uri: Uri) -> ApiError {
    ApiError::MethodNotAllowed { method: shortened(method.as_str()), path: shortened(uri.path()) }
}

/// Gives every response its id and counts it.
async fn observe(State(server): State<Arc<Server>>, request: Request<Body>, next: Next) -> Response {
    let endpoint = endpoint(request.uri().path());
    let id = client_id(request.headers()).unwrap_or_else(|| {
        HeaderValue::try_from(server.answer_id("req")).expect("an id is letters, digits and dashes")
    });
    let line = format!("{} {}", shortened(request.method().as_str()), shortened(request.uri().path()));
    let mut response = next.run(request).await;
    let status = response.status().as_u16();
    tracing::debug!(status, id = ?id, "{line}");
    server.metrics.responded(endpoint, status);
    response.headers_mut().insert(REQUEST_ID, id);
    response
}

/// The client's own id, if it is one: short, visible, one word.
fn client_id(headers: &HeaderMap) -> Option<HeaderValue> {
    let value = headers.get(REQUEST_ID)?;
    let sane = (1..=REQUEST_ID_BYTES_MAX).contains(&value.len())
        && value.as_bytes().iter().all(u8::is_ascii_graphic);
    sane.then(|| value.clone())
}

/// Requests that carry the same session id go to one lane, where their common beginning is cached.
fn session(headers: &HeaderMap) -> Option<u64> {
    let id = headers.get(SESSION_ID).filter(|id| !id.is_empty())?;
    let mut hasher = DefaultHasher::new();
    id.as_bytes().hash(&mut hasher);
    Some(hasher.finish())
}

fn endpoint(path: &str) -> Endpoint {
    match path {
        "/v1/chat/completions" => Endpoint::Chat,
        "/v1/completions" => Endpoint::Completions,
        "/metrics" => Endpoint::Metrics,
        "/health" | "/health/live" | "/health/ready" | "/ping" => Endpoint::Health,
        _ if path == "/v1/models" || path.starts_with("/v1/models/") => Endpoint::Models,
        _ => Endpoint::Other,
    }
}

/// An error message is no place for a client's kilobytes.
fn shortened(text: &str) -> String {
    text.chars().take(SHOWN_CHARS_MAX).collect()
}

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const SESSION_ID: HeaderName = HeaderName::from_static("x-session-id");
const REQUEST_ID_BYTES_MAX: usize = 128;
const SHOWN_CHARS_MAX: usize = 128;
const KNOWN_PATHS: &str = "/v1/chat/completions, /v1/completions, /v1/models, /health, /health/live, \
    /health/ready, /metrics, /version and /ping";
