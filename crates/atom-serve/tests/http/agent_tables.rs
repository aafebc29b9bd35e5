//! `docs/api.md` says of every field of the messages and responses APIs whether it acts; every example is sent
//! and must be taken or refused so.

use crate::fake::{MARKERS, Site, TOOL_TEMPLATE, says, text_model_with};
use atom_text::{Dialect, ReasoningFormat, ToolFormat};
use serde_json::{Value, json};

const PAGE: &str = include_str!("../../../../docs/api.md");

async fn check(path: &str, base: Value, rows_min: usize) {
    let template = format!("{TOOL_TEMPLATE}{{{{ reasoning_effort }}}}");
    let dialect = Dialect { reasoning: Some(ReasoningFormat::Think), tools: Some(ToolFormat::Hermes) };
    let site = Site::start_model(says("ok"), text_model_with(&template, dialect, &MARKERS), |_| {}).await;
    let mut client = site.client().await;
    let rows: Vec<Vec<&str>> = PAGE
        .lines()
        .skip_while(|line| !line.starts_with(&format!("## `POST {path}`")))
        .skip(1)
        .take_while(|line| !line.starts_with('#'))
        .filter(|line| line.starts_with("| `"))
        .map(|line| line.trim_matches('|').split(" | ").map(|cell| cell.trim().trim_matches('`')).collect())
        .collect();
    assert!(rows.len() >= rows_min, "{} rows: is the table still there?", rows.len());
    for row in rows {
        let [name, says, example, ..] = row[..] else { panic!("{row:?}") };
        let example: Value = serde_json::from_str(example).unwrap_or_else(|error| panic!("{row:?}: {error}"));
        let mut body = base.clone();
        body[name] = example;
        let response = client.post(path, &body).await;
        let status = match says {
            "acts" | "n/a" => 200,
            "refused" => 400,
            other => panic!("{name} is {other:?}"),
        };
        assert_eq!(response.status, status, "{body}: {}", response.text());
        if status == 400 {
            let message = response.json()["error"]["message"].as_str().unwrap().to_owned();
            assert!(message.starts_with(&format!("'{name}' is not supported")), "{message}");
        }
    }
}

#[tokio::test]
async fn every_field_of_messages_does_what_its_page_says() {
    check("/v1/messages", json!({"max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}), 20).await;
}

#[tokio::test]
async fn every_field_of_responses_does_what_its_page_says() {
    check("/v1/responses", json!({"input": "x"}), 25).await;
}
