//! Answers as grammars: calls that must come, calls that may come, and formats behind thoughts or beside calls.
//!
//! The text is Lark as llguidance reads it (`docs/syntax.md` of guidance-ai/llguidance): JSON schemas stand
//! inline as `%json {..}`, special tokens by name as `<|name|>` or by number as `<[7]>`, and text up to a
//! marker is a lazy rule with that marker at its end.

use super::{AnswerStart, Dialect, ReasoningFormat, Tool, ToolFormat, harmony};
use crate::grammar::{GrammarSource, check_schema, regex_literal, with_options};
use crate::{TextError, Tokenizer};
use serde_json::{Value, json};

mod references;
mod strings;
mod tags;

/// The calls that an answer may make.
#[derive(Clone, Copy, Debug)]
pub struct Calls<'a> {
    /// How they are written.
    pub format: ToolFormat,
    /// Which functions, with arguments of their schemas, whether `strict` or not.
    pub tools: &'a [Tool],
    /// Several, one behind the other.
    pub parallel: bool,
}

/// What an answer may be instead of calls.
#[derive(Clone, Copy, Debug)]
pub enum Instead<'a> {
    /// Nothing: it must call.
    Nothing,
    /// Any text, with calls behind it or without.
    Text,
    /// A text of this format.
    Format(&'a GrammarSource),
}

impl Dialect {
    /// The grammar of an answer; reasoning may come before, and has to be closed first if the prompt has opened it
    /// (`start`). The tokenizer's own special tokens are written by number, all other markers as text.
    ///
    /// `None`: a format that is a whole grammar by itself and can't stand within another one.
    ///
    /// # Errors
    /// A schema that no answer can follow, with the tool's name.
    pub fn answer_grammar(
        &self,
        tokenizer: &Tokenizer,
        start: AnswerStart,
        calls: Option<Calls<'_>>,
        instead: Instead<'_>,
    ) -> Result<Option<String>, TextError> {
        let by_number = |marker: &str| {
            let id = tokenizer.id_of(marker).filter(|&id| tokenizer.is_special(id))?;
            Some(format!("<[{id}]>"))
        };
        self.grammar(start, calls, instead, &by_number)
    }

    fn grammar(
        &self,
        start: AnswerStart,
        calls: Option<Calls<'_>>,
        instead: Instead<'_>,
        special: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Option<String>, TextError> {
        let mut lark = Lark { special, rules: Vec::new() };
        let answer = match instead {
            Instead::Nothing | Instead::Text => None,
            Instead::Format(source) => match (source, source.rule()?) {
                (_, None) => return Ok(None),
                (GrammarSource::Regex(_), Some(pattern)) => {
                    // It may not be taken for a call or a thought, which begin otherwise.
                    let opening = calls.map(|calls| Frame::of(calls.format).opening.concat());
                    let mut without: Vec<String> = opening.iter().map(|opening| at_first(opening)).collect();
                    without.extend(self.thought_at_first());
                    lark.rules.push(("ANSWER".into(), and_not(&pattern, &without)));
                    Some(lark.rule("answer", "ANSWER"))
                }
                (_, Some(rule)) => Some(lark.rule("answer", &rule)),
            },
        };
        let thought = match instead {
            // Such a text may begin like a thought.
            Instead::Format(GrammarSource::Regex(_) | GrammarSource::Choice(_))
                if start == AnswerStart::Content && !self.is_harmony() =>
            {
                Thought::default()
            }
            _ => self.thought(start, calls, &mut lark),
        };
        let (mut options, mut unclosed, mut preamble) = (Vec::new(), String::new(), String::new());
        if let Some(answer) = answer {
            options.push(self.said(&answer, &mut lark));
        }
        if let Some(calls) = calls {
            for tool in calls.tools {
                let checked = check_schema(&tool.parameters);
                checked.and_then(|()| tags::check(calls.format, tool)).map_err(|reason| {
                    let reason = format!("parameters of {:?}: {reason}", tool.name);
                    TextError::Grammar { kind: "JSON schema", reason }
                })?;
            }
            let is_text = matches!(instead, Instead::Text);
            let Options { whole, rest } = self.calls(calls, is_text, &mut lark);
            options.extend(whole);
            if self.calls_end_thoughts() && !thought.whole.is_empty() {
                let (_, close) = ReasoningFormat::KimiK2.tags().unwrap_or_default();
                let others = other_openings(calls.format).chain([close]);
                let none: Vec<String> = holding(others).into_iter().collect();
                let thinking = lark.until("thinking_on", Frame::of(calls.format).opening, &[], &none);
                unclosed = spaced(&[" |".into(), thought.open.clone(), thinking, rest]);
            }
            if self.is_harmony() && is_text {
                preamble = lark.preamble() + "*";
            }
        }
        let all = match &options[..] {
            [one] => one.clone(),
            _ => format!("({})", options.join(" | ")),
        };
        let whole = spaced(&[thought.whole, preamble, all]);
        let mut text = format!("start: {whole}{unclosed}\n");
        for (name, body) in &lark.rules {
            text.push_str(&format!("{name}: {body}\n"));
        }
        Ok(Some(text))
    }

    fn is_harmony(&self) -> bool {
        self.reasoning == Some(ReasoningFormat::Harmony) || self.tools == Some(ToolFormat::Harmony)
    }

    /// What may come before everything else: what opens a thought, and the whole of one.
    fn thought(&self, start: AnswerStart, calls: Option<Calls<'_>>, lark: &mut Lark<'_>) -> Thought {
        let tags = self.reasoning.and_then(|reasoning| reasoning.tags());
        let (open, close, after, none) = match tags {
            _ if self.is_harmony() => (
                lark.markers(&["<|channel|>", "analysis", "<|message|>"]),
                "<|end|>",
                lark.markers(&["<|start|>", "assistant"]),
                other_ends("<|end|>"),
            ),
            // Some templates leave a line break in front of the tag to the model, and one or two behind.
            Some((open, close)) => {
                let calls = calls.filter(|_| self.calls_end_thoughts());
                let openings = calls.map_or(&[][..], |calls| calls.format.openings());
                let none = holding(openings.iter().copied()).into_iter().collect();
                (lark.behind_blanks(open), close, "/\\n{1,2}/?".to_owned(), none)
            }
            None => return Thought::default(),
        };
        let rest = lark.until("thinking", &[close], &[], &none);
        let (open, optional) = match start {
            AnswerStart::Content => (open, "?"),
            AnswerStart::Reasoning => (String::new(), ""),
        };
        let whole = lark.rule("thought", &spaced(&[open.clone(), rest, after])) + optional;
        Thought { open, whole }
    }

    /// Kimi calls tools in the middle of its thoughts, which end so.
    fn calls_end_thoughts(&self) -> bool {
        self.reasoning == Some(ReasoningFormat::KimiK2)
    }

    /// A text for the reader.
    fn said(&self, text: &str, lark: &mut Lark<'_>) -> String {
        if !self.is_harmony() {
            return text.to_owned();
        }
        format!("{} {text}", lark.markers(&["<|channel|>", "final", "<|message|>"]))
    }

    /// Calls, and any text before or instead of them if `is_text`.
    fn calls(&self, calls: Calls<'_>, is_text: bool, lark: &mut Lark<'_>) -> Options {
        let Calls { format, tools, parallel } = calls;
        let bodies: Vec<String> = tools
            .iter()
            .enumerate()
            .map(|(at, tool)| {
                let call = lark.call(format, at, tool);
                lark.rule(&format!("call_{at}"), &call)
            })
            .collect();
        lark.rule("call", &bodies.join(" | "));
        let frame = Frame::of(format);
        let opening = lark.markers(frame.opening);
        let next = if frame.is_section { String::new() } else { opening.clone() };
        // Harmony ends an answer with a call.
        let many = if parallel && format != ToolFormat::Harmony {
            let parts = [lark.text(frame.between), next, "call".to_owned()];
            format!("({})*", spaced(&parts))
        } else {
            String::new()
        };
        let rest = [lark.markers(frame.open), "call".into(), many, lark.markers(frame.close)];
        let rest = spaced(&rest);
        if !is_text {
            return Options { whole: vec![spaced(&[opening, rest.clone()])], rest };
        }
        let whole = match format {
            ToolFormat::Harmony => {
                lark.rules.push(("TEXT".into(), and_not("/(?s:.*)/", &other_ends(""))));
                vec![self.said("TEXT", lark), spaced(&[opening, rest.clone()])]
            }
            ToolFormat::Llama3Json => {
                let thought = self.thought_at_first();
                vec![rest.clone(), lark.other_than_objects(format, thought)]
            }
            _ => {
                let without = self.excluded(format);
                let before = lark.until("before", frame.opening, &[], &without);
                vec![lark.without(frame.opening, &without), spaced(&[before, rest.clone()])]
            }
        };
        Options { whole, rest }
    }

    /// As patterns: what text may not hold that stands before calls or instead of them.
    fn excluded(&self, format: ToolFormat) -> Vec<String> {
        let mut without: Vec<String> = holding(other_openings(format)).into_iter().collect();
        // In a thought calls are none.
        without.extend(self.thought_at_first());
        without
    }

    /// As a pattern: text that would be read as a thought.
    fn thought_at_first(&self) -> Option<String> {
        let tags = self.reasoning.and_then(|reasoning| reasoning.tags());
        tags.map(|(open, _)| at_first(open))
    }
}

/// What may come first.
#[derive(Default)]
struct Thought {
    /// What opens it; nothing where the prompt has done so.
    open: String,
    whole: String,
}

/// Answers that call, or don't.
struct Options {
    whole: Vec<String>,
    /// Calls, from behind their opening on.
    rest: String,
}

/// What opens calls beside what the grammar writes.
fn other_openings(format: ToolFormat) -> impl Iterator<Item = &'static str> {
    let opening = Frame::of(format).opening.concat();
    format.openings().iter().copied().filter(move |other| *other != opening)
}

/// A pattern of text with what ends a message of Harmony, but for this end.
fn other_ends(end: &str) -> Vec<String> {
    holding(harmony::ENDS.iter().copied().filter(|other| *other != end)).into_iter().collect()
}

/// What stands around and between the calls of a format. At one place, no text may be the beginning of
/// another one: llguidance takes the longer one as soon as it may be meant.
struct Frame {
    /// What tells calls from text: in front of each of them, or of the section that they stand in.
    opening: &'static [&'static str],
    is_section: bool,
    /// Behind the opening of a section.
    open: &'static [&'static str],
    between: &'static str,
    close: &'static [&'static str],
}

impl Frame {
    fn of(format: ToolFormat) -> Self {
        let each = |opening, between| Self { opening, is_section: false, open: &[], between, close: &[] };
        let section =
            |opening, open, between, close| Self { opening, is_section: true, open, between, close };
        match format {
            ToolFormat::Hermes | ToolFormat::Qwen3Coder | ToolFormat::Glm45 => each(&["<tool_call>"], "\n"),
            ToolFormat::Llama3Json => each(&[], "; "),
            ToolFormat::Mistral => each(&["[TOOL_CALLS]"], ""),
            ToolFormat::Harmony => each(&["<|channel|>"], ""),
            ToolFormat::DeepseekV3 => {
                section(&["<｜tool▁calls▁begin｜>"], &[], "\n", &["<｜tool▁calls▁end｜>"])
            }
            ToolFormat::DeepseekV31 => {
                section(&["<｜tool▁calls▁begin｜>"], &[], "", &["<｜tool▁calls▁end｜>"])
            }
            ToolFormat::KimiK2 => {
                section(&["<|tool_calls_section_begin|>"], &[], "", &["<|tool_calls_section_end|>"])
            }
            ToolFormat::DeepseekV4 => {
                let close = &["</", "｜DSML｜", "tool_calls>"];
                section(&["<", "｜DSML｜", "tool_calls>"], &["\n"], "", close)
            }
            ToolFormat::MinimaxM2 => {
                section(&["<minimax:tool_call>"], &["\n"], "\n", &["\n", "</minimax:tool_call>"])
            }
        }
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

    /// Any text up to a closing that is made of these parts, and the closing. The text doesn't hold it, spelled with
    /// ordinary tokens either, for that would be read as what it looks like. All of it up to the first special token of
    /// the closing matches each of `all`, as patterns of what stands before the closing, and none of `none`.
    fn until(&mut self, name: &str, closing: &[&str], all: &[String], none: &[String]) -> String {
        let at = closing.iter().position(|part| (self.special)(part).is_some()).unwrap_or(closing.len());
        let (text, tokens) = closing.split_at(at);
        let (text, spelled) = (regex_literal(&text.concat()), regex_literal(&closing.concat()));
        let mut terminal = format!("/(?s:.*){text}/");
        for pattern in all {
            terminal.push_str(&format!(" & /({pattern}){text}/"));
        }
        let mut none = none.to_vec();
        match (tokens.is_empty(), all.is_empty()) {
            // The first one ends the text, whatever else is asked of it.
            (true, true) => {}
            (true, false) => none.push(format!("(?s:.*){spelled}(?s:.+)")),
            (false, _) => none.push(format!("(?s:.*){spelled}(?s:.*)")),
        }
        let terminal_name = name.to_uppercase();
        self.rules.push((terminal_name.clone(), and_not(&terminal, &none)));
        // Up to a text it is lazy; up to a token it can't be too long.
        let rule = if tokens.is_empty() { format!("{name}[lazy]") } else { name.to_owned() };
        let rule = self.rule(&rule, &terminal_name);
        spaced(&[rule, self.markers(tokens)])
    }

    /// Any text without such an opening, spelled or not.
    fn without(&mut self, opening: &[&str], without: &[String]) -> String {
        let mut without = without.to_vec();
        without.extend(holding([opening.concat().as_str()]));
        self.rules.push(("TEXT".into(), and_not("/(?s:.*)/", &without)));
        self.rule("text", "TEXT")
    }

    /// Any text that begins with no object, where such a one is a call.
    fn other_than_objects(&mut self, format: ToolFormat, thought: Option<String>) -> String {
        let tags = holding(format.openings().iter().copied()).into_iter().chain(thought);
        let pattern = "/[ \\n\\r\\t]*([^{ \\n\\r\\t](?s:.*))?/";
        self.rules.push(("TEXT".into(), and_not(pattern, &tags.collect::<Vec<_>>())));
        self.rule("text", "TEXT")
    }

    /// What the model says to the reader before it calls.
    fn preamble(&mut self) -> String {
        let head = self.markers(&["<|channel|>", "commentary", "<|message|>"]);
        let said = self.until("said", &["<|end|>"], &[], &other_ends("<|end|>"));
        let next = self.markers(&["<|start|>", "assistant"]);
        self.rule("preamble", &spaced(&[head, said, next]))
    }

    /// A tag, and the blanks that may stand before it.
    fn behind_blanks(&mut self, tag: &str) -> String {
        match (self.special)(tag) {
            Some(token) => format!("/[ \\n\\r\\t]+/? {token}"),
            None => {
                self.rules.push(("OPEN".into(), format!("/[ \\n\\r\\t]*{}/", regex_literal(tag))));
                "OPEN".into()
            }
        }
    }

    fn json(&self, schema: &Value) -> String {
        format!("%json {}", with_options(schema))
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
                format!("\"\\n\" {object} \"\\n\" {}", self.markers(&["</tool_call>"]))
            }
            ToolFormat::Llama3Json => whole(self, "parameters"),
            ToolFormat::Mistral => format!("{} {arguments}", self.markers(&[name, "[ARGS]"])),
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
                let head = [&to, "<|constrain|>", "json", "<|message|>"];
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
    let (mut arguments, definitions) = references::moved(schema_of(tool));
    for word in definitions.keys() {
        arguments.as_object_mut().and_then(|members| members.remove(word));
    }
    let object = json!({
        "type": "object",
        "properties": {"name": {"const": tool.name}, key: arguments},
        "required": ["name", key],
        "additionalProperties": false,
    });
    references::with_definitions(object, definitions)
}

fn spaced(parts: &[String]) -> String {
    parts.iter().filter(|part| !part.is_empty()).cloned().collect::<Vec<_>>().join(" ")
}

/// A pattern of text that holds one of these markers; none where there are none.
fn holding<'a>(markers: impl IntoIterator<Item = &'a str>) -> Option<String> {
    let markers: Vec<String> = markers.into_iter().map(regex_literal).collect();
    (!markers.is_empty()).then(|| format!("(?s:.*)({})(?s:.*)", markers.join("|")))
}

/// A pattern of text that begins with `marker`, but for blanks.
fn at_first(marker: &str) -> String {
    format!("[ \\n\\r\\t]*{}(?s:.*)", regex_literal(marker))
}

/// A terminal that matches `pattern` and none of the others, which are one to the lexer: it is much slower with many.
fn and_not(pattern: &str, without: &[String]) -> String {
    match without {
        [] => pattern.to_owned(),
        without => format!("{pattern} & ~/{}/", without.join("|")),
    }
}

#[cfg(test)]
mod tests;
