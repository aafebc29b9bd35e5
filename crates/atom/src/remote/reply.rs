//! What servers answer with: chunks in a stream of events, or one object; errors in whatever shape.

use anyhow::{Result, bail};
use serde_json::Value;

/// A part of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Text(String),
    /// What the model thinks before it answers.
    Reasoning(String),
    /// The name of a tool that it wants called.
    Call(String),
    /// The answer ended at a limit of tokens.
    Cut,
}

/// Reads the lines of a stream of events (the HTML standard's, as far as completions use them).
#[derive(Debug, Default)]
pub(super) struct Reader {
    /// Of the event that is being read.
    data: Option<String>,
    parts: Vec<Part>,
    begun: bool,
    finished: bool,
    done: bool,
}

impl Reader {
    /// Takes a line without its end.
    pub(super) fn line(&mut self, line: &str) -> Result<()> {
        let line = if self.begun { line } else { line.strip_prefix('\u{feff}').unwrap_or(line) };
        self.begun = true;
        if line.is_empty() {
            return self.dispatch();
        }
        if let Some(value) = line.strip_prefix("data:") {
            let value = value.strip_prefix(' ').unwrap_or(value);
            match &mut self.data {
                Some(data) => {
                    data.push('\n');
                    data.push_str(value);
                }
                None => self.data = Some(value.to_owned()),
            }
        }
        // Comments (`: ping`), names and ids of events say nothing about the answer.
        Ok(())
    }

    /// The stream ended. An event whose blank line is missing counts: some servers leave out the last one.
    pub(super) fn end_of_stream(&mut self) -> Result<()> {
        self.dispatch()
    }

    fn dispatch(&mut self) -> Result<()> {
        match self.data.take() {
            Some(data) if data.trim() == "[DONE]" => self.done = true,
            Some(data) if !data.trim().is_empty() => self.take(&data)?,
            _ => {}
        }
        Ok(())
    }

    /// Takes a chunk, or a whole answer.
    pub(super) fn take(&mut self, json: &str) -> Result<()> {
        let Ok(chunk) = serde_json::from_str::<Value>(json) else {
            bail!("the server sent something that is no part of an answer: {}", shorten(json));
        };
        if is_error(&chunk) {
            bail!("the server gave up: {}", error_text(json));
        }
        let choice = &chunk["choices"][0];
        for said in [&choice["delta"], &choice["message"]] {
            let reasoning = [&said["reasoning_content"], &said["reasoning"]];
            let reasoning = reasoning.into_iter().map(text).find(|text| !text.is_empty());
            self.parts.extend(reasoning.map(Part::Reasoning));
            let content = text(&said["content"]);
            // A model that refuses says so in a field of its own.
            let content = if content.is_empty() { text(&said["refusal"]) } else { content };
            if !content.is_empty() {
                self.parts.push(Part::Text(content));
            }
            let calls = said["tool_calls"].as_array().into_iter().flatten();
            let names = calls.filter_map(|call| call["function"]["name"].as_str());
            self.parts.extend(names.map(|name| Part::Call(name.to_owned())));
        }
        if let Some(reason) = choice["finish_reason"].as_str().filter(|reason| !reason.is_empty()) {
            self.finished = true;
            self.parts.extend((reason == "length").then_some(Part::Cut));
        }
        Ok(())
    }

    /// What came since the last call.
    pub(super) fn parts(&mut self) -> impl Iterator<Item = Part> + use<'_> {
        self.parts.drain(..)
    }

    /// Nothing more comes.
    pub(super) fn is_done(&self) -> bool {
        self.done
    }

    /// An error if the answer has no end: then it may be half of one.
    pub(super) fn finish(&self) -> Result<()> {
        if !self.done && !self.finished {
            bail!("the connection ended before the answer did");
        }
        Ok(())
    }
}

/// Text, also as a list of parts; nothing for what is none.
fn text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(parts) => parts.iter().filter_map(|part| part["text"].as_str()).collect(),
        _ => String::new(),
    }
}

fn is_error(chunk: &Value) -> bool {
    let says_so = chunk["object"] == "error" || chunk["type"] == "error";
    says_so || !chunk["error"].is_null() || (chunk["choices"].is_null() && chunk["detail"].is_string())
}

/// The words of an error, whoever's: `{"error": {"message"}}`, `{"error": ".."}`, `{"message"}`,
/// `{"detail": ..}`, `{"errors": [..]}`, or the beginning of whatever it is.
pub(super) fn error_text(body: &str) -> String {
    let value: Value = serde_json::from_str(body).unwrap_or_default();
    shorten(&words(&value, 0).unwrap_or_else(|| body.to_owned()))
}

fn words(value: &Value, depth: usize) -> Option<String> {
    if depth > DEPTH_MAX {
        return None;
    }
    match value {
        Value::String(text) if !text.is_empty() => Some(text.clone()),
        Value::Array(list) => {
            let all: Vec<_> = list.iter().filter_map(|one| words(one, depth + 1)).collect();
            (!all.is_empty()).then(|| all.join("; "))
        }
        Value::Object(fields) => {
            let found = NAMES.iter().find_map(|&name| words(fields.get(name)?, depth + 1))?;
            // FastAPI says where: {"loc": ["body", "messages"], "msg": ".."}.
            let place = fields.get("loc").and_then(Value::as_array).map(|path| {
                let steps = path.iter().map(|step| step.as_str().map_or(step.to_string(), str::to_owned));
                steps.collect::<Vec<_>>().join(".")
            });
            Some(place.map_or(found.clone(), |place| format!("{place}: {found}")))
        }
        _ => None,
    }
}

/// One line, not a page of HTML.
fn shorten(text: &str) -> String {
    let one_line: String =
        text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(SHOWN_CHARS_MAX).collect();
    let one_line = one_line.trim();
    if one_line.is_empty() { "(nothing)".into() } else { one_line.to_owned() }
}

/// Where errors have their words, the best place first.
const NAMES: [&str; 7] = ["error", "message", "msg", "detail", "errors", "error_description", "title"];
/// No server wraps its words in more.
const DEPTH_MAX: usize = 6;
const SHOWN_CHARS_MAX: usize = 400;
