//! The Responses API: what reaches the model, what comes back, and what isn't kept.

use crate::client::Response;
use crate::equality;
use crate::fake::{Play, Site, answer, bytes, says, text_model};
use atom_base::hash::{FNV_64, fnv1a_64};
use atom_engine::{EngineError, Event};
use serde_json::{Value, json};

const PATH: &str = "/v1/responses";

fn ask(extra: Value) -> Value {
    let mut body = json!({"model": "tiny", "input": "hi"});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

#[tokio::test]
async fn a_response_has_the_shape_of_the_api_and_repeats_its_request() {
    let site = Site::start(says("Grüße!")).await;
    let fields = json!({
        "temperature": 0.7, "top_p": 0.5, "max_output_tokens": 50, "metadata": {"k": "v"}, "store": false,
        "instructions": "Be brief.", "parallel_tool_calls": false, "tools": [], "truncation": "disabled",
        "include": ["reasoning.encrypted_content"], "user": "u", "text": {"format": {"type": "text"}},
    });
    let response = site.post(PATH, &ask(fields)).await;
    assert_eq!(response.status, 200, "{}", response.text());
    let mut found = response.json();
    assert!(found["id"].as_str().unwrap().starts_with("resp_"));
    assert!(found["output"][0]["id"].as_str().unwrap().starts_with("msg_"));
    assert!(found["created_at"].as_u64().unwrap() > 1_600_000_000);
    for place in ["/id", "/created_at", "/output/0/id"] {
        *found.pointer_mut(place).unwrap() = Value::Null;
    }
    let tokens = site.fake.request(0).prompt.len();
    assert_eq!(
        found,
        json!({
            "id": null, "object": "response", "created_at": null, "status": "completed", "error": null,
            "incomplete_details": null, "model": "tiny", "instructions": "Be brief.", "metadata": {"k": "v"},
            "output": [{
                "id": null, "type": "message", "status": "completed", "role": "assistant",
                "content": [{"type": "output_text", "text": "Grüße!", "annotations": [], "logprobs": []}],
            }],
            "temperature": 0.7, "top_p": 0.5, "max_output_tokens": 50, "store": false, "background": false,
            "parallel_tool_calls": false, "tools": [], "tool_choice": "auto", "truncation": "disabled",
            "previous_response_id": null, "reasoning": {"effort": null, "summary": null}, "user": "u",
            "service_tier": "default", "text": {"format": {"type": "text"}}, "top_logprobs": 0,
            "usage": {
                "input_tokens": tokens, "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
                "output_tokens": 8, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": tokens + 8,
            },
        })
    );
    let sampling = site.fake.request(0).sampling;
    assert_eq!((sampling.temperature, sampling.top_p), (0.7, 0.5));
}

#[tokio::test]
async fn items_reach_the_template_in_order() {
    let site = Site::start(says("ok")).await;
    let input = json!([
        {"role": "developer", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}], "encrypted_content": null},
        {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
         "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "look", "arguments": "{}", "status": "completed"},
        {"type": "function_call", "call_id": "call_2", "name": "look", "arguments": ""},
        {"type": "function_call_output", "call_id": "call_1", "output": "dark"},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "bright"}]},
        {"role": "user", "content": "So?"},
    ]);
    let response = site.post(PATH, &ask(json!({"instructions": "Be brief.", "input": input}))).await;
    assert_eq!(response.status, 200, "{}", response.text());
    let turn = |role: &str, text: &str| format!("<|im_start|>{role}\n{text}<|im_end|>\n");
    let expected = [
        turn("system", "Be brief.\n\nBe kind."),
        turn("user", "a\nb"),
        turn("assistant", "I look."),
        turn("tool", "dark"),
        turn("tool", "bright"),
        turn("user", "So?"),
        "<|im_start|>assistant\n".into(),
    ];
    assert_eq!(text_model().tokenizer.decode(&site.fake.request(0).prompt, false), expected.concat());
}

#[tokio::test]
async fn streams_say_what_whole_answers_say_for_any_tokens() {
    let site = Site::start(|request| {
        answer(request, &equality::tokens(fnv1a_64(FNV_64, request.prompt.iter().copied()), 0))
    })
    .await;
    let mut client = site.client().await;
    let mut cut = 0;
    for seed in 0..200 {
        let mut body = ask(json!({"input": seed.to_string(), "max_output_tokens": 1 + seed % 30}));
        let mut whole = client.post(PATH, &body).await.json();
        body["stream"] = true.into();
        let events = client.post(PATH, &body).await.named_events();
        for (at, (_, data)) in events.iter().enumerate() {
            assert_eq!(data["sequence_number"], at);
        }
        let (name, last) = events.last().unwrap();
        let mut streamed = last["response"].clone();
        assert_eq!(*name, format!("response.{}", whole["status"].as_str().unwrap()));
        cut += usize::from(whole["status"] == "incomplete");
        for response in [&mut whole, &mut streamed] {
            response["id"] = Value::Null;
            response["created_at"] = Value::Null;
            for item in response["output"].as_array_mut().unwrap() {
                item["id"] = Value::Null;
            }
        }
        assert_eq!(streamed, whole, "{body}");
        let text: String = events
            .iter()
            .filter(|(name, _)| name == "response.output_text.delta")
            .map(|(_, data)| data["delta"].as_str().unwrap())
            .collect();
        assert_eq!(text, whole["output"][0]["content"][0]["text"].as_str().unwrap_or_default(), "{body}");
    }
    assert!(cut > 10, "some answers must be cut: {cut}");
}

#[tokio::test]
async fn a_format_reaches_the_engine_as_a_grammar_from_both_younger_apis() {
    let site = Site::start(says("{}")).await;
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
    let format = json!({"type": "json_schema", "name": "a", "schema": schema, "strict": true});
    let found = site.post(PATH, &ask(json!({"text": {"format": format}}))).await;
    assert_eq!(found.status, 200, "{}", found.text());
    assert_eq!(found.json()["text"]["format"], format);
    assert_eq!(site.post(PATH, &ask(json!({"text": {"format": {"type": "text"}}}))).await.status, 200);
    let body = json!({
        "max_tokens": 9, "messages": [{"role": "user", "content": "x"}],
        "output_config": {"format": {"type": "json_schema", "schema": schema}},
    });
    let found = site.post("/v1/messages", &body).await;
    assert_eq!(found.status, 200, "{}", found.text());
    // As clients of the first structured outputs send it.
    let body = json!({
        "max_tokens": 9, "messages": [{"role": "user", "content": "x"}],
        "output_format": {"type": "json_schema", "schema": schema},
    });
    let found = site.post("/v1/messages", &body).await;
    assert_eq!(found.status, 200, "{}", found.text());
    let held: Vec<bool> = (0..4).map(|at| site.fake.request(at).grammar.is_some()).collect();
    assert_eq!(held, [true, false, true, true]);
}

#[tokio::test]
async fn a_failed_engine_fails_the_response() {
    let site = Site::start(|request| {
        let mut plays = answer(request, &bytes("ab"));
        plays.pop();
        plays.push(Play::Say(Event::Failed(EngineError::Rank("rank 1 is gone".into()))));
        plays
    })
    .await;
    let response = site.post(PATH, &ask(json!({}))).await;
    assert_eq!((response.status, response.error()["type"].as_str()), (500, Some("server_error")));
    let events = site.post(PATH, &ask(json!({"stream": true}))).await.named_events();
    let (name, data) = events.last().unwrap();
    assert_eq!((name.as_str(), &data["response"]["status"]), ("response.failed", &json!("failed")));
    assert!(data["response"]["error"]["message"].as_str().unwrap().contains("rank 1 is gone"));
}

/// aiperf --use-server-token-count asks for it in every API, though here it is always there.
#[tokio::test]
async fn usage_may_be_asked_for_as_in_chat() {
    let site = Site::start(says("ok")).await;
    let last = |response: Response| response.named_events().pop().unwrap().1["response"]["usage"].clone();
    let asked = json!({"stream": true, "stream_options": {"include_usage": true}});
    let asked = last(site.post(PATH, &ask(asked)).await);
    let unasked = last(site.post(PATH, &ask(json!({"stream": true}))).await);
    assert!(asked["output_tokens"].as_u64().unwrap() > 0 && asked == unasked, "{asked} {unasked}");
}

#[tokio::test]
async fn what_is_not_kept_or_not_built_is_refused_by_name() {
    let site = Site::start(says("ok")).await;
    let mut client = site.client().await;
    let item = |item: Value| json!({"input": [item]});
    let part = |part: Value| json!({"input": [{"role": "user", "content": [part]}]});
    let cases: Vec<(Value, &str, &[&str])> = vec![
        (json!({"store": true}), "store", &["nothing is stored"]),
        (json!({"background": true}), "background", &["stored"]),
        (json!({"previous_response_id": "resp_1"}), "previous_response_id", &["whole conversation"]),
        (json!({"conversation": "conv_1"}), "conversation", &["whole conversation"]),
        (json!({"prompt": {"id": "pmpt_1"}}), "prompt", &["templates"]),
        (json!({"include": ["message.output_text.logprobs"]}), "include", &[]),
        (json!({"truncation": "auto"}), "truncation", &["as a whole"]),
        (json!({"max_tool_calls": 2}), "max_tool_calls", &[]),
        (json!({"top_logprobs": 2}), "top_logprobs", &["/v1/chat/completions"]),
        (json!({"service_tier": "flex"}), "service_tier", &["one tier"]),
        (
            json!({"stream": true, "stream_options": {"include_obfuscation": true}}),
            "stream_options.include_obfuscation",
            &[],
        ),
        (
            json!({"stream": true, "stream_options": {"include_usage": false}}),
            "stream_options.include_usage",
            &["usage included"],
        ),
        (json!({"text": {"format": {"type": "yaml"}}}), "text.format.type", &["\"yaml\""]),
        (json!({"text": {"verbosity": "high"}}), "text.verbosity", &[]),
        (json!({"reasoning": {"summary": "long"}}), "reasoning.summary", &["\"long\"", "concise"]),
        (json!({"reasoning": {"context": "all_turns"}}), "reasoning.context", &["chat template"]),
        (json!({"reasoning": {"effort": "huge"}}), "reasoning.effort", &["low"]),
        (json!({"temperature": 3}), "temperature", &["from 0 to 2"]),
        (json!({"max_output_tokens": 0}), "max_output_tokens", &["is 0"]),
        (json!({"metadata": []}), "metadata", &["an object"]),
        (json!({"messages": []}), "messages", &["unknown field"]),
        (json!({"max_tokens": 5}), "max_tokens", &["unknown field"]),
        (json!({"input": null}), "input", &["missing"]),
        (json!({"input": []}), "input", &["at least one item"]),
        (json!({"input": 5}), "input", &["a text or a list"]),
        (item(json!({"type": "item_reference", "id": "msg_1"})), "input[0].type", &["no item is kept"]),
        (item(json!({"type": "file_search_call", "id": "fs_1"})), "input[0].type", &["no tools run"]),
        (
            item(json!({"type": "custom_tool_call", "call_id": "c", "name": "f"})),
            "input[0].input",
            &["missing"],
        ),
        (
            item(json!({"type": "function_call", "call_id": "c", "namespace": "n", "name": ""})),
            "input[0].name",
            &["1 to 512 bytes"],
        ),
        (item(json!({"type": "poem"})), "input[0].type", &["\"poem\""]),
        (item(json!({"role": "king", "content": "x"})), "input[0].role", &["\"king\""]),
        (item(json!({"role": "user"})), "input[0].content", &["missing"]),
        (
            item(json!({"type": "function_call", "call_id": "c", "name": "f", "arguments": [1]})),
            "input[0].arguments",
            &["a string"],
        ),
        (
            item(json!({"type": "function_call", "call_id": "c", "name": "a\nb", "arguments": "{}"})),
            "input[0].name",
            &["control characters"],
        ),
        (
            part(json!({"type": "input_image", "image_url": "data:"})),
            "input[0].content[0].type",
            &["no images"],
        ),
        (part(json!({"type": "input_file", "file_id": "x"})), "input[0].content[0].type", &["no files"]),
        (part(json!({"type": "input_text"})), "input[0].content[0].text", &["missing"]),
        (json!({"tools": [{"type": "file_search"}]}), "tools[0].type", &["no tools run"]),
        (json!({"tools": [{"type": "mcp"}]}), "tools[0].type", &["run it yourself"]),
        (
            json!({"tools": [{"type": "custom", "name": "x", "format": {"type": "grammar", "syntax": "gbnf"}}]}),
            "tools[0].format.syntax",
            &["\"gbnf\"", "lark"],
        ),
        (
            json!({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "web_search"}]}]}),
            "tools[0].tools[0].type",
            &["within a namespace"],
        ),
        (json!({"tools": [{"type": "namespace", "name": "a b"}]}), "tools[0].name", &["\"a b\""]),
        (
            json!({"tools": [{"type": "web_search"}], "tool_choice": "required"}),
            "tool_choice",
            &["without 'tools'"],
        ),
        (
            json!({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}),
            "tool_choice.type",
            &["\"web_search\""],
        ),
        (json!({"tools": [{"type": "function"}]}), "tools[0].name", &["missing"]),
        (json!({"tool_choice": "maybe"}), "tool_choice", &["\"maybe\""]),
        (json!({"tool_choice": {"type": "function", "name": "f"}}), "tool_choice.name", &["\"f\""]),
        (json!({"tool_choice": "required"}), "tool_choice", &["'tools'"]),
    ];
    for (fields, param, words) in cases {
        let response = client.post(PATH, &ask(fields.clone())).await;
        assert_eq!(response.status, 400, "{fields}: {}", response.text());
        let error = response.error();
        assert_eq!(error["param"].as_str(), Some(param), "{fields}: {error}");
        for word in words {
            assert!(error["message"].as_str().unwrap().contains(word), "{fields}: no {word:?} in {error}");
        }
    }
    assert_eq!(site.fake.taken_now(), 0);
    let error = client.post(PATH, &json!({"model": "other", "input": "x"})).await;
    assert_eq!((error.status, error.error()["code"].as_str()), (404, Some("model_not_found")));
}
