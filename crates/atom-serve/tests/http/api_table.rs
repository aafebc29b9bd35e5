//! `docs/api.md` says of every field whether it acts; every example is sent and must be taken or refused so.

use crate::fake::{MARKERS, Site, TOOL_TEMPLATE, says, text_model_with};
use atom_text::{Dialect, ReasoningFormat, ToolFormat};
use serde_json::{Value, json};

const PAGE: &str = include_str!("../../../../docs/api.md");

#[tokio::test]
async fn every_field_does_what_its_page_says() {
    let template = format!("{TOOL_TEMPLATE}{{{{ reasoning_effort }}}}");
    let dialect = Dialect { reasoning: Some(ReasoningFormat::Think), tools: Some(ToolFormat::Hermes) };
    let text = text_model_with(&template, dialect, &MARKERS);
    let site = Site::start_model(says("ok"), text, |_| {}).await;
    let mut client = site.client().await;
    let rows: Vec<Vec<&str>> = PAGE
        .lines()
        .skip_while(|line| !line.starts_with("## `POST /v1/chat/completions`"))
        .take_while(|line| !line.starts_with("### "))
        .filter(|line| line.starts_with("| `"))
        .map(|line| line.trim_matches('|').split(" | ").map(|cell| cell.trim().trim_matches('`')).collect())
        .collect();
    assert!(rows.len() > 50, "{} rows: is the table still there?", rows.len());
    for row in rows {
        let [name, says, example, ..] = row[..] else { panic!("{row:?}") };
        let example: Value = serde_json::from_str(example).unwrap_or_else(|error| panic!("{row:?}: {error}"));
        let mut body = json!({"messages": [{"role": "user", "content": "x"}]});
        match name {
            "top_logprobs" => body["logprobs"] = true.into(),
            "stream_options" => body["stream"] = true.into(),
            "tool_choice" | "parallel_tool_calls" => {
                body["tools"] = json!([{"type": "function", "function": {"name": "f"}}]);
            }
            _ => {}
        }
        body[name] = example;
        let response = client.post("/v1/chat/completions", &body).await;
        let status = match says {
            "acts" | "n/a" => 200,
            "refused" => 400,
            other => panic!("{name} is {other:?}"),
        };
        assert_eq!(response.status, status, "{body}: {}", response.text());
        if status == 400 {
            let error = response.error();
            assert!(error["param"].as_str().is_some_and(|param| param.starts_with(name)), "{name}: {error}");
        }
    }
}
