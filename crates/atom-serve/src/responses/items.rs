//! The parts of an answer as output items: a message, a reasoning or a call of a tool, one after the other.
//!
//! The stream and the whole answer are both made from what [`Items`] says and keeps.

use super::custom::InputText;
use super::tools::{Spelling, Spellings};
use crate::chat::history::CallIds;
use atom_text::AnswerPart;
use serde_json::{Map, Value, json};

/// Opens and closes items as the kind of the parts changes, and keeps what was said.
pub(super) struct Items {
    answer_id: String,
    ids: CallIds,
    spellings: Spellings,
    done: Vec<Value>,
    open: Option<Item>,
}

struct Item {
    id: String,
    kind: Kind,
    /// The text or the arguments so far.
    text: String,
    /// Finds the text in the arguments of a custom tool.
    input: Option<InputText>,
}

enum Kind {
    Message,
    Reasoning,
    Call { index: u32, call_id: String, tool: Spelling },
}

/// Takes an event's type and its data, to which type and number are to be added.
pub(super) type Emit<'a> = dyn FnMut(&'static str, Map<String, Value>) + 'a;

impl Items {
    pub(super) fn new(answer_id: String, ids: CallIds, spellings: Spellings) -> Self {
        Self { answer_id, ids, spellings, done: Vec::new(), open: None }
    }

    /// Takes the next part.
    pub(super) fn part(&mut self, part: &AnswerPart, emit: &mut Emit<'_>) {
        match part {
            AnswerPart::Content(text) => {
                if !matches!(self.open, Some(Item { kind: Kind::Message, .. })) {
                    self.start(Kind::Message, emit);
                }
                self.go_on(text, emit);
            }
            AnswerPart::Reasoning(text) => {
                if !matches!(self.open, Some(Item { kind: Kind::Reasoning, .. })) {
                    self.start(Kind::Reasoning, emit);
                }
                self.go_on(text, emit);
            }
            AnswerPart::Call { index, id, name } => {
                let call_id = id.clone().unwrap_or_else(|| self.ids.of(0, *index));
                let tool = self.spellings.of(name);
                self.start(Kind::Call { index: *index, call_id, tool }, emit);
            }
            AnswerPart::Arguments { index, json } => {
                let open = self.open.as_ref().map(|item| &item.kind);
                let is_open = matches!(open, Some(Kind::Call { index: open, .. }) if open == index);
                assert!(is_open, "arguments of call {index} behind the end of its item");
                let item = self.open.as_mut().expect("checked above");
                let text = match &mut item.input {
                    Some(input) => &input.push(json),
                    None => json,
                };
                if !text.is_empty() {
                    self.go_on(text, emit);
                }
            }
        }
    }

    /// The answer is over; `cut`: before the model had ended it.
    pub(super) fn finish(&mut self, cut: bool, emit: &mut Emit<'_>) {
        self.stop(if cut { "incomplete" } else { "completed" }, emit);
    }

    /// The items that are complete.
    pub(super) fn output(&self) -> &[Value] {
        &self.done
    }

    fn start(&mut self, kind: Kind, emit: &mut Emit<'_>) {
        self.stop("completed", emit);
        let index = self.done.len();
        let prefix = match kind {
            Kind::Message => "msg_",
            Kind::Reasoning => "rs_",
            Kind::Call { tool: Spelling { is_custom: true, .. }, .. } => "ctc_",
            Kind::Call { .. } => "fc_",
        };
        // No other answer has it, since no other has the answer's id.
        let unique = self.answer_id.rsplit('_').next().unwrap_or_default();
        let input = matches!(&kind, Kind::Call { tool, .. } if tool.is_custom).then(InputText::new);
        let id = format!("{prefix}{unique}{index:02x}");
        let item = Item { id, kind, text: String::new(), input };
        emit("response.output_item.added", whole_item(index, item.opening()));
        if let Some(part) = item.part() {
            emit("response.content_part.added", item.place(index, "part", part));
        }
        self.open = Some(item);
    }

    fn go_on(&mut self, text: &str, emit: &mut Emit<'_>) {
        let index = self.done.len();
        let item = self.open.as_mut().expect("an item begins before it goes on");
        item.text.push_str(text);
        let mut data = item.place(index, "delta", text.into());
        let name = match item.kind {
            Kind::Message => {
                data.insert("logprobs".into(), json!([]));
                "response.output_text.delta"
            }
            Kind::Reasoning => "response.reasoning_text.delta",
            Kind::Call { .. } if item.input.is_some() => "response.custom_tool_call_input.delta",
            Kind::Call { .. } => "response.function_call_arguments.delta",
        };
        emit(name, data);
    }

    fn stop(&mut self, status: &'static str, emit: &mut Emit<'_>) {
        let Some(item) = self.open.take() else { return };
        let index = self.done.len();
        let text = Value::from(item.text.as_str());
        match &item.kind {
            Kind::Message => {
                let mut data = item.place(index, "text", text);
                data.insert("logprobs".into(), json!([]));
                emit("response.output_text.done", data);
            }
            Kind::Reasoning => {
                emit("response.reasoning_text.done", item.place(index, "text", text));
            }
            Kind::Call { tool: Spelling { is_custom: true, .. }, .. } => {
                emit("response.custom_tool_call_input.done", item.place(index, "input", text));
            }
            Kind::Call { tool, .. } => {
                let mut data = item.place(index, "arguments", text);
                data.insert("name".into(), tool.name.as_str().into());
                emit("response.function_call_arguments.done", data);
            }
        }
        if let Some(part) = item.part() {
            emit("response.content_part.done", item.place(index, "part", part));
        }
        let whole = item.whole(status);
        emit("response.output_item.done", whole_item(index, whole.clone()));
        self.done.push(whole);
    }
}

impl Item {
    /// The item before it says anything.
    fn opening(&self) -> Value {
        let mut opening = self.whole("in_progress");
        if !matches!(self.kind, Kind::Call { .. }) {
            opening["content"] = json!([]);
        }
        opening
    }

    fn whole(&self, status: &str) -> Value {
        let content = || self.part().into_iter().collect::<Vec<_>>();
        match &self.kind {
            Kind::Message => json!({
                "id": self.id, "type": "message", "status": status, "role": "assistant", "content": content(),
            }),
            // Nobody summarises: the text is the reasoning itself.
            Kind::Reasoning => json!({
                "id": self.id, "type": "reasoning", "status": status, "summary": [], "content": content(),
            }),
            Kind::Call { call_id, tool, .. } => {
                let (kind, field) = match tool.is_custom {
                    true => ("custom_tool_call", "input"),
                    false => ("function_call", "arguments"),
                };
                let mut call = json!({
                    "id": self.id, "type": kind, "status": status,
                    "call_id": call_id, "name": tool.name, field: self.text,
                });
                if let Some(namespace) = &tool.namespace {
                    call["namespace"] = namespace.as_str().into();
                }
                call
            }
        }
    }

    /// The one part of the content; calls have none.
    fn part(&self) -> Option<Value> {
        match self.kind {
            Kind::Message => {
                Some(json!({"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}))
            }
            Kind::Reasoning => Some(json!({"type": "reasoning_text", "text": self.text})),
            Kind::Call { .. } => None,
        }
    }

    /// Where in the answer an event belongs, and a field more.
    fn place(&self, index: usize, name: &str, value: Value) -> Map<String, Value> {
        let mut data = Map::new();
        data.insert("item_id".into(), self.id.as_str().into());
        data.insert("output_index".into(), index.into());
        if !matches!(self.kind, Kind::Call { .. }) {
            data.insert("content_index".into(), 0.into());
        }
        data.insert(name.into(), value);
        data
    }
}

fn whole_item(index: usize, item: Value) -> Map<String, Value> {
    let mut data = Map::new();
    data.insert("output_index".into(), index.into());
    data.insert("item".into(), item);
    data
}
