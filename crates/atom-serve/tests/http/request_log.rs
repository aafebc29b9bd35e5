//! The request log, as a file.

use crate::client::JSON;
use crate::fake::{Play, Site, answer, bytes};
use atom_engine::Request;
use atom_serve::{ApiKeys, LogSink};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::sync::Arc;

fn path(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("atom-requests-{}-{name}.jsonl", std::process::id()))
}

/// A server that wants a key and keeps a log.
async fn logged(name: &str, content: bool) -> (Site, PathBuf) {
    let path = path(name);
    let _ = std::fs::remove_file(&path);
    let sink = LogSink::file(&path).unwrap().with_content(content);
    let script = |request: &Request| {
        let echoes = request.prompt.contains(&u32::from(b'!'));
        let mut plays = answer(request, &bytes(if echoes { "it is sk-secret!" } else { "okay" }));
        if echoes {
            // Every token is read before the next one comes.
            plays = plays.into_iter().flat_map(|play| [play, Play::Yield, Play::Yield]).collect();
        }
        if request.prompt.last() == Some(&u32::from(b'w')) {
            plays.insert(2, Play::Gate);
        }
        plays
    };
    let site = Site::start_with(script, |options| {
        options.request_log = Some(sink);
        options.api_keys = Arc::new(ApiKeys::new(["sk-secret"]).unwrap());
    })
    .await;
    (site, path)
}

/// Ends the server and reads what it has written.
async fn entries(mut site: Site, path: &PathBuf) -> (String, Vec<Value>) {
    site.stop();
    site.ended().await;
    let text = std::fs::read_to_string(path).unwrap();
    std::fs::remove_file(path).unwrap();
    let entries = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    (text, entries)
}

const KEY: (&str, &str) = ("authorization", "Bearer sk-secret");

#[tokio::test]
async fn every_request_is_a_line_with_its_numbers_and_without_its_words() {
    let (site, path) = logged("numbers", false).await;
    let mut client = site.client().await;
    let body =
        json!({"prompt": ["secret prompt", "other"], "n": 2, "max_tokens": 3, "data_parallel_rank": 1});
    let headers = [JSON, KEY, ("x-request-id", "mine")];
    client.send("POST", "/v1/completions", &headers, body.to_string().as_bytes()).await;
    assert_eq!(client.response().await.status, 200);
    let body = json!({"messages": [{"role": "user", "content": "secret prompt"}], "stream": true});
    client
        .send("POST", "/v1/chat/completions?key=sk-secret", &[JSON, KEY], body.to_string().as_bytes())
        .await;
    assert_eq!(client.response().await.status, 200);
    client.send("POST", "/v1/completions", &[JSON, KEY], b"{\"prompt\": 5}").await;
    assert_eq!(client.response().await.status, 400);
    assert_eq!(client.get("/v1/models").await.status, 401);
    client.write(b"NONSENSE\r\n\r\n").await;
    assert_eq!(client.response().await.status, 400);
    let mut leaver = site.client().await;
    leaver.send("POST", "/v1/completions", &[JSON, KEY], b"{\"prompt\": \"w\"}").await;
    while site.fake.taken_now() < 6 {
        tokio::task::yield_now().await;
    }
    drop(leaver);
    site.fake.aborted(1).await;

    let (text, entries) = entries(site, &path).await;
    assert!(!text.contains("secret") && !text.contains("okay"), "{text}");
    assert_eq!(entries.len(), 6, "{text}");
    let of = |at: usize, names: &[&str]| -> Vec<Value> {
        names.iter().map(|name| entries[at][name].clone()).collect()
    };
    let names = ["id", "endpoint", "method", "status", "complete", "stream", "n", "lane"];
    let first = json!(["mine", "completions", "POST", 200, true, false, 2, 1]);
    assert_eq!(json!(of(0, &names)), first);
    let tokens = ["prompt_tokens", "cached_tokens", "generated_tokens", "finish_reasons"];
    // Two prompts with a BOS each; each prompt has three tokens in the cache.
    assert_eq!(json!(of(0, &tokens)), json!([20, 6, 12, ["length", "length", "length", "length"]]));
    assert!(entries[0]["time"].as_str().unwrap().ends_with('Z'));
    assert!(entries[0]["client"].as_str().unwrap().starts_with("127.0.0.1:"));
    let (first, total) = (entries[0]["ttft_ms"].as_f64().unwrap(), entries[0]["total_ms"].as_f64().unwrap());
    assert!(0.0 <= first && first <= total, "{first} {total}");

    let chat = json!(["chat_completions", "/v1/chat/completions", 200, true, true, ["stop"]]);
    assert_eq!(json!(of(1, &["endpoint", "path", "status", "complete", "stream", "finish_reasons"])), chat);
    assert_eq!(json!(of(2, &["status", "complete", "n"])), json!([400, true, null]));
    assert_eq!(json!(of(3, &["endpoint", "status"])), json!(["models", 401]));
    assert_eq!(json!(of(4, &["endpoint", "status", "path"])), json!(["other", 400, ""]));
    let left = json!(["completions", null, false, 1, ["abort"]]);
    assert_eq!(json!(of(5, &["endpoint", "status", "complete", "n", "finish_reasons"])), left);
    for entry in &entries {
        for name in ["request", "response"] {
            assert!(entry.get(name).is_none(), "{entry}");
        }
    }
}

#[tokio::test]
async fn content_is_written_when_asked_for_and_keys_are_not() {
    let (site, path) = logged("content", true).await;
    let mut client = site.client().await;
    let words = "use sk-secret or Authorization: Bearer abcdefgh123 please";
    let body = json!({
        "messages": [{"role": "user", "content": words}],
        "metadata": {"Authorization": "Basic abc", "api_key": 5, "keep": "this"},
    });
    client.send("POST", "/v1/chat/completions", &[JSON, KEY], body.to_string().as_bytes()).await;
    assert_eq!(client.response().await.status, 200);
    let body = json!({"prompt": "streamed", "stream": true}).to_string();
    client.send("POST", "/v1/completions", &[JSON, KEY], body.as_bytes()).await;
    assert_eq!(client.response().await.status, 200);
    client.send("POST", "/v1/completions", &[JSON, KEY], b"not JSON: sk-secret").await;
    assert_eq!(client.response().await.status, 400);

    let (text, entries) = entries(site, &path).await;
    for secret in ["sk-secret", "abcdefgh123", "Basic abc"] {
        assert!(!text.contains(secret), "{secret} in {text}");
    }
    let request = &entries[0]["request"];
    let redacted = "use [redacted] or Authorization: [redacted]";
    assert_eq!(request["messages"][0]["content"], redacted);
    let metadata = json!({"Authorization": "[redacted]", "api_key": "[redacted]", "keep": "this"});
    assert_eq!(request["metadata"], metadata);
    assert_eq!(entries[0]["response"]["choices"][0]["message"]["content"], "okay");
    assert_eq!(entries[1]["request"]["prompt"], "streamed");
    assert!(entries[1]["response"].as_str().unwrap().ends_with("data: [DONE]\n\n"));
    assert_eq!(entries[2]["request"], "not JSON: [redacted]");
    assert_eq!(entries[2]["response"]["error"]["code"], "invalid_json");
}

#[tokio::test]
async fn a_key_that_the_model_streams_in_pieces_is_not_written() {
    let (site, path) = logged("pieces", true).await;
    let mut client = site.client().await;
    let paths = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"];
    for path in paths {
        let said = "say it!";
        let body = match path {
            "/v1/completions" => json!({"prompt": said, "stream": true}),
            "/v1/responses" => json!({"input": said, "stream": true, "store": false}),
            _ => json!({"messages": [{"role": "user", "content": said}], "stream": true, "max_tokens": 50}),
        };
        client.send("POST", path, &[JSON, KEY], body.to_string().as_bytes()).await;
        let response = client.response().await;
        assert_eq!(response.status, 200, "{}", response.text());
    }
    let (text, entries) = entries(site, &path).await;
    let spelled = |text: &str| {
        let parts =
            text.split("\n\n").filter_map(|event| event.rsplit_once("data: ")).filter_map(|(_, data)| {
                let data: Value = serde_json::from_str(data).ok()?;
                let places = ["/choices/0/text", "/choices/0/delta/content", "/delta/text", "/delta"];
                places.iter().find_map(|place| Some(data.pointer(place)?.as_str()?.to_owned()))
            });
        parts.collect::<String>()
    };
    assert!(!text.contains("sk-secret"), "{text}");
    assert_eq!(entries.len(), paths.len());
    for entry in &entries {
        let told = entry["response"].as_str().unwrap();
        assert!(!spelled(told).contains("secret"), "{told}");
    }
    assert_eq!(spelled(entries[0]["response"].as_str().unwrap()), "it is [redacted]!");
}
