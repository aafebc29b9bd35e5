//! Clients that leave, queues that are full, servers that stop.

use crate::client::JSON;
use crate::fake::{DRAIN, Play, Site, answer, bytes, says};
use atom_engine::{Event, Refusal, Request};
use serde_json::{Value, json};
use std::time::Duration;

/// Begins an answer and waits for the gate before it goes on.
fn gated(request: &Request) -> Vec<Play> {
    let mut plays = answer(request, &bytes("ab"));
    plays.insert(2, Play::Gate);
    plays
}

fn body(stream: bool) -> Value {
    json!({"prompt": "x", "stream": stream, "n": 2})
}

#[tokio::test]
async fn a_client_that_leaves_aborts_its_request_whole_or_streamed() {
    for stream in [false, true] {
        let site = Site::start(gated).await;
        let mut client = site.client().await;
        client.send("POST", "/v1/completions", &[JSON], body(stream).to_string().as_bytes()).await;
        if stream {
            assert_eq!(client.head().await.status, 200);
            client.chunk().await.unwrap();
        } else {
            // Both choices are with the engine before the client goes.
            while site.fake.taken_now() < 2 {
                tokio::task::yield_now().await;
            }
        }
        drop(client);
        let aborted = site.fake.aborted(2).await;
        assert_eq!(aborted.len(), 2);
        let metrics = site.get("/metrics").await;
        assert!(metrics.text().contains("atom_request_success_total{finished_reason=\"abort\"} 2\n"));
        assert!(metrics.text().contains("atom_num_requests_in_flight 0\n"));
    }
}

#[tokio::test]
async fn an_answer_that_was_read_to_its_end_aborts_nothing() {
    let site = Site::start(says("ok")).await;
    for stream in [false, true] {
        assert_eq!(site.post("/v1/completions", &body(stream)).await.status, 200);
    }
    assert_eq!(site.fake.aborted_now(), 0);
}

#[tokio::test]
async fn a_full_queue_is_a_429_that_says_when_and_takes_back_what_was_taken() {
    for stream in [false, true] {
        let site = Site::start(gated).await;
        site.fake.refuse_after(3, Refusal::QueueFull { waiting: 3 });
        let response = site.post("/v1/completions", &json!({"prompt": "x", "n": 5, "stream": stream})).await;
        assert_eq!(response.status, 429);
        assert_eq!(response.header("retry-after"), Some("1"));
        let error = response.error();
        assert_eq!((&error["type"], &error["code"]), (&json!("rate_limit_error"), &json!("queue_full")));
        assert!(error["message"].as_str().unwrap().contains("3 requests are waiting"));
        assert_eq!(site.fake.aborted_now(), 3);
    }
}

#[tokio::test]
async fn a_full_queue_is_a_lanes_and_names_the_one_that_was_asked_for() {
    let site = Site::start(gated).await;
    site.fake.refuse_after(0, Refusal::QueueFull { waiting: 3 });
    let cases = [
        (json!({"prompt": "x", "data_parallel_rank": 1}), "waiting for lane 1, the most that a lane queues"),
        (
            json!({"prompt": "x"}),
            "waiting for the lane that this one was given to, the most that a lane queues",
        ),
    ];
    for (body, words) in cases {
        let error = site.post("/v1/completions", &body).await.error();
        assert!(error["message"].as_str().unwrap().contains(words), "{error}");
    }
}

#[tokio::test]
async fn an_engine_that_is_closed_is_a_503_with_its_reason() {
    let site = Site::start(gated).await;
    site.fake.refuse_after(0, Refusal::Closed("rank 2 has failed".into()));
    let response = site.post("/v1/completions", &body(true)).await;
    assert_eq!((response.status, response.header("retry-after")), (503, Some("1")));
    assert!(response.error()["message"].as_str().unwrap().contains("rank 2 has failed"));
}

#[tokio::test]
async fn a_draining_server_finishes_what_runs_and_takes_nothing_new() {
    let mut site = Site::start_with(gated, |options| options.drain = DRAIN).await;
    let mut idle = site.client().await;
    assert_eq!(idle.get("/health").await.status, 200);
    let mut running = site.client().await;
    running.send("POST", "/v1/completions", &[JSON], body(true).to_string().as_bytes()).await;
    assert_eq!(running.head().await.status, 200);
    let first = running.chunk().await.unwrap();

    site.stop();
    assert!(idle.is_closed().await, "an idle connection is closed at once");
    let health = site.get("/health").await;
    assert_eq!((health.status, &health.json()["ready"]), (503, &json!(false)));
    assert!(health.json()["reason"].as_str().unwrap().contains("shutting down"));
    assert_eq!(site.get("/health/ready").await.status, 503);
    assert_eq!(site.get("/health/live").await.status, 200, "draining is not a fault");
    let refused = site.post("/v1/completions", &body(false)).await;
    assert_eq!((refused.status, &refused.error()["code"]), (503, &json!("shutting_down")));

    site.fake.gate.add_permits(2);
    let mut text = first;
    while let Some(chunk) = running.chunk().await {
        text.extend(chunk);
    }
    assert!(text.ends_with(b"data: [DONE]\n\n"), "{}", String::from_utf8_lossy(&text));
    assert_eq!(site.ended().await.cut, 0);
}

#[tokio::test]
async fn what_outlasts_the_drain_is_aborted_and_told_so() {
    let mut site = Site::start_with(gated, |options| options.drain = Duration::ZERO).await;
    let mut streamed = site.client().await;
    streamed.send("POST", "/v1/completions", &[JSON], body(true).to_string().as_bytes()).await;
    assert_eq!(streamed.head().await.status, 200);
    streamed.chunk().await.unwrap();
    let mut whole = site.client().await;
    whole.send("POST", "/v1/completions", &[JSON], body(false).to_string().as_bytes()).await;
    while site.fake.taken_now() < 4 {
        tokio::task::yield_now().await;
    }

    site.stop();
    let response = whole.response().await;
    assert_eq!((response.status, &response.error()["code"]), (503, &json!("shutting_down")));
    let mut text = Vec::new();
    while let Some(chunk) = streamed.chunk().await {
        text.extend(chunk);
    }
    let text = String::from_utf8(text).unwrap();
    assert!(text.contains("shutting_down") && !text.contains("[DONE]"), "{text}");
    site.fake.aborted(4).await;
    assert_eq!(site.ended().await.cut, 2);
}

#[tokio::test]
async fn whoever_has_sent_a_request_before_the_end_gets_an_answer() {
    // Some on connections that the server knows, some on those that it has not accepted yet.
    let mut site = Site::start_with(says("ok"), |options| options.drain = DRAIN).await;
    let mut clients = Vec::new();
    for _ in 0..20 {
        let mut client = site.client().await;
        assert_eq!(client.get("/health").await.status, 200);
        clients.push(client);
    }
    let sent = body(false).to_string();
    for client in &mut clients {
        client.send("POST", "/v1/completions", &[JSON], sent.as_bytes()).await;
    }
    for _ in 0..20 {
        let mut client = site.client().await;
        client.send("POST", "/v1/completions", &[JSON], sent.as_bytes()).await;
        clients.push(client);
    }
    site.stop();
    for (number, client) in clients.iter_mut().enumerate() {
        let response = client.response().await;
        assert!([200, 503].contains(&response.status), "client {number}: {}", response.status);
        if response.status == 503 {
            assert_eq!(response.error()["code"], "shutting_down");
            assert_eq!(response.header("retry-after"), Some("1"));
        }
    }
    assert_eq!(site.ended().await.cut, 0);
}

#[tokio::test]
async fn a_server_without_requests_stops_at_once_and_frees_its_port() {
    let mut site = Site::start(says("ok")).await;
    assert_eq!(site.get("/health").await.status, 200);
    let address = site.address;
    site.stop();
    assert_eq!(site.ended().await.cut, 0);
    assert!(tokio::net::TcpStream::connect(address).await.is_err());
}

#[tokio::test]
async fn a_model_that_ends_at_once_gives_an_empty_answer_and_not_none() {
    let site = Site::start(|_| {
        vec![
            Play::Say(Event::Started { cached_tokens: 1 }),
            Play::Say(Event::Finished(atom_base::FinishReason::Stop)),
        ]
    })
    .await;
    let whole = site.post("/v1/completions", &json!({"prompt": "x"})).await.json();
    assert_eq!(
        whole["choices"][0],
        json!({"index": 0, "text": "", "logprobs": null, "finish_reason": "stop"})
    );
    let chunks = site.post("/v1/completions", &json!({"prompt": "x", "stream": true})).await.chunks();
    assert_eq!(chunks.len(), 1);
}
