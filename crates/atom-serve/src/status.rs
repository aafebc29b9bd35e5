//! What can be asked about the server itself.

use crate::engine::{Condition, Health};
use crate::inside;
use crate::phase::Phase;
use crate::server::Server;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use std::sync::Arc;

/// `GET /v1/models`: a card for every name.
pub(crate) async fn models(State(server): State<Arc<Server>>) -> Response {
    let cards: Vec<Value> = server.names().map(|name| card(&server, name)).collect();
    json(json!({"object": "list", "data": cards}))
}

/// `GET /v1/models/{name}`; names may contain slashes.
pub(crate) async fn model(State(server): State<Arc<Server>>, Path(name): Path<String>) -> Response {
    match server.resolve_model(Some(name)) {
        Ok(name) => json(card(&server, &name)),
        Err(error) => error.into_response(),
    }
}

/// `GET /health`: 200 when a request would be taken, else 503 with the reason.
pub(crate) async fn health(State(server): State<Arc<Server>>) -> Response {
    let health = health_now(&server);
    report(&server, &health, health.is_ready())
}

/// `GET /health/live`: red only when waiting won't help, and the process should be replaced.
pub(crate) async fn live(State(server): State<Arc<Server>>) -> Response {
    let health = health_now(&server);
    report(&server, &health, health.is_live())
}

/// `GET /health/ready`: red when requests should go elsewhere.
pub(crate) async fn ready(State(server): State<Arc<Server>>) -> Response {
    health(State(server)).await
}

/// `GET /metrics`: the server's own and the engine's, for Prometheus.
pub(crate) async fn metrics(State(server): State<Arc<Server>>) -> Response {
    let mut text = String::new();
    server.metrics.write(&mut text);
    inside::write_token_cache(&server, &mut text);
    server.engine.write_metrics(&mut text);
    let mut response = Response::new(Body::from(text));
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static(atom_telemetry::CONTENT_TYPE));
    response
}

/// `GET /version`.
pub(crate) async fn version() -> Response {
    json(json!({"version": env!("CARGO_PKG_VERSION")}))
}

/// A 200 of JSON.
pub(crate) fn json(value: Value) -> Response {
    let mut response = Response::new(Body::from(value.to_string()));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// The engine's word, and ours on top: a draining server admits nothing, however well the engine is.
fn health_now(server: &Server) -> Health {
    let mut health = server.engine.health();
    if server.phases.now() > Phase::Serving && health.is_live() {
        health.condition = Condition::Unready("the server is shutting down".into());
    }
    health
}

fn report(server: &Server, health: &Health, is_well: bool) -> Response {
    let lanes: Vec<Value> = health
        .lanes
        .iter()
        .map(|lane| {
            json!({
                "lane": lane.lane.0,
                "doing": lane.doing,
                "since_s": lane.since.as_secs_f64(),
                "status": word(&lane.condition),
                "reason": lane.condition.reason(),
            })
        })
        .collect();
    let mut response = json(json!({
        "status": word(&health.condition),
        "live": health.is_live(),
        "ready": health.is_ready(),
        "reason": health.condition.reason(),
        "model": server.options.model,
        "running": server.phases.running(),
        "lanes": lanes,
    }));
    if !is_well {
        *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    }
    response
}

fn word(condition: &Condition) -> &'static str {
    match condition {
        Condition::Ready => "ok",
        Condition::Unready(_) => "unready",
        Condition::Stalled(_) => "stalled",
    }
}

fn card(server: &Server, name: &str) -> Value {
    json!({
        "id": name,
        "object": "model",
        "created": server.started_s,
        "owned_by": "atom",
        "root": server.options.model,
        "max_model_len": server.context(),
    })
}
