//! API keys.

use crate::client::{JSON, Response};
use crate::fake::{Site, says};
use atom_serve::ApiKeys;
use serde_json::json;
use std::sync::Arc;

async fn locked() -> Site {
    Site::start_with(says("ok"), |options| {
        options.api_keys = Arc::new(ApiKeys::new(["sk-one", "sk-two"]).unwrap());
        options.admin = true;
    })
    .await
}

fn is_refused(response: &Response, words: &str) {
    assert_eq!(response.status, 401, "{}", response.text());
    let error = response.error();
    assert_eq!(
        (&error["code"], &error["type"]),
        (&json!("invalid_api_key"), &json!("invalid_request_error"))
    );
    assert!(error["message"].as_str().unwrap().contains(words), "{error}");
    assert_eq!(response.header("www-authenticate"), Some("Bearer"));
    assert!(response.header("x-request-id").is_some());
}

#[tokio::test]
async fn without_a_key_only_the_health_is_told() {
    let site = locked().await;
    let mut client = site.client().await;
    // The page asks for a key, and what it calls wants it.
    for path in ["/health", "/health/live", "/health/ready", "/ping", "/"] {
        assert_eq!(client.get(path).await.status, 200, "{path}");
    }
    for path in [
        "/v1/models",
        "/metrics",
        "/version",
        "/nowhere",
        "/health/other",
        "/v1/chat/completions",
        "/debug/steps",
    ] {
        is_refused(&client.get(path).await, "wants an API key");
    }
    for path in ["/v1/chat/completions", "/v1/completions", "/admin/pause", "/admin/exit"] {
        is_refused(&site.post(path, &json!({})).await, "wants an API key");
    }
    assert!(!*site.fake.paused.borrow());
    assert_eq!(site.fake.taken_now(), 0);
}

#[tokio::test]
async fn a_key_opens_everything_in_either_header() {
    let site = locked().await;
    let mut client = site.client().await;
    let body = json!({"prompt": "x"}).to_string();
    for header in
        [("authorization", "Bearer sk-one"), ("authorization", "bearer sk-two"), ("x-api-key", "sk-two")]
    {
        client.send("POST", "/v1/completions", &[JSON, header], body.as_bytes()).await;
        assert_eq!(client.response().await.status, 200, "{header:?}");
        client.send("GET", "/metrics", &[header], b"").await;
        let metrics = client.response().await;
        assert_eq!(metrics.status, 200);
        assert!(!metrics.text().contains("sk-"));
    }
    for header in [("authorization", "Bearer sk-three"), ("authorization", "Basic sk-one"), ("x-api-key", "")]
    {
        client.send("GET", "/v1/models", &[header], b"").await;
        let response = client.response().await;
        is_refused(&response, "not valid");
        assert!(!response.text().contains("sk-"), "{}", response.text());
    }
}

#[tokio::test]
async fn a_wrong_key_is_told_to_a_client_that_sends_megabytes_first() {
    let site = locked().await;
    let body = vec![b' '; 20 << 20];
    let mut client = site.client().await;
    client.send("POST", "/v1/completions", &[JSON, ("x-api-key", "wrong")], &body).await;
    is_refused(&client.response().await, "not valid");
    assert_eq!(site.fake.taken_now(), 0);
}
