//! The OpenAPI document: valid by itself, and what it says of bodies is what they are read by. What it says of
//! answers is checked by every other test (`document`).

use crate::client::{Client, JSON};
use crate::document::{document, fetch, fits};
use crate::fake::{MARKERS, Site, TOOL_TEMPLATE, says, text_model_with};
use atom_serve::ApiKeys;
use atom_text::{Dialect, ReasoningFormat, ToolFormat};
use serde_json::{Value, json};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// JSON schema of documents (spec.openapis.org/oas/3.1/schema), without the schemas within.
const OPENAPI: &str = include_str!("openapi-3.1.schema.json");

/// Path, method, operation.
fn operations(document: &Value) -> impl Iterator<Item = (&str, &str, &Value)> {
    let paths = document["paths"].as_object().unwrap().iter();
    paths.flat_map(|(path, methods)| {
        let methods = methods.as_object().unwrap().iter();
        methods.map(move |(method, operation)| (path.as_str(), method.as_str(), operation))
    })
}

#[tokio::test]
async fn the_document_is_openapi_3_1() {
    let document = document().await;
    let schema = serde_json::from_str(OPENAPI).unwrap();
    let validator = jsonschema::draft202012::new(&schema).unwrap();
    let faults: Vec<_> = validator.iter_errors(document).map(|fault| fault.to_string()).collect();
    assert!(faults.is_empty(), "{faults:#?}");

    let schemas = document["components"]["schemas"].as_object().unwrap();
    for (name, schema) in schemas {
        let fault = jsonschema::draft202012::meta::validate(schema).map_err(|fault| fault.to_string());
        assert_eq!(fault, Ok(()), "{name}");
    }
    let mut used = HashSet::new();
    let mut ids = HashSet::new();
    references(document, document, &mut used);
    for (path, _, operation) in operations(document) {
        assert!(ids.insert(operation["operationId"].as_str().unwrap()), "two operations of one id: {path}");
        let tag = &operation["tags"][0];
        assert!(document["tags"].as_array().unwrap().iter().any(|known| known["name"] == *tag), "{tag}");
    }
    for name in schemas.keys() {
        assert!(used.contains(&format!("#/components/schemas/{name}")), "nobody needs {name}");
    }
}

/// Each reference leads to something.
fn references(document: &Value, value: &Value, used: &mut HashSet<String>) {
    match value {
        Value::Object(map) => {
            if let Some(Value::String(reference)) = map.get("$ref") {
                assert!(document.pointer(&reference[1..]).is_some(), "{reference} leads nowhere");
                used.insert(reference.clone());
            }
            map.values().for_each(|inner| references(document, inner, used));
        }
        Value::Array(items) => items.iter().for_each(|inner| references(document, inner, used)),
        _ => {}
    }
}

#[tokio::test]
async fn formats_that_named_each_other_had_more_ways_through_them_than_a_generator_has_memory() {
    const WAYS_MAX: usize = 100;
    let schemas = document().await["components"]["schemas"].as_object().unwrap();
    let named: HashMap<_, _> = schemas.iter().map(|(name, schema)| (name.as_str(), names(schema))).collect();
    let mut formats = 0;
    for &name in named.keys() {
        let ways = ways(&named, name, &mut Vec::new());
        assert!(ways <= WAYS_MAX, "{ways} ways through {name}: let one schema be on all of its cycles");
        formats += usize::from(ways > 1 && named[name].contains(&"Format"));
    }
    assert!(formats >= 6, "only {formats} schemas are made of formats");
    // Three that name each other, and the same by way of one.
    let each = ["a", "b", "c"].map(|name| (name, vec!["a", "b", "c"]));
    let by_one = [("a", vec!["any"]), ("b", vec!["any"]), ("c", vec!["any"]), ("any", vec!["a", "b", "c"])];
    assert_eq!(ways(&HashMap::from(each), "a", &mut Vec::new()), 5);
    assert_eq!(ways(&HashMap::from(by_one), "a", &mut Vec::new()), 4);
}

/// Schemas that a schema refers to, each as often as it does.
fn names(schema: &Value) -> Vec<&str> {
    match schema {
        Value::Object(map) => {
            let reference = map.get("$ref").and_then(Value::as_str);
            let name = reference.map(|reference| reference.rsplit('/').next().unwrap());
            name.into_iter().chain(map.values().flat_map(names)).collect()
        }
        Value::Array(items) => items.iter().flat_map(names).collect(),
        _ => Vec::new(),
    }
}

/// Paths of references that begin at a schema and come to none of them twice: a generator makes cases for each.
fn ways<'a>(named: &HashMap<&'a str, Vec<&'a str>>, name: &'a str, open: &mut Vec<&'a str>) -> usize {
    if open.contains(&name) {
        return 0;
    }
    open.push(name);
    let ways = 1 + named[name].iter().map(|inner| ways(named, inner, open)).sum::<usize>();
    open.pop();
    ways
}

#[tokio::test]
async fn structured_outputs_of_nothing_were_allowed_and_refused() {
    let document = document().await;
    let site = Site::start(says("ok")).await;
    for path in ["/v1/chat/completions", "/v1/completions"] {
        for (value, is_taken) in [(json!({}), false), (json!({"json_object": false}), true)] {
            let mut body = smallest(path).remove(0);
            body["structured_outputs"] = value;
            assert_eq!(fits(document, &document["paths"][path]["post"], &body), is_taken, "{body}");
            let status = if is_taken { 200 } else { 400 };
            assert_eq!(site.post(path, &body).await.status, status, "{body}");
        }
    }
}

#[tokio::test]
async fn a_path_that_is_off_is_not_in_the_document() {
    let site = Site::start_with(says("ok"), |options| options.ui = false).await;
    let mut client = site.client().await;
    let plain = fetch(&mut client).await;
    assert!(plain.get("security").is_none() && plain["components"].get("securitySchemes").is_none());
    let everything = document().await;
    let mut missing = Vec::new();
    for (path, method, _) in operations(everything) {
        if plain["paths"].get(path).is_none() {
            client.send(&method.to_uppercase(), path, &[JSON], b"").await;
            assert_eq!(client.response().await.status, 404, "{path}");
            missing.push(path);
        }
    }
    for path in ["/", "/debug/steps", "/debug/cache_stats", "/admin/drain", "/ui/atom.js"] {
        assert!(missing.contains(&path), "{path}");
    }
    for (path, _, operation) in operations(&plain) {
        assert!(operation["responses"].get("401").is_none(), "{path}");
    }
}

#[tokio::test]
async fn keys_are_asked_for_where_the_document_says_so() {
    let site = Site::start_with(says("ok"), |options| {
        options.api_keys = Arc::new(ApiKeys::new(["key"]).unwrap());
    })
    .await;
    let plain = fetch(&mut site.client().await).await;
    assert_eq!(plain["security"], json!([{"bearer": []}, {"x-api-key": []}]));
    for (path, method, operation) in operations(&plain) {
        let is_open = operation.get("security") == Some(&json!([]));
        let mut client = site.client().await;
        client.send(&method.to_uppercase(), path, &[], b"").await;
        let status = client.head().await.status;
        assert_eq!(status != 401, is_open, "{method} {path} answers {status} without a key");
        assert_eq!(operation["responses"].get("401").is_none(), is_open, "{path}");
    }
}

#[tokio::test]
async fn names_of_strangers_are_refused_where_the_document_says_so() {
    let site = Site::start(says("ok")).await;
    let plain = fetch(&mut site.client().await).await;
    for (path, method, operation) in operations(&plain) {
        let mut client = site.client().await;
        let method = method.to_uppercase();
        let head = format!("{method} {path} HTTP/1.1\r\nhost: evil.example\r\ncontent-length: 0\r\n\r\n");
        client.write(head.as_bytes()).await;
        let status = client.head().await.status;
        let is_described = operation["responses"].get("403").is_some();
        assert_eq!(status == 403, is_described, "{method} {path} answers {status} to a stranger's name");
    }
}

/// Values of every kind, at the edges of kinds.
fn values() -> Vec<Value> {
    let texts = ["", "x", "a\u{0}b", "none", "auto"].map(Value::from);
    let numbers = [0, 1, -1, 264, i64::MAX].map(Value::from);
    let mut values = vec![
        json!(true),
        json!(false),
        json!(0.5),
        json!(2.00000001),
        json!(1e30),
        json!(3.0),
        json!([]),
        json!([1]),
        json!([[1]]),
        json!([{}]),
        json!(["x", 1]),
        json!(["x"]),
        json!([null]),
        json!({}),
        json!({"a": null}),
        json!({"a": 1}),
        json!({"type": "object"}),
        json!({"type": "text"}),
        json!({"type": "x"}),
        json!({"5": 1}),
        json!({"05": 1}),
        json!({"5": 100.00000001}),
    ];
    values.extend(texts);
    values.extend(numbers);
    values
}

/// The values at the edges of a field's schema, and the first ones beyond.
fn edges(schema: &Value) -> Vec<Value> {
    let mut edges = Vec::new();
    for (bound, beyond) in [("minimum", -1), ("maximum", 1)] {
        match &schema[bound] {
            Value::Number(number) if number.is_i64() => {
                edges.push(json!(number));
                edges.extend(number.as_i64().unwrap().checked_add(beyond).map(Value::from));
            }
            Value::Number(number) => {
                edges.push(json!(number));
                edges.push(json!(number.as_f64().unwrap() * (1.0 + 1e-9)));
            }
            _ => {}
        }
    }
    edges.extend(schema["enum"].as_array().into_iter().flatten().cloned());
    edges
}

/// The objects within a schema, each with a way to put it into a body that has it there.
fn smallest(path: &str) -> Vec<Value> {
    match path {
        "/v1/chat/completions" | "/v1/chat/completions/render" => vec![json!({"messages": [message()]})],
        "/v1/completions" | "/v1/completions/render" => vec![json!({"prompt": "x", "max_tokens": 3})],
        "/v1/responses" => vec![json!({"input": "x"})],
        "/v1/messages" => vec![json!({"max_tokens": 9, "messages": [message()]})],
        "/v1/messages/count_tokens" => vec![json!({"messages": [message()]})],
        "/tokenize" => vec![json!({"prompt": "x"}), json!({"messages": [message()]})],
        "/detokenize" => vec![json!({"tokens": [65]})],
        _ => vec![json!({})],
    }
}

fn message() -> Value {
    json!({"role": "user", "content": "x"})
}

/// Fields and their schemas, of all kinds of body that an operation takes.
fn fields<'a>(document: &'a Value, operation: &'a Value) -> Vec<(&'a str, &'a Value)> {
    let schema = &operation["requestBody"]["content"]["application/json"]["schema"];
    let kinds = schema["anyOf"].as_array().map_or_else(|| vec![schema], |kinds| kinds.iter().collect());
    let objects = kinds
        .into_iter()
        .filter_map(|kind| document.pointer(&kind["$ref"].as_str()?[1..])?["properties"].as_object());
    objects.flatten().map(|(name, schema)| (name.as_str(), schema)).collect()
}

/// Sends a body, and compares what becomes of it with what the document says. Whether it was taken.
async fn compare(client: &mut Client, path: &str, operation: &Value, body: &Value) -> bool {
    let document = document().await;
    let response = client.post(path, body).await;
    let fits = fits(document, operation, body);
    assert!(response.status < 500, "{body}: {}", response.text());
    assert!(fits || response.status >= 400, "{path} takes {body}");
    // What its type allows can still be refused: for the model, or for other fields.
    if fits && response.status == 400 {
        let text = response.text();
        let of_type = ["it must be a whole number from", "it must be a string\"", "it must be true or false"];
        assert!(!of_type.iter().any(|words| text.contains(words)), "{body}: {text}");
    }
    response.status == 200
}

#[tokio::test]
async fn bodies_are_read_by_what_the_document_says() {
    let template = format!("{TOOL_TEMPLATE}{{{{ reasoning_effort }}}}");
    let dialect = Dialect { reasoning: Some(ReasoningFormat::Think), tools: Some(ToolFormat::Hermes) };
    let text = text_model_with(&template, dialect, &MARKERS);
    let site = Site::start_model(says("ok"), text, |_| {}).await;
    let mut client = site.client().await;
    let document = document().await;
    let bodies = operations(document).filter(|(path, _, operation)| {
        operation.get("requestBody").is_some() && !path.starts_with("/admin") && !path.ends_with("_profile")
    });
    for (path, _, operation) in bodies {
        let fields = fields(document, operation);
        assert!(fields.len() > 1, "{path}");
        for smallest in smallest(path) {
            assert!(compare(&mut client, path, operation, &smallest).await, "{path}");
            for &(name, schema) in &fields {
                let (mut tries, mut fitting) = (values(), 0);
                tries.extend(edges(schema));
                tries.extend(smallest.get(name).cloned());
                for value in tries {
                    let mut body = smallest.clone();
                    body[name] = value;
                    compare(&mut client, path, operation, &body).await;
                    fitting += usize::from(fits(document, operation, &body));
                }
                // One of an object of several fields needs an example of its own.
                let is_plain = schema.get("type").is_some() || schema.get("enum").is_some();
                assert!(fitting > 0 || !is_plain || path == "/tokenize", "no value fits {path} {name}");
            }
            for name in ["unknown", "logit_Bias", ""] {
                let mut body = smallest.clone();
                body[name] = json!(1);
                assert!(!compare(&mut client, path, operation, &body).await, "{path} {name:?}");
                body[name] = Value::Null;
                assert!(compare(&mut client, path, operation, &body).await, "null is absent: {path}");
            }
        }
    }
}

#[tokio::test]
async fn edits_of_the_context_that_are_no_list_are_refused() {
    let site = Site::start(says("ok")).await;
    let keep = json!({"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]});
    for (context_management, status) in [
        (json!({}), 200),
        (json!({"edits": []}), 200),
        (keep, 200),
        (json!({"edits": {}}), 400),
        (json!({"edits": "x"}), 400),
        (json!({"edits": null}), 200),
        (json!({"edits": [{"type": "clear_thinking_20251015"}]}), 400),
        (json!({"more": []}), 400),
    ] {
        let body = json!({"messages": [message()], "context_management": context_management});
        assert_eq!(site.post("/v1/messages/count_tokens", &body).await.status, status, "{body}");
    }
}

#[tokio::test]
async fn a_choice_of_nothing_is_refused_where_nothing_is_compiled_too() {
    let site = Site::start(says("ok")).await;
    let tags = |structures: Value, triggers: Value| json!({"structural_tag": {"structures": structures, "triggers": triggers}});
    let structure = json!({"begin": "<", "schema": {}, "end": ">"});
    for (name, value) in [
        ("guided_choice", json!([])),
        ("structured_outputs", json!({"choice": []})),
        ("structured_outputs", tags(json!([]), json!(["<"]))),
        ("structured_outputs", tags(json!([structure]), json!([]))),
    ] {
        let mut body = json!({"messages": [message()]});
        body[name] = value;
        let response = site.post("/v1/chat/completions/render", &body).await;
        assert_eq!(response.status, 400, "{body}");
        assert!(response.text().contains("at least one"), "{}", response.text());
    }
}

#[tokio::test]
async fn a_schema_that_is_a_number_is_refused_where_nothing_is_compiled_too() {
    let site = Site::start(says("ok")).await;
    let format = json!({"type": "json_schema", "json_schema": {"name": "n", "schema": 0.5}});
    let tag = json!({"type": "structural_tag", "triggers": ["<"],
        "structures": [{"begin": "<", "schema": [], "end": ">"}]});
    for (name, value) in [
        ("guided_json", json!(0.5)),
        ("guided_json", json!("0.5")),
        ("response_format", format),
        ("response_format", tag.clone()),
        ("structured_outputs", json!({"json": []})),
        ("structured_outputs", json!({"structural_tag": tag.to_string()})),
    ] {
        let mut body = json!({"messages": [message()]});
        body[name] = value;
        let response = site.post("/v1/chat/completions/render", &body).await;
        assert_eq!(response.status, 400, "{body}");
        let error = response.error();
        assert!(
            error["message"].as_str().unwrap().contains("a JSON schema: an object, true or false"),
            "{error}"
        );
        assert!(error["param"].as_str().unwrap().starts_with(name), "{error}");
    }
}
