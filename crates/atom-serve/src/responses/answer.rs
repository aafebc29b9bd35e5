//! The answer, whole or as a stream of numbered events.

use super::items::Items;
use super::tools::Spellings;
use crate::chat::history::CallIds;
use crate::choice::{Finish, Piece};
use crate::error::ApiError;
use crate::server::{Server, unix_s};
use crate::shape::{Shape, Usage, push_named_event};
use serde_json::{Map, Value, json};

/// `response` objects, and in a stream the events that build one.
pub(crate) struct ResponsesShape {
    id: String,
    created_s: u64,
    /// What every response object repeats of its request.
    request: Map<String, Value>,
    items: Items,
    finish: Option<Finish>,
    events: Events,
}

/// Writes events and numbers them.
#[derive(Default)]
struct Events {
    next: u64,
}

impl ResponsesShape {
    pub(super) fn new(server: &Server, request: Map<String, Value>, spellings: Spellings) -> Self {
        let id = server.answer_id("resp").replace('-', "_");
        let items = Items::new(id.clone(), CallIds::new(server), spellings);
        Self { id, created_s: unix_s(), request, items, finish: None, events: Events::default() }
    }

    fn response(&self, status: &str, usage: Option<&Usage>) -> Map<String, Value> {
        let mut map = Map::new();
        map.insert("id".into(), self.id.as_str().into());
        map.insert("object".into(), "response".into());
        map.insert("created_at".into(), self.created_s.into());
        map.insert("status".into(), status.into());
        map.insert("error".into(), Value::Null);
        map.insert("incomplete_details".into(), Value::Null);
        map.insert("output".into(), self.items.output().into());
        map.insert("usage".into(), usage.map_or(Value::Null, usage_json));
        map.extend(self.request.clone());
        map
    }

    /// The response that ends the answer.
    fn last(&self, usage: &Usage) -> Map<String, Value> {
        if self.is_cut() {
            let mut response = self.response("incomplete", Some(usage));
            response.insert("incomplete_details".into(), json!({"reason": "max_output_tokens"}));
            response
        } else {
            self.response("completed", Some(usage))
        }
    }

    fn is_cut(&self) -> bool {
        self.finish == Some(Finish::Length)
    }
}

impl Events {
    fn push(&mut self, name: &str, mut data: Map<String, Value>, out: &mut String) {
        data.insert("type".into(), name.into());
        data.insert("sequence_number".into(), self.next.into());
        self.next += 1;
        push_named_event(out, name, &Value::Object(data));
    }

    fn push_response(&mut self, name: &str, response: Map<String, Value>, out: &mut String) {
        let mut data = Map::new();
        data.insert("response".into(), Value::Object(response));
        self.push(name, data, out);
    }
}

impl Shape for ResponsesShape {
    fn begin(&mut self, _usage: &Usage, out: &mut String) {
        for name in ["response.created", "response.in_progress"] {
            let response = self.response("in_progress", None);
            self.events.push_response(name, response, out);
        }
    }

    fn piece(&mut self, piece: &Piece, _usage: &Usage, out: &mut String) {
        let (items, events) = (&mut self.items, &mut self.events);
        let mut emit = |name: &'static str, data| events.push(name, data, out);
        for part in &piece.parts {
            items.part(part, &mut emit);
        }
        if piece.finish.is_some() {
            items.finish(piece.finish == Some(Finish::Length), &mut emit);
            self.finish = piece.finish;
        }
    }

    fn end(&mut self, usage: &Usage, out: &mut String) {
        let name = if self.is_cut() { "response.incomplete" } else { "response.completed" };
        let response = self.last(usage);
        self.events.push_response(name, response, out);
    }

    fn failed(&mut self, error: &ApiError, _id: &str, out: &mut String) {
        if self.events.next == 0 {
            self.begin(&Usage::default(), out);
        }
        let mut response = self.response("failed", None);
        response.insert("error".into(), json!({"code": "server_error", "message": error.to_string()}));
        self.events.push_response("response.failed", response, out);
    }

    fn whole(&mut self, pieces: &[Piece], usage: &Usage) -> Value {
        let [piece] = pieces else { unreachable!("a response has one choice") };
        for part in &piece.parts {
            self.items.part(part, &mut |_, _| {});
        }
        self.finish = piece.finish;
        self.items.finish(self.is_cut(), &mut |_, _| {});
        Value::Object(self.last(usage))
    }
}

fn usage_json(usage: &Usage) -> Value {
    json!({
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.generated,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning.unwrap_or(0)},
        "total_tokens": usage.prompt + usage.generated,
    })
}

#[cfg(test)]
mod tests;
