//! The answer, whole or as a stream of named events.

use super::blocks::{Blocks, Delta, Event, Start, Thinking};
use super::error;
use crate::chat::history::CallIds;
use crate::choice::{Finish, Piece};
use crate::error::ApiError;
use crate::server::Server;
use crate::shape::{Shape, Usage, push_named_event};
use serde_json::{Map, Value, json};

/// `message` objects, and in a stream the events that build one.
pub(crate) struct MessagesShape {
    id: String,
    model: String,
    stop_sequences: Vec<String>,
    /// Tokens end where the context does, before the request's own bound.
    fills_context: bool,
    blocks: Blocks,
    finish: Option<Finish>,
}

impl MessagesShape {
    pub(super) fn new(
        server: &Server,
        model: String,
        stop_sequences: Vec<String>,
        fills_context: bool,
        thinking: Thinking,
    ) -> Self {
        let id = server.answer_id("msg").replace('-', "_");
        let blocks = Blocks::new(CallIds::new(server), thinking);
        Self { id, model, stop_sequences, fills_context, blocks, finish: None }
    }

    fn message(&self, content: Value, stop: &Stop<'_>, usage: &Usage) -> Value {
        json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": stop.reason,
            "stop_sequence": stop.sequence,
            "usage": usage_json(usage),
        })
    }

    /// Why the answer ended, once all of it has gone through the blocks.
    fn stop(&self) -> Stop<'_> {
        let (reason, sequence) = match self.finish {
            None => (None, None),
            Some(Finish::ToolCalls) if self.blocks.calls() => (Some("tool_use"), None),
            Some(Finish::Stop | Finish::ToolCalls) => (Some("end_turn"), None),
            Some(Finish::StopString(at)) => (Some("stop_sequence"), Some(self.stop_sequences[at].as_str())),
            Some(Finish::Length) if self.fills_context => (Some("model_context_window_exceeded"), None),
            Some(Finish::Length) => (Some("max_tokens"), None),
        };
        Stop { reason, sequence }
    }
}

#[derive(Default)]
struct Stop<'a> {
    reason: Option<&'static str>,
    sequence: Option<&'a str>,
}

impl Shape for MessagesShape {
    fn begin(&mut self, usage: &Usage, out: &mut String) {
        let message = self.message(json!([]), &Stop::default(), usage);
        push_named_event(out, "message_start", &json!({"type": "message_start", "message": message}));
        out.push_str(PING);
    }

    fn piece(&mut self, piece: &Piece, _usage: &Usage, out: &mut String) {
        let mut emit = |index: u32, event: Event<'_>| push_block_event(out, index, &event);
        for part in &piece.parts {
            self.blocks.part(part, &mut emit);
        }
        if piece.finish.is_some() {
            self.blocks.finish(&mut emit);
            self.finish = piece.finish;
        }
    }

    fn end(&mut self, usage: &Usage, out: &mut String) {
        let Stop { reason, sequence } = self.stop();
        let data = json!({
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": sequence},
            "usage": usage_json(usage),
        });
        push_named_event(out, "message_delta", &data);
        push_named_event(out, "message_stop", &json!({"type": "message_stop"}));
    }

    fn failed(&mut self, error: &ApiError, id: &str, out: &mut String) {
        push_named_event(out, "error", &error::body(error.status(), &error.to_string(), id));
    }

    fn keep_alive(&self) -> &'static str {
        PING
    }

    fn whole(&mut self, pieces: &[Piece], usage: &Usage) -> Value {
        let [piece] = pieces else { unreachable!("a message has one choice") };
        let mut content = Content::default();
        let mut emit = |_: u32, event: Event<'_>| content.take(&event);
        for part in &piece.parts {
            self.blocks.part(part, &mut emit);
        }
        self.blocks.finish(&mut emit);
        self.finish = piece.finish;
        self.message(Value::Array(content.blocks), &self.stop(), usage)
    }
}

/// The blocks of a whole answer.
#[derive(Default)]
struct Content {
    blocks: Vec<Value>,
    /// The JSON text of the open call.
    input: String,
}

impl Content {
    fn take(&mut self, event: &Event<'_>) {
        if let Event::Start(start) = event {
            self.blocks.push(block(start));
            return;
        }
        let block = self.blocks.last_mut().expect("a block begins before it goes on");
        match event {
            Event::Start(_) => {}
            Event::Delta(Delta::InputJson(json)) => self.input.push_str(json),
            Event::Delta(Delta::Text(text)) => append(block, "text", text),
            Event::Delta(Delta::Thinking(text)) => append(block, "thinking", text),
            Event::Delta(Delta::Signature(text)) => append(block, "signature", text),
            Event::Stop => {
                let input = std::mem::take(&mut self.input);
                // Arguments that were cut off are no JSON. Half of them must not look like a call that
                // somebody could run.
                if let Ok(Value::Object(input)) = serde_json::from_str(&input) {
                    block["input"] = Value::Object(input);
                }
            }
        }
    }
}

fn append(block: &mut Value, field: &str, text: &str) {
    if let Some(Value::String(so_far)) = block.get_mut(field) {
        so_far.push_str(text);
    }
}

fn block(start: &Start<'_>) -> Value {
    match start {
        Start::Text => json!({"type": "text", "text": ""}),
        Start::Thinking => json!({"type": "thinking", "thinking": "", "signature": ""}),
        Start::ToolUse { id, name } => json!({"type": "tool_use", "id": id, "name": name, "input": {}}),
    }
}

fn push_block_event(out: &mut String, index: u32, event: &Event<'_>) {
    let (name, field, value) = match event {
        Event::Start(start) => ("content_block_start", "content_block", block(start)),
        Event::Delta(delta) => ("content_block_delta", "delta", delta_json(delta)),
        Event::Stop => ("content_block_stop", "", Value::Null),
    };
    let mut data = Map::new();
    data.insert("type".into(), name.into());
    data.insert("index".into(), index.into());
    if !value.is_null() {
        data.insert(field.into(), value);
    }
    push_named_event(out, name, &Value::Object(data));
}

fn delta_json(delta: &Delta<'_>) -> Value {
    match delta {
        Delta::Text(text) => json!({"type": "text_delta", "text": text}),
        Delta::Thinking(text) => json!({"type": "thinking_delta", "thinking": text}),
        Delta::Signature(text) => json!({"type": "signature_delta", "signature": text}),
        Delta::InputJson(json) => json!({"type": "input_json_delta", "partial_json": json}),
    }
}

/// The three kinds of input tokens add up to the prompt. Nothing is paid for writing into the cache, so
/// no tokens are of that kind.
fn usage_json(usage: &Usage) -> Value {
    let mut json = json!({
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.generated,
    });
    if let Some(reasoning) = usage.reasoning {
        json["output_tokens_details"] = json!({"thinking_tokens": reasoning});
    }
    json
}

const PING: &str = "event: ping\ndata: {\"type\":\"ping\"}\n\n";

#[cfg(test)]
mod tests;
