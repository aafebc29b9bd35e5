//! Calls that end before the model ended them, in the words of every API.

use crate::fake::{Site, answer, says, tool_model};
use crate::tools::marked;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const RESPONSES: &str = "/v1/responses";
const MESSAGES: &str = "/v1/messages";

const CALL: &str =
    "Hm.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"s\": \"é\", \"a\": [{}]}}\n</tool_call>";
const ARGUMENTS: &str = "{\"s\": \"é\", \"a\": [{}]}";

async fn site() -> Site {
    Site::start_model(|request| answer(request, &marked(CALL)), tool_model(), |_| {}).await
}

/// A body of one tool and a bound.
fn body(path: &str, max: usize) -> Value {
    let messages = json!([{"role": "user", "content": "hi"}]);
    match path {
        CHAT => json!({
            "messages": messages, "max_tokens": max, "tools": [{"type": "function", "function": {"name": "f"}}],
        }),
        RESPONSES => {
            json!({"input": messages, "max_output_tokens": max, "tools": [{"type": "function", "name": "f"}]})
        }
        _ => json!({"model": "tiny", "messages": messages, "max_tokens": max, "tools": [{"name": "f"}]}),
    }
}

/// What the model has written of the content and of the arguments after so many tokens.
fn written(max: usize) -> (&'static str, Option<&'static str>) {
    // Each marker is one token, and each byte else.
    let before_call = "Hm.\n".len();
    let named = before_call + 1 + "\n{\"name\": \"f\"".len();
    let content = &CALL[..max.min(before_call)];
    if max < named {
        return (content, None);
    }
    let arguments = max.saturating_sub(named + ", \"arguments\": ".len()).min(ARGUMENTS.len());
    (content, Some(&ARGUMENTS[..ARGUMENTS.floor_char_boundary(arguments)]))
}

/// A length limit that fell into a call had `{}` or brackets written that the model never wrote, and a call without a
/// name was content.
#[tokio::test]
async fn chat_passes_on_what_the_model_wrote_of_a_cut_call() {
    let site = site().await;
    let all = marked(CALL).len();
    for max in 1..=all {
        let choice = site.post(CHAT, &body(CHAT, max)).await.json()["choices"][0].clone();
        let (content, arguments) = written(max);
        let message = &choice["message"];
        assert_eq!(choice["finish_reason"], "length", "{max}");
        assert_eq!(message["content"].as_str().unwrap_or_default(), content, "{max}");
        match arguments {
            // Half a character is shown as one that can't be read.
            Some(arguments) => {
                let said = message["tool_calls"][0]["function"]["arguments"].as_str().unwrap();
                assert_eq!(said.trim_end_matches('\u{fffd}'), arguments, "{max}");
            }
            None => assert!(message["tool_calls"].is_null(), "{max}: {message}"),
        }
        let mut streamed = body(CHAT, max);
        streamed["stream"] = true.into();
        let chunks = site.post(CHAT, &streamed).await.chunks();
        let deltas = || chunks.iter().map(|chunk| &chunk["choices"][0]["delta"]);
        let said: String = deltas().filter_map(|delta| delta["content"].as_str()).collect();
        let given: String =
            deltas().filter_map(|delta| delta["tool_calls"][0]["function"]["arguments"].as_str()).collect();
        assert_eq!(said, message["content"].as_str().unwrap_or_default(), "{max}");
        let whole = message["tool_calls"][0]["function"]["arguments"].as_str().unwrap_or_default();
        assert_eq!(given, whole, "{max}");
        assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "length", "{max}");
    }
    let whole = site.post(CHAT, &body(CHAT, all + 1)).await.json()["choices"][0].clone();
    assert_eq!(whole["finish_reason"], "tool_calls");
    assert_eq!(whole["message"]["tool_calls"][0]["function"]["arguments"], ARGUMENTS);
}

#[tokio::test]
async fn a_response_has_what_the_model_wrote_of_a_cut_call_and_is_incomplete() {
    let site = site().await;
    for max in 1..=marked(CALL).len() {
        let found = site.post(RESPONSES, &body(RESPONSES, max)).await.json();
        let (content, arguments) = written(max);
        assert_eq!(found["status"], "incomplete", "{max}");
        let output = found["output"].as_array().unwrap();
        assert_eq!(output[0]["content"][0]["text"], content, "{max}");
        let call = output.get(1);
        assert_eq!(call.is_some(), arguments.is_some(), "{max}: {output:?}");
        if let (Some(call), Some(arguments)) = (call, arguments) {
            assert_eq!(call["status"], "incomplete", "{max}");
            assert_eq!(call["arguments"].as_str().unwrap().trim_end_matches('\u{fffd}'), arguments, "{max}");
        }
        let mut streamed = body(RESPONSES, max);
        streamed["stream"] = true.into();
        let events = site.post(RESPONSES, &streamed).await.named_events();
        let deltas = events.iter().filter(|(name, _)| name == "response.function_call_arguments.delta");
        let given: String = deltas.map(|(_, data)| data["delta"].as_str().unwrap()).collect();
        assert_eq!(given, call.map_or("", |call| call["arguments"].as_str().unwrap()), "{max}");
        assert_eq!(events.last().unwrap().0, "response.incomplete", "{max}");
    }
}

/// `input` is an object there, so that half of one is none.
#[tokio::test]
async fn a_message_has_the_input_of_a_call_whole_or_not_at_all() {
    let site = site().await;
    for max in 1..=marked(CALL).len() {
        let found = site.post(MESSAGES, &body(MESSAGES, max)).await.json();
        let (content, arguments) = written(max);
        assert_eq!(found["stop_reason"], "max_tokens", "{max}");
        let blocks = found["content"].as_array().unwrap();
        assert_eq!(blocks[0]["text"], content, "{max}");
        assert_eq!(blocks.len() - 1, usize::from(arguments.is_some()), "{max}: {blocks:?}");
        if let Some(arguments) = arguments {
            let input = if arguments == ARGUMENTS { json!({"s": "é", "a": [{}]}) } else { json!({}) };
            assert_eq!(blocks[1]["input"], input, "{max}");
        }
        let mut streamed = body(MESSAGES, max);
        streamed["stream"] = true.into();
        let events = site.post(MESSAGES, &streamed).await.named_events();
        let given: String =
            events.iter().filter_map(|(_, data)| data["delta"]["partial_json"].as_str()).collect();
        assert_eq!(given.trim_end_matches('\u{fffd}'), arguments.unwrap_or_default(), "{max}");
    }
}

/// What ends in the middle of a call by the client's own word is nothing to run.
#[tokio::test]
async fn a_stop_string_within_a_call_is_a_stop() {
    let site = site().await;
    let reason = async |stop: &str| {
        let mut asked = body(CHAT, 500);
        asked["stop"] = stop.into();
        let choice = site.post(CHAT, &asked).await.json()["choices"][0].clone();
        let call = choice["message"]["tool_calls"][0]["function"]["arguments"].clone();
        (choice["finish_reason"].as_str().unwrap().to_owned(), call)
    };
    assert_eq!(reason("\"a\"").await, ("stop".into(), json!("{\"s\": \"é\", ")));
    assert_eq!(reason("}]}").await, ("stop".into(), json!("{\"s\": \"é\", \"a\": [{")));
    assert_eq!(reason("\"f\"").await, ("stop".into(), Value::Null));
    assert_eq!(reason("}\n").await, ("tool_calls".into(), json!(ARGUMENTS)));
    let mut asked = body(MESSAGES, 500);
    asked["stop_sequences"] = json!(["\"a\""]);
    let found = site.post(MESSAGES, &asked).await.json();
    assert_eq!((&found["stop_reason"], &found["stop_sequence"]), (&json!("stop_sequence"), &json!("\"a\"")));
}

/// A model that ends its answer within a call has left something out, which is made good as ever.
#[tokio::test]
async fn brackets_that_the_model_itself_leaves_out_are_made_good() {
    let text = "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": [\"b\"";
    let site = Site::start_model(says(text), tool_model(), |_| {}).await;
    let choice = site.post(CHAT, &body(CHAT, 500)).await.json()["choices"][0].clone();
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(choice["message"]["tool_calls"][0]["function"]["arguments"], "{\"a\": [\"b\"]}");
}
