//! Tools and reasoning, from the request's fields to the shape of the answer.

use crate::fake::{MARKERS, Site, TOOL_TEMPLATE, answer, bytes, says, text_model_with, tool_model};
use atom_base::TokenId;
use atom_text::{Dialect, ReasoningFormat, ToolFormat};
use serde_json::{Value, json};
use std::collections::HashSet;

const CHAT: &str = "/v1/chat/completions";

/// A request with one tool.
fn chat(extra: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "hi"}], "tools": [weather()]});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

fn weather() -> Value {
    json!({"type": "function", "function": {
        "name": "weather", "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    }})
}

/// The tokens of a text, its markers as special tokens.
pub(crate) fn marked(text: &str) -> Vec<TokenId> {
    let mut tokens = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        match MARKERS.iter().position(|marker| rest.starts_with(marker)) {
            Some(at) => {
                tokens.push(259 + at as TokenId);
                rest = &rest[MARKERS[at].len()..];
            }
            None => {
                tokens.push(rest.as_bytes()[0].into());
                // Within a character there is no marker to look for.
                let width = rest.chars().next().unwrap().len_utf8();
                tokens.extend(rest.as_bytes()[1..width].iter().map(|&byte| TokenId::from(byte)));
                rest = &rest[width..];
            }
        }
    }
    tokens
}

async fn site(text: &'static str) -> Site {
    Site::start_model(move |request| answer(request, &marked(text)), tool_model(), |_| {}).await
}

fn prompt(site: &Site, at: usize) -> String {
    tool_model().tokenizer.decode(&site.fake.request(at).prompt, false)
}

const CALL: &str =
    "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Zürich\"}}\n</tool_call>";

#[tokio::test]
async fn a_call_is_answered_in_the_shape_of_the_api() {
    let site = site(CALL).await;
    let response = site.post(CHAT, &chat(json!({"n": 2}))).await;
    assert_eq!(response.status, 200, "{}", response.text());
    let whole = response.json();
    let mut ids = HashSet::new();
    for (at, choice) in whole["choices"].as_array().unwrap().iter().enumerate() {
        let id = choice["message"]["tool_calls"][0]["id"].as_str().unwrap().to_owned();
        assert!(id.starts_with("call_"), "{id}");
        assert_eq!(
            *choice,
            json!({
                "index": at,
                "message": {"role": "assistant", "content": null, "tool_calls": [{
                    "id": id, "type": "function",
                    "function": {"name": "weather", "arguments": "{\"city\": \"Zürich\"}"},
                }]},
                "logprobs": null,
                "finish_reason": "tool_calls",
            })
        );
        ids.insert(id);
    }
    assert_eq!(ids.len(), 2, "each call has an id of its own");

    let chunks = site.post(CHAT, &chat(json!({"stream": true}))).await.chunks();
    let deltas: Vec<&Value> = chunks.iter().map(|chunk| &chunk["choices"][0]["delta"]).collect();
    assert_eq!(*deltas[0], json!({"role": "assistant", "content": ""}));
    let id = deltas[1]["tool_calls"][0]["id"].as_str().unwrap();
    assert!(id.starts_with("call_") && !ids.contains(id), "{id}");
    assert_eq!(
        *deltas[1],
        json!({"tool_calls": [{
            "index": 0, "id": id, "type": "function", "function": {"name": "weather", "arguments": ""},
        }]})
    );
    let (last, arguments) = deltas[2..].split_last().unwrap();
    let arguments: String = arguments
        .iter()
        .map(|delta| {
            let call = &delta["tool_calls"][0];
            assert_eq!(**delta, json!({"tool_calls": [{"index": 0, "function": call["function"]}]}));
            call["function"]["arguments"].as_str().unwrap()
        })
        .collect();
    assert_eq!(arguments, "{\"city\": \"Zürich\"}");
    assert_eq!(**last, json!({}));
    assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");
}

#[tokio::test]
async fn tools_reach_the_template_in_one_shape_and_none_hides_them() {
    let site = site("ok").await;
    let shuffled = json!({"function": {
        "parameters": {"properties": {"city": {"type": "string"}}, "type": "object"},
        "description": "Tells the weather.", "name": "weather", "strict": false,
    }, "type": "function"});
    let bare = json!({"type": "function", "function": {"name": "now"}});
    let bodies = [
        chat(json!({})),
        chat(json!({"tools": [shuffled]})),
        chat(json!({"tools": [bare], "tool_choice": "auto", "parallel_tool_calls": true})),
        chat(json!({"tool_choice": "none"})),
        chat(json!({"tools": []})),
        chat(json!({"tools": null, "tool_choice": "auto"})),
    ];
    for body in &bodies {
        let response = site.post(CHAT, body).await;
        assert_eq!(response.status, 200, "{body}: {}", response.text());
    }
    let tools = |at: usize| prompt(&site, at).split_once("<|im_start|>user").unwrap().0.to_owned();
    assert_eq!(
        tools(0),
        "<|im_start|>system\n{\"type\": \"function\", \"function\": {\"name\": \"weather\", \
         \"description\": \"Tells the weather.\", \"parameters\": {\"type\": \"object\", \"properties\": \
         {\"city\": {\"type\": \"string\"}}}}}<|im_end|>\n"
    );
    assert!(tools(1).contains("{\"name\": \"weather\", \"description\""), "{}", tools(1));
    assert!(
        tools(2).contains("{\"name\": \"now\", \"parameters\": {\"type\": \"object\", \"properties\": {}}}")
    );
    assert_eq!([tools(3), tools(4), tools(5)], ["", "", ""]);
}

#[tokio::test]
async fn without_offered_tools_nothing_is_a_call() {
    // Written with ordinary tokens, as a model does that quotes a marker.
    let site = Site::start_model(says(CALL), tool_model(), |_| {}).await;
    for extra in [json!({"tool_choice": "none"}), json!({"tools": []})] {
        let choice = site.post(CHAT, &chat(extra)).await.json()["choices"][0].clone();
        assert_eq!(choice["message"], json!({"role": "assistant", "content": CALL}));
        assert_eq!(choice["finish_reason"], "stop");
    }
}

#[tokio::test]
async fn without_parallel_calls_the_answer_ends_before_the_second() {
    let text = "Both.<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"Bern\"}}</tool_call>\n\
                <tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"Basel\"}}</tool_call>";
    let site = site(text).await;
    let both = site.post(CHAT, &chat(json!({}))).await.json();
    assert_eq!(both["choices"][0]["message"]["tool_calls"].as_array().unwrap().len(), 2);
    assert_eq!(both["choices"][0]["message"]["content"], "Both.");
    for stream in [false, true] {
        let body = chat(json!({"parallel_tool_calls": false, "stream": stream}));
        let response = site.post(CHAT, &body).await;
        let text = response.text();
        assert!(text.contains("Bern") || stream, "{text}");
        assert!(!text.contains("Basel"), "{text}");
        assert!(text.contains("\"finish_reason\":\"tool_calls\""), "{text}");
        assert_eq!(text.matches("\"name\":\"weather\"").count(), 1, "{text}");
    }
}

#[tokio::test]
async fn past_calls_and_their_answers_reach_the_template() {
    let site = site("ok").await;
    let call = |id: &str, arguments: &str| {
        json!({"id": id, "type": "function", "index": 0, "function": {
            "name": "weather", "arguments": arguments, "parsed_arguments": {"city": "Bern"},
        }})
    };
    let body = json!({"tools": [weather()], "messages": [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": null, "refusal": null, "function_call": null, "audio": null, "annotations": [],
         "parsed": null, "reasoning_content": "hm",
         "tool_calls": [call("a", "{\"city\": \"Bern\", \"days\": [1, 2]}"), call("b", "")]},
        {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "rain"}]},
        {"role": "tool", "tool_call_id": "a", "name": "weather", "content": "sun"},
        {"role": "assistant", "reasoning": "ah"},
        {"role": "user", "content": "thanks", "tool_calls": null},
    ]});
    let response = site.post(CHAT, &body).await;
    assert_eq!(response.status, 200, "{}", response.text());
    assert_eq!(
        prompt(&site, 0).split_once("<|im_end|>\n").unwrap().1,
        "<|im_start|>user\nweather?<|im_end|>\n\
         <|im_start|>assistant\n<think>hm</think><tool_call>weather city=\"Bern\" days=[1, 2]</tool_call>\
         <tool_call>weather</tool_call><|im_end|>\n\
         <|im_start|>tool=b\nrain<|im_end|>\n<|im_start|>tool=a\nsun<|im_end|>\n\
         <|im_start|>assistant\n<think>ah</think><|im_end|>\n\
         <|im_start|>user\nthanks<|im_end|>\n<|im_start|>assistant\n"
    );
}

/// An agent whose model was cut off, or called what there is none of, has to be able to go on.
#[tokio::test]
async fn calls_that_went_wrong_reach_the_template_as_the_model_made_them() {
    let site = site("ok").await;
    let call = |name: &str, arguments: &str| json!({"id": "functions.x:0", "type": "function", "function": {"name": name, "arguments": arguments}});
    let answer = |text: &str| json!({"role": "tool", "tool_call_id": "functions.x:0", "content": text});
    let body = json!({"tools": [weather()], "messages": [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "tool_calls": [call("weather", "{\"city\": \"Be"), call("get the weather!", "[1]")]},
        answer("no JSON"), answer("no such tool"),
        {"role": "user", "content": "again"},
    ]});
    let response = site.post(CHAT, &body).await;
    assert_eq!(response.status, 200, "{}", response.text());
    let rendered = prompt(&site, 0);
    for words in [
        "<tool_call>weather unparsed_arguments=\"{\\\"city\\\": \\\"Be\"</tool_call>",
        "<tool_call>get the weather! unparsed_arguments=\"[1]\"</tool_call>",
        "\nno JSON<|im_end|>",
        "\nno such tool<|im_end|>",
    ] {
        assert!(rendered.contains(words), "no {words:?} in {rendered}");
    }
}

#[tokio::test]
async fn an_answer_can_be_sent_back_as_it_came() {
    let site = site("<think>Let me see.</think>One moment.<tool_call>{\"name\": \"weather\", \"arguments\": {}}</tool_call>").await;
    let message = site.post(CHAT, &chat(json!({}))).await.json()["choices"][0]["message"].clone();
    let id = &message["tool_calls"][0]["id"];
    let body = chat(json!({"messages": [
        {"role": "user", "content": "hi"}, message, {"role": "tool", "tool_call_id": id, "content": "sun"},
    ]}));
    let response = site.post(CHAT, &body).await;
    assert_eq!(response.status, 200, "{}", response.text());
    let rendered = prompt(&site, 1);
    assert!(
        rendered.contains("<think>Let me see.</think>One moment.<tool_call>weather</tool_call><|im_end|>"),
        "{rendered}"
    );
}

#[tokio::test]
async fn reasoning_is_told_apart_and_counted() {
    let cases: [(&str, Value, usize); 5] = [
        (
            "<think>why\nnot</think>\n\nbecause",
            json!({"content": "because", "reasoning_content": "why\nnot"}),
            8,
        ),
        ("<think></think>because", json!({"content": "because"}), 1),
        ("because", json!({"content": "because"}), 0),
        ("<think>never done", json!({"content": "", "reasoning_content": "never done"}), 10),
        ("<think>a</think>\n<think>c</think>d", json!({"content": "d", "reasoning_content": "ac"}), 4),
    ];
    for (text, mut message, tokens) in cases {
        let site = site(text).await;
        let whole = site.post(CHAT, &chat(json!({}))).await.json();
        message["role"] = "assistant".into();
        assert_eq!(whole["choices"][0]["message"], message, "{text}");
        assert_eq!(whole["choices"][0]["finish_reason"], "stop");
        assert_eq!(whole["usage"]["completion_tokens"], marked(text).len());
        assert_eq!(
            whole["usage"]["completion_tokens_details"],
            json!({"reasoning_tokens": tokens}),
            "{text}"
        );

        let hidden = site.post(CHAT, &chat(json!({"include_reasoning": false}))).await.json();
        message.as_object_mut().unwrap().remove("reasoning_content");
        assert_eq!(hidden["choices"][0]["message"], message, "{text}");
        assert_eq!(hidden["usage"], whole["usage"], "hidden thoughts were thought");
        let body = chat(json!({"include_reasoning": false, "stream": true}));
        assert!(!site.post(CHAT, &body).await.text().contains("reasoning_content"));
    }
}

#[tokio::test]
async fn an_answer_begins_where_the_prompt_left_the_model() {
    let site = site("mind</think>\n\nmouth").await;
    let ask = async |extra: Value| {
        let whole = site.post(CHAT, &chat(extra.clone())).await;
        assert_eq!(whole.status, 200, "{extra}: {}", whole.text());
        whole.json()["choices"][0]["message"].clone()
    };
    let thought = json!({"role": "assistant", "content": "mouth", "reasoning_content": "mind"});
    for on in [
        json!({"thinking": {"type": "enabled"}}),
        json!({"chat_template_kwargs": {"enable_thinking": true}}),
        json!({"chat_template_kwargs": {"enable_thinking": true}, "thinking": {"type": "enabled"}}),
        json!({"reasoning_effort": "low"}),
        json!({"reasoning_effort": "max", "thinking": {"type": "enabled"}}),
    ] {
        assert_eq!(ask(on).await, thought);
        assert!(prompt(&site, site.fake.taken_now() - 1).ends_with("assistant\n<think>\n"));
    }
    for off in [
        json!({"thinking": {"type": "disabled"}}),
        json!({"reasoning_effort": "none"}),
        json!({"reasoning_effort": "minimal"}),
        json!({"chat_template_kwargs": {"enable_thinking": false}}),
    ] {
        let message = ask(off).await;
        assert!(message.get("reasoning_content").is_none(), "{message}");
        assert!(prompt(&site, site.fake.taken_now() - 1).ends_with("<think>\n\n</think>\n\n"));
    }
    // Long thoughts stream as thoughts from the first token on.
    let long = format!("{}</think>mouth", "thinking ".repeat(40));
    let tokens = marked(&long);
    let site = Site::start_model(move |request| answer(request, &tokens), tool_model(), |_| {}).await;
    let body = chat(json!({"thinking": {"type": "enabled"}, "stream": true}));
    let chunks = site.post(CHAT, &body).await.chunks();
    let said: String =
        chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(said, "mouth");
}

#[tokio::test]
async fn effort_is_the_templates_word_where_it_reads_one() {
    let template =
        "{{ messages[0].content }} {{ reasoning_effort | default('medium') }} {{ thinking | default('-') }}";
    let dialect = Dialect { reasoning: Some(ReasoningFormat::Think), tools: None };
    let text = text_model_with(template, dialect, &MARKERS);
    let tokenizer = text.tokenizer.clone();
    let site = Site::start_model(|request| answer(request, &bytes("ok")), text, |_| {}).await;
    // A template with a switch too may leave it off by itself: to think much is to think.
    let cases = [
        (json!({}), "hi medium -"),
        (json!({"reasoning_effort": "high"}), "hi high True"),
        (json!({"reasoning_effort": "minimal"}), "hi minimal -"),
        (json!({"reasoning_effort": "none"}), "hi medium False"),
        (json!({"reasoning_effort": "high", "thinking": {"type": "disabled"}}), "hi high False"),
    ];
    for (at, (extra, expected)) in cases.into_iter().enumerate() {
        let mut body = chat(extra);
        body.as_object_mut().unwrap().remove("tools");
        assert_eq!(site.post(CHAT, &body).await.status, 200);
        assert_eq!(tokenizer.decode(&site.fake.request(at).prompt, false), expected);
    }
}

#[tokio::test]
async fn stop_strings_end_the_text_before_it_is_taken_apart() {
    let site = site("<think>a stop b</think>c").await;
    let stopped = site.post(CHAT, &chat(json!({"stop": "stop"}))).await.json()["choices"][0].clone();
    assert_eq!(stopped["message"], json!({"role": "assistant", "content": "", "reasoning_content": "a "}));
    assert_eq!(stopped["finish_reason"], "stop");
    let stopped = site.post(CHAT, &chat(json!({"stop": "</think>"}))).await.json()["choices"][0].clone();
    assert_eq!(stopped["message"]["reasoning_content"], "a stop b");
}

#[tokio::test]
async fn templates_that_want_calls_in_their_own_way_get_them_so() {
    let template = "\
        {%- macro id(text) %}{% if text | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}{% endmacro %}\
        {%- for t in tools or [] %}{{ t.function.name }}{% endfor %}\
        {%- for m in messages %}[{{ m.role }}]{{ m.thinking or '' }}{{ m.content }}\
        {%- if m.tool_call_id %}{{ id(m.tool_call_id) }}{% endif %}\
        {%- for c in m.tool_calls or [] %}{{ id(c.id) }}{{ '(' + c.function.arguments + ')' }}{% endfor %}{% endfor %}";
    let text = text_model_with(template, tool_model().dialect, &MARKERS);
    let tokenizer = text.tokenizer.clone();
    let script =
        "<think>Hm.</think><tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": 1}}</tool_call>";
    let site = Site::start_model(move |request| answer(request, &marked(script)), text, |_| {}).await;
    let message = site.post(CHAT, &chat(json!({}))).await.json()["choices"][0]["message"].clone();
    let id = message["tool_calls"][0]["id"].as_str().unwrap().to_owned();
    assert!(id.len() == 9 && id.bytes().all(|byte| byte.is_ascii_alphanumeric()), "{id}");
    for id in [id.as_str(), "call_of_another_server"] {
        let mut message = message.clone();
        message["tool_calls"][0]["id"] = id.into();
        let body = chat(json!({"messages": [
            {"role": "user", "content": "hi"}, message, {"role": "tool", "tool_call_id": id, "content": "sun"},
        ]}));
        let response = site.post(CHAT, &body).await;
        assert_eq!(response.status, 200, "{}", response.text());
        let prompt = tokenizer.decode(&site.fake.request(site.fake.taken_now() - 1).prompt, false);
        assert_eq!(prompt, "weather[user]hi[assistant]Hm.({\"city\":1})[tool]sun");
    }
}

#[tokio::test]
async fn harmony_is_read_whether_or_not_there_are_tools() {
    let markers = ["<|channel|>", "<|message|>", "<|end|>", "<|start|>"];
    let dialect = Dialect { reasoning: Some(ReasoningFormat::Harmony), tools: Some(ToolFormat::Harmony) };
    let tokens: Vec<TokenId> = [
        &[259][..],
        &bytes("analysis"),
        &[260],
        &bytes("Hm."),
        &[261, 262],
        &bytes("assistant"),
        &[259],
        &bytes("final"),
        &[260],
        &bytes("Hello."),
    ]
    .concat();
    let text = text_model_with(TOOL_TEMPLATE, dialect, &markers);
    let site = Site::start_model(move |request| answer(request, &tokens), text, |_| {}).await;
    for extra in [json!({}), json!({"tools": []})] {
        let whole = site.post(CHAT, &chat(extra)).await.json();
        let message = json!({"role": "assistant", "content": "Hello.", "reasoning_content": "Hm."});
        assert_eq!(whole["choices"][0]["message"], message);
        // Three characters and the marker behind them.
        assert_eq!(whole["usage"]["completion_tokens_details"]["reasoning_tokens"], 4);
    }
}
