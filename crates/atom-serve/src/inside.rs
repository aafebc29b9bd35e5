//! What an operator may ask about the inside: `GET /server_info`, `POST /start_profile` and
//! `/stop_profile`, and `/debug/*`, which is off unless [`ServerOptions::debug`](crate::ServerOptions) is
//! set.

use crate::error::ApiError;
use crate::openapi::{Routes, operations};
use crate::server::Server;
use crate::{body, status};
use atom_telemetry::{Exposition, Kind};
use axum::body::Body;
use axum::extract::State;
use axum::http::Request;
use axum::response::Response;
use serde_json::json;
use std::sync::Arc;

/// The routes below `/debug`.
pub(crate) fn debug_routes() -> Routes {
    Routes::new().get("/debug/cache_stats", cache_stats, &operations::CACHE_STATS)
}

/// `GET /server_info`: what is served, and how it is laid out.
pub(crate) async fn server_info(State(server): State<Arc<Server>>) -> Response {
    let (limits, layout) = (server.engine.limits(), server.engine.layout());
    status::json(json!({
        "model_id": server.options.model,
        "served_model_name": server.names().collect::<Vec<_>>(),
        "version": env!("CARGO_PKG_VERSION"),
        "device": layout.device,
        "tp_size": layout.ranks_per_lane,
        "dp_size": layout.lanes,
        "lanes_per_group": layout.lanes_per_group,
        "nodes": layout.hosts,
        "step_rows": layout.step_rows,
        "page_size": layout.page_size,
        "limits": {
            "max_model_len": limits.max_model_len,
            "cache_tokens_per_lane": limits.cache_tokens,
            "max_num_seqs": limits.max_num_seqs,
            "max_waiting": limits.queue_max,
            "lanes_served_here": limits.lanes,
            "vocab_size": limits.vocab_size,
        },
    }))
}

/// `POST /start_profile`: from now on steps are recorded.
pub(crate) async fn start_profile(
    State(server): State<Arc<Server>>,
    request: Request<Body>,
) -> Result<Response, ApiError> {
    let _running = server.phases.begin().ok_or(ApiError::Draining)?;
    body::read_order(&server, request).await?;
    server.engine.start_profile()?;
    Ok(status::json(json!({"profiling": true})))
}

/// `POST /stop_profile`: writes what was recorded, and says where.
pub(crate) async fn stop_profile(
    State(server): State<Arc<Server>>,
    request: Request<Body>,
) -> Result<Response, ApiError> {
    let _running = server.phases.begin().ok_or(ApiError::Draining)?;
    body::read_order(&server, request).await?;
    // It writes a file.
    let written = server.on_text_thread(|server| Ok(server.engine.stop_profile()?)).await?;
    Ok(status::json(json!({
        "profiling": false,
        "file": written.file.display().to_string(),
        "steps": written.steps,
        "steps_lost": written.steps_lost,
    })))
}

/// `GET /debug/cache_stats`: the caches of tokens and of keys and values.
async fn cache_stats(State(server): State<Arc<Server>>) -> Response {
    let tokens = server.tokens.counts();
    let lanes = server.engine.caches();
    let lanes = lanes.iter().enumerate().map(|(lane, cache)| {
        json!({
            "lane": lane,
            "pages_held": cache.pages_held,
            "pages_kept": cache.pages_kept,
            "prompt_tokens": cache.prompt_tokens,
            "prompt_tokens_found": cache.cached_tokens,
            "preemptions": cache.preempted,
        })
    });
    status::json(json!({
        "token_cache": {
            "hits": tokens.hits,
            "misses": tokens.misses,
            "hit_bytes": tokens.hit_bytes,
            "miss_bytes": tokens.miss_bytes,
            "parts": tokens.parts,
            "bytes": tokens.bytes,
        },
        "kv_caches": lanes.collect::<Vec<_>>(),
    }))
}

/// Appends the token cache's counts to a scrape.
pub(crate) fn write_token_cache(server: &Server, out: &mut String) {
    let counts = server.tokens.counts();
    let mut text = Exposition::new(out);
    for (kind, name, help, value) in [
        (
            Kind::Counter,
            "atom_token_cache_hits_total",
            "Parts of prompts whose tokens were known.",
            counts.hits as f64,
        ),
        (
            Kind::Counter,
            "atom_token_cache_misses_total",
            "Parts of prompts that were made into tokens.",
            counts.misses as f64,
        ),
        (
            Kind::Counter,
            "atom_token_cache_hit_bytes_total",
            "Bytes of text whose tokens were known.",
            counts.hit_bytes as f64,
        ),
        (
            Kind::Counter,
            "atom_token_cache_miss_bytes_total",
            "Bytes of text that were made into tokens.",
            counts.miss_bytes as f64,
        ),
        (Kind::Gauge, "atom_token_cache_bytes", "Memory of the token cache.", counts.bytes as f64),
    ] {
        text.family(kind, name, help).sample(&[], value);
    }
}
