//! Frames: what is in them, when they come, and what they do when something breaks.

use crate::client::{Client, JSON, Response};
use crate::fake::{Play, Site, answer, bytes, says, scored, tool_model};
use crate::tools::marked;
use atom_base::FinishReason;
use atom_engine::{EngineError, Event, Request};
use serde_json::{Value, json};
use std::time::Duration;

fn streamed(extra: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "hi"}], "stream": true});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

async fn begin(client: &mut Client, path: &str, body: &Value) -> Response {
    client.send("POST", path, &[JSON], body.to_string().as_bytes()).await;
    client.head().await
}

#[tokio::test]
async fn a_stream_opens_with_the_role_and_ends_with_the_reason_the_usage_and_done() {
    let site = Site::start(says("hey")).await;
    let body = streamed(json!({"stream_options": {"include_usage": true}}));
    let response = site.post("/v1/chat/completions", &body).await;
    assert_eq!(response.header("cache-control"), Some("no-cache"));
    let chunks = response.chunks();
    assert!(
        chunks
            .iter()
            .all(|chunk| chunk["object"] == "chat.completion.chunk" && chunk["id"] == chunks[0]["id"])
    );
    let choice = |at: usize| chunks[at]["choices"][0].clone();
    assert_eq!(choice(0)["delta"], json!({"role": "assistant", "content": ""}));
    let count = chunks.len();
    assert_eq!(choice(count - 2)["delta"], json!({}));
    assert_eq!(choice(count - 2)["finish_reason"], "stop");
    assert_eq!(chunks[count - 1]["choices"], json!([]));
    assert_eq!(chunks[count - 1]["usage"]["completion_tokens"], 3);

    let chunks = site.post("/v1/chat/completions", &streamed(json!({}))).await.chunks();
    assert!(chunks.iter().all(|chunk| chunk.get("usage").is_none() && chunk["choices"] != json!([])));
}

#[tokio::test]
async fn usage_so_far_is_in_every_chunk_when_asked_for() {
    let site = Site::start(says("hey")).await;
    let body = streamed(json!({"stream_options": {"continuous_usage_stats": true}}));
    let chunks = site.post("/v1/chat/completions", &body).await.chunks();
    let counts: Vec<u64> =
        chunks.iter().map(|chunk| chunk["usage"]["completion_tokens"].as_u64().unwrap()).collect();
    assert!(counts.is_sorted() && counts.last() == Some(&3), "{counts:?}");
}

#[tokio::test]
async fn a_character_leaves_whole_and_at_once_and_held_text_does_not_leave() {
    // Each gate lets one more token through.
    let site = Site::start(|request| {
        let mut plays = answer(request, &bytes("é🦀sto"));
        let end = plays.len() - 1;
        for at in (1..=end).rev() {
            plays.insert(at, Play::Gate);
        }
        plays
    })
    .await;
    let mut client = site.client().await;
    let body = json!({"prompt": "x", "stream": true, "stop": "stop"});
    assert_eq!(begin(&mut client, "/v1/completions", &body).await.status, 200);
    let mut chunk = async |tokens: usize| {
        site.fake.gate.add_permits(tokens);
        let frame = String::from_utf8(client.chunk().await.unwrap()).unwrap();
        let (first, _) = frame.split_once("\n\n").unwrap();
        let json: Value = serde_json::from_str(first.trim_start_matches("data: ")).unwrap();
        json["choices"][0]["text"].as_str().unwrap().to_owned()
    };
    assert_eq!(chunk(2).await, "é");
    assert_eq!(chunk(4).await, "🦀");
    // "sto" could become the stop string; it comes out when the text ends without it.
    assert_eq!(chunk(4).await, "sto");
}

#[tokio::test]
async fn a_stop_string_over_several_tokens_ends_the_answer_and_aborts_the_rest() {
    for stream in [false, true] {
        // Without the abort this request would stay open for ever.
        let site = Site::start(|request| {
            let mut plays = answer(request, &bytes("one STOP two"));
            plays.pop();
            plays
        })
        .await;
        let body = json!({"prompt": "x", "stop": ["never", "STOP"], "stream": stream, "max_tokens": 100});
        let response = site.post("/v1/completions", &body).await;
        let text: String = if stream {
            let chunks = response.chunks();
            assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "stop");
            chunks.iter().map(|chunk| chunk["choices"][0]["text"].as_str().unwrap()).collect()
        } else {
            let whole = response.json();
            assert_eq!(whole["choices"][0]["finish_reason"], "stop");
            assert_eq!(whole["usage"]["completion_tokens"], 8);
            whole["choices"][0]["text"].as_str().unwrap().to_owned()
        };
        assert_eq!(text, "one ");
        assert_eq!(site.fake.aborted(1).await, [site.fake.request(0).id]);
    }
}

#[tokio::test]
async fn a_failure_within_a_stream_is_its_last_frame_and_a_whole_answer_is_a_500() {
    let failures: [(Play, &str); 4] = [
        (Play::Say(Event::Failed(EngineError::Rank("rank 1 is gone".into()))), "rank 1 is gone"),
        (Play::Say(Event::Failed(EngineError::NotANumber { position: 12 })), "position 12"),
        (Play::Say(Event::Finished(FinishReason::Aborted)), "aborted"),
        (Play::Vanish, "went away"),
    ];
    for (failure, words) in failures {
        let fails = failure.clone();
        let site = Site::start(move |request| {
            let mut plays = answer(request, &bytes("ab"));
            plays.pop();
            plays.push(fails.clone());
            plays
        })
        .await;
        let response = site.post("/v1/chat/completions", &streamed(json!({"n": 2}))).await;
        let events = response.events();
        let last: Value = serde_json::from_str(events.last().unwrap()).unwrap();
        assert!(last["error"]["message"].as_str().unwrap().contains(words), "{last}");
        assert_eq!(last["error"]["type"], "server_error");
        assert!(events[..events.len() - 1].iter().any(|event| event.contains("\"ab\"")), "{events:?}");

        let body = json!({"messages": [{"role": "user", "content": "hi"}]});
        let response = site.post("/v1/chat/completions", &body).await;
        assert!(matches!(response.status, 500 | 503), "{}", response.status);
        assert!(response.error()["message"].as_str().unwrap().contains(words));
    }
}

#[tokio::test]
async fn a_reader_who_takes_nothing_loses_nothing_and_stops_nobody() {
    const TOKENS: usize = 800;
    let site = Site::start(|request| {
        let mut plays = vec![Play::Say(Event::Started { cached_tokens: 0 })];
        let tokens = (0..TOKENS).map(|at| 97 + at as u32 % 26);
        plays.extend(tokens.map(|token| Play::Say(Event::Token(scored(token, request.sampling.logprobs)))));
        plays.push(Play::Say(Event::Finished(FinishReason::Length)));
        plays
    })
    .await;
    // 20 alternatives a token: far more than the sockets hold.
    let body = streamed(json!({"logprobs": true, "top_logprobs": 20, "n": 8}));
    let mut slow = site.client().await;
    slow.send("POST", "/v1/chat/completions", &[JSON], body.to_string().as_bytes()).await;
    site.fake.played(8).await;
    let other = site.post("/v1/completions", &json!({"prompt": "x", "max_tokens": 800})).await;
    assert_eq!(other.json()["usage"]["completion_tokens"], TOKENS);

    let chunks = slow.response().await.chunks();
    let mut texts = vec![String::new(); 8];
    let mut entries = 0;
    for chunk in &chunks {
        let choice = &chunk["choices"][0];
        let index = choice["index"].as_u64().unwrap() as usize;
        texts[index].push_str(choice["delta"]["content"].as_str().unwrap_or_default());
        entries += choice["logprobs"]["content"].as_array().map_or(0, Vec::len);
    }
    let alphabet: String = (0..TOKENS).map(|at| char::from(b'a' + (at % 26) as u8)).collect();
    assert!(texts.iter().all(|text| *text == alphabet));
    assert_eq!(entries, 8 * TOKENS);
}

/// The clock stands still but for timers, so the first thing that can come is the keep-alive.
#[tokio::test(start_paused = true)]
async fn a_silent_stream_is_kept_alive_by_comments() {
    let site = Site::start(|request| {
        let mut plays = answer(request, &bytes("late"));
        plays.insert(1, Play::Gate);
        plays
    })
    .await;
    let mut client = site.client().await;
    assert_eq!(begin(&mut client, "/v1/chat/completions", &streamed(json!({}))).await.status, 200);
    for _ in 0..3 {
        assert_eq!(client.chunk().await.unwrap(), b": keep-alive\n\n");
    }
    site.fake.gate.add_permits(1);
    let mut rest = Vec::new();
    while let Some(chunk) = client.chunk().await {
        rest.extend(chunk);
    }
    let rest = String::from_utf8(rest).unwrap();
    assert!(rest.contains("late") && rest.ends_with("data: [DONE]\n\n"), "{rest}");
}

/// Tokens come all the time, but none that the client wants to see: to everybody between it is silence.
#[tokio::test(start_paused = true)]
async fn a_stream_whose_thoughts_are_hidden_is_kept_alive() {
    let script = |request: &Request| {
        let mut plays = Vec::new();
        for play in answer(request, &marked(&format!("<think>{}</think>Z", "hm".repeat(40)))) {
            plays.push(Play::Think(Duration::from_secs(1)));
            plays.push(play);
        }
        plays
    };
    let site = Site::start_model(script, tool_model(), |_| {}).await;
    let mut client = site.client().await;
    let body = streamed(json!({"include_reasoning": false}));
    assert_eq!(begin(&mut client, "/v1/chat/completions", &body).await.status, 200);
    let mut rest = Vec::new();
    while let Some(chunk) = client.chunk().await {
        rest.extend(chunk);
    }
    let rest = String::from_utf8(rest).unwrap();
    let thoughts = rest.split("\"Z\"").next().unwrap();
    assert!(thoughts.matches(": keep-alive").count() >= 4, "80 seconds of thoughts: {rest}");
    assert!(rest.contains("\"Z\"") && !rest.contains("hm") && rest.ends_with("data: [DONE]\n\n"), "{rest}");
}
