//! Tools and thoughts in the APIs that agents speak: messages and responses, beside chat completions.

use crate::equality::Draws;
use crate::fake::{Play, Site, answer, says, tool_model};
use crate::tools::marked;
use atom_base::hash::{FNV_64, fnv1a_64};
use atom_engine::Request;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const MESSAGES: &str = "/v1/messages";
const RESPONSES: &str = "/v1/responses";

fn schema() -> Value {
    json!({"type": "object", "properties": {"city": {"type": "string"}}})
}

fn with(mut body: Value, extra: Value) -> Value {
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

/// The same question in each API, with one tool.
fn chat(extra: Value) -> Value {
    let tool = json!({"type": "function", "function": {"name": "weather", "description": "Looks.", "parameters": schema()}});
    with(json!({"messages": [{"role": "user", "content": "hi"}], "tools": [tool], "max_tokens": 500}), extra)
}

fn messages(extra: Value) -> Value {
    let tool = json!({"name": "weather", "description": "Looks.", "input_schema": schema()});
    with(json!({"messages": [{"role": "user", "content": "hi"}], "tools": [tool], "max_tokens": 500}), extra)
}

fn responses(extra: Value) -> Value {
    let tool =
        json!({"type": "function", "name": "weather", "description": "Looks.", "parameters": schema()});
    with(json!({"input": "hi", "tools": [tool], "max_output_tokens": 500}), extra)
}

async fn site(text: &'static str) -> Site {
    Site::start_model(move |request| answer(request, &marked(text)), tool_model(), |_| {}).await
}

fn prompt(site: &Site, at: usize) -> String {
    tool_model().tokenizer.decode(&site.fake.request(at).prompt, false)
}

const CALL: &str = "<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"Zürich\"}}</tool_call>";

/// An answer by its kinds of parts: text, thoughts, and calls as name and arguments.
type Said = (String, String, Vec<(String, Value)>);

/// Cut-off arguments are none in messages; the others give them as they are.
fn arguments(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or(json!({}))
}

fn said_in_chat(whole: &Value) -> Said {
    let message = &whole["choices"][0]["message"];
    let text = |name: &str| message[name].as_str().unwrap_or_default().to_owned();
    let calls = message["tool_calls"].as_array().into_iter().flatten().map(|call| {
        let function = &call["function"];
        (function["name"].as_str().unwrap().to_owned(), arguments(function["arguments"].as_str().unwrap()))
    });
    (text("content"), text("reasoning_content"), calls.collect())
}

fn said_in_messages(whole: &Value) -> Said {
    let mut said = Said::default();
    for block in whole["content"].as_array().unwrap() {
        match block["type"].as_str().unwrap() {
            "text" => said.0.push_str(block["text"].as_str().unwrap()),
            "thinking" => said.1.push_str(block["thinking"].as_str().unwrap()),
            _ => said.2.push((block["name"].as_str().unwrap().to_owned(), block["input"].clone())),
        }
    }
    said
}

fn said_in_responses(whole: &Value) -> Said {
    let mut said = Said::default();
    for item in whole["output"].as_array().unwrap() {
        let text = item["content"][0]["text"].as_str().unwrap_or_default();
        match item["type"].as_str().unwrap() {
            "message" => said.0.push_str(text),
            "reasoning" => said.1.push_str(text),
            _ => {
                let input = arguments(item["arguments"].as_str().unwrap());
                said.2.push((item["name"].as_str().unwrap().to_owned(), input));
            }
        }
    }
    said
}

/// The deltas of a stream of messages, put together.
fn said_by_deltas(events: &[(String, Value)]) -> Said {
    let (mut said, mut json) = (Said::default(), String::new());
    let end = |said: &mut Said, json: &mut String| {
        if let Some(call) = said.2.last_mut().filter(|call| call.1.is_null()) {
            call.1 = arguments(&std::mem::take(json));
        }
    };
    for (name, data) in events {
        match name.as_str() {
            "content_block_start" if data["content_block"]["type"] == "tool_use" => {
                said.2.push((data["content_block"]["name"].as_str().unwrap().to_owned(), Value::Null));
            }
            "content_block_delta" => {
                let delta = &data["delta"];
                said.0.push_str(delta["text"].as_str().unwrap_or_default());
                said.1.push_str(delta["thinking"].as_str().unwrap_or_default());
                json.push_str(delta["partial_json"].as_str().unwrap_or_default());
            }
            "content_block_stop" => end(&mut said, &mut json),
            "response.output_item.added" if data["item"]["type"] == "function_call" => {
                said.2.push((data["item"]["name"].as_str().unwrap().to_owned(), Value::Null));
            }
            "response.output_text.delta" => said.0.push_str(data["delta"].as_str().unwrap()),
            "response.reasoning_text.delta" => said.1.push_str(data["delta"].as_str().unwrap()),
            "response.function_call_arguments.delta" => json.push_str(data["delta"].as_str().unwrap()),
            "response.output_item.done" => end(&mut said, &mut json),
            _ => {}
        }
    }
    said
}

/// Answers with words, thoughts, calls and markers where they make no sense, by the prompt, and lets them be
/// read now and then.
fn play(request: &Request) -> Vec<Play> {
    let mut draws = Draws { seed: fnv1a_64(FNV_64, request.prompt.iter().copied()), at: 0 };
    // Thoughts open an answer; elsewhere the tag is quoted.
    let mut text = String::from(draws.pick(&["", "<think>"]));
    for _ in 0..draws.below(8) {
        match draws.below(4) {
            0 => text.push_str(CALL),
            1 => text.push_str(draws.pick(&["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_"])),
            _ => text.push_str(draws.pick(&["ab", "é🦀", " \n", "<", "c ", "{\"a\": 1}"])),
        }
    }
    let mut mixed = Vec::new();
    let mut cuts = Draws { seed: request.id.0, at: 0 };
    for play in answer(request, &marked(&text)) {
        mixed.push(play);
        if cuts.below(4) == 0 {
            mixed.extend([Play::Yield, Play::Yield]);
        }
    }
    mixed
}

#[tokio::test]
async fn three_apis_say_the_same_whole_and_streamed() {
    let site = Site::start_model(play, tool_model(), |_| {}).await;
    let mut client = site.client().await;
    let (mut thoughts, mut calls, mut cut) = (0, 0, 0);
    for seed in 0..150 {
        let turn = json!([{"role": "user", "content": seed.to_string()}]);
        let max = 20 + seed * 7 % 300;
        let expected = client.post(CHAT, &chat(json!({"messages": turn, "max_tokens": max}))).await.json();
        let said = said_in_chat(&expected);
        let finish = expected["choices"][0]["finish_reason"].as_str().unwrap();
        thoughts += usize::from(!said.1.is_empty());
        calls += said.2.len();
        cut += usize::from(finish == "length");

        let mut body = messages(json!({"messages": turn, "max_tokens": max}));
        let whole = client.post(MESSAGES, &body).await.json();
        // Thoughts that nobody asked for are shown where there is nothing else.
        let mut shown = said.clone();
        if !(said.0.is_empty() && said.2.is_empty()) {
            shown.1.clear();
        }
        assert_eq!(said_in_messages(&whole), shown, "{body}");
        body["stream"] = true.into();
        let events = client.post(MESSAGES, &body).await.named_events();
        assert_eq!(said_by_deltas(&events), shown, "{body}");
        let end = &events[events.len() - 2].1;
        assert_eq!((&end["usage"], &end["delta"]["stop_reason"]), (&whole["usage"], &whole["stop_reason"]));
        assert_eq!(whole["usage"]["output_tokens"], expected["usage"]["completion_tokens"]);
        let reason = match finish {
            "length" => "max_tokens",
            "tool_calls" => "tool_use",
            _ => "end_turn",
        };
        assert_eq!(whole["stop_reason"], reason, "{whole}");

        let mut body = responses(json!({"input": turn, "max_output_tokens": max}));
        let whole = client.post(RESPONSES, &body).await.json();
        assert_eq!(said_in_responses(&whole), said, "{body}");
        body["stream"] = true.into();
        let events = client.post(RESPONSES, &body).await.named_events();
        assert_eq!(said_by_deltas(&events), said, "{body}");
        let last = &events.last().unwrap().1["response"];
        assert_eq!((&last["usage"], &last["status"]), (&whole["usage"], &whole["status"]));
        assert_eq!(last["status"], if finish == "length" { "incomplete" } else { "completed" });
        let prompts: Vec<_> =
            (0..5).map(|at| site.fake.request(site.fake.taken_now() - 1 - at).prompt).collect();
        assert!(prompts.windows(2).all(|pair| pair[0] == pair[1]), "one question makes one prompt");
    }
    assert!(thoughts > 10 && calls > 30 && cut > 10, "{thoughts} thoughts, {calls} calls, {cut} cut");
}

/// ATOM's `test_anthropic_endpoint`: the order of blocks, and what clients send back.
#[tokio::test]
async fn a_message_with_thoughts_text_and_a_call_can_be_sent_back_as_it_came() {
    let text = "<think>hm</think>I look.<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"Zürich\"}}</tool_call>";
    let site = site(text).await;
    let unasked = site.post(MESSAGES, &messages(json!({}))).await.json();
    assert_eq!(
        unasked["content"][0],
        json!({"type": "text", "text": "I look."}),
        "thoughts are for those who ask"
    );
    let found = site.post(MESSAGES, &messages(json!({"thinking": {"type": "adaptive"}}))).await.json();
    let kinds: Vec<&str> =
        found["content"].as_array().unwrap().iter().map(|block| block["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["thinking", "text", "tool_use"]);
    assert_eq!(found["stop_reason"], "tool_use");
    assert!(found["usage"]["output_tokens_details"]["thinking_tokens"].as_u64().unwrap() >= 2);
    let id = found["content"][2]["id"].clone();
    let history = json!([
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": found["content"]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": id, "content": "rain"}]},
    ]);
    let response = site.post(MESSAGES, &messages(json!({"messages": history}))).await;
    assert_eq!(response.status, 200, "{}", response.text());
    let said = "<|im_start|>assistant\n<think>hm</think>I look.<tool_call>weather city=\"Zürich\"</tool_call><|im_end|>";
    // The switch had opened the thoughts already when the model opened them again.
    let once = |prompt: String| prompt.replace("<think><think>", "<think>");
    let prompt = once(prompt(&site, 2));
    assert!(prompt.contains(said), "{prompt}");
    assert!(
        prompt.contains(&format!("<|im_start|>tool={}\nrain<|im_end|>", id.as_str().unwrap())),
        "{prompt}"
    );

    let found = site.post(RESPONSES, &responses(json!({}))).await.json();
    let mut items = found["output"].as_array().unwrap().clone();
    let kinds: Vec<&str> = items.iter().map(|item| item["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["reasoning", "message", "function_call"]);
    assert!(found["usage"]["output_tokens_details"]["reasoning_tokens"].as_u64().unwrap() >= 2);
    let call_id = items[2]["call_id"].clone();
    items.insert(0, json!({"role": "user", "content": "hi"}));
    items.push(json!({"type": "function_call_output", "call_id": call_id, "output": "rain"}));
    let response = site.post(RESPONSES, &responses(json!({"input": items}))).await;
    assert_eq!(response.status, 200, "{}", response.text());
    assert_eq!(
        once(self::prompt(&site, 4)).replace(call_id.as_str().unwrap(), "ID"),
        prompt.replace(id.as_str().unwrap(), "ID")
    );
}

#[tokio::test]
async fn choices_of_tools_act_in_both_apis() {
    let two = Box::leak(format!("{CALL}{CALL}").into_boxed_str());
    let site = site(two).await;
    let calls = |found: &Value| found["content"].as_array().unwrap().len();
    assert_eq!(calls(&site.post(MESSAGES, &messages(json!({}))).await.json()), 2);
    let single = json!({"tool_choice": {"type": "auto", "disable_parallel_tool_use": true}});
    let found = site.post(MESSAGES, &messages(single)).await.json();
    assert_eq!((calls(&found), found["stop_reason"].as_str()), (1, Some("tool_use")));
    let found = site.post(RESPONSES, &responses(json!({"parallel_tool_calls": false}))).await.json();
    assert_eq!((found["output"].as_array().unwrap().len(), found["status"].as_str()), (1, Some("completed")));

    let none = json!({"tool_choice": {"type": "none"}});
    let found = site.post(MESSAGES, &messages(none.clone())).await.json();
    assert_eq!(
        (found["content"][0]["type"].as_str(), found["stop_reason"].as_str()),
        (Some("text"), Some("end_turn"))
    );
    let found = site.post(RESPONSES, &responses(json!({"tool_choice": "none"}))).await.json();
    assert_eq!(found["output"][0]["type"], "message");
    assert_eq!(found["tool_choice"], "none");
    for at in [3, 4] {
        assert_eq!(prompt(&site, at).trim_end(), "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant");
    }
    assert!(
        prompt(&site, 0).contains("\"name\":\"weather\"")
            || prompt(&site, 0).contains("\"name\": \"weather\"")
    );

    let mut counted = messages(none);
    counted.as_object_mut().unwrap().remove("max_tokens");
    let found = site.post("/v1/messages/count_tokens", &counted).await.json();
    assert_eq!(found["input_tokens"], site.fake.request(3).prompt.len());
    counted.as_object_mut().unwrap().remove("tool_choice");
    let found = site.post("/v1/messages/count_tokens", &counted).await.json();
    assert_eq!(found["input_tokens"], site.fake.request(0).prompt.len());
}

#[tokio::test]
async fn thinking_is_the_templates_switch_and_hides_what_was_not_asked_for() {
    let site = Site::start_model(says("hm</think>so"), tool_model(), |_| {}).await;
    let mut at = 0;
    let mut seen = async |fields: Value| {
        let found =
            site.post(MESSAGES, &messages(with(json!({"max_tokens": 2000, "tools": []}), fields))).await;
        assert_eq!(found.status, 200, "{}", found.text());
        let end = prompt(&site, at).rsplit("assistant").next().unwrap().trim().to_owned();
        at += 1;
        (end, said_in_messages(&found.json()))
    };
    let thought = ("so".to_owned(), "hm".to_owned(), Vec::new());
    let enabled = json!({"thinking": {"type": "enabled", "budget_tokens": 1500}});
    assert_eq!(seen(enabled).await, ("<think>".into(), thought.clone()));
    assert_eq!(seen(json!({"thinking": {"type": "adaptive"}})).await.0, "<think>");
    let (end, said) = seen(json!({"thinking": {"type": "disabled"}})).await;
    assert_eq!((end.as_str(), said.1.as_str()), ("<think>\n\n</think>", ""));
    assert_eq!(seen(json!({})).await.0, "");

    let begun = json!([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "It"}]);
    let on = json!({"messages": begun, "tools": [], "thinking": {"type": "adaptive"}});
    let response = site.post(MESSAGES, &messages(on)).await;
    assert_eq!(response.status, 400, "{}", response.text());
    assert!(response.text().contains("thinking off"), "{}", response.text());
    let off = json!({"messages": begun, "tools": [], "thinking": {"type": "disabled"}});
    assert_eq!(site.post(MESSAGES, &messages(off)).await.status, 200);
    assert!(prompt(&site, 4).ends_with("</think>\n\nIt"), "{}", prompt(&site, 4));

    let response =
        site.post(RESPONSES, &responses(json!({"tools": [], "reasoning": {"effort": "none"}}))).await;
    assert_eq!(response.status, 200, "{}", response.text());
    assert!(prompt(&site, 5).ends_with("</think>\n\n"));
}

/// Effort and thinking are two things in this API: clients send both always.
#[tokio::test]
async fn effort_does_not_switch_on_what_thinking_switched_off() {
    let site = Site::start_model(says("ok"), tool_model(), |_| {}).await;
    let end = async |thinking: Value, effort: &str| {
        let fields = json!({"tools": [], "thinking": thinking, "output_config": {"effort": effort}});
        let found = site.post(MESSAGES, &messages(fields)).await;
        assert_eq!(found.status, 200, "{}", found.text());
        prompt(&site, site.fake.taken_now() - 1).rsplit("assistant\n").next().unwrap().to_owned()
    };
    let (on, off) = ("<think>\n", "<think>\n\n</think>\n\n");
    assert_eq!(end(json!({"type": "disabled"}), "high").await, off);
    assert_eq!(end(json!({"type": "adaptive"}), "low").await, on);
    assert_eq!(end(Value::Null, "high").await, on);
    assert_eq!(end(Value::Null, "minimal").await, off);
}
