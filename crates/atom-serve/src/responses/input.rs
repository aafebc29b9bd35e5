//! The conversation: `instructions` and input items, read into the turns that a chat has too.
//!
//! What one answer consists of here are several items in a row: reasoning, messages and calls. They are one
//! turn of the assistant.

use super::custom::INPUT;
use super::tools::joined_name;
use crate::chat::history::{History, PastArguments, PastCall, Turn};
use crate::chat::tools::{PAST_TOOL_NAME, past_tool_name};
use crate::declare::Takes::{Either, List, Object as Inner, OneOf, Only, Schema, Text, Unread, Word};
use crate::declare::{Field, Object, field, idle, needed};
use crate::error::ApiError;
use crate::fields::{Fields, wrong};
use serde_json::{Map, Value, json};

/// Takes `input`; `instructions` come before it.
pub(super) fn read(fields: &mut Fields, instructions: Option<&str>) -> Result<History, ApiError> {
    let input = fields
        .take("input")
        .ok_or(ApiError::Missing { name: "input".into(), expected: "send a text or a list of items" })?;
    let items = match input {
        Value::String(text) => vec![json!({"role": "user", "content": text})],
        Value::Array(items) if items.is_empty() => {
            return Err(wrong("input", &Value::Array(items), "a text or at least one item"));
        }
        Value::Array(items) => items,
        other => return Err(wrong("input", &other, "a text or a list of items")),
    };
    let mut reader = Reader::default();
    reader.system.extend(instructions.map(str::to_owned));
    for (at, item) in items.into_iter().enumerate() {
        reader.push(&format!("input[{at}]"), item)?;
    }
    reader.end()
}

/// Puts items together to turns.
#[derive(Default)]
struct Reader {
    history: History,
    /// System texts before anything else. Templates take one message of them.
    system: Vec<String>,
    answer: Option<Answer>,
    has_begun: bool,
}

/// A turn of the assistant in the making.
#[derive(Default)]
struct Answer {
    place: String,
    texts: Vec<String>,
    thoughts: Vec<String>,
    calls: Vec<PastCall>,
}

impl Reader {
    fn push(&mut self, place: &str, item: Value) -> Result<(), ApiError> {
        let mut fields = Fields::nested(place, item, &MESSAGE)?;
        let kind = fields.string("type")?.unwrap_or_else(|| "message".into());
        for (word, declared) in OTHERS {
            if kind == word {
                fields.is_declared_as(declared);
            }
        }
        match kind.as_str() {
            "message" => self.message(place, &mut fields)?,
            "reasoning" => {
                let thoughts = read_reasoning(&mut fields)?;
                self.answer(place)?.thoughts.extend(thoughts);
            }
            "function_call" => {
                let call = read_call(&mut fields)?;
                self.answer(place)?.calls.push(call);
            }
            "custom_tool_call" => {
                let call = read_custom_call(&mut fields)?;
                self.answer(place)?.calls.push(call);
            }
            // What another server found for its own model: the answer that it went into follows.
            "web_search_call" => {}
            "function_call_output" | "custom_tool_call_output" => {
                let call_place = fields.name("call_id");
                let call_id =
                    fields.required_string("call_id", "it names the call that this is the answer to")?;
                let content = read_content(&mut fields, "output", &["input_text"])?;
                let turn = Turn::Answer { place: call_place, call_id, content };
                self.turn(place, turn)?;
            }
            _ => return Err(refused_kind(&fields, kind)),
        }
        fields.finish()
    }

    fn message(&mut self, place: &str, fields: &mut Fields) -> Result<(), ApiError> {
        let role = fields.required_string("role", "it is one of user, assistant, system and developer")?;
        match role.as_str() {
            "assistant" => {
                let text = read_content(fields, "content", &["output_text", "input_text"])?;
                self.answer(place)?.texts.push(text);
            }
            "user" => {
                let text = read_content(fields, "content", &["input_text"])?;
                self.turn(place, Turn::User(text))?;
            }
            "system" | "developer" => {
                let text = read_content(fields, "content", &["input_text"])?;
                if self.has_begun {
                    self.turn(place, Turn::System(text))?;
                } else {
                    self.system.push(text);
                }
            }
            _ => {
                let expected = "one of \"user\", \"assistant\", \"system\" and \"developer\"";
                return Err(wrong(&fields.name("role"), &role.into(), expected));
            }
        }
        Ok(())
    }

    /// The turn of the assistant that is in the making, or a new one.
    fn answer(&mut self, place: &str) -> Result<&mut Answer, ApiError> {
        self.begin()?;
        Ok(self.answer.get_or_insert_with(|| Answer { place: place.to_owned(), ..Answer::default() }))
    }

    fn turn(&mut self, place: &str, turn: Turn) -> Result<(), ApiError> {
        self.begin()?;
        self.end_answer()?;
        self.history.push(place, turn, None)
    }

    fn begin(&mut self) -> Result<(), ApiError> {
        self.has_begun = true;
        let system = std::mem::take(&mut self.system);
        if system.is_empty() {
            return Ok(());
        }
        self.history.push("instructions", Turn::System(system.join("\n\n")), None)
    }

    fn end_answer(&mut self) -> Result<(), ApiError> {
        let Some(Answer { place, texts, thoughts, calls }) = self.answer.take() else { return Ok(()) };
        let reasoning = (!thoughts.is_empty()).then(|| thoughts.join("\n"));
        let turn = Turn::Assistant { content: texts.join("\n"), reasoning, calls };
        self.history.push(&place, turn, None)
    }

    fn end(mut self) -> Result<History, ApiError> {
        self.begin()?;
        self.end_answer()?;
        Ok(self.history)
    }
}

/// A string or a list of parts of one of these types.
fn read_content(fields: &mut Fields, name: &str, kinds: &[&str]) -> Result<String, ApiError> {
    let place = fields.name(name);
    let content = fields.take(name).ok_or_else(|| ApiError::Missing {
        name: place.clone(),
        expected: "send a text or a list of text parts",
    })?;
    let items = match content {
        Value::String(text) => return Ok(text),
        Value::Array(items) => items,
        other => return Err(wrong(&place, &other, "a text or a list of text parts")),
    };
    let read = |(at, item)| read_part(&format!("{place}[{at}]"), item, kinds);
    Ok(items.into_iter().enumerate().map(read).collect::<Result<Vec<_>, _>>()?.join("\n"))
}

fn read_part(place: &str, item: Value, kinds: &[&str]) -> Result<String, ApiError> {
    let mut fields = Fields::nested(place, item, &PART)?;
    let kind = fields.required_string("type", "every part has one, like \"input_text\"")?;
    let unsupported = |reason| Err(ApiError::unsupported_kind(fields.name("type"), &kind, reason));
    match kind.as_str() {
        "input_image" => return unsupported("the model reads text only, no images"),
        "input_file" => return unsupported("the model reads text only, no files"),
        "input_audio" => return unsupported("the model reads text only, no sound"),
        "refusal" => return unsupported("it would not reach the model; send it as text"),
        // Chat's word for the same.
        "text" => {}
        known if kinds.contains(&known) => {}
        _ => {
            return Err(wrong(&fields.name("type"), &kind.into(), format!("\"{}\"", kinds.join("\" or \""))));
        }
    }
    let text = fields.required_string("text", "a text part has one")?;
    fields.finish()?;
    Ok(text)
}

/// The reasoning itself. A summary stands for it in items of servers that keep it to themselves.
fn read_reasoning(fields: &mut Fields) -> Result<Vec<String>, ApiError> {
    let summary = read_texts(fields, "summary", "summary_text")?;
    let content = read_texts(fields, "content", "reasoning_text")?;
    Ok(if content.is_empty() { summary } else { content })
}

fn read_texts(fields: &mut Fields, name: &str, kind: &str) -> Result<Vec<String>, ApiError> {
    let place = fields.name(name);
    let read = |(at, item)| {
        let mut part = Fields::nested(&format!("{place}[{at}]"), item, &THOUGHT)?;
        let found = part.required_string("type", "every part has one")?;
        if found != kind {
            return Err(wrong(&part.name("type"), &found.into(), format!("\"{kind}\"")));
        }
        let text = part.required_string("text", "a text part has one")?;
        part.finish()?;
        Ok(text)
    };
    fields.list(name)?.unwrap_or_default().into_iter().enumerate().map(read).collect()
}

fn read_call(fields: &mut Fields) -> Result<PastCall, ApiError> {
    let id = fields.required_string("call_id", "it is how the tool's answer names the call")?;
    let name = read_name(fields)?;
    let arguments = PastArguments::read(&fields.string("arguments")?.unwrap_or_default());
    Ok(PastCall { id, name, arguments })
}

fn read_custom_call(fields: &mut Fields) -> Result<PastCall, ApiError> {
    let id = fields.required_string("call_id", "it is how the tool's answer names the call")?;
    let name = read_name(fields)?;
    let input = fields.required_string("input", "it is the text that the call was made with")?;
    let arguments = PastArguments::Object(Map::from_iter([(INPUT.to_owned(), input.into())]));
    Ok(PastCall { id, name, arguments })
}

/// The name by which the model made the call.
fn read_name(fields: &mut Fields) -> Result<String, ApiError> {
    let place = fields.name("name");
    let name = past_tool_name(fields.required_string("name", "it is the tool that was called")?, &place)?;
    let namespace = fields.string("namespace")?;
    past_tool_name(joined_name(namespace.as_deref(), &name), &place)
}

fn refused_kind(fields: &Fields, kind: String) -> ApiError {
    let reason = match kind.as_str() {
        "item_reference" => "no item is kept; send the item itself",
        "compaction" => "only who compacted a conversation can read it",
        _ if kind.ends_with("_call") || kind.ends_with("_call_output") => "no tools run on this server",
        _ => {
            let expected = "one of \"message\", \"reasoning\", \"function_call\", \"custom_tool_call\" and the outputs of these";
            return wrong(&fields.name("type"), &kind.into(), expected);
        }
    };
    ApiError::unsupported_kind(fields.name("type"), &kind, reason)
}

pub(super) const FIELD: Field = needed(
    "input",
    Either(&[Text, List(&OneOf(ITEMS), 1, usize::MAX)]),
    "The conversation: a text, or items.",
);

const MESSAGE: Object = Object {
    name: "ResponsesInputMessage",
    groups: &[
        &[
            field("type", Word(&["message"]), ""),
            needed("role", Word(&["user", "system", "developer"]), ""),
            needed("content", Either(&[Text, List(&Inner(&PART), 0, usize::MAX)]), ""),
            PHASE,
        ],
        SENT_BACK,
    ],
};
const ANSWER_MESSAGE: Object = Object {
    name: "ResponsesAssistantMessage",
    groups: &[
        &[
            field("type", Word(&["message"]), ""),
            needed("role", Word(&["assistant"]), ""),
            needed("content", Either(&[Text, List(&OneOf(&[&PART, &OUTPUT_PART]), 0, usize::MAX)]), ""),
            PHASE,
        ],
        SENT_BACK,
    ],
};
const ITEMS: &[&Object] =
    &[&MESSAGE, &ANSWER_MESSAGE, &REASONING, &CALL, &OUTPUT, &CUSTOM_CALL, &CUSTOM_OUTPUT, &SEARCH];
/// Items of other types than messages.
const OTHERS: [(&str, &Object); 6] = [
    ("reasoning", &REASONING),
    ("function_call", &CALL),
    ("function_call_output", &OUTPUT),
    ("custom_tool_call", &CUSTOM_CALL),
    ("custom_tool_call_output", &CUSTOM_OUTPUT),
    ("web_search_call", &SEARCH),
];
const REASONING: Object = Object {
    name: "ResponsesReasoningItem",
    groups: &[
        &[
            needed("type", Word(&["reasoning"]), ""),
            field(
                "summary",
                List(&Inner(&SUMMARY), 0, usize::MAX),
                "In place of a content that is not there.",
            ),
            field("content", List(&Inner(&THOUGHT), 0, usize::MAX), ""),
            field("encrypted_content", Unread(&Text), "Left out: only who wrote it can read it."),
        ],
        SENT_BACK,
    ],
};
const CALL: Object = Object {
    name: "ResponsesFunctionCall",
    groups: &[
        &[
            needed("type", Word(&["function_call"]), ""),
            field("arguments", Text, "JSON text, as the model wrote it."),
            field("parsed_arguments", Unread(&Schema("{}")), "The same, as the Python client parsed them."),
        ],
        CALLED,
        SENT_BACK,
    ],
};
const CUSTOM_CALL: Object = Object {
    name: "ResponsesCustomToolCall",
    groups: &[
        &[
            needed("type", Word(&["custom_tool_call"]), ""),
            needed("input", Text, "The text that the tool was called with."),
        ],
        CALLED,
        SENT_BACK,
    ],
};
const CALLED: &[Field] = &[
    needed("call_id", Text, "How the tool's answer names the call."),
    needed("name", PAST_TOOL_NAME, ""),
    field("namespace", Text, "That of the tool, if it has one."),
];
const OUTPUT: Object = Object {
    name: "ResponsesFunctionCallOutput",
    groups: &[&[needed("type", Word(&["function_call_output"]), "")], ANSWERED, SENT_BACK],
};
const CUSTOM_OUTPUT: Object = Object {
    name: "ResponsesCustomToolCallOutput",
    groups: &[&[needed("type", Word(&["custom_tool_call_output"]), "")], ANSWERED, SENT_BACK],
};
const ANSWERED: &[Field] = &[
    needed("call_id", Text, "The call that it answers."),
    needed("output", Either(&[Text, List(&Inner(&PART), 0, usize::MAX)]), ""),
    field("name", Unread(&Text), "The tool once more, as some clients send it."),
];
const SEARCH: Object = Object {
    name: "ResponsesWebSearchCall",
    groups: &[
        &[
            needed(
                "type",
                Word(&["web_search_call"]),
                "Left out: another server searched for its own model.",
            ),
            field("action", Unread(&Schema("{}")), ""),
        ],
        SENT_BACK,
    ],
};
/// Items come back as they were sent: their ids and states say nothing new.
const SENT_BACK: &[Field] = &[field("id", Unread(&Text), ""), field("status", Unread(&Text), "")];
/// Templates don't tell the parts of an answer apart.
const PHASE: Field = field("phase", Unread(&Text), "Of no consequence.");
const PART: Object = Object {
    name: "ResponsesInputText",
    groups: &[&[needed("type", Word(&["input_text", "text"]), ""), needed("text", Text, "")], NOTES],
};
const OUTPUT_PART: Object = Object {
    name: "ResponsesOutputTextPart",
    groups: &[&[needed("type", Word(&["output_text"]), ""), needed("text", Text, "")], NOTES],
};
const NOTES: &[Field] = &[
    idle("annotations", Only(&["[]"], "they would not reach the model")),
    idle("logprobs", Only(&["[]"], "they would not reach the model")),
    field("parsed", Unread(&Schema("{}")), "The text once more, as the Python client parsed it."),
];
const SUMMARY: Object = Object {
    name: "ResponsesSummaryText",
    groups: &[&[needed("type", Word(&["summary_text"]), ""), needed("text", Text, "")]],
};
const THOUGHT: Object = Object {
    name: "ResponsesReasoningText",
    groups: &[&[needed("type", Word(&["reasoning_text"]), ""), needed("text", Text, "")]],
};
