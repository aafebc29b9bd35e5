//! Errors in the words of the Anthropic API.

use crate::error::Words;
use axum::body::Body;
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::response::Response;
use serde_json::{Value, json};

/// Brings a response of one of this API's paths into its shape, whoever refused the request, and gives it
/// the header in which the API's clients look for the request's id.
pub(crate) fn reshape(response: &mut Response, id: &HeaderValue) {
    if let Some(Words(message)) = response.extensions_mut().remove::<Words>() {
        let id = id.to_str().unwrap_or_default();
        let body = body(response.status(), &message, id);
        *response.body_mut() = Body::from(body.to_string());
    }
    response.headers_mut().insert(REQUEST_ID, id.clone());
}

/// The error object. `id`: of the request.
pub(super) fn body(status: StatusCode, message: &str, id: &str) -> Value {
    json!({
        "type": "error",
        "error": {"type": kind(status), "message": message},
        "request_id": id,
    })
}

fn kind(status: StatusCode) -> &'static str {
    match status {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::FORBIDDEN => "permission_error",
        StatusCode::NOT_FOUND => "not_found_error",
        StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        // The API says 529, which proxies don't know.
        StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
        StatusCode::GATEWAY_TIMEOUT => "timeout_error",
        status if status.is_client_error() => "invalid_request_error",
        _ => "api_error",
    }
}

const REQUEST_ID: HeaderName = HeaderName::from_static("request-id");
