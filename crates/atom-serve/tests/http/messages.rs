//! The Anthropic API: what reaches the model, what comes back, and in which words.

use crate::client::{JSON, Response};
use crate::equality;
use crate::fake::{Play, Site, answer, bytes, says, text_model};
use atom_base::hash::{FNV_64, fnv1a_64};
use atom_base::limits::BODY_BYTES_MAX;
use atom_engine::{EngineError, Event, Refusal};
use atom_serve::ApiKeys;
use serde_json::{Value, json};
use std::sync::Arc;

const PATH: &str = "/v1/messages";
const COUNT: &str = "/v1/messages/count_tokens";

fn ask(extra: Value) -> Value {
    let mut body =
        json!({"model": "tiny", "max_tokens": 100, "messages": [{"role": "user", "content": "hi"}]});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

/// The error of a failed request: its type and its message.
fn error(response: &Response) -> (String, String) {
    let body = response.json();
    assert_eq!(body["type"], "error", "{body}");
    assert_eq!(body["request_id"].as_str(), response.header("request-id"), "{body}");
    assert_eq!(response.header("request-id"), response.header("x-request-id"));
    let word =
        |name: &str| body["error"][name].as_str().unwrap_or_else(|| panic!("no {name} in {body}")).to_owned();
    (word("type"), word("message"))
}

/// The prompt that the request at `at` had, as text.
fn prompt(site: &Site, at: usize) -> String {
    text_model().tokenizer.decode(&site.fake.request(at).prompt, false)
}

#[tokio::test]
async fn a_message_is_answered_in_the_shape_of_the_api() {
    let site = Site::start(says("Grüße!")).await;
    let mut client = site.client().await;
    let headers =
        [JSON, ("anthropic-version", "2023-06-01"), ("anthropic-beta", "a,b"), ("x-api-key", "none")];
    client.send("POST", PATH, &headers, ask(json!({})).to_string().as_bytes()).await;
    let response = client.response().await;
    assert_eq!(response.status, 200, "{}", response.text());
    assert_eq!(response.header("request-id"), response.header("x-request-id"));
    let mut found = response.json();
    assert!(found["id"].as_str().unwrap().starts_with("msg_"));
    found["id"] = "".into();
    let tokens = site.fake.request(0).prompt.len();
    assert_eq!(
        found,
        json!({
            "id": "", "type": "message", "role": "assistant", "model": "tiny",
            "content": [{"type": "text", "text": "Grüße!"}],
            "stop_reason": "end_turn", "stop_sequence": null,
            "usage": {
                "input_tokens": tokens - 3, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 3,
                "output_tokens": 8,
            },
        })
    );
}

#[tokio::test]
async fn blocks_of_the_conversation_reach_the_template_in_order() {
    let site = Site::start(says("ok")).await;
    let body = ask(json!({
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=ab12"},
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
            {"type": "text", "text": "Be kind."},
        ],
        "messages": [
            {"role": "user", "content": "one"},
            {"role": "user", "content": [{"type": "text", "text": "two", "cache_control": {"type": "ephemeral"}}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "EqQB"},
                {"type": "redacted_thinking", "data": "EmwK"},
                {"type": "text", "text": "I look.", "citations": []},
                {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": 1}, "caller": {"type": "direct"}},
                {"type": "tool_use", "id": "toolu_2", "name": "look", "input": {}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "toolu_2", "content": "dark"},
                {"type": "tool_result", "tool_use_id": "toolu_1", "is_error": true,
                 "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"type": "text", "text": "So?"},
            ]},
        ],
    }));
    let response = site.post(PATH, &body).await;
    assert_eq!(response.status, 200, "{}", response.text());
    let turn = |role: &str, text: &str| format!("<|im_start|>{role}\n{text}<|im_end|>\n");
    let expected = [
        turn("system", "Be brief.\nBe kind."),
        turn("user", "one\ntwo"),
        turn("assistant", "I look."),
        turn("tool", "dark"),
        turn("tool", "Error: a\nb"),
        turn("user", "So?"),
        "<|im_start|>assistant\n".into(),
    ];
    assert_eq!(prompt(&site, 0), expected.concat());
}

/// ATOM's `test_anthropic_endpoint`.
#[tokio::test]
async fn a_system_of_nothing_but_a_billing_header_is_none() {
    let site = Site::start(says("ok")).await;
    let header = "x-anthropic-billing-header: cch=1";
    for system in [json!(header), json!([{"type": "text", "text": header}]), json!([]), Value::Null] {
        let before = site.fake.taken_now();
        assert_eq!(site.post(PATH, &ask(json!({"system": system}))).await.status, 200);
        assert_eq!(prompt(&site, before), "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n");
    }
}

#[tokio::test]
async fn the_answer_goes_on_from_a_last_message_of_the_assistant() {
    let site = Site::start(says("Paris.")).await;
    let messages = json!([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "It is "}]);
    let found = site.post(PATH, &ask(json!({"messages": messages}))).await.json();
    assert_eq!(prompt(&site, 0), "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nIt is ");
    assert_eq!(found["content"], json!([{"type": "text", "text": "Paris."}]));
}

/// ATOM's `test_api_server_helpers`: the request's value, else the server's, else none.
#[tokio::test]
async fn the_requests_sampling_beats_the_servers() {
    let site = Site::start_with(says("ok"), |options| {
        options.defaults.temperature = 0.75;
        options.defaults.top_k = 20;
    })
    .await;
    let cases = [
        (json!({}), (0.75, 20, 1.0)),
        (json!({"temperature": null, "top_p": 0.5}), (0.75, 20, 0.5)),
        (
            json!({"temperature": 0, "top_k": 3, "metadata": {"user_id": "u"}, "service_tier": "auto"}),
            (0.0, 3, 1.0),
        ),
    ];
    for (at, (fields, expected)) in cases.into_iter().enumerate() {
        let response = site.post(PATH, &ask(fields)).await;
        assert_eq!(response.status, 200, "{}", response.text());
        let sampling = site.fake.request(at).sampling;
        assert_eq!((sampling.temperature, sampling.top_k, sampling.top_p), expected);
    }
}

#[tokio::test]
async fn reasons_are_the_words_of_the_api() {
    let site = Site::start(says("one STOP two")).await;
    let reason = async |fields: Value| {
        let mut seen = Vec::new();
        for stream in [false, true] {
            let mut body = ask(fields.clone());
            body["stream"] = stream.into();
            let response = site.post(PATH, &body).await;
            let (delta, text) = if stream {
                let events = response.named_events();
                let of = |kind: &str, field: &str| -> String {
                    events
                        .iter()
                        .filter(|(_, data)| data["delta"]["type"] == kind)
                        .map(|(_, data)| data["delta"][field].as_str().unwrap())
                        .collect()
                };
                (events[events.len() - 2].1["delta"].clone(), of("text_delta", "text"))
            } else {
                let found = response.json();
                let text = found["content"][0]["text"].as_str().unwrap_or_default().to_owned();
                (json!({"stop_reason": found["stop_reason"], "stop_sequence": found["stop_sequence"]}), text)
            };
            seen.push((delta, text));
        }
        assert_eq!(seen[0], seen[1]);
        seen.swap_remove(0)
    };
    let delta =
        |reason: &str, sequence: Option<&str>| json!({"stop_reason": reason, "stop_sequence": sequence});
    assert_eq!(reason(json!({})).await, (delta("end_turn", None), "one STOP two".into()));
    assert_eq!(reason(json!({"max_tokens": 3})).await, (delta("max_tokens", None), "one".into()));
    let stops = json!({"stop_sequences": ["never", "STOP"]});
    assert_eq!(reason(stops).await, (delta("stop_sequence", Some("STOP")), "one ".into()));
}

/// The API takes more than there is room for, and says when the context ended the answer.
#[tokio::test]
async fn a_bound_beyond_the_context_is_the_context() {
    let site = Site::start(|request| answer(request, &vec![97; 2000])).await;
    let found = site.post(PATH, &ask(json!({"max_tokens": 64_000}))).await.json();
    let request = site.fake.request(0);
    assert_eq!(request.stop.max_tokens as usize, 900 - request.prompt.len());
    assert_eq!(found["stop_reason"], "model_context_window_exceeded");
    let long = json!({"messages": [{"role": "user", "content": "x".repeat(900)}]});
    let response = site.post(PATH, &ask(long)).await;
    assert_eq!((response.status, error(&response).0.as_str()), (400, "invalid_request_error"));
}

#[tokio::test]
async fn counted_tokens_are_those_of_the_real_request() {
    let site = Site::start(says("ok")).await;
    let long = "x".repeat(500);
    let bodies = [
        json!({}),
        json!({"system": "Be brief.", "messages": [{"role": "user", "content": [{"type": "text", "text": "é"}]}]}),
        json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}),
        json!({"messages": [{"role": "user", "content": long}], "tools": [], "cache_control": {"type": "ephemeral"}}),
        json!({"thinking": {"type": "disabled"}}),
    ];
    for fields in bodies {
        let body = ask(fields);
        let usage = site.post(PATH, &body).await.json()["usage"].clone();
        let mut counted = body.clone();
        counted.as_object_mut().unwrap().remove("max_tokens");
        let response = site.post(COUNT, &counted).await;
        let sum = ["input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"]
            .map(|name| usage[name].as_u64().unwrap());
        assert_eq!(response.json(), json!({"input_tokens": sum.iter().sum::<u64>()}), "{body}");
    }
    // A prompt that is too long for an answer has a length nevertheless.
    let long = json!({"model": "tiny", "messages": [{"role": "user", "content": "x".repeat(2000)}]});
    assert!(site.post(COUNT, &long).await.json()["input_tokens"].as_u64().unwrap() > 2000);
    assert_eq!(error(&site.post(COUNT, &ask(json!({}))).await).1, "unknown field 'max_tokens'");
}

/// Agents compact a conversation when they read these words, and stop at others.
#[tokio::test]
async fn a_prompt_that_is_too_long_is_called_so_with_both_numbers() {
    let site = Site::start(says("ok")).await;
    // Tokenised and found too long; and too many bytes to be tokenised at all.
    for length in [2000, 200_000] {
        let body = ask(json!({"messages": [{"role": "user", "content": "x".repeat(length)}]}));
        let response = site.post(PATH, &body).await;
        let (kind, message) = error(&response);
        assert_eq!((response.status, kind.as_str()), (400, "invalid_request_error"), "{message}");
        let numbers = message.strip_prefix("prompt is too long: ").unwrap_or_else(|| panic!("{message}"));
        let (tokens, max) = numbers.split_once(" tokens > ").unwrap();
        let max = max.split_once(" maximum").unwrap().0;
        assert!(tokens.parse::<usize>().unwrap() >= max.parse::<usize>().unwrap(), "{message}");
    }
}

#[tokio::test]
async fn streams_say_what_whole_answers_say_for_any_tokens() {
    let site = Site::start(|request| {
        answer(request, &equality::tokens(fnv1a_64(FNV_64, request.prompt.iter().copied()), 0))
    })
    .await;
    let mut client = site.client().await;
    for seed in 0..200 {
        let mut body = ask(json!({
            "messages": [{"role": "user", "content": seed.to_string()}],
            "max_tokens": 1 + seed % 40,
            "stop_sequences": if seed % 3 == 0 { json!(["ab", "é"]) } else { json!([]) },
        }));
        let whole = client.post(PATH, &body).await.json();
        body["stream"] = true.into();
        let events = client.post(PATH, &body).await.named_events();
        let text: String = events.iter().filter_map(|(_, data)| data["delta"]["text"].as_str()).collect();
        let expected =
            whole["content"].as_array().unwrap().iter().map(|block| block["text"].as_str().unwrap());
        assert_eq!(text, expected.collect::<String>(), "{body}");
        let end = &events[events.len() - 2].1;
        assert_eq!(end["usage"], whole["usage"], "{body}");
        assert_eq!(end["delta"]["stop_reason"], whole["stop_reason"], "{body}");
        let start = &events[0].1["message"]["usage"];
        assert_eq!(start["input_tokens"], whole["usage"]["input_tokens"]);
        assert_eq!(start["cache_read_input_tokens"], 3);
    }
}

/// The clock stands still but for timers, so the first thing that can come is the ping.
#[tokio::test(start_paused = true)]
async fn a_silent_stream_is_kept_alive_by_pings() {
    let site = Site::start(|request| {
        let mut plays = answer(request, &bytes("late"));
        plays.insert(1, Play::Gate);
        plays
    })
    .await;
    let mut client = site.client().await;
    client.send("POST", PATH, &[JSON], ask(json!({"stream": true})).to_string().as_bytes()).await;
    assert_eq!(client.head().await.status, 200);
    for _ in 0..2 {
        assert_eq!(client.chunk().await.unwrap(), b"event: ping\ndata: {\"type\":\"ping\"}\n\n");
    }
    site.fake.gate.add_permits(1);
    let mut rest = Vec::new();
    while let Some(chunk) = client.chunk().await {
        rest.extend(chunk);
    }
    let rest = String::from_utf8(rest).unwrap();
    assert!(rest.starts_with("event: message_start\n") && rest.contains("late"), "{rest}");
    assert!(rest.ends_with("event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n"), "{rest}");
}

#[tokio::test]
async fn failures_have_the_types_and_statuses_of_the_api() {
    let site = Site::start(says("ok")).await;
    let seen = async |method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]| {
        let mut client = site.client().await;
        client.send(method, path, headers, body).await;
        let response = client.response().await;
        (response.status, error(&response))
    };
    let large = vec![b' '; BODY_BYTES_MAX + 1];
    type Case<'a> = (&'a str, &'a str, &'a [(&'a str, &'a str)], &'a [u8], u16, &'a str, &'a str);
    let cases: [Case; 6] = [
        ("POST", PATH, &[JSON], b"{", 400, "invalid_request_error", "not valid JSON"),
        ("POST", PATH, &[JSON], b"{\"model\": \"claude\"}", 404, "not_found_error", "'claude' is not served"),
        ("POST", COUNT, &[JSON], b"{\"model\": \"claude\"}", 404, "not_found_error", "'tiny'"),
        ("POST", PATH, &[], b"{}", 415, "invalid_request_error", "content type"),
        ("GET", PATH, &[], b"", 405, "invalid_request_error", "not allowed"),
        ("POST", PATH, &[JSON], &large, 413, "request_too_large", "at most"),
    ];
    for (method, path, headers, body, status, kind, words) in cases {
        let (found, (found_kind, message)) = seen(method, path, headers, body).await;
        assert_eq!((found, found_kind.as_str()), (status, kind), "{method} {path}: {message}");
        assert!(message.contains(words), "no {words:?} in {message:?}");
    }
    site.fake.refuse_after(0, Refusal::QueueFull { waiting: 32 });
    let response = site.post(PATH, &ask(json!({}))).await;
    assert_eq!((response.status, error(&response).0.as_str()), (429, "rate_limit_error"));
    assert!(response.header("retry-after").is_some());
}

#[tokio::test]
async fn a_wrong_key_is_an_authentication_error_and_the_apis_own_header_opens() {
    let site = Site::start_with(says("ok"), |options| {
        options.api_keys = Arc::new(ApiKeys::new(["sk-one"]).unwrap());
    })
    .await;
    let body = ask(json!({})).to_string();
    for (key, status) in [("sk-one", 200), ("sk-two", 401)] {
        for path in [PATH, COUNT] {
            let body = if path == COUNT { body.replace("\"max_tokens\":100,", "") } else { body.clone() };
            let mut client = site.client().await;
            client.send("POST", path, &[JSON, ("x-api-key", key)], body.as_bytes()).await;
            let response = client.response().await;
            assert_eq!(response.status, status, "{}", response.text());
            assert!(status == 200 || error(&response).0 == "authentication_error");
        }
    }
}

#[tokio::test]
async fn a_failed_engine_is_an_api_error_and_the_last_event_of_a_stream() {
    let site = Site::start(|request| {
        let mut plays = answer(request, &bytes("ab"));
        plays.pop();
        plays.push(Play::Say(Event::Failed(EngineError::Rank("rank 1 is gone".into()))));
        plays
    })
    .await;
    let response = site.post(PATH, &ask(json!({}))).await;
    assert_eq!((response.status, error(&response).0.as_str()), (500, "api_error"));
    let streamed = site.post(PATH, &ask(json!({"stream": true}))).await;
    let events = streamed.named_events();
    let (name, data) = events.last().unwrap();
    assert_eq!(name, "error");
    assert_eq!(data["request_id"].as_str(), streamed.header("request-id"));
    assert_eq!(data["error"]["type"], "api_error");
    assert!(data["error"]["message"].as_str().unwrap().contains("rank 1 is gone"));
    assert!(!events.iter().any(|(name, _)| name == "message_stop"));
}

#[tokio::test]
async fn what_the_server_cannot_do_is_refused_by_name() {
    let site = Site::start(says("ok")).await;
    let mut client = site.client().await;
    let content = |content: Value| json!({"messages": [{"role": "user", "content": content}]});
    let past = |block: Value| json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": [block]}, {"role": "user", "content": "b"}]});
    let cases: Vec<(Value, &[&str])> = vec![
        (json!({"max_tokens": null}), &["'max_tokens' is missing"]),
        (json!({"max_tokens": 0}), &["max_tokens", "is 0"]),
        (json!({"temperature": 1.5}), &["temperature", "1.5", "from 0 to 1"]),
        (json!({"top_p": 0}), &["top_p", "above 0"]),
        (json!({"top_k": -1}), &["top_k", "-1"]),
        (json!({"stop_sequences": "x"}), &["stop_sequences", "a list"]),
        (json!({"stop_sequences": ["a", ""]}), &["stop_sequences[1]", "empty"]),
        (json!({"stop_sequences": ["a", 5]}), &["stop_sequences", "5"]),
        (json!({"stream": "yes"}), &["stream"]),
        (json!({"metadata": {"user_id": 5}}), &["metadata.user_id"]),
        (json!({"metadata": {"who": "x"}}), &["unknown field 'metadata.who'"]),
        (json!({"nonsense": 1}), &["unknown field 'nonsense'"]),
        (json!({"n": 2}), &["unknown field 'n'"]),
        (json!({"service_tier": "priority"}), &["service_tier", "one tier"]),
        (json!({"container": "c"}), &["container", "no code runs"]),
        (json!({"mcp_servers": [{"type": "url"}]}), &["mcp_servers"]),
        (
            json!({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}),
            &["context_management"],
        ),
        (json!({"inference_geo": "us"}), &["inference_geo"]),
        (json!({"speed": "fast"}), &["speed"]),
        (json!({"output_config": {"format": {"type": "yaml"}}}), &["output_config.format.type", "\"yaml\""]),
        (json!({"output_config": {"effort": "huge"}}), &["output_config.effort", "low"]),
        (json!({"thinking": {"type": "on"}}), &["thinking.type", "\"on\""]),
        (json!({"thinking": {"type": "enabled"}}), &["thinking.budget_tokens", "missing"]),
        (json!({"thinking": {"type": "enabled", "budget_tokens": 100}}), &["budget_tokens", "1024"]),
        (
            json!({"thinking": {"type": "enabled", "budget_tokens": 1024}}),
            &["budget_tokens", "less than max_tokens, which is 100"],
        ),
        (json!({"thinking": {"type": "adaptive", "display": "loud"}}), &["thinking.display", "omitted"]),
        (json!({"output_format": {"type": "yaml"}}), &["output_format.type", "\"yaml\""]),
        (
            json!({
                "output_format": {"type": "json_schema", "schema": {}},
                "output_config": {"format": {"type": "json_schema", "schema": {}}},
            }),
            &["output_format", "beside"],
        ),
        (json!({"system": 5}), &["system", "a string or a list"]),
        (json!({"system": [{"type": "image"}]}), &["system[0].type' is \"image\"", "no images"]),
        (json!({"cache_control": {"type": "forever"}}), &["cache_control.type"]),
        (json!({"messages": []}), &["at least one"]),
        (
            json!({"messages": [{"role": "tool", "content": "x"}]}),
            &["messages[0].role", "\"user\" or \"assistant\""],
        ),
        (json!({"messages": [{"role": "user"}]}), &["messages[0].content", "missing"]),
        (
            content(json!([{"type": "image", "source": {}}])),
            &["messages[0].content[0].type' is \"image\"", "no images"],
        ),
        (content(json!([{"type": "document", "source": {}}])), &["type' is \"document\"", "no documents"]),
        (content(json!([{"type": "tool_use"}])), &["messages[0].content[0].type", "assistant"]),
        (content(json!([{"type": "poem"}])), &["\"poem\""]),
        (
            content(json!([{"type": "text", "text": "x", "mood": 1}])),
            &["unknown field 'messages[0].content[0].mood'"],
        ),
        (
            content(
                json!([{"type": "text", "text": "x", "cache_control": {"type": "ephemeral", "ttl": "1y"}}]),
            ),
            &["cache_control.ttl"],
        ),
        (past(json!({"type": "server_tool_use", "id": "x"})), &["server_tool_use", "no tools run"]),
        (past(json!({"type": "web_search_tool_result"})), &["no tools run"]),
        (
            past(json!({"type": "thinking", "thinking": "a", "signature": "atom1-0000000000000000"})),
            &["signature", "as they came"],
        ),
        (past(json!({"type": "tool_use", "id": "t1", "name": "f", "input": {}})), &["messages[2]", "t1"]),
        (past(json!({"type": "tool_use", "id": "t1", "name": "f", "input": "{}"})), &["input", "an object"]),
        (
            json!({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
            &["tools[0].type' is \"web_search_20250305\""],
        ),
        (
            json!({"tools": [{"name": "a b", "input_schema": {"type": "object"}}]}),
            &["tools[0].name", "\"a b\""],
        ),
        (json!({"tools": [{"name": "f", "input_schema": {"type": "string"}}]}), &["input_schema.type"]),
        (json!({"tools": [{"name": "f", "defer_loading": true}]}), &["tools[0].defer_loading"]),
        (json!({"tool_choice": {"type": "any"}}), &["tool_choice"]),
        (json!({"tool_choice": {"type": "tool", "name": "f"}}), &["tool_choice.name", "\"f\""]),
        (json!({"tool_choice": {"type": "maybe"}}), &["tool_choice.type", "maybe"]),
        (json!({"tool_choice": "auto"}), &["tool_choice", "an object"]),
    ];
    for (fields, words) in cases {
        let response = client.post(PATH, &ask(fields.clone())).await;
        assert_eq!(response.status, 400, "{fields}: {}", response.text());
        let (kind, message) = error(&response);
        assert_eq!(kind, "invalid_request_error");
        for word in words {
            assert!(message.contains(word), "{fields}: no {word:?} in {message:?}");
        }
    }
    assert_eq!(site.fake.taken_now(), 0);
    assert_eq!(client.post(PATH, &ask(json!({}))).await.status, 200);
}
