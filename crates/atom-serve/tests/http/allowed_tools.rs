//! `tool_choice` of type `allowed_tools`: the model sees all tools and may call some.

use crate::constraints::follows;
use crate::fake::{Site, says, tool_model};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const RESPONSES: &str = "/v1/responses";

/// A body of the tools `f`, `g` and `h`.
fn body(path: &str, choice: &Value) -> Value {
    let named = |name: &str| match path {
        CHAT => json!({"type": "function", "function": {"name": name}}),
        _ => json!({"type": "function", "name": name}),
    };
    let messages = json!([{"role": "user", "content": "hi"}]);
    let input = if path == CHAT { "messages" } else { "input" };
    json!({input: messages, "tools": [named("f"), named("g"), named("h")], "tool_choice": choice})
}

fn choice(path: &str, mode: &str, names: &[&str]) -> Value {
    let tools: Vec<Value> = names
        .iter()
        .map(|name| match path {
            CHAT => json!({"type": "function", "function": {"name": name}}),
            _ => json!({"type": "function", "name": name}),
        })
        .collect();
    match path {
        CHAT => json!({"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}),
        _ => json!({"type": "allowed_tools", "mode": mode, "tools": tools}),
    }
}

fn call(name: &str) -> String {
    format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {{}}}}\n</tool_call>")
}

#[tokio::test]
async fn some_of_the_tools_may_or_must_be_called_and_all_are_shown() {
    let site = Site::start_model(says("ok"), tool_model(), |_| {}).await;
    for path in [CHAT, RESPONSES] {
        let before = site.fake.taken_now();
        for choice in [json!("auto"), choice(path, "auto", &["g", "h"]), choice(path, "required", &["g"])] {
            let response = site.post(path, &body(path, &choice)).await;
            assert_eq!(response.status, 200, "{choice}: {}", response.text());
        }
        let [free, auto, required] = [0, 1, 2].map(|at| site.fake.request(before + at));
        assert!(free.grammar.is_none());
        assert_eq!((&auto.prompt, &required.prompt), (&free.prompt, &free.prompt), "all are shown");
        for (text, in_auto, in_required) in [
            ("no call".into(), true, false),
            (call("f"), false, false),
            (call("g"), true, true),
            (call("h"), true, false),
            (format!("so {}", call("h")), true, false),
            (format!("so {}", call("f")), false, false),
        ] {
            assert_eq!(follows(&auto, &text), in_auto, "auto: {text}");
            assert_eq!(follows(&required, &text), in_required, "required: {text}");
        }
    }
}

#[tokio::test]
async fn allowed_tools_stand_beside_a_format() {
    let site = Site::start_model(says("{}"), tool_model(), |_| {}).await;
    let mut asked = body(CHAT, &choice(CHAT, "auto", &["g"]));
    asked["response_format"] = json!({"type": "json_object"});
    assert_eq!(site.post(CHAT, &asked).await.status, 200);
    let request = site.fake.request(0);
    assert!(follows(&request, "{\"a\": 1}") && !follows(&request, "so"));
    assert!(follows(&request, &call("g")) && !follows(&request, &call("f")));
}

#[tokio::test]
async fn allowed_tools_that_make_no_sense_are_refused_by_place() {
    let site = Site::start_model(says("ok"), tool_model(), |_| {}).await;
    let allowed = |more: Value| json!({"type": "allowed_tools", "allowed_tools": more});
    let inner = |more: Value| {
        let mut choice = json!({"type": "allowed_tools", "mode": "auto", "tools": []});
        choice.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        choice
    };
    let f = json!({"type": "function", "function": {"name": "f"}});
    let own = json!({"type": "function", "name": "f"});
    for (path, choice, param, word) in [
        (CHAT, json!({"type": "allowed_tools"}), "tool_choice.allowed_tools", "missing"),
        (CHAT, allowed(json!({"tools": [f]})), "tool_choice.allowed_tools.mode", "missing"),
        (CHAT, allowed(json!({"mode": "any", "tools": [f]})), "tool_choice.allowed_tools.mode", "\"any\""),
        (CHAT, allowed(json!({"mode": "auto"})), "tool_choice.allowed_tools.tools", "missing"),
        (
            CHAT,
            allowed(json!({"mode": "auto", "tools": []})),
            "tool_choice.allowed_tools.tools",
            "at least one",
        ),
        (
            CHAT,
            allowed(json!({"mode": "auto", "tools": ["f"]})),
            "tool_choice.allowed_tools.tools[0]",
            "\"f\"",
        ),
        (
            CHAT,
            allowed(json!({"mode": "auto", "tools": [f, {"type": "mcp"}]})),
            "tool_choice.allowed_tools.tools[1].type",
            "\"mcp\"",
        ),
        (
            CHAT,
            choice(CHAT, "auto", &["f", "nobody"]),
            "tool_choice.allowed_tools.tools[1].function.name",
            "one of the tools: \"f\", \"g\", \"h\"",
        ),
        (RESPONSES, inner(json!({"mode": null})), "tool_choice.mode", "missing"),
        (RESPONSES, inner(json!({})), "tool_choice.tools", "at least one"),
        (RESPONSES, inner(json!({"tools": [{"type": "web_search"}]})), "tool_choice.tools", "at least one"),
        (
            RESPONSES,
            inner(json!({"tools": [own, {"type": "mcp"}]})),
            "tool_choice.tools[1].type",
            "no tools run",
        ),
        (RESPONSES, choice(RESPONSES, "required", &["nobody"]), "tool_choice.tools[0].name", "\"nobody\""),
        (RESPONSES, inner(json!({"tools": [own], "name": "f"})), "tool_choice.name", "unknown"),
    ] {
        let response = site.post(path, &body(path, &choice)).await;
        assert_eq!(response.status, 400, "{choice}: {}", response.text());
        let error = response.error();
        let message = error["message"].as_str().unwrap();
        assert!(error["param"] == param && message.contains(word), "{choice}: {error}");
    }
    assert_eq!(site.fake.taken_now(), 0);
    // What was left out may be named beside the rest, as agents do.
    let both = inner(json!({"tools": [own, {"type": "web_search_preview"}]}));
    assert_eq!(site.post(RESPONSES, &body(RESPONSES, &both)).await.status, 200);
}
