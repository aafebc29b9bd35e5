//! Holds what is sent and answered, in every test, to the OpenAPI document.

use crate::client::{Client, Response};
use crate::fake::{Site, says};
use atom_serve::ApiKeys;
use jsonschema::Validator;
use serde_json::Value;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock};
use tokio::sync::OnceCell;

/// The document of a server that has everything.
pub(crate) async fn document() -> &'static Value {
    static DOCUMENT: OnceCell<Value> = OnceCell::const_new();
    DOCUMENT
        .get_or_init(|| async {
            let site = Site::start_with(says("ok"), |options| {
                options.admin = true;
                options.debug = true;
                options.api_keys = Arc::new(ApiKeys::new(["key"]).unwrap());
            })
            .await;
            fetch(&mut site.client().await).await
        })
        .await
}

/// As a server has it that `client` is connected to.
pub(crate) async fn fetch(client: &mut Client) -> Value {
    client.send("GET", "/openapi.json", &[("x-api-key", "key")], b"").await;
    let response = client.response().await;
    assert_eq!(response.status, 200, "{}", response.text());
    response.json()
}

/// What the document says of a path; `None` for paths that there are not.
fn operation<'a>(document: &'a Value, method: &str, path: &str) -> Option<&'a Value> {
    let path = path.split('?').next().unwrap();
    let found = document["paths"].get(path).or_else(|| {
        let is_model = path.strip_prefix("/v1/models/").is_some_and(|name| !name.is_empty());
        is_model.then(|| &document["paths"]["/v1/models/{name}"])
    });
    found?.get(method.to_ascii_lowercase())
}

/// Complains of an exchange that the document doesn't know.
pub(crate) async fn check(method: &str, path: &str, sent: Option<&Value>, response: &Response) {
    static CLOSED: OnceLock<Value> = OnceLock::new();
    let document = document().await;
    let closed = CLOSED.get_or_init(|| closed(document.clone()));
    let Some(operation) = operation(document, method, path) else { return };
    // The document is of a server that has everything; here it may be off.
    if response.status == 404 && response.text().contains("there is no ") {
        return;
    }
    let status = response.status.to_string();
    let mut described = &operation["responses"][&status];
    if let Some(name) = described["$ref"].as_str() {
        described = document.pointer(&name[1..]).unwrap();
    }
    assert!(described.is_object(), "{method} {path} answers {status}: {}", response.text());
    if let Some(content) = described["content"].as_object() {
        let found = response.header("content-type").unwrap_or_default();
        let essence = |kind: &str| kind.split(';').next().unwrap().trim().to_owned();
        let described = content.iter().find(|(kind, _)| essence(kind) == essence(found));
        let (kind, described) = described.unwrap_or_else(|| panic!("{method} {path} answers with {found}"));
        match kind.as_str() {
            "application/json" => conforms(closed, &described["schema"], &response.json(), path),
            "text/event-stream" => {
                for data in response.text().lines().filter_map(|line| line.strip_prefix("data: ")) {
                    let event = serde_json::from_str(data).unwrap_or_else(|_| data.into());
                    conforms(closed, &described["x-event-schema"], &event, path);
                }
            }
            _ => {}
        }
    }
    if let Some(sent) = sent {
        let fits = fits(document, operation, sent);
        match response.status {
            200 => assert!(fits, "{path} takes what its document refuses: {sent}"),
            400 if response.json()["error"]["code"] == "unknown_field" => {
                assert!(!fits, "{path} doesn't know what its document has: {}", response.text());
            }
            _ => {}
        }
    }
}

/// Whether a body is one of an operation.
pub(crate) fn fits(document: &Value, operation: &Value, body: &Value) -> bool {
    let schema = &operation["requestBody"]["content"]["application/json"]["schema"];
    with_validator(document, schema, |validator| validator.is_valid(body))
}

fn conforms(closed: &Value, schema: &Value, value: &Value, path: &str) {
    with_validator(closed, schema, |validator| {
        let faults: Vec<_> = validator.iter_errors(value).map(|fault| fault.to_string()).collect();
        assert!(faults.is_empty(), "{path} answers {value}, but {faults:?}");
    });
}

/// The document with answers that have no field beyond those that it names. Bodies say so themselves.
fn closed(mut document: Value) -> Value {
    for schema in document["components"]["schemas"].as_object_mut().unwrap().values_mut() {
        if schema.get("additionalProperties").is_none() {
            close(schema);
        }
    }
    document
}

fn close(schema: &mut Value) {
    match schema {
        Value::Object(map) => {
            map.values_mut().for_each(close);
            if map.contains_key("properties") && map.get("type").is_some_and(|kind| kind.is_string()) {
                map.insert("additionalProperties".into(), false.into());
            }
        }
        Value::Array(items) => items.iter_mut().for_each(close),
        _ => {}
    }
}

/// Compiles a schema of the document when it is first asked for.
pub(crate) fn with_validator<T>(document: &Value, schema: &Value, ask: impl FnOnce(&Validator) -> T) -> T {
    static KNOWN: OnceLock<Mutex<HashMap<String, Arc<Validator>>>> = OnceLock::new();
    let components = &document["components"];
    let key = format!("{:p} {schema}", document);
    let known = KNOWN.get_or_init(Mutex::default);
    let found = known.lock().unwrap().get(&key).cloned();
    let validator = found.unwrap_or_else(|| {
        let mut whole = schema.clone();
        whole["components"] = components.clone();
        let made = jsonschema::draft202012::new(&whole).unwrap_or_else(|error| panic!("{schema}: {error}"));
        let made = Arc::new(made);
        known.lock().unwrap().insert(key, made.clone());
        made
    });
    ask(&validator)
}
