//! Tools, past calls and thinking that must be refused: with which status, naming what.

use crate::client::Response;
use crate::fake::{Site, says, text_model_with, tool_model};
use atom_base::limits::{TOOLS_BYTES_MAX, TOOLS_MAX};
use atom_text::{Dialect, ToolFormat};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

fn with(fields: &Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "hi"}]});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

fn tool(name: &str) -> Value {
    json!({"type": "function", "function": {"name": name}})
}

fn refused(response: &Response, param: &str, words: &[&str], case: &Value) {
    let case = format!("{case:.300}");
    assert_eq!(response.status, 400, "{case}: {:.300}", response.text());
    let error = response.error();
    let message = error["message"].as_str().unwrap();
    assert_eq!(error["param"], param, "{case}: {error}");
    for word in words {
        assert!(message.contains(word), "{case}: no {word:?} in {message:?}");
    }
}

async fn check(site: &Site, cases: &[(Value, &str, &[&str])]) {
    let mut client = site.client().await;
    for (fields, param, words) in cases {
        refused(&client.post(CHAT, &with(fields)).await, param, words, fields);
    }
    assert_eq!(site.fake.taken_now(), 0, "nothing of this reached the engine");
    assert_eq!(client.post(CHAT, &with(&json!({}))).await.status, 200, "and the server goes on");
}

#[tokio::test]
async fn tools_that_are_none_are_refused_by_place() {
    let site = Site::start_model(says("ok"), tool_model(), |_| {}).await;
    let many: Vec<Value> = (0..=TOOLS_MAX).map(|at| tool(&format!("t{at}"))).collect();
    let function = |function: Value| json!({"tools": [{"type": "function", "function": function}]});
    let large = function(json!({"name": "f", "description": "x".repeat(TOOLS_BYTES_MAX)}));
    check(
        &site,
        &[
            (json!({"tools": 5}), "tools", &["is 5", "a list"]),
            (json!({"tools": {}}), "tools", &["a list"]),
            (json!({"tools": ["f"]}), "tools[0]", &["\"f\"", "an object"]),
            (json!({"tools": [{}]}), "tools[0].type", &["missing", "function"]),
            (json!({"tools": [{"type": "function"}]}), "tools[0].function", &["missing"]),
            (
                json!({"tools": [{"type": "web_search"}]}),
                "tools[0].type",
                &["\"web_search\"", "\"function\""],
            ),
            (json!({"tools": [{"type": "custom", "custom": {}}]}), "tools[0].type", &["\"custom\""]),
            (json!({"tools": [{"type": "function", "function": 5}]}), "tools[0].function", &["an object"]),
            (
                json!({"tools": [{"type": "function", "function": {"name": "f"}, "x": 1}]}),
                "tools[0].x",
                &["unknown"],
            ),
            (function(json!({})), "tools[0].function.name", &["missing"]),
            (function(json!({"name": ""})), "tools[0].function.name", &["1 to 64"]),
            (function(json!({"name": "x".repeat(65)})), "tools[0].function.name", &["65 bytes", "1 to 64"]),
            (function(json!({"name": "a b"})), "tools[0].function.name", &["\"a b\"", "'_'"]),
            (function(json!({"name": "é"})), "tools[0].function.name", &["a-z"]),
            (function(json!({"name": "a\u{0}"})), "tools[0].function.name", &["a-z"]),
            (function(json!({"name": 5})), "tools[0].function.name", &["a string"]),
            (
                function(json!({"name": "f", "description": 5})),
                "tools[0].function.description",
                &["a string"],
            ),
            (
                function(json!({"name": "f", "parameters": []})),
                "tools[0].function.parameters",
                &["an object"],
            ),
            (
                function(json!({"name": "f", "parameters": "{}"})),
                "tools[0].function.parameters",
                &["an object"],
            ),
            (
                function(json!({"name": "f", "parameters": {"type": "array"}})),
                "tools[0].function.parameters.type",
                &["\"array\"", "\"object\""],
            ),
            (function(json!({"name": "f", "strict": "yes"})), "tools[0].function.strict", &["true or false"]),
            (function(json!({"name": "f", "mood": 1})), "tools[0].function.mood", &["unknown"]),
            (
                json!({"tools": [tool("f"), tool("g"), tool("f")]}),
                "tools[2].function.name",
                &["\"f\"", "no tool before"],
            ),
            (json!({ "tools": many }), "tools", &["513", "512"]),
            (large, "tools", &["2097152", "tools[0]"]),
            (
                json!({"tools": [tool("f")], "tool_choice": "maybe"}),
                "tool_choice",
                &["\"maybe\"", "\"auto\""],
            ),
            (json!({"tools": [tool("f")], "tool_choice": 1}), "tool_choice", &["is 1"]),
            (json!({"tools": [tool("f")], "tool_choice": {}}), "tool_choice.type", &["missing"]),
            (
                json!({"tools": [tool("f")], "tool_choice": {"type": "custom"}}),
                "tool_choice.type",
                &["\"custom\"", "\"allowed_tools\""],
            ),
            (
                json!({"tools": [tool("f")], "tool_choice": {"type": "function"}}),
                "tool_choice.function.name",
                &["missing"],
            ),
            (
                json!({"tools": [tool("f")], "tool_choice": tool("g")}),
                "tool_choice.function.name",
                &["\"g\"", "one of the tools: \"f\""],
            ),
            (json!({"tool_choice": tool("g")}), "tool_choice.function.name", &["no 'tools'"]),
            (json!({"tool_choice": "required"}), "tool_choice", &["without 'tools'"]),
            (json!({"tools": [], "tool_choice": "any"}), "tool_choice", &["without 'tools'"]),
            (
                json!({"tools": [tool("f")], "parallel_tool_calls": 1}),
                "parallel_tool_calls",
                &["true or false"],
            ),
            (json!({"functions": [{"name": "f"}]}), "functions", &["send 'tools' instead"]),
            (json!({"function_call": "auto"}), "function_call", &["send 'tool_choice' instead"]),
        ],
    )
    .await;
}

#[tokio::test]
async fn calls_that_must_come_strict_tools_and_formats_beside_tools_are_held_to_a_grammar() {
    let site = Site::start_model(says("ok"), tool_model(), |_| {}).await;
    let strict = json!({"type": "function", "function": {"name": "s", "strict": true}});
    let json = json!({"type": "json_object"});
    let loose = json!({"type": "function", "function": {"name": "loose", "parameters":
        {"type": "object", "properties": {"p": {"not": {"type": "string"}}}}}});
    for (fields, held) in [
        (json!({"tool_choice": "none"}), false),
        (json!({"tool_choice": "auto"}), false),
        (json!({"tool_choice": "required"}), true),
        (json!({"tool_choice": tool("f")}), true),
        (json!({"tools": [tool("f"), strict]}), true),
        (json!({"tools": [tool("f"), strict], "tool_choice": "none"}), false),
        (json!({"response_format": json}), true),
        (json!({"tools": [strict], "response_format": json}), true),
        (json!({"guided_regex": "[a-z]+"}), true),
        (json!({"guided_choice": ["a", "b"], "parallel_tool_calls": false}), true),
        // What no grammar can hold is any object, unless it is strict or has to be called.
        (json!({"tools": [strict, loose]}), true),
        (json!({"tools": [loose], "response_format": json}), true),
        (json!({"tools": [tool("f"), loose], "tool_choice": tool("f")}), true),
    ] {
        let mut body =
            json!({"messages": [{"role": "user", "content": "x"}], "tools": [tool("f"), tool("g")]});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let response = site.post("/v1/chat/completions", &body).await;
        assert_eq!(response.status, 200, "{body}: {}", response.text());
        assert_eq!(site.fake.taken.lock().unwrap().last().unwrap().grammar.is_some(), held, "{fields}");
    }
}

#[tokio::test]
async fn what_no_grammar_can_hold_together_is_refused() {
    let site = Site::start_model(says("ok"), tool_model(), |_| {}).await;
    let endless = json!({"type": "object", "properties": {"p": {"$ref": "#/$defs/p"}}, "required": ["p"],
        "$defs": {"p": {"type": "object", "properties": {"p": {"$ref": "#/$defs/p"}}, "required": ["p"]}}});
    let odd = json!({"type": "function", "function": {"name": "odd", "strict": true, "parameters": endless}});
    let unheld = json!({"type": "function", "function": {"name": "unheld", "strict": true, "parameters":
        {"type": "object", "properties": {"p": {"not": {"type": "string"}}}}}});
    let json = json!({"type": "json_object"});
    check(
        &site,
        &[
            (
                json!({"tools": [tool("f")], "tool_choice": "required", "response_format": json}),
                "tool_choice",
                &["only constraint"],
            ),
            (
                json!({"tools": [tool("f")], "guided_grammar": "start: \"a\""}),
                "guided_grammar",
                &["no tool", "a JSON schema"],
            ),
            (json!({"tools": [odd]}), "tools", &["\"odd\"", "no finite document"]),
            (json!({"tools": [unheld]}), "tools", &["\"unheld\"", "not"]),
            (json!({"tools": [tool("f")], "guided_regex": "(a"}), "guided_regex", &["regular expression"]),
            (json!({"tools": [odd], "tool_choice": "required"}), "tools", &["\"odd\""]),
        ],
    )
    .await;
}

/// Whoever insists on a call was given any object, and nothing said so.
#[tokio::test]
async fn a_forced_call_whose_schema_no_grammar_can_hold_is_refused_in_every_api_and_every_dialect() {
    let unique = json!({"type": "array", "items": {"type": "integer"}, "uniqueItems": true});
    let loose = json!({"type": "object", "properties": {"p": unique}, "required": ["p"]});
    let fine = json!({"type": "object", "properties": {"p": {"enum": ["x", "y"]}}, "required": ["p"]});
    for format in ToolFormat::ALL {
        let dialect = Dialect { reasoning: None, tools: Some(format) };
        let shows = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{{ messages[0].content }}";
        let site = Site::start_model(says("ok"), text_model_with(shows, dialect, &[]), |_| {}).await;
        let forced = [
            (CHAT, json!("required"), json!({"type": "function", "function": {"name": "loose"}})),
            ("/v1/responses", json!("required"), json!({"type": "function", "name": "loose"})),
            ("/v1/messages", json!({"type": "any"}), json!({"type": "tool", "name": "loose"})),
        ];
        for (path, required, named) in forced {
            let tools = |tools: &[(&str, &Value)]| {
                tools.iter().map(|(name, schema)| in_api(path, name, schema)).collect::<Value>()
            };
            let both = tools(&[("fine", &fine), ("loose", &loose)]);
            let mut body = in_every_api(&fine, None).into_iter().find(|(at, _)| *at == path).unwrap().1;
            for choice in [&required, &named] {
                (body["tools"], body["tool_choice"]) = (both.clone(), choice.clone());
                let response = site.post(path, &body).await;
                assert_eq!(response.status, 400, "{format:?} {path} {choice}: {}", response.text());
                let message = response.json()["error"]["message"].as_str().unwrap().to_owned();
                for word in ["\"loose\"", "uniqueItems", "tool_choice"] {
                    assert!(message.contains(word), "{word}: {message}");
                }
            }
            // What can be held is, without being strict, and what need not be called is no hindrance.
            body["tools"] = tools(&[("fine", &fine)]);
            for tools in [body["tools"].clone(), both] {
                let is_alone = tools.as_array().unwrap().len() == 1;
                body["tools"] = tools;
                body["tool_choice"] = if is_alone { required.clone() } else { named_fine(path) };
                let response = site.post(path, &body).await;
                assert_eq!(response.status, 200, "{format:?} {path}: {}", response.text());
                assert!(site.fake.taken.lock().unwrap().last().unwrap().grammar.is_some());
            }
            (body["tools"], body["tool_choice"]) =
                (tools(&[("fine", &fine), ("loose", &loose)]), Value::Null);
            assert_eq!(site.post(path, &body).await.status, 200, "{format:?} {path}");
        }
    }
}

/// A tool that is not strict, as an API spells it.
fn in_api(path: &str, name: &str, schema: &Value) -> Value {
    match path {
        CHAT => json!({"type": "function", "function": {"name": name, "parameters": schema}}),
        "/v1/responses" => json!({"type": "function", "name": name, "parameters": schema}),
        _ => json!({"name": name, "input_schema": schema}),
    }
}

fn named_fine(path: &str) -> Value {
    match path {
        CHAT => json!({"type": "function", "function": {"name": "fine"}}),
        "/v1/responses" => json!({"type": "function", "name": "fine"}),
        _ => json!({"type": "tool", "name": "fine"}),
    }
}

#[tokio::test]
async fn histories_that_do_not_belong_together_are_refused_by_place() {
    let site = Site::start_model(says("ok"), tool_model(), |_| {}).await;
    let user = || json!({"role": "user", "content": "x"});
    let call = |id: &str| json!({"id": id, "type": "function", "function": {"name": "f", "arguments": "{}"}});
    let calls = |calls: Vec<Value>| json!({"role": "assistant", "tool_calls": calls});
    let answer = |id: &str| json!({"role": "tool", "tool_call_id": id, "content": "42"});
    let messages = |messages: Vec<Value>| json!({ "messages": messages });
    let one = |message: Value| json!({"messages": [message]});
    let arguments = |arguments: Value| {
        one(calls(vec![json!({"id": "a", "function": {"name": "f", "arguments": arguments}})]))
    };
    let place = "messages[0].tool_calls[0]";
    let inner = |name: &str| format!("{place}.{name}");
    check(
        &site,
        &[
            (
                messages(vec![user(), calls(vec![call("call_1"), call("call_2")]), answer("call_1"), user()]),
                "messages[3]",
                &["missing: call_2", "\"tool\""],
            ),
            (
                messages(vec![user(), calls(vec![call("a")]), answer("b")]),
                "messages[2].tool_call_id",
                &["\"b\"", "waits for its answer: a"],
            ),
            (
                messages(vec![user(), calls(vec![call("a")]), answer("a"), answer("a")]),
                "messages[3].tool_call_id",
                &["none waits"],
            ),
            (one(json!({"role": "tool", "content": "x"})), "messages[0].tool_call_id", &["missing"]),
            (one(json!({"role": "tool", "tool_call_id": "a"})), "messages[0].content", &["missing"]),
            (
                one(json!({"role": "tool", "tool_call_id": 5, "content": ""})),
                "messages[0].tool_call_id",
                &["a string"],
            ),
            (one(json!({"role": "function", "content": "x"})), "messages[0].role", &["role 'tool'"]),
            (one(json!({"role": "assistant"})), "messages[0].content", &["'tool_calls'"]),
            (one(json!({"role": "assistant", "tool_calls": []})), "messages[0].content", &["missing"]),
            (one(json!({"role": "assistant", "tool_calls": {}})), "messages[0].tool_calls", &["a list"]),
            (
                one(json!({"role": "user", "content": "x", "tool_calls": [call("a")]})),
                "messages[0].tool_calls",
                &["only the assistant"],
            ),
            (
                one(json!({"role": "assistant", "content": "x", "refusal": "no"})),
                "messages[0].refusal",
                &["'content'"],
            ),
            (
                one(json!({"role": "assistant", "content": "x", "function_call": {}})),
                "messages[0].function_call",
                &["'tool_calls'"],
            ),
            (
                one(json!({"role": "assistant", "content": "x", "reasoning": "a", "reasoning_content": "b"})),
                "messages[0].reasoning",
                &["one of the two"],
            ),
            (one(calls(vec![json!("f")])), place, &["an object"]),
            (one(calls(vec![json!({"function": {"name": "f"}})])), &inner("id"), &["missing"]),
            (one(calls(vec![json!({"id": "a"})])), &inner("function"), &["missing"]),
            (one(calls(vec![json!({"id": "a", "type": "custom"})])), &inner("type"), &["\"custom\""]),
            (one(calls(vec![json!({"id": "a", "function": {}})])), &inner("function.name"), &["missing"]),
            (
                one(calls(vec![json!({"id": "a", "function": {"name": "a\u{0}b"}})])),
                &inner("function.name"),
                &["control characters"],
            ),
            (
                one(calls(vec![json!({"id": "a", "function": {"name": "x".repeat(513)}})])),
                &inner("function.name"),
                &["1 to 512"],
            ),
            (arguments(json!({})), &inner("function.arguments"), &["a string"]),
        ],
    )
    .await;
    // Calls at the end wait for nothing, and answers whose calls were cut off are taken.
    let mut client = site.client().await;
    for fine in [messages(vec![user(), calls(vec![call("a")])]), messages(vec![answer("cut"), user()])] {
        let response = client.post(CHAT, &fine).await;
        assert_eq!(response.status, 200, "{fine}: {}", response.text());
    }
}

#[tokio::test]
async fn thinking_is_refused_where_the_template_knows_no_variable_for_it() {
    let plain = Site::start(says("ok")).await;
    let none = "no variable";
    check(
        &plain,
        &[
            (json!({"reasoning_effort": "low"}), "reasoning_effort", &[none]),
            (json!({"reasoning_effort": "none"}), "reasoning_effort", &[none]),
            (json!({"thinking": {"type": "disabled"}}), "thinking", &["no switch"]),
            (
                json!({"chat_template_kwargs": {"enable_thinking": false}}),
                "chat_template_kwargs.enable_thinking",
                &["no such variable"],
            ),
        ],
    )
    .await;
    let site = Site::start_model(says("ok"), tool_model(), |_| {}).await;
    check(
        &site,
        &[
            (json!({"reasoning_effort": "some"}), "reasoning_effort", &["\"some\"", "xhigh"]),
            (json!({"reasoning_effort": 5}), "reasoning_effort", &["a string"]),
            (json!({"thinking": true}), "thinking", &["an object"]),
            (json!({"thinking": {}}), "thinking.type", &["missing"]),
            (json!({"thinking": {"type": "adaptive"}}), "thinking.type", &["\"adaptive\""]),
            (
                json!({"thinking": {"type": "enabled", "budget_tokens": 9}}),
                "thinking.budget_tokens",
                &["can't be cut"],
            ),
            (
                json!({"thinking": {"type": "enabled"}, "reasoning_effort": "none"}),
                "reasoning_effort",
                &["true, which another field"],
            ),
            (
                json!({"thinking": {"type": "disabled"}, "reasoning_effort": "high"}),
                "reasoning_effort",
                &["false, which another field"],
            ),
            (json!({"include_reasoning": "no"}), "include_reasoning", &["true or false"]),
            (json!({"separate_reasoning": false}), "separate_reasoning", &["not supported"]),
        ],
    )
    .await;
}

#[tokio::test]
async fn a_model_without_a_way_to_call_says_what_to_do() {
    let tools = json!({"tools": [tool("f")]});
    let site = Site::start(says("ok")).await;
    check(&site, &[(tools.clone(), "tools", &["--chat-template"])]).await;
    let shows = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{{ messages[0].content }}";
    let silent = text_model_with(shows, Dialect::default(), &[]);
    let site = Site::start_model(says("ok"), silent, |_| {}).await;
    check(&site, &[(tools.clone(), "tools", &["--tool-call-parser"])]).await;
    let mut hidden = with(&tools);
    hidden["tool_choice"] = "none".into();
    assert_eq!(site.post(CHAT, &hidden).await.status, 200);
    let named = Dialect { reasoning: None, tools: Some(ToolFormat::Hermes) };
    let site = Site::start_model(says("ok"), text_model_with(shows, named, &[]), |_| {}).await;
    assert_eq!(site.post(CHAT, &with(&tools)).await.status, 200);
}

/// The same tool in the spelling of each API.
fn in_every_api(parameters: &Value, choice: Option<&str>) -> [(&'static str, Value); 3] {
    let user = json!([{"role": "user", "content": "hi"}]);
    let function = json!({"name": "f", "strict": true, "parameters": parameters});
    let mut chat = json!({"messages": user, "tools": [{"type": "function", "function": function}]});
    let mut responses = json!({"input": "hi", "tools": [{"type": "function", "name": "f", "strict": true, "parameters": parameters}]});
    let mut messages = json!({
        "max_tokens": 9, "messages": user, "tools": [{"name": "f", "strict": true, "input_schema": parameters}],
    });
    if let Some(name) = choice {
        chat["tool_choice"] = json!({"type": "function", "function": {"name": name}});
        responses["tool_choice"] = json!({"type": "function", "name": name});
        messages["tool_choice"] = json!({"type": "tool", "name": name});
    }
    [(CHAT, chat), ("/v1/responses", responses), ("/v1/messages", messages)]
}

#[tokio::test]
async fn schemas_too_deep_or_endless_and_unknown_tool_names_are_refused_in_every_api() {
    // A prompt that names the tools alone is short, whatever their schemas are.
    let template = "{% for t in tools or [] %}{{ t.function.name }}{{ t.function.description }}{% endfor %}{{ messages[0].content }}";
    let hermes = Dialect { reasoning: None, tools: Some(ToolFormat::Hermes) };
    let site = Site::start_model(says("ok"), text_model_with(template, hermes, &[]), |_| {}).await;
    let deep = (0..51)
        .fold(json!({"type": "object"}), |inner, _| json!({"type": "object", "properties": {"a": inner}}));
    let endless = json!({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]});
    let cases = [
        (deep, None, "nested too deep"),
        (endless, None, "no finite document"),
        (json!({"type": "object"}), Some("g"), "\"g\""),
    ];
    for (parameters, choice, words) in cases {
        for (path, body) in in_every_api(&parameters, choice) {
            let response = site.post(path, &body).await;
            assert_eq!(response.status, 400, "{path}: {}", response.text());
            let error = response.json()["error"]["message"].as_str().unwrap().to_owned();
            assert!(error.contains(words), "{path}: no {words:?} in {error:?}");
        }
    }
    assert_eq!(site.fake.taken_now(), 0);
    for (path, body) in in_every_api(&json!({"type": "object"}), Some("f")) {
        assert_eq!(site.post(path, &body).await.status, 200, "{path}");
    }
}
