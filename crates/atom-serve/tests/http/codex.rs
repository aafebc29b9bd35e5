//! What Codex sends to `/v1/responses` with every request, and what it needs back.

use crate::fake::{Site, answer, tool_model};
use crate::tools::marked;
use atom_base::limits::TOOLS_MAX;
use serde_json::{Value, json};

const PATH: &str = "/v1/responses";

/// A request as Codex makes it: tools of all kinds, hosted ones that it declares always among them.
fn ask(input: Value) -> Value {
    let object = json!({"type": "object"});
    json!({
        "model": "tiny",
        "instructions": "Code.",
        "input": input,
        "tools": [
            {"type": "function", "name": "sh", "strict": false, "parameters": object},
            {"type": "custom", "name": "apply_patch", "description": "Edits.",
             "format": {"type": "grammar", "syntax": "lark", "definition": "start: \"*** Begin\""}},
            {"type": "namespace", "name": "agents", "description": "Sub-agents.", "tools": [
                {"type": "function", "name": "spawn", "strict": false, "defer_loading": true, "parameters": object},
                {"type": "function", "name": "wait", "strict": false, "parameters": object},
            ]},
            {"type": "web_search", "external_web_access": false},
            {"type": "image_generation", "output_format": "png"},
            {"type": "tool_search", "execution": "client", "description": "Finds.", "parameters": object},
        ],
        "tool_choice": "auto", "parallel_tool_calls": false, "store": false, "stream": false,
        "reasoning": {"effort": "medium", "summary": "detailed"},
        "include": ["reasoning.encrypted_content"], "prompt_cache_key": "c", "client_metadata": {"k": "v"},
    })
}

fn user() -> Value {
    json!({"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]})
}

async fn site(text: &'static str) -> Site {
    Site::start_model(move |request| answer(request, &marked(text)), tool_model(), |_| {}).await
}

fn prompt(site: &Site) -> String {
    tool_model().tokenizer.decode(&site.fake.request(site.fake.taken_now() - 1).prompt, false)
}

/// llama.cpp's issue 20156: a server that refuses hosted tools can't serve Codex. The answer says what is in force.
#[tokio::test]
async fn hosted_tools_that_agents_always_declare_are_left_out_and_the_response_says_so() {
    let site = site("</think>ok").await;
    let response = site.post(PATH, &ask(json!([user()]))).await;
    assert_eq!(response.status, 200, "{}", response.text());
    let found = response.json();
    let sent = ask(json!([user()]))["tools"].clone();
    let mut expected = json!([sent[0], sent[1], sent[2]]);
    // Nothing holds a custom tool's text to its grammar.
    expected[1]["format"] = json!({"type": "text"});
    assert_eq!(found["tools"], expected);
    assert_eq!(found["reasoning"], json!({"effort": "medium", "summary": null}));
    let prompt = prompt(&site);
    for word in [
        "\"sh\"",
        "\"apply_patch\"",
        "\"agents__spawn\"",
        "\"agents__wait\"",
        "*** Begin",
        "agents: Sub-agents.",
    ] {
        assert!(prompt.contains(word), "no {word} in {prompt}");
    }
    for word in ["web_search", "image_generation", "tool_search"] {
        assert!(!prompt.contains(word), "{word} in {prompt}");
    }
    // Where nothing else is left there are no tools.
    let mut alone = ask(json!([user()]));
    alone["tools"] = json!([{"type": "web_search_preview"}]);
    let found = site.post(PATH, &alone).await.json();
    assert_eq!(found["tools"], json!([]));
    // Of tools that don't reach the model there may be any number.
    alone["tools"] = vec![json!({"type": "web_search"}); TOOLS_MAX + 1].into();
    assert_eq!(site.post(PATH, &alone).await.status, 200);
}

#[tokio::test]
async fn a_custom_tool_is_called_with_its_text_and_the_call_comes_back() {
    let text = "</think><tool_call>{\"name\": \"apply_patch\", \"arguments\": {\"input\": \"*** Begin\\n+\\u00e9 \\\"x\\\"\"}}</tool_call>";
    let site = site(text).await;
    let found = site.post(PATH, &ask(json!([user()]))).await.json();
    let call = found["output"][0].clone();
    let input = "*** Begin\n+é \"x\"";
    assert_eq!(
        (call["type"].as_str(), call["name"].as_str()),
        (Some("custom_tool_call"), Some("apply_patch")),
        "{found}"
    );
    assert_eq!((call["input"].as_str(), call["status"].as_str()), (Some(input), Some("completed")));
    assert!(call["id"].as_str().unwrap().starts_with("ctc_") && call.get("arguments").is_none());

    let mut streamed = ask(json!([user()]));
    streamed["stream"] = true.into();
    let events = site.post(PATH, &streamed).await.named_events();
    let deltas = events.iter().filter(|(name, _)| name == "response.custom_tool_call_input.delta");
    let deltas: Vec<&str> = deltas.map(|(_, data)| data["delta"].as_str().unwrap()).collect();
    assert!(deltas.concat() == input, "{deltas:?}");
    let done = events.iter().find(|(name, _)| name == "response.custom_tool_call_input.done").unwrap();
    assert_eq!(done.1["input"], input);

    let output = json!({"type": "custom_tool_call_output", "call_id": call["call_id"], "name": "apply_patch", "output": "Done."});
    let response = site.post(PATH, &ask(json!([user(), call, output]))).await;
    assert_eq!(response.status, 200, "{}", response.text());
    let prompt = prompt(&site);
    assert!(
        prompt.contains("<tool_call>apply_patch input=\"*** Begin\\n+é \\\"x\\\"\"</tool_call>"),
        "{prompt}"
    );
    assert!(prompt.contains("\nDone.<|im_end|>"), "{prompt}");
}

#[tokio::test]
async fn a_tool_of_a_namespace_is_called_by_both_names() {
    let text =
        "</think><tool_call>{\"name\": \"agents__spawn\", \"arguments\": {\"text\": \"go\"}}</tool_call>";
    let site = site(text).await;
    let found = site.post(PATH, &ask(json!([user()]))).await.json();
    let call = found["output"][0].clone();
    let names = [&call["type"], &call["namespace"], &call["name"], &call["arguments"]]
        .map(|value| value.as_str().unwrap());
    assert_eq!(names, ["function_call", "agents", "spawn", "{\"text\": \"go\"}"]);
    let output = json!({"type": "function_call_output", "call_id": call["call_id"], "output": "started"});
    // Another model's search, in a conversation that goes on here, is no turn.
    let search = json!({"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "q"}});
    let response = site.post(PATH, &ask(json!([user(), search, call, output]))).await;
    assert_eq!(response.status, 200, "{}", response.text());
    let prompt = prompt(&site);
    assert!(
        prompt.contains("<tool_call>agents__spawn text=\"go\"</tool_call>") && !prompt.contains("search"),
        "{prompt}"
    );
    let mut named = ask(json!([user()]));
    named["tool_choice"] = json!({"type": "function", "namespace": "agents", "name": "wait"});
    assert_eq!(site.post(PATH, &named).await.status, 200);
    // Names of MCP servers end in what separates them from their tools.
    let mut twice = ask(json!([user()]));
    let inner = json!([{"type": "function", "name": "wait"}]);
    let tools = twice["tools"].as_array_mut().unwrap();
    tools.push(json!({"type": "namespace", "name": "agents__", "tools": inner}));
    let error = site.post(PATH, &twice).await.error();
    assert_eq!(error["param"], "tools[6].tools[0].name", "{error}");
}

/// The Python client sends back what it made of an answer.
#[tokio::test]
async fn texts_come_back_with_what_the_client_parsed_of_them() {
    let site = site("</think>ok").await;
    let text = json!({"type": "output_text", "text": "{}", "annotations": [], "logprobs": [], "parsed": {}});
    let said =
        json!({"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [text]});
    let response = site.post(PATH, &ask(json!([user(), said, user()]))).await;
    assert_eq!(response.status, 200, "{}", response.text());
}
