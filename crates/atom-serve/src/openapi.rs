//! The OpenAPI document at `/openapi.json`, and the routes that it describes.
//!
//! A path can't be served without its [`Operation`]: [`Routes`] takes both or nothing. Bodies are described by the
//! declarations that they are read by ([`declare`](crate::declare)); answers are written down in `answers`, and the
//! tests hold every response of every test to them.

mod answers;
pub(crate) mod operations;
#[cfg(test)]
mod tables;

use crate::declare::{Object, Schemas};
use crate::server::Server;
use axum::Router;
use axum::body::{Body, Bytes};
use axum::handler::Handler;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use axum::routing::{MethodRouter, get, post};
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Routes with what is said of them.
pub(crate) struct Routes {
    router: Router<Arc<Server>>,
    paths: Vec<(&'static str, &'static str, &'static Operation)>,
}

/// What a request must get past before its path is looked at.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Guards {
    /// It must have a key, unless the path is open.
    pub(crate) keys: bool,
    /// It must name this machine, or an allowed host, unless it asks whether the server is well.
    pub(crate) hosts: bool,
}

/// One path, asked by one method.
#[derive(Debug)]
pub(crate) struct Operation {
    pub(crate) id: &'static str,
    pub(crate) tag: &'static str,
    pub(crate) summary: &'static str,
    pub(crate) takes: Takes,
    pub(crate) gives: Gives,
    /// Errors beyond those of every request, and of every body.
    pub(crate) fails: &'static [u16],
    /// Needs no key.
    pub(crate) is_open: bool,
}

/// What is sent.
#[derive(Debug)]
pub(crate) enum Takes {
    Nothing,
    /// A part of the path.
    Name,
    /// A body of one of these kinds.
    Body(&'static [&'static Object]),
    /// A body that asks for tokens.
    Generation(&'static Object),
    /// No body, or an empty object. A browser must say by the content type that no form sent it.
    Order,
}

/// What is answered with a 200. Names are those of components.
#[derive(Debug)]
pub(crate) enum Gives {
    Json(&'static str),
    /// The second: each event of the stream that a body with `"stream": true` gets.
    JsonOrStream(&'static str, &'static str),
    Stream(&'static str),
    /// A 503 has the same shape.
    Health,
    /// A text of this type; `changes`: not sent again to who has it.
    Text {
        kind: &'static str,
        changes: bool,
    },
}

impl Routes {
    pub(crate) fn new() -> Self {
        Self { router: Router::new(), paths: Vec::new() }
    }

    pub(crate) fn get<H: Handler<T, Arc<Server>>, T: 'static>(
        self,
        path: &'static str,
        handler: H,
        operation: &'static Operation,
    ) -> Self {
        self.add("get", path, get(handler), operation)
    }

    pub(crate) fn post<H: Handler<T, Arc<Server>>, T: 'static>(
        self,
        path: &'static str,
        handler: H,
        operation: &'static Operation,
    ) -> Self {
        self.add("post", path, post(handler), operation)
    }

    fn add(
        mut self,
        method: &'static str,
        path: &'static str,
        handler: MethodRouter<Arc<Server>>,
        operation: &'static Operation,
    ) -> Self {
        self.router = self.router.route(path, handler);
        self.paths.push((method, path, operation));
        self
    }

    pub(crate) fn merge(mut self, other: Self) -> Self {
        self.router = self.router.merge(other.router);
        self.paths.extend(other.paths);
        self
    }

    /// Puts all routes so far behind something.
    pub(crate) fn behind(self, layer: impl FnOnce(Router<Arc<Server>>) -> Router<Arc<Server>>) -> Self {
        Self { router: layer(self.router), paths: self.paths }
    }

    /// The routes and the one of their document.
    pub(crate) fn documented(mut self, server: &Server, guards: Guards) -> Router<Arc<Server>> {
        self.paths.push(("get", "/openapi.json", &operations::DOCUMENT));
        let text = Bytes::from(document(server, guards, &self.paths).to_string());
        let document = move || {
            let mut response = Response::new(Body::from(text.clone()));
            let kind = HeaderValue::from_static("application/json");
            response.headers_mut().insert(header::CONTENT_TYPE, kind);
            std::future::ready(response)
        };
        self.router.route("/openapi.json", get(document))
    }
}

/// The document of a server with these paths.
fn document(server: &Server, guards: Guards, paths: &[(&str, &str, &'static Operation)]) -> Value {
    let mut schemas = Schemas::new(server.engine.limits().vocab_size);
    let mut described = Map::new();
    for &(method, path, operation) in paths {
        // A rest of a path is a parameter like others to OpenAPI.
        let path = path.replace("{*", "{");
        let operation = operation.describe(guards, path.starts_with("/v1/messages"), &mut schemas);
        described.insert(path, json!({method: operation}));
    }
    schemas.components.sort_keys();
    schemas.components.extend(answers::schemas());
    let mut components = json!({"schemas": schemas.components, "responses": failures()});
    let mut document = json!({
        "openapi": "3.1.0",
        "info": {
            "title": "atom",
            "version": env!("CARGO_PKG_VERSION"),
            "summary": "A server for large language models.",
            "description": ABOUT,
            "license": {"name": "MIT OR Apache-2.0", "identifier": "MIT OR Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "tags": operations::TAGS.map(|(name, about)| json!({"name": name, "description": about})),
        "paths": described,
    });
    if guards.keys {
        components["securitySchemes"] = json!({
            "bearer": {"type": "http", "scheme": "bearer"},
            "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        });
        document["security"] = json!([{"bearer": []}, {"x-api-key": []}]);
    }
    document["components"] = components;
    document
}

impl Operation {
    fn describe(&self, guards: Guards, is_messages: bool, schemas: &mut Schemas) -> Value {
        let mut described = json!({"operationId": self.id, "tags": [self.tag], "summary": self.summary});
        match self.takes {
            Takes::Nothing => {}
            Takes::Name => {
                described["parameters"] = json!([{
                    "name": "name", "in": "path", "required": true, "schema": {"type": "string", "minLength": 1},
                    "description": "May contain slashes.",
                }]);
            }
            Takes::Generation(object) => {
                described["parameters"] = json!([{
                    "name": "x-session-id", "in": "header", "schema": {"type": "string"},
                    "description": "Requests that carry the same go to one lane, where their beginning is cached.",
                }]);
                described["requestBody"] = body(schemas.object(object));
            }
            Takes::Body([object]) => described["requestBody"] = body(schemas.object(object)),
            Takes::Body(objects) => {
                let all: Vec<_> = objects.iter().map(|object| schemas.object(object)).collect();
                described["requestBody"] = body(json!({"anyOf": all}));
            }
            Takes::Order => {
                described["requestBody"] = body(json!({"type": "object", "maxProperties": 0}));
                described["requestBody"]["required"] = false.into();
            }
        }
        described["responses"] = self.responses(guards, is_messages).into();
        if guards.keys && self.is_open {
            described["security"] = json!([]);
        }
        described
    }

    fn responses(&self, guards: Guards, is_messages: bool) -> Map<String, Value> {
        let mut responses = Map::new();
        let content = match self.gives {
            Gives::Json(name) => json!({"application/json": {"schema": refer(name)}}),
            Gives::Health => json!({"application/json": {"schema": refer("Health")}}),
            Gives::Stream(event) => stream(event),
            Gives::JsonOrStream(name, event) => {
                let mut content = json!({"application/json": {"schema": refer(name)}});
                content[STREAM] = stream(event)[STREAM].take();
                content
            }
            Gives::Text { kind, .. } => json!({kind: {"schema": {"type": "string"}}}),
        };
        responses.insert("200".into(), json!({"description": "OK", "content": content}));
        if let Gives::Text { changes: true, .. } = self.gives {
            responses.insert("304".into(), json!({"description": "The client has it."}));
        }
        let own = match self.takes {
            Takes::Nothing | Takes::Name => &[][..],
            Takes::Order => BODY,
            Takes::Body(_) | Takes::Generation(_) => &[BODY, &[404]].concat(),
        };
        let generates = if matches!(self.takes, Takes::Generation(_)) { GENERATION } else { &[] };
        let keys: &[u16] = if guards.keys && !self.is_open { &[401] } else { &[] };
        let hosts: &[u16] = if guards.hosts && !matches!(self.gives, Gives::Health) { &[403] } else { &[] };
        let mut failures: Vec<u16> = [ALWAYS, own, generates, keys, hosts, self.fails].concat();
        failures.sort_unstable();
        failures.dedup();
        for status in failures {
            let response = match (&self.gives, status) {
                (Gives::Health, 503) => json!({
                    "description": "Requests are not taken; the body says why.",
                    "content": {"application/json": {"schema": refer("Health")}},
                }),
                _ => {
                    let prefix = if is_messages { "Messages" } else { "" };
                    json!({"$ref": format!("#/components/responses/{prefix}Error{status}")})
                }
            };
            responses.insert(status.to_string(), response);
        }
        responses
    }
}

/// Every error, in the shapes of both APIs.
fn failures() -> Map<String, Value> {
    let mut failures = Map::new();
    for (prefix, shape) in [("", "Error"), ("Messages", "MessagesError")] {
        for (status, about) in FAILURES {
            let reason = StatusCode::from_u16(status).ok().and_then(|status| status.canonical_reason());
            let mut response = json!({
                "description": if about.is_empty() { reason.unwrap_or_default() } else { about },
                "content": {"application/json": {"schema": refer(shape)}},
            });
            if matches!(status, 429 | 503) {
                let seconds = json!({"schema": {"type": "string"}, "description": "Seconds."});
                response["headers"] = json!({"retry-after": seconds});
            }
            failures.insert(format!("{prefix}Error{status}"), response);
        }
    }
    failures
}

fn body(schema: Value) -> Value {
    json!({"required": true, "content": {"application/json": {"schema": schema}}})
}

/// OpenAPI 3.1 has no word for the events of a stream; each one's data is JSON of this schema.
fn stream(event: &str) -> Value {
    json!({STREAM: {"x-event-schema": refer(event)}})
}

fn refer(name: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{name}")})
}

const STREAM: &str = "text/event-stream";

const ABOUT: &str = "Made of what this server parses with. Null is the same as absent in every body. A field that is \
    not here is refused by name. A body can be refused for more than a schema says: the error's message has the field and \
    the numbers.";

/// Any request: its head, or the time that it takes.
const ALWAYS: &[u16] = &[400, 408, 414, 431, 500];
const BODY: &[u16] = &[413, 415, 503];
const GENERATION: &[u16] = &[429, 504];

/// What each status means here, where its own words don't say it.
const FAILURES: [(u16, &str); 16] = [
    (400, "The request can't be understood, or asks for what can't be: `param` names the field."),
    (401, "No key, or none of this server's."),
    (403, "This server doesn't do it, or not for who comes by this name."),
    (404, "No model has this name."),
    (405, ""),
    (408, "The client stopped sending."),
    (409, "Another order came before."),
    (413, "The body is too large."),
    (414, ""),
    (415, "The body must be application/json, in UTF-8 and without an encoding."),
    (429, "Too many requests wait."),
    (431, ""),
    (500, "A fault of the server."),
    (503, "The server takes no requests now."),
    (504, "It took longer than it may."),
    (505, ""),
];
