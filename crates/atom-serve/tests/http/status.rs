//! What can be asked about the server itself, and what every response carries.

use crate::client::Client;
use crate::fake::{Site, says};
use atom_serve::Condition;
use serde_json::json;
use std::collections::HashSet;

#[tokio::test]
async fn every_name_of_the_model_has_a_card() {
    let site = Site::start(says("ok")).await;
    let list = site.get("/v1/models").await.json();
    assert_eq!(list["object"], "list");
    let ids: Vec<_> =
        list["data"].as_array().unwrap().iter().map(|card| card["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["tiny", "org/tiny-1"]);
    for path in ["/v1/models/tiny", "/v1/models/org/tiny-1"] {
        let card = site.get(path).await.json();
        assert_eq!(
            (&card["object"], &card["owned_by"], &card["max_model_len"]),
            (&json!("model"), &json!("atom"), &json!(900))
        );
    }
    let missing = site.get("/v1/models/other").await;
    assert_eq!((missing.status, &missing.error()["code"]), (404, &json!("model_not_found")));
}

#[tokio::test]
async fn health_tells_dead_from_busy() {
    let site = Site::start(says("ok")).await;
    let cases = [
        (Condition::Ready, "ok", [200, 200, 200]),
        (Condition::Unready("recording bucket 64".into()), "unready", [503, 200, 503]),
        (Condition::Stalled("lane 1 missed step 17".into()), "stalled", [503, 503, 503]),
    ];
    for (condition, word, statuses) in cases {
        *site.fake.condition.lock().unwrap() = condition.clone();
        for (path, status) in ["/health", "/health/live", "/health/ready"].iter().zip(statuses) {
            let response = site.get(path).await;
            assert_eq!(response.status, status, "{path} {condition:?}");
            assert_eq!(response.json()["status"], word);
            assert_eq!(response.json()["reason"].as_str(), condition.reason());
        }
    }
}

#[tokio::test]
async fn metrics_join_the_servers_with_the_engines() {
    let site = Site::start(says("four")).await;
    let chat = json!({"messages": [{"role": "user", "content": "hi"}]});
    assert_eq!(site.post("/v1/chat/completions", &chat).await.status, 200);
    assert_eq!(site.post("/v1/chat/completions", &json!({})).await.status, 400);
    site.get("/no/such/path").await;
    let metrics = site.get("/metrics").await;
    assert_eq!(metrics.header("content-type"), Some("text/plain; version=0.0.4; charset=utf-8"));
    for line in [
        "atom_http_requests_total{endpoint=\"chat_completions\",status=\"200\"} 1",
        "atom_http_requests_total{endpoint=\"chat_completions\",status=\"400\"} 1",
        "atom_http_requests_total{endpoint=\"other\",status=\"404\"} 1",
        "atom_generation_tokens_total 4",
        "atom_prompt_tokens_cached_total 3",
        "atom_time_to_first_token_seconds_count 1",
        "atom_inter_token_latency_seconds_count 3",
        "atom_e2e_request_latency_seconds_count 1",
        "atom_request_success_total{finished_reason=\"stop\"} 1",
        "atom_num_requests_in_flight 0",
        "fake_steps_total 7",
    ] {
        assert!(metrics.text().lines().any(|found| found == line), "no {line:?} in\n{}", metrics.text());
    }
}

#[tokio::test]
async fn every_response_has_an_id_of_its_own_or_the_clients() {
    let site = Site::start(says("ok")).await;
    let mut client = Client::connect(site.address).await;
    let mut ids = HashSet::new();
    for path in ["/health", "/version", "/ping", "/metrics", "/nowhere", "/v1/models"] {
        let response = client.get(path).await;
        assert!(ids.insert(response.header("x-request-id").unwrap().to_owned()), "{path}");
    }
    let long = "x".repeat(129);
    for (sent, kept) in [("abc-123", true), (long.as_str(), false), ("two words", false), ("", false)] {
        client.send("GET", "/version", &[("x-request-id", sent)], b"").await;
        let response = client.response().await;
        assert_eq!(response.header("x-request-id") == Some(sent), kept, "{sent:?}");
    }
    client.send("POST", "/v1/completions", &[("x-request-id", "mine"), crate::client::JSON], b"{}").await;
    let response = client.response().await;
    assert_eq!((response.status, response.header("x-request-id")), (400, Some("mine")));
}
