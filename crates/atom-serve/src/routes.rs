//! Paths to work, and what every response carries.

use crate::connection::{Peer, TwoLengths};
use crate::error::ApiError;
use crate::exchange::Due;
use crate::generation::{Admission, Generation, Work};
use crate::openapi::{Guards, Routes, operations};
use crate::record::{Asked, Head, Logged, Record};
use crate::server::Server;
use crate::shape::Shape;
use crate::stream::SseBody;
use crate::{
    admin, auth, body, chat, completions, constraint, hosts, inside, messages, responses, status, tokens, ui,
};
use atom_base::limits::URI_BYTES_MAX;
use atom_telemetry::Endpoint;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Uri, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::Router;
use bytes::Bytes;
use std::convert::Infallible;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Instant;
use tokio_stream::Stream;

/// All routes of a server. [`serve`](crate::serve) runs them on a listener; a test may call them directly.
pub fn router(server: Arc<Server>) -> Router {
    router_for(server, false)
}

/// The same; `is_local`: on a listener that this machine alone can reach.
pub(crate) fn router_for(server: Arc<Server>, is_local: bool) -> Router {
    let options = &server.options;
    // A name that was rebound has no certificate here, and a page of another site no key.
    let is_bare = options.api_keys.is_empty() && options.tls.is_none();
    let guards = Guards {
        keys: !options.api_keys.is_empty(),
        hosts: is_local && is_bare && !options.hosts.is_any() && !options.cors.is_any(),
    };
    let admin = if server.options.admin { admin::routes(server.clone()) } else { Routes::new() };
    let debug = if server.options.debug { inside::debug_routes() } else { Routes::new() };
    let ui = if server.options.ui { ui::routes() } else { Routes::new() };
    let routes = Routes::new()
        .merge(admin)
        .merge(debug)
        .merge(ui)
        .merge(api())
        .documented(&server, guards)
        .fallback(no_such_path)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(from_fn_with_state(server.clone(), auth::check));
    let routes =
        if guards.hosts { routes.layer(from_fn_with_state(server.clone(), hosts::check)) } else { routes };
    // Outside the keys: a preflight has none.
    let routes = match server.options.cors.layer() {
        Some(cors) => routes.layer(cors),
        None => routes,
    };
    routes.layer(from_fn_with_state(server.clone(), observe)).with_state(server)
}

/// The routes that every server has.
pub(crate) fn api() -> Routes {
    Routes::new()
        .post("/v1/chat/completions", chat_completions, &operations::CHAT)
        .post("/v1/completions", plain_completions, &operations::COMPLETIONS)
        .post("/v1/responses", responses, &operations::RESPONSES)
        .post("/v1/messages", messages, &operations::MESSAGES)
        .post("/v1/messages/count_tokens", count_tokens, &operations::COUNT_TOKENS)
        .post("/v1/chat/completions/render", tokens::render_chat, &operations::RENDER_CHAT)
        .post("/v1/completions/render", tokens::render_completions, &operations::RENDER_COMPLETIONS)
        .post("/tokenize", tokens::tokenize, &operations::TOKENIZE)
        .post("/detokenize", tokens::detokenize, &operations::DETOKENIZE)
        .get("/tokenizer_info", tokens::tokenizer_info, &operations::TOKENIZER_INFO)
        .get("/server_info", inside::server_info, &operations::SERVER_INFO)
        .post("/start_profile", inside::start_profile, &operations::START_PROFILE)
        .post("/stop_profile", inside::stop_profile, &operations::STOP_PROFILE)
        .get("/v1/models", status::models, &operations::MODELS)
        .get("/v1/models/{*name}", status::model, &operations::MODEL)
        .get("/health", status::health, &operations::HEALTH)
        .get("/health/live", status::live, &operations::LIVE)
        .get("/health/ready", status::ready, &operations::READY)
        .get("/metrics", status::metrics, &operations::METRICS)
        .get("/version", status::version, &operations::VERSION)
        .get("/ping", status::health, &operations::PING)
}

async fn chat_completions(State(server): State<Arc<Server>>, request: Request<Body>) -> Response {
    generate(server, request, chat::read).await.unwrap_or_else(IntoResponse::into_response)
}

async fn plain_completions(State(server): State<Arc<Server>>, request: Request<Body>) -> Response {
    generate(server, request, completions::read).await.unwrap_or_else(IntoResponse::into_response)
}

async fn responses(State(server): State<Arc<Server>>, request: Request<Body>) -> Response {
    generate(server, request, responses::read).await.unwrap_or_else(IntoResponse::into_response)
}

async fn messages(State(server): State<Arc<Server>>, request: Request<Body>) -> Response {
    generate(server, request, messages::read).await.unwrap_or_else(IntoResponse::into_response)
}

async fn count_tokens(State(server): State<Arc<Server>>, request: Request<Body>) -> Response {
    let counted = async {
        let _running = server.phases.begin().ok_or(ApiError::Draining)?;
        let bytes = body::read(&server, request).await?;
        server.on_text_thread(move |server| messages::count(server, &bytes)).await
    };
    counted.await.map_or_else(IntoResponse::into_response, status::json)
}

/// Bytes to work; runs on a text thread.
pub(crate) type ReadBody<S> = fn(&Server, &[u8]) -> Result<(Work, S), ApiError>;

/// Reads a body and compiles what it holds the output to. Runs on a text thread.
pub(crate) fn understand<S>(server: &Server, read: ReadBody<S>, body: &[u8]) -> Result<(Work, S), ApiError> {
    let (mut work, shape) = read(server, body)?;
    constraint::compile(server, &mut work)?;
    Ok((work, shape))
}

/// The way of a generation request, whichever API it speaks. Dropping this future, as the connection does
/// when its client goes away, gives up what was begun.
async fn generate<S: Shape>(
    server: Arc<Server>,
    request: Request<Body>,
    read: ReadBody<S>,
) -> Result<Response, ApiError> {
    let in_flight = server.metrics.begin();
    let running = server.phases.begin().ok_or(ApiError::Draining)?;
    let due = server.due();
    // One for the way to an answer, one that goes along with a stream.
    let (cut, deadline) = (server.end_of_patience(due), server.end_of_patience(due));
    let session = session(request.headers());
    let record = request.extensions().get::<Arc<Record>>().cloned();
    let id = request.extensions().get().map_or_else(String::new, |RequestId(id)| id.clone());
    let answer = async {
        let bytes = body::read(&server, request).await?;
        record.iter().for_each(|record| record.body(&bytes));
        let arrived = Instant::now();
        let (mut work, mut shape) =
            server.on_text_thread(move |server| understand(server, read, &bytes)).await?;
        work.session = session;
        let (stream, n) = (work.params.stream.is_some(), work.params.n);
        let lane = work.params.lane.map(|lane| lane.0);
        record.iter().for_each(|record| record.asked(Asked { stream, n, lane }));
        let admission = Admission { running, in_flight, arrived, record };
        let generation = Generation::submit(&server, &work, admission)?;
        match work.params.stream {
            Some(_) => Ok(event_stream(SseBody::new(generation, shape, id, deadline))),
            None => {
                let (pieces, usage) = generation.collect().await?;
                Ok(status::json(shape.whole(&pieces, &usage)))
            }
        }
    };
    let answer: Result<Response, ApiError> = tokio::select! {
        biased;
        answer = answer => answer,
        error = cut => Err(error),
    };
    let mut answer = answer.unwrap_or_else(IntoResponse::into_response);
    // The reader has no more time than the model.
    if let Some(due) = due {
        answer.extensions_mut().insert(Due(due));
    }
    Ok(answer)
}

/// An extension of every request: what its `x-request-id` is.
#[derive(Clone, Debug)]
struct RequestId(String);

/// A response of server-sent events.
pub(crate) fn event_stream(
    frames: impl Stream<Item = Result<Bytes, Infallible>> + Send + 'static,
) -> Response {
    let mut response = Response::new(Body::from_stream(frames));
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

/// Gives every response its id, counts it, and has it written down.
async fn observe(State(server): State<Arc<Server>>, mut request: Request<Body>, next: Next) -> Response {
    let id = client_id(request.headers()).unwrap_or_else(|| {
        HeaderValue::try_from(server.answer_id("req")).expect("an id is letters, digits and dashes")
    });
    let head = Head {
        id: String::from_utf8_lossy(id.as_bytes()).into_owned(),
        peer: request.extensions().get::<Peer>().map(|peer| peer.0),
        endpoint: endpoint(request.uri().path()),
        method: shortened(request.method().as_str()),
        path: shortened(request.uri().path()),
    };
    request.extensions_mut().insert(RequestId(head.id.clone()));
    let logged = server.request_log.as_ref().map(|log| {
        let record = Record::new(head.clone(), log);
        request.extensions_mut().insert(record.clone());
        Logged::new(server.clone(), record)
    });
    let mut response = match refuse_head(&request) {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    };
    let status = response.status();
    tracing::debug!(status = status.as_u16(), id = head.id, "{} {}", head.method, head.path);
    server.metrics.responded(head.endpoint, status.as_u16());
    if matches!(head.endpoint, Endpoint::Messages | Endpoint::CountTokens) {
        messages::reshape(&mut response, &id);
    }
    response.headers_mut().insert(REQUEST_ID, id);
    match logged {
        Some(logged) => response.map(|body| logged.with(status, body)),
        None => response,
    }
}

/// What hyper lets pass and this server doesn't.
fn refuse_head(request: &Request<Body>) -> Result<(), ApiError> {
    let uri = request.uri();
    let bytes = uri.path_and_query().map_or(0, |path| path.as_str().len())
        + uri.authority().map_or(0, |authority| authority.as_str().len());
    if bytes > URI_BYTES_MAX {
        return Err(ApiError::UriTooLong);
    }
    if request.extensions().get::<TwoLengths>().is_some() {
        return Err(ApiError::TwoLengths);
    }
    let count = request.headers().get_all(header::HOST).iter().count();
    if count > 1 {
        return Err(ApiError::Hosts { count });
    }
    Ok(())
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
        "/v1/responses" => Endpoint::Responses,
        "/v1/messages" => Endpoint::Messages,
        "/v1/messages/count_tokens" => Endpoint::CountTokens,
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

pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const SESSION_ID: HeaderName = HeaderName::from_static("x-session-id");
const REQUEST_ID_BYTES_MAX: usize = 128;
const SHOWN_CHARS_MAX: usize = 128;
const KNOWN_PATHS: &str = "/v1/chat/completions, /v1/completions (each with /render), /v1/responses, /v1/messages, \
    /v1/messages/count_tokens, /v1/models, /tokenize, /detokenize, /tokenizer_info, /health, /health/live, \
    /health/ready, /metrics, /server_info, /start_profile, /stop_profile, /openapi.json, /version and /ping";
