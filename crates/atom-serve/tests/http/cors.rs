//! Web pages that use the server from a browser.

use crate::client::{JSON, Response};
use crate::fake::{Site, says};
use atom_serve::{ApiKeys, CorsOrigins};
use serde_json::json;
use std::sync::Arc;

async fn preflight(site: &Site, origin: &str) -> Response {
    let mut client = site.client().await;
    let headers = [
        ("origin", origin),
        ("access-control-request-method", "POST"),
        ("access-control-request-headers", "authorization,content-type"),
    ];
    client.send("OPTIONS", "/v1/chat/completions", &headers, b"").await;
    client.response().await
}

async fn ask(site: &Site, origin: &str, key: &str) -> Response {
    let mut client = site.client().await;
    let body = json!({"prompt": "x"}).to_string();
    client
        .send("POST", "/v1/completions", &[JSON, ("origin", origin), ("x-api-key", key)], body.as_bytes())
        .await;
    client.response().await
}

#[tokio::test]
async fn no_page_is_allowed_unless_the_operator_says_so() {
    let site = Site::start(says("ok")).await;
    assert_eq!(preflight(&site, "https://a.example").await.status, 405);
    let response = ask(&site, "https://a.example", "").await;
    assert_eq!((response.status, response.header("access-control-allow-origin")), (200, None));
}

#[tokio::test]
async fn pages_of_the_named_origins_are_allowed_and_others_are_not() {
    let site = Site::start_with(says("ok"), |options| {
        options.cors = CorsOrigins::new(["https://a.example", "http://localhost:3000"]).unwrap();
        options.api_keys = Arc::new(ApiKeys::new(["sk-one"]).unwrap());
    })
    .await;
    for origin in ["https://a.example", "http://localhost:3000"] {
        let allowed = preflight(&site, origin).await;
        assert_eq!(allowed.status, 200, "a preflight has no key");
        assert_eq!(allowed.header("access-control-allow-origin"), Some(origin));
        assert_eq!(allowed.header("access-control-allow-headers"), Some("authorization,content-type"));
        assert!(allowed.header("access-control-allow-methods").unwrap().contains("POST"));
        assert!(allowed.header("x-request-id").is_some());
        let answer = ask(&site, origin, "sk-one").await;
        assert_eq!((answer.status, answer.header("access-control-allow-origin")), (200, Some(origin)));
        assert!(answer.header("access-control-expose-headers").unwrap().contains("x-request-id"));
        let refused = ask(&site, origin, "wrong").await;
        assert_eq!((refused.status, refused.header("access-control-allow-origin")), (401, Some(origin)));
    }
    for origin in ["https://b.example", "https://a.example:444", "http://a.example", "null"] {
        assert_eq!(preflight(&site, origin).await.header("access-control-allow-origin"), None, "{origin}");
        assert_eq!(
            ask(&site, origin, "sk-one").await.header("access-control-allow-origin"),
            None,
            "{origin}"
        );
    }
}

#[tokio::test]
async fn a_star_allows_every_page() {
    let site = Site::start_with(says("ok"), |options| options.cors = CorsOrigins::new(["*"]).unwrap()).await;
    assert_eq!(preflight(&site, "null").await.header("access-control-allow-origin"), Some("*"));
    let answer = ask(&site, "https://anywhere.example", "").await;
    assert_eq!((answer.status, answer.header("access-control-allow-origin")), (200, Some("*")));
}
