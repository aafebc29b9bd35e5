//! One connection: TLS where it is asked for, HTTP, and an answer also to what is no HTTP.

use crate::error::ApiError;
use crate::exchange::{Download, Exchange};
use crate::phase::Phase;
use crate::record::{Entry, Head};
use crate::routes::REQUEST_ID;
use crate::server::Server;
use crate::wire::{Paced, Transport, Wire};
use atom_base::limits::{HEAD_BYTES_MAX, HEADERS_MAX};
use atom_telemetry::Endpoint;
use axum::Router;
use axum::http::{Request, Response, StatusCode, header};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustix::net::sockopt::set_socket_send_buffer_size;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::yield_now;
use tokio::time::{sleep, timeout};

/// Who sent a request: an extension of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peer(pub(crate) SocketAddr);

/// One connection, until either side ends it, or the server has closed and its peer takes nothing.
pub(crate) async fn connection(stream: TcpStream, peer: SocketAddr, routes: Router, server: Arc<Server>) {
    // Tokens are small and must not wait for each other.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%peer, "no TCP_NODELAY: {error}");
    }
    if let Err(error) = set_socket_send_buffer_size(&stream, SEND_BUFFER) {
        tracing::debug!(%peer, "the system's own send buffer: {error}");
    }
    let taken = Arc::default();
    let stream = Paced::new(stream, server.options.idle_timeout, Arc::clone(&taken));
    let served = async {
        match &server.options.tls {
            None => speak(stream, peer, routes, &server).await,
            Some(tls) => match tls.accept(stream).await {
                Ok(stream) => speak(stream, peer, routes, &server).await,
                Err(error) => tracing::debug!(%peer, "no TLS: {error}"),
            },
        }
    };
    let stuck = async {
        server.phases.reached(Phase::Closed).await;
        standstill(&taken).await;
    };
    tokio::select! {
        biased;
        () = served => {}
        () = stuck => tracing::debug!(%peer, "closed: the client took nothing for {FLUSH:?} after the drain"),
    }
}

/// Resolves when nothing was taken for [`FLUSH`].
async fn standstill(taken: &AtomicU64) {
    let mut before = taken.load(Ordering::Relaxed);
    loop {
        sleep(FLUSH).await;
        let now = taken.load(Ordering::Relaxed);
        if now == before {
            return;
        }
        before = now;
    }
}

/// Speaks HTTP. What hyper would answer on its own, without a body and an id, is answered here.
async fn speak<S: Transport + 'static>(stream: S, peer: SocketAddr, routes: Router, server: &Arc<Server>) {
    let exchange = Arc::new(Exchange::default());
    let wire = Wire::new(stream, exchange.clone());
    let routes = TowerToHyperService::new(routes);
    let service = service_fn(|request| serve_one(request, peer, &exchange, &routes));
    let mut serving = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(server.options.idle_timeout)
        .max_buf_size(WRITE_BUFFER)
        .max_header_size(HEAD_BYTES_MAX)
        .max_headers(HEADERS_MAX)
        // One buffer: see `Exchange::automatic_answer`.
        .writev(false)
        // While draining, one answer per connection.
        .keep_alive(server.phases.now() == Phase::Serving)
        .serve_connection(TokioIo::new(wire), service);
    let ended = {
        // A request that has arrived is taken before its connection ends: the runtime must have told of it.
        let reached = |phase| {
            let reached = server.phases.reached(phase);
            async {
                reached.await;
                yield_now().await;
            }
        };
        let mut draining = pin!(reached(Phase::Draining));
        let mut closed = pin!(reached(Phase::Closed));
        let fresh = server.phases.now() > Phase::Serving;
        tokio::select! {
            // In this order, for the same reason.
            biased;
            ended = &mut serving => ended,
            () = draining.as_mut(), if !fresh => {
                std::pin::Pin::new(&mut serving).graceful_shutdown();
                (&mut serving).await
            }
            () = closed.as_mut() => {
                std::pin::Pin::new(&mut serving).graceful_shutdown();
                (&mut serving).await
            }
        }
    };
    if let Err(error) = &ended {
        tracing::debug!(%peer, "connection ended: {error}");
    }
    let parts = serving.into_parts();
    let mut stream = parts.io.into_inner().into_inner();
    let refusal =
        ended.err().and_then(|error| refusal(&error, &exchange, !parts.read_buf.is_empty(), server));
    if let Some(refusal) = &refusal {
        let answer = raw_answer(refusal, peer, server);
        let sent = async { stream.write_all(&answer).await.and(stream.shutdown().await) };
        if !timeout(FLUSH, sent).await.is_ok_and(|sent| sent.is_ok()) {
            return;
        }
    }
    if refusal.is_some() || exchange.has_unread() {
        let end = async {
            server.phases.reached(Phase::Closed).await;
            sleep(LAST_LINGER).await;
        };
        tokio::select! {
            () = linger(stream) => {}
            // Nobody who still sends holds up the end for long.
            () = end => {}
        }
    }
}

/// Gives a request to the routes, unless it can be read in two ways.
///
/// The exchange is open when this returns: before hyper polls the answer for the first time it reads on, and a
/// peer that has closed its sending side already must be known to wait for one.
fn serve_one(
    request: Request<Incoming>,
    peer: SocketAddr,
    exchange: &Arc<Exchange>,
    routes: &TowerToHyperService<Router>,
) -> impl Future<Output = Result<Response<Download>, Infallible>> + use<> {
    let (mut request, is_clear) = exchange.open(request);
    request.extensions_mut().insert(Peer(peer));
    if !is_clear {
        request.extensions_mut().insert(TwoLengths);
    }
    let response = routes.call(request);
    let exchange = Arc::clone(exchange);
    async move { Ok(exchange.answer(response.await?)) }
}

/// An extension of a request that says in two ways how long it is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TwoLengths;

/// What to say to a peer whose connection ended with `error`, if it can hear anything.
fn refusal(error: &hyper::Error, exchange: &Exchange, has_begun: bool, server: &Server) -> Option<ApiError> {
    match exchange.refusal() {
        Some(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE) => Some(ApiError::HeadTooLarge),
        Some(StatusCode::URI_TOO_LONG) => Some(ApiError::UriTooLong),
        None if error.is_timeout() && has_begun => {
            Some(ApiError::HeadSlow { waited: server.options.idle_timeout })
        }
        None if !error.is_parse() => None,
        // HTTP/2 without a negotiation is an error without an answer.
        Some(_) | None => Some(ApiError::NotHttp { reason: error.to_string() }),
    }
}

/// A whole response, with the id and the count that the routes give every other.
fn raw_answer(error: &ApiError, peer: SocketAddr, server: &Server) -> Vec<u8> {
    let id = server.answer_id("req");
    let body = error.body().to_string();
    let status = error.status();
    server.metrics.responded(Endpoint::Other, status.as_u16());
    if let Some(log) = &server.request_log {
        let (method, path) = (String::new(), String::new());
        let head = Head { id: id.clone(), peer: Some(peer), endpoint: Endpoint::Other, method, path };
        log.write(Entry::refused(head, status));
    }
    let mut head = format!("HTTP/1.1 {status}\r\n");
    for (name, value) in [
        (header::CONTENT_TYPE, "application/json"),
        (header::CONNECTION, "close"),
        (REQUEST_ID, &id),
        (header::CONTENT_LENGTH, &body.len().to_string()),
    ] {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    [head.as_bytes(), b"\r\n", body.as_bytes()].concat()
}

/// Takes what the peer still sends, within bounds. A connection that is closed with bytes unread is reset, and
/// a reset can overtake the answer.
async fn linger(mut stream: impl AsyncRead + Unpin) {
    let drained = async {
        let mut buffer = vec![0; LINGER_BUFFER];
        let mut left = LINGER_BYTES_MAX;
        while left > 0 {
            match stream.read(&mut buffer).await {
                Ok(0) | Err(_) => break,
                Ok(read) => left = left.saturating_sub(read),
            }
        }
    };
    let _ = timeout(LINGER, drained).await;
}

/// Once nothing runs any more: time for the last bytes to leave, and for a reader to take the next ones of an
/// answer that is complete. With [`SEND_BUFFER`], one that takes 10 kB a second is seen to read.
pub(crate) const FLUSH: Duration = Duration::from_secs(5);

/// Bytes that the system holds of an answer that its reader doesn't take. Linux says that there is room again when
/// a third of it is: with its own choice, up to 4 MiB, slow readers would seem to take nothing for minutes. It
/// keeps that many bytes on their way, at 100 ms to the client and back 640 kB a second.
const SEND_BUFFER: usize = 64 << 10;

/// Bytes that hyper holds of an answer that its reader doesn't take, and of a request that nobody has read yet.
/// Not less than a head may have.
pub(crate) const WRITE_BUFFER: usize = HEAD_BYTES_MAX + (8 << 10);

/// For how long, and how much, is taken of a request that was refused.
const LINGER: Duration = Duration::from_secs(2);
/// The same when the process ends: a round trip.
const LAST_LINGER: Duration = Duration::from_millis(200);
const LINGER_BYTES_MAX: usize = 64 << 20;
const LINGER_BUFFER: usize = 16 << 10;
