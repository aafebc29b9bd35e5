//! `docs/api.md` says of every field whether it acts; every example is sent and must be taken or refused so. That the
//! tables are complete is tested within the crate, where the declarations are.

use crate::fake::{MARKERS, Site, TOOL_TEMPLATE, says, text_model_with};
use crate::rows::rows;
use atom_text::{Dialect, ReasoningFormat, ToolFormat};
use serde_json::{Value, json};

/// Sends each row of the table of `table` to `path`, with the fields that `around` puts beside it.
async fn check(table: &str, path: &str, around: impl Fn(&str) -> Value) {
    let template = format!("{TOOL_TEMPLATE}{{{{ reasoning_effort }}}}");
    let dialect = Dialect { reasoning: Some(ReasoningFormat::Think), tools: Some(ToolFormat::Hermes) };
    let site = Site::start_model(says("ok"), text_model_with(&template, dialect, &MARKERS), |_| {}).await;
    let mut client = site.client().await;
    for row in rows(table) {
        let name = row.name;
        let mut body = around(name);
        body[name] = serde_json::from_str(row.example).unwrap_or_else(|error| panic!("{row:?}: {error}"));
        let response = client.post(path, &body).await;
        let status = match row.says {
            "acts" | "n/a" => 200,
            "refused" => 400,
            other => panic!("{name} is {other:?}"),
        };
        assert_eq!(response.status, status, "{path} {body}: {}", response.text());
        if status == 400 {
            // Not as one that nobody knows.
            let message = response.json()["error"]["message"].as_str().unwrap().to_owned();
            assert!(message.starts_with(&format!("'{name}' is not supported")), "{path}: {message}");
        }
    }
}

fn messages() -> Value {
    json!([{"role": "user", "content": "x"}])
}

fn chat(name: &str) -> Value {
    let mut body = json!({"messages": messages()});
    match name {
        "top_logprobs" => body["logprobs"] = true.into(),
        "stream_options" => body["stream"] = true.into(),
        "tool_choice" | "parallel_tool_calls" => {
            body["tools"] = json!([{"type": "function", "function": {"name": "f"}}]);
        }
        _ => {}
    }
    body
}

#[tokio::test]
async fn every_field_of_chat_does_what_its_page_says() {
    for path in ["/v1/chat/completions", "/v1/chat/completions/render"] {
        check("/v1/chat/completions", path, chat).await;
    }
}

#[tokio::test]
async fn every_field_of_completions_does_what_its_page_says() {
    let around = |name: &str| match name {
        "stream_options" => json!({"prompt": "x", "stream": true}),
        _ => json!({"prompt": "x"}),
    };
    for path in ["/v1/completions", "/v1/completions/render"] {
        check("/v1/completions", path, around).await;
    }
}

#[tokio::test]
async fn every_field_of_messages_does_what_its_page_says() {
    check("/v1/messages", "/v1/messages", |_| json!({"max_tokens": 9, "messages": messages()})).await;
}

#[tokio::test]
async fn every_field_of_count_tokens_does_what_its_page_says() {
    let path = "/v1/messages/count_tokens";
    check(path, path, |_| json!({"messages": messages()})).await;
}

#[tokio::test]
async fn every_field_of_responses_does_what_its_page_says() {
    check("/v1/responses", "/v1/responses", |_| json!({"input": "x"})).await;
}

#[tokio::test]
async fn every_field_of_tokenize_and_detokenize_does_what_its_page_says() {
    let around = |name: &str| if name == "prompt" { json!({}) } else { chat(name) };
    check("/tokenize", "/tokenize", around).await;
    check("/detokenize", "/detokenize", |_| json!({"tokens": [72]})).await;
}
