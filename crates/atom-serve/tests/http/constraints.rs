//! Constrained output: what reaches the engine of it, and what is refused.

use crate::fake::{IM_END, Play, Site, answer, bytes, says};
use crate::tools::marked;
use atom_base::{MaskFault, TokenId};
use atom_engine::{EngineError, Event, Request};
use serde_json::{Value, json};
use std::time::Duration;

const CHAT: &str = "/v1/chat/completions";
const PLAIN: &str = "/v1/completions";

fn body(path: &str, extra: &Value) -> Value {
    let mut body = json!({"max_tokens": 100});
    let fields = body.as_object_mut().unwrap();
    if path == CHAT {
        fields.insert("messages".into(), json!([{"role": "user", "content": "hi"}]));
    } else {
        fields.insert("prompt".into(), json!("hi"));
    }
    fields.extend(extra.as_object().unwrap().clone());
    body
}

/// True if the request's grammar lets the model write this text, markers as their tokens, and end there.
pub(crate) fn follows(request: &Request, text: &str) -> bool {
    takes(request, marked(text))
}

/// The same, all of it spelled in letters.
fn spells(request: &Request, text: &str) -> bool {
    takes(request, bytes(text))
}

fn takes(request: &Request, tokens: Vec<TokenId>) -> bool {
    let mut constraint = request.grammar.as_ref().expect("a grammar").0.start().unwrap();
    tokens.into_iter().chain([IM_END]).all(|token: TokenId| {
        let mut mask = vec![0u32; 264usize.div_ceil(32)];
        constraint.mask(&mut mask).is_ok()
            && mask[token as usize / 32] >> (token % 32) & 1 == 1
            && constraint.advance(token).is_ok()
    })
}

#[tokio::test]
async fn every_way_to_constrain_reaches_the_engine_with_every_choice() {
    let site = Site::start(says("ok")).await;
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
        "additionalProperties": false});
    let tags =
        json!({"structures": [{"begin": "<t>", "schema": {"const": 1}, "end": "</t>"}], "triggers": ["<t"]});
    let mut tagged = tags.clone();
    tagged["type"] = json!("structural_tag");
    let format = json!({"type": "structural_tag", "format": {"type": "sequence", "elements": [
        {"type": "optional", "content": {"type": "const_string", "value": "So: "}},
        {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": ["</think>", "</thought>"]},
        {"type": "triggered_tags", "triggers": ["<f="], "excludes": ["!"], "stop_after_first": true, "tags": [
            {"begin": "<f=a>", "content": {"type": "json_schema", "json_schema": schema, "style": "json"}, "end": "</f>"},
            {"type": "tag", "begin": "<f=b>", "content": {"type": "grammar", "grammar": "root ::= [0-9]+"}, "end": "</f>"},
        ]},
    ]}});
    let list = json!({"format": {"type": "tags_with_separator", "separator": ", ", "at_least_one": true, "tags": [
        {"begin": "<i>", "end": "</i>", "content": {"type": "or", "elements": [
            {"type": "regex", "pattern": "[a-z]{2}"},
            {"type": "repeat", "min": 1, "max": -1, "content": {"type": "const_string", "value": "9"}},
        ]}},
    ]}});
    let number = r#"{"a": 12}"#;
    let json_schema = json!({"name": "n", "schema": schema, "strict": true, "description": "d"});
    for (fields, fits, breaks) in [
        (json!({"response_format": {"type": "json_object"}}), "{\"x\": [1]}", "[1]"),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": json_schema}}),
            number,
            "{\"b\": 1}",
        ),
        (json!({"response_format": tagged}), "text <t>1</t>", "text <t>2</t>"),
        (json!({"response_format": format}), "So: <think>hm</thought>ok <f=b>12</f>", "<think>hm</think>oh!"),
        (json!({"response_format": format}), "<think></think><f=a>{\"a\":1}</f>", "<f=a>{\"a\":1}</f>"),
        (
            json!({"structured_outputs": {"structural_tag": list}}),
            "<i>ab</i>, <i>999</i>",
            "<i>ab</i><i>cd</i>",
        ),
        (json!({"structured_outputs": {"structural_tag": format.to_string()}}), "<think></think>", "<think>"),
        (json!({"guided_json": schema}), number, "{}"),
        (json!({"guided_json": schema.to_string()}), number, "{}"),
        (json!({"guided_regex": "a+b?"}), "aab", "abb"),
        (json!({"guided_choice": ["yes", "no"]}), "no", "noo"),
        (json!({"guided_grammar": "start: \"x\" start?"}), "xxx", "xy"),
        (json!({"guided_grammar": "root ::= \"x\" root | [0-9]{2}"}), "xx12", "x1"),
        (json!({"structured_outputs": {"json": schema}}), number, "{}"),
        (json!({"structured_outputs": {"regex": "[0-9]+"}}), "42", "x"),
        (json!({"structured_outputs": {"choice": ["é"]}}), "é", "e"),
        (json!({"structured_outputs": {"grammar": "start: \"x\""}}), "x", "xx"),
        (json!({"structured_outputs": {"grammar": "# EBNF\nroot ::= a?\na ::= [^x]"}}), "é", "x"),
        (json!({"structured_outputs": {"json_object": true}}), "{}", "1"),
        (json!({"structured_outputs": {"structural_tag": tags}}), "<t>1</t>!", "<t>"),
        (json!({"structured_outputs": {"structural_tag": tagged.to_string()}}), "", "<t>1"),
    ] {
        for path in [CHAT, PLAIN] {
            let before = site.fake.taken_now();
            let mut all = fields.clone();
            all["n"] = json!(2);
            let response = site.post(path, &body(path, &all)).await;
            assert_eq!(response.status, 200, "{fields}: {}", response.text());
            for at in before..before + 2 {
                let request = site.fake.request(at);
                assert!(spells(&request, fits), "{fields}: {fits}");
                assert!(!spells(&request, breaks), "{fields}: {breaks}");
            }
        }
    }
    // What asks for nothing holds nobody.
    for fields in [
        json!({"response_format": {"type": "text"}}),
        json!({"response_format": null, "guided_json": null, "structured_outputs": {"json_object": false}}),
    ] {
        let before = site.fake.taken_now();
        assert_eq!(site.post(CHAT, &body(CHAT, &fields)).await.status, 200);
        assert!(site.fake.request(before).grammar.is_none(), "{fields}");
    }
}

#[tokio::test]
async fn constraints_that_can_not_be_met_are_a_400_that_names_the_field() {
    let site = Site::start(says("ok")).await;
    let deep = (0..40).fold(json!({}), |inner, _| json!({"type": "object", "properties": {"a": inner}}));
    let deeper = (0..55).fold(json!({}), |inner, _| json!({"type": "object", "properties": {"a": inner}}));
    let format = |schema: Value| json!({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}});
    let tags = |format: Value| json!({"response_format": {"type": "structural_tag", "format": format}});
    let explodes: String = (0..30).map(|i| format!("A{}: A{i} A{i}\n", i + 1)).collect();
    let explodes = format!("start: A30\nA0: /[ab]*a[ab]{{300}}/\n{explodes}");
    let fine = site.post(CHAT, &body(CHAT, &format(deep))).await;
    assert_eq!(fine.status, 200, "{}", fine.text());
    let cases: Vec<(Value, &str, &str)> = vec![
        (json!({"response_format": "json"}), "response_format", "an object"),
        (json!({"response_format": {}}), "response_format.type", "json_schema"),
        (json!({"response_format": {"type": "xml"}}), "response_format.type", "the string \"xml\""),
        (
            json!({"response_format": {"type": "json_object", "schema": {}}}),
            "response_format.schema",
            "unknown",
        ),
        (json!({"response_format": {"type": "json_schema"}}), "response_format.json_schema", "missing"),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}),
            "response_format.json_schema.name",
            "name",
        ),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}),
            "response_format.json_schema.schema",
            "missing",
        ),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "strict": 1}}}),
            "response_format.json_schema.strict",
            "true or false",
        ),
        (json!({"response_format": {"type": "structural_tag"}}), "response_format.structures", "missing"),
        (
            json!({"response_format": {"type": "structural_tag", "structures": [{"begin": "<a"}], "triggers": ["<"]}}),
            "response_format.structures[0].end",
            "missing",
        ),
        (tags(json!({"type": "token", "token": 5})), "response_format.format.type: token", "special ones"),
        (
            tags(json!({"type": "dispatch", "rules": []})),
            "response_format.format.type: dispatch",
            "triggered_tags",
        ),
        (tags(json!({"type": "chorus"})), "response_format.format.type", "one of const_string, json_schema"),
        (tags(json!("any_text")), "response_format.format", "an object"),
        (
            tags(json!({"type": "any_text", "max_tokens": 5})),
            "response_format.format.max_tokens",
            "max_chars",
        ),
        (
            tags(json!({"type": "any_text", "excludes": [""]})),
            "response_format.format.excludes[0]",
            "not empty",
        ),
        (
            tags(json!({"type": "json_schema", "json_schema": {}, "style": "qwen_xml"})),
            "response_format.format.style",
            "only JSON",
        ),
        (
            tags(json!({"type": "json_schema", "json_schema": {}, "any_order": true})),
            "response_format.format.any_order",
            "required",
        ),
        (tags(json!({"type": "or", "elements": []})), "response_format.format.elements", "at least one"),
        (
            tags(json!({"type": "or", "elements": [{"type": "regex"}]})),
            "response_format.format.elements[0].pattern",
            "missing",
        ),
        (
            tags(json!({"type": "repeat", "min": 3, "max": 2, "content": {}})),
            "response_format.format.max",
            "at least the 3",
        ),
        (
            tags(json!({"type": "tag", "begin": {"type": "token", "token": 1}, "end": ""})),
            "response_format.format.begin",
            "of text",
        ),
        (
            tags(json!({"type": "tag", "begin": "", "end": "", "content": {"type": "star"}})),
            "response_format.format.content.content",
            "missing",
        ),
        (tags(json!({"type": "const_string", "value": "a", "x": 1})), "response_format.format.x", "unknown"),
        (
            tags(
                json!({"type": "sequence", "elements": [{"type": "any_text"}, {"type": "json_schema", "json_schema": {}}]}),
            ),
            "response_format",
            "response_format.format.elements[0]: it can't be told where this ends",
        ),
        (
            tags(json!({"type": "grammar", "grammar": "start: \"a\""})),
            "response_format",
            "format.grammar: line 1",
        ),
        (format(json!(5)), "response_format.json_schema.schema", "an object, true or false"),
        (format(json!({"type": "nonsense"})), "response_format", "nonsense"),
        (format(json!({"$ref": "#"})), "response_format", "refers back to itself"),
        (format(json!({"$ref": "http://127.0.0.1/secret"})), "response_format", "127.0.0.1"),
        (format(deeper), "response_format", "111 levels, at most 100"),
        (json!({"guided_json": "{"}), "guided_json", "not JSON"),
        (json!({"guided_json": {"not": {}}}), "guided_json", "not"),
        (json!({"guided_regex": 5}), "guided_regex", "a string"),
        (json!({"guided_regex": "("}), "guided_regex", "unclosed group"),
        (json!({"guided_regex": "x".repeat(300_000)}), "guided_regex", "300000 bytes; at most 262144"),
        (json!({"guided_choice": "yes"}), "guided_choice", "a list of strings"),
        (json!({"guided_choice": ["a", 1]}), "guided_choice[1]", "a string"),
        (json!({"guided_choice": []}), "guided_choice", "at least one string"),
        (
            json!({"guided_grammar": "root ::= \"a\"\n b ::= c"}),
            "guided_grammar",
            "line 2: there is no rule \"c\"",
        ),
        (json!({"guided_grammar": "root ::= Token(5)"}), "guided_grammar", "Token(..) is not taken"),
        (json!({"guided_grammar": "start: \"::=\" nothing"}), "guided_grammar", "it was read as Lark"),
        (json!({ "guided_grammar": explodes }), "guided_grammar", "too big"),
        (json!({"structured_outputs": []}), "structured_outputs", "an object"),
        (json!({"structured_outputs": {}}), "structured_outputs", "says nothing"),
        (json!({"structured_outputs": {"json": null}}), "structured_outputs", "says nothing"),
        (
            json!({"structured_outputs": {"regex": "a", "disable_fallback": true}}),
            "structured_outputs.disable_fallback",
            "unknown",
        ),
        (json!({"structured_outputs": {"regex": "a", "choice": ["b"]}}), "structured_outputs.choice", "only"),
        (json!({"guided_regex": "a", "guided_json": {}}), "guided_regex", "beside 'guided_json'"),
        (
            json!({"response_format": {"type": "json_object"}, "structured_outputs": {"json_object": true}}),
            "structured_outputs.json_object",
            "beside 'response_format'",
        ),
        (json!({"guided_regex": "a", "ignore_eos": true}), "ignore_eos", "beside 'guided_regex'"),
    ];
    for (fields, param, words) in cases {
        for path in [CHAT, PLAIN] {
            let response = site.post(path, &body(path, &fields)).await;
            assert_eq!(response.status, 400, "{fields}: {}", response.text());
            let error = response.error();
            assert_eq!(error["param"], param, "{error}");
            let message = error["message"].as_str().unwrap();
            assert!(message.contains(words) && message.len() < 1500, "{words}: {message}");
        }
    }
    assert_eq!(site.post(CHAT, &body(CHAT, &json!({}))).await.status, 200, "and the server goes on");
}

#[tokio::test]
async fn a_name_twice_in_a_schema_that_came_as_text_was_the_last_one() {
    let site = Site::start(says("ok")).await;
    let twice = r#"{"type": "string", "type": "integer"}"#;
    let deep = r#"{"properties": {"a": {"anyOf": [{}, {"const": 1, "\u0063onst": 2}]}}}"#;
    let format = r#"{"format": {"type": "const_string", "value": "a", "value": "b"}}"#;
    let tags = r#"{"triggers": ["<"], "structures": [{"begin": "<", "schema": {}, "end": ">", "end": "!"}]}"#;
    for (fields, param) in [
        (json!({"guided_json": twice}), "guided_json.type"),
        (json!({"guided_json": deep}), "guided_json.properties.a.anyOf[1].const"),
        (json!({"structured_outputs": {"json": twice}}), "structured_outputs.json.type"),
        (
            json!({"structured_outputs": {"structural_tag": format}}),
            "structured_outputs.structural_tag.format.value",
        ),
        (
            json!({"structured_outputs": {"structural_tag": tags}}),
            "structured_outputs.structural_tag.structures[0].end",
        ),
    ] {
        for path in [CHAT, PLAIN] {
            let response = site.post(path, &body(path, &fields)).await;
            let error = response.error();
            let said = (response.status, &error["code"], &error["param"]);
            assert_eq!(said, (400, &json!("duplicate_field"), &json!(param)), "{error}");
        }
    }
    assert_eq!(site.fake.taken_now(), 0);
}

#[tokio::test]
async fn a_device_that_can_not_constrain_refuses_and_says_so() {
    let site = Site::without_grammars(says("ok")).await;
    for path in [CHAT, PLAIN] {
        let response = site.post(path, &body(path, &json!({"guided_regex": "a"}))).await;
        assert_eq!((response.status, &response.error()["param"]), (400, &json!("guided_regex")));
        let message = response.error()["message"].as_str().unwrap().to_owned();
        assert!(message.contains("--device cpu"), "{message}");
        assert_eq!(site.post(path, &body(path, &json!({}))).await.status, 200);
    }
}

#[tokio::test]
async fn a_grammar_that_ends_in_nothing_is_the_clients_and_one_that_is_late_is_ours() {
    for (fault, status, code) in [
        (MaskFault::Failed("nothing can follow".into()), 400, "constraint_failed"),
        (MaskFault::Late { waited: Duration::from_secs(1) }, 503, "constraint_late"),
        (MaskFault::Busy { waiting: 64 }, 503, "busy"),
    ] {
        let said = fault.to_string();
        let site = Site::start(move |request| {
            let mut plays = answer(request, &bytes("ab"));
            plays.pop();
            let fault = fault.clone();
            plays.push(Play::Say(Event::Failed(EngineError::Grammar { token: 3, fault })));
            plays
        })
        .await;
        let response = site.post(PLAIN, &body(PLAIN, &json!({"guided_regex": "a+"}))).await;
        assert_eq!(response.status, status);
        let error = response.error();
        assert_eq!(error["code"], code);
        let message = error["message"].as_str().unwrap();
        assert!(message.contains(&said) && message.contains("at token 3 of it"), "{error}");
    }
}
