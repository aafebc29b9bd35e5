//! Orders to the whole engine, for whoever operates it: off unless [`ServerOptions::admin`]
//! (crate::ServerOptions) is set. Each is a decision of the group, never of one lane.

use crate::error::ApiError;
use crate::openapi::{Routes, operations};
use crate::phase::Phase;
use crate::server::Server;
use crate::{body, status};
use axum::body::Body;
use axum::extract::State;
use axum::http::Request;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use serde_json::json;
use std::sync::Arc;
use std::time::Duration;

/// The routes, below `/admin`.
pub(crate) fn routes(server: Arc<Server>) -> Routes {
    Routes::new()
        .post("/admin/pause", pause, &operations::PAUSE)
        .post("/admin/resume", resume, &operations::RESUME)
        .post("/admin/drain", drain, &operations::DRAIN)
        .post("/admin/exit", exit, &operations::EXIT)
        .behind(|routes| routes.layer(from_fn_with_state(server, only_orders)))
}

/// An order has no fields, so a body that says more than `{}` asks for something that would not happen.
async fn only_orders(
    State(server): State<Arc<Server>>,
    request: Request<Body>,
    next: Next,
) -> Result<Response, ApiError> {
    let (head, body) = request.into_parts();
    let mut whole = Request::new(body);
    whole.headers_mut().clone_from(&head.headers);
    body::read_order(&server, whole).await?;
    Ok(next.run(Request::from_parts(head, Body::empty())).await)
}

/// `POST /admin/pause`: answers when no lane computes any more. Requests keep what they have; new ones
/// are taken and wait. A later order, of any client or host, ends the wait: this one will not come true.
async fn pause(State(server): State<Arc<Server>>) -> Result<Response, ApiError> {
    let is_leaving = || server.phases.now() >= Phase::Leaving;
    if is_leaving() {
        return Err(ApiError::PauseOvertaken);
    }
    server.engine.pause();
    let at_rest = async {
        loop {
            if is_leaving() || !server.engine.is_pausing() {
                return Err(ApiError::PauseOvertaken);
            }
            if server.engine.is_at_rest() {
                return Ok(());
            }
            // Steps take milliseconds, and nobody announces the end of one.
            tokio::time::sleep(LOOK_EVERY).await;
        }
    };
    tokio::time::timeout(REST_WITHIN, at_rest)
        .await
        .unwrap_or(Err(ApiError::NotAtRest { waited: REST_WITHIN }))?;
    Ok(state(&server))
}

/// `POST /admin/resume`: ends a pause.
async fn resume(State(server): State<Arc<Server>>) -> Response {
    server.engine.resume();
    state(&server)
}

/// `POST /admin/drain`: refuses new requests from now on, for good; running ones go on.
async fn drain(State(server): State<Arc<Server>>) -> Response {
    server.engine.drain();
    server.phases.enter_at_least(Phase::Draining);
    state(&server)
}

/// `POST /admin/exit`: as SIGTERM does. A paused engine goes on: what was taken is answered.
async fn exit(State(server): State<Arc<Server>>) -> Response {
    server.exit.notify_one();
    state(&server)
}

fn state(server: &Server) -> Response {
    status::json(json!({
        "paused": server.engine.is_at_rest(),
        "draining": server.phases.now() > Phase::Serving,
        "running": server.phases.running(),
    }))
}

/// How long a pause may take: one step or a recording, and the way to other hosts and back.
const REST_WITHIN: Duration = Duration::from_secs(60);
/// How often a pause looks whether it is complete.
const LOOK_EVERY: Duration = Duration::from_millis(2);
