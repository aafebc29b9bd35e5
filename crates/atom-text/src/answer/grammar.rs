//! The calls of a format as a grammar, for answers that must be calls.
//!
//! The text is Lark as llguidance reads it (`docs/syntax.md` of guidance-ai/llguidance): JSON schemas stand
//! inline as `%json {..}`, special tokens by name as `<|name|>` or by number as `<[7]>`, and text up to a
//! marker is a rule with that marker as its `suffix`.

use super::{AnswerStart, Dialect, Tool, ToolFormat};
use crate::Tokenizer;
use serde_json::{Map, Value, json};

mod tags;

impl Dialect {
    /// The grammar of an answer that is one call of one of these tools, or of several calls if `parallel`.
    /// Markers that look like special tokens (`<|name|>`) are written as such, and reasoning may come before.
    pub fn call_grammar(&self, format: ToolFormat, tools: &[Tool], parallel: bool) -> String {
        let by_shape = |marker: &str| {
            let is_special = (marker.starts_with("<|") && marker.ends_with("|>"))
                || (marker.starts_with("<｜") && marker.ends_with("｜>"));
            is_special.then(|| marker.to_owned())
        };
        self.grammar(format, tools, parallel, AnswerStart::Content, &by_shape)
    }

    /// The same for one tokenizer: its own special tokens are written by number, all other markers as text.
    /// `start` says whether the prompt has opened reasoning, which then has to be closed first.
    pub fn call_grammar_for(
        &self,
        tokenizer: &Tokenizer,
        start: AnswerStart,
        format: ToolFormat,
        tools: &[Tool],
        parallel: bool,
    ) -> String {
        let by_number = |marker: &str| {
            let id = tokenizer.id_of(marker).filter(|&id| tokenizer.is_special(id))?;
            Some(format!("<[{id}]>"))
        };
        self.grammar(format, tools, parallel, start, &by_number)
    }

    fn grammar(
        &self,
        format: ToolFormat,
        tools: &[Tool],
        parallel: bool,
        start: AnswerStart,
        special: &dyn Fn(&str) -> Option<String>,
    ) -> String {
        let mut lark = Lark { special, rules: Vec::new() };
        let thought = self.thought(format, start, &mut lark);
        let calls: Vec<String> = tools
            .iter()
            .enumerate()
            .map(|(at, tool)| {
                let call = lark.call(format, at, tool);
                lark.rule(&format!("call_{at}"), &call)
            })
            .collect();
        lark.rule("call", &calls.join(" | "));
        let frame = Frame::of(format);
        // Harmony ends an answer with a call.
        let many = match lark.text(frame.between) {
            _ if !parallel || format == ToolFormat::Harmony => String::new(),
            between if between.is_empty() => " call*".to_owned(),
            between => format!(" ({between} call)*"),
        };
        let [open, close] = [frame.open, frame.close].map(|markers| lark.markers(markers));
        let all = [thought, open, format!("call{many}"), close];
        let all = all.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(" ");
        let mut text = format!("start: {all}\n");
        for (name, body) in &lark.rules {
            text.push_str(&format!("{name}: {body}\n"));
        }
        text
    }

    /// What may come before calls.
    fn thought(&self, format: ToolFormat, start: AnswerStart, lark: &mut Lark<'_>) -> String {
        let is_harmony = format == ToolFormat::Harmony;
        let tags = self.reasoning.and_then(|reasoning| reasoning.tags());
        let (open, close, after) = match tags {
            _ if is_harmony => (
                lark.markers(&["<|channel|>", "analysis", "<|message|>"]),
                "<|end|>",
                lark.markers(&["<|start|>", "assistant"]),
            ),
            Some((open, close)) => (lark.markers(&[open]), close, "\"\\n\\n\"?".to_owned()),
            None => return String::new(),
        };
        let rest = lark.until("thinking", close);
        let (rest, optional) = match start {
            AnswerStart::Content => (format!("{open} {rest}"), "?"),
            AnswerStart::Reasoning => (rest, ""),
        };
        lark.rule("thought", &format!("{rest} {after}")) + optional
    }
}

/// What stands around and between the calls of a format. At one place, no text may be the beginning of
/// another one: llguidance takes the longer one as soon as it may be meant.
struct Frame {
    open: &'static [&'static str],
    between: &'static str,
    close: &'static [&'static str],
}

impl Frame {
    fn of(format: ToolFormat) -> Self {
        let (open, between, close): (&[_], _, &[_]) = match format {
            ToolFormat::Hermes | ToolFormat::Qwen3Coder | ToolFormat::Glm45 => (&[], "\n", &[]),
            ToolFormat::Llama3Json => (&[], "; ", &[]),
            ToolFormat::Mistral | ToolFormat::Harmony => (&[], "", &[]),
            ToolFormat::DeepseekV3 => (&["<｜tool▁calls▁begin｜>"], "\n", &["<｜tool▁calls▁end｜>"]),
            ToolFormat::DeepseekV31 => (&["<｜tool▁calls▁begin｜>"], "", &["<｜tool▁calls▁end｜>"]),
            ToolFormat::KimiK2 => (&["<|tool_calls_section_begin|>"], "", &["<|tool_calls_section_end|>"]),
            ToolFormat::DeepseekV4 => {
                (&["<", "｜DSML｜", "tool_calls>\n"], "", &["</", "｜DSML｜", "tool_calls>"])
            }
            ToolFormat::MinimaxM2 => (&["<minimax:tool_call>", "\n"], "\n", &["\n", "</minimax:tool_call>"]),
        };
        Self { open, between, close }
    }
}

/// A grammar that is being written.
pub(super) struct Lark<'a> {
    /// How a marker is written that is a special token.
    special: &'a dyn Fn(&str) -> Option<String>,
    rules: Vec<(String, String)>,
}

impl Lark<'_> {
    /// Adds a rule and gives its name.
    fn rule(&mut self, name: &str, body: &str) -> String {
        self.rules.push((name.to_owned(), body.to_owned()));
        // Options in brackets belong to the definition.
        name.split('[').next().unwrap_or(name).to_owned()
    }

    fn text(&self, text: &str) -> String {
        if text.is_empty() { String::new() } else { Value::from(text).to_string() }
    }

    /// Texts in a row, each of which may be a special token.
    fn markers(&self, texts: &[&str]) -> String {
        let one = |text: &&str| (self.special)(text).unwrap_or_else(|| self.text(text));
        texts.iter().filter(|text| !text.is_empty()).map(one).collect::<Vec<_>>().join(" ")
    }

    /// Any text up to a marker, and the marker.
    fn until(&mut self, name: &str, marker: &str) -> String {
        match (self.special)(marker) {
            Some(token) => self.rule(name, &format!("{ANY_TEXT} {token}")),
            None => self.rule(&format!("{name}[suffix={}]", self.text(marker)), ANY_TEXT),
        }
    }

    fn json(&self, schema: &Value) -> String {
        format!("%json {schema}")
    }

    /// One call of one tool.
    fn call(&mut self, format: ToolFormat, at: usize, tool: &Tool) -> String {
        let name = tool.name.as_str();
        let arguments = self.rule(&format!("arguments_{at}"), &self.json(&schema_of(tool)));
        let whole = |lark: &mut Self, key| {
            lark.rules.pop();
            lark.rule(&format!("object_{at}"), &lark.json(&object_of(tool, key)))
        };
        match format {
            ToolFormat::Hermes => {
                let object = whole(self, "arguments");
                let [open, close] = ["<tool_call>", "</tool_call>"].map(|tag| self.markers(&[tag]));
                format!("{open} \"\\n\" {object} \"\\n\" {close}")
            }
            ToolFormat::Llama3Json => whole(self, "parameters"),
            ToolFormat::Mistral => format!("{} {arguments}", self.markers(&["[TOOL_CALLS]", name, "[ARGS]"])),
            ToolFormat::DeepseekV3 => {
                let head = ["<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>", name, "\n```json\n"];
                let end = ["\n```", "<｜tool▁call▁end｜>"];
                format!("{} {arguments} {}", self.markers(&head), self.markers(&end))
            }
            ToolFormat::DeepseekV31 => {
                let head = ["<｜tool▁call▁begin｜>", name, "<｜tool▁sep｜>"];
                format!("{} {arguments} {}", self.markers(&head), self.markers(&["<｜tool▁call▁end｜>"]))
            }
            ToolFormat::KimiK2 => {
                let id = format!("functions.{name}:");
                let head = self.markers(&["<|tool_call_begin|>", &id]);
                let begin = self.markers(&["<|tool_call_argument_begin|>"]);
                format!("{head} /[0-9]{{1,4}}/ {begin} {arguments} {}", self.markers(&["<|tool_call_end|>"]))
            }
            ToolFormat::Harmony => {
                let to = format!("commentary to=functions.{name} ");
                let head = ["<|channel|>", &to, "<|constrain|>", "json", "<|message|>"];
                format!("{} {arguments}", self.markers(&head))
            }
            ToolFormat::Qwen3Coder | ToolFormat::Glm45 | ToolFormat::MinimaxM2 | ToolFormat::DeepseekV4 => {
                self.rules.pop();
                self.tagged_call(format, at, tool)
            }
        }
    }
}

/// The schema of a tool's arguments, which are an object whatever the schema says.
fn schema_of(tool: &Tool) -> Value {
    let mut schema = tool.parameters.as_object().cloned().unwrap_or_default();
    if !schema.contains_key("type") {
        schema.insert("type".into(), "object".into());
    }
    Value::Object(schema)
}

/// The schema of an object with the name and the arguments.
fn object_of(tool: &Tool, key: &str) -> Value {
    let mut arguments = schema_of(tool);
    let definitions = take_definitions(&mut arguments);
    let object = json!({
        "type": "object",
        "properties": {"name": {"const": tool.name}, key: arguments},
        "required": ["name", key],
        "additionalProperties": false,
    });
    with_definitions(object, definitions)
}

/// Any text, line breaks too.
const ANY_TEXT: &str = "/(.|\\n)*/";

/// References are from the root of a schema, so definitions have to stand there.
fn take_definitions(schema: &mut Value) -> Map<String, Value> {
    let object = schema.as_object_mut();
    let taken = object.map(|object| DEFINITIONS.map(|word| Some((word.to_owned(), object.remove(word)?))));
    taken.into_iter().flatten().flatten().collect()
}

fn with_definitions(mut schema: Value, definitions: Map<String, Value>) -> Value {
    if let Some(object) = schema.as_object_mut() {
        object.extend(definitions);
    }
    schema
}

const DEFINITIONS: [&str; 2] = ["$defs", "definitions"];

#[cfg(test)]
mod tests;
