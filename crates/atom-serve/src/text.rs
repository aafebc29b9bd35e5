//! The text side of the model: what turns a conversation into tokens, and tokens into parts of an answer.

use crate::chat::history::{CallStyle, History, PastArguments, PastCall, Turn};
use crate::error::ApiError;
use atom_text::{
    AnswerParser, AnswerStart, Calls, ChatTemplate, Detokenizer, Dialect, Instead, ReasoningFormat,
    TemplateInput, TextError, Tokenizer, Tool, ToolFormat,
};
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// A model's tokenizer, chat template and dialect, and what follows from them.
#[derive(Debug)]
pub struct TextModel {
    /// Between text and tokens.
    pub tokenizer: Arc<Tokenizer>,
    /// Of a checkpoint without one, chat requests are refused.
    pub template: ChatTemplate,
    /// How the model marks reasoning and calls.
    pub dialect: Dialect,
    shows_tools: bool,
    call_style: CallStyle,
}

impl TextModel {
    /// Puts them together, and finds out by rendering a few messages how the template writes tools.
    pub fn new(tokenizer: Arc<Tokenizer>, template: ChatTemplate, dialect: Dialect) -> Self {
        let shows_tools = shows_tools(&template);
        let call_style = call_style(&template);
        Self { tokenizer, template, dialect, shows_tools, call_style }
    }

    /// How the template wants the calls of earlier turns.
    pub(crate) fn call_style(&self) -> CallStyle {
        self.call_style
    }

    /// Refuses tools that would not reach the model, or whose calls nobody could read.
    pub(crate) fn check_tools(&self) -> Result<(), ApiError> {
        let refuse = |reason| Err(ApiError::Unsupported { name: "tools".into(), reason });
        if !self.shows_tools {
            return refuse(
                "this model's chat template doesn't show tools to it; the server can be started with another, \
                 --chat-template FILE",
            );
        }
        if self.dialect.tools.is_none() {
            return refuse(
                "how this model writes calls isn't known; the server can be told at start, --tool-call-parser NAME",
            );
        }
        Ok(())
    }

    /// How to read answers to this prompt. Without tools nothing in them is a call.
    pub(crate) fn reading(&self, prompt: &str, tools: Arc<[Tool]>, calls_max: u32) -> Reading {
        // Harmony is a convention for whole answers, with calls or without.
        let is_wanted = |format: &ToolFormat| !tools.is_empty() || *format == ToolFormat::Harmony;
        let format = self.dialect.tools.filter(is_wanted);
        let dialect = Dialect { tools: format, ..self.dialect };
        Reading { dialect, start: dialect.start(prompt), tools, calls_max, is_whole: false }
    }
}

/// How the text of answers is taken apart: the same for all choices of a request.
#[derive(Clone, Debug)]
pub(crate) struct Reading {
    dialect: Dialect,
    /// Where the prompt left the model.
    start: AnswerStart,
    tools: Arc<[Tool]>,
    /// Calls in an answer at the most; it ends before one more.
    pub(crate) calls_max: u32,
    is_whole: bool,
}

impl Reading {
    /// Everything is content.
    pub(crate) fn plain() -> Self {
        let (dialect, start) = (Dialect::default(), AnswerStart::Content);
        Self { dialect, start, tools: Arc::default(), calls_max: u32::MAX, is_whole: false }
    }

    /// A parser for one choice.
    pub(crate) fn parser(&self) -> AnswerParser {
        let parser = AnswerParser::new(self.dialect, self.start, self.tools.clone());
        if self.is_whole { parser.with_whole_content() } else { parser }
    }

    /// A detokenizer for one choice: it leaves special tokens out but for those that the parser looks for.
    pub(crate) fn detokenizer(&self, tokenizer: Arc<Tokenizer>) -> Detokenizer {
        Detokenizer::new(tokenizer, true).showing(&self.dialect.markers())
    }

    /// The answer may call tools.
    pub(crate) fn expects_calls(&self) -> bool {
        !self.tools.is_empty()
    }

    /// The prompt leaves the model in the middle of its thoughts.
    pub(crate) fn begins_in_reasoning(&self) -> bool {
        self.start == AnswerStart::Reasoning
    }

    /// The grammar of an answer that calls one of `tools`, or several, or is `instead`; see
    /// [`Dialect::answer_grammar`]. Thoughts may come before.
    pub(crate) fn grammar(
        &self,
        tokenizer: &Tokenizer,
        tools: &[Tool],
        instead: Instead<'_>,
    ) -> Result<Option<String>, TextError> {
        let parallel = self.calls_max > 1;
        let calls = self.dialect.tools.filter(|_| !tools.is_empty());
        let calls = calls.map(|format| Calls { format, tools, parallel });
        self.dialect.answer_grammar(tokenizer, self.start, calls, instead)
    }

    /// Tools that the answer may call.
    pub(crate) fn tools(&self) -> Arc<[Tool]> {
        self.tools.clone()
    }

    /// Content, once it has begun, goes on to the end.
    pub(crate) fn with_whole_content(self) -> Self {
        Self { is_whole: true, ..self }
    }

    /// The answer is a row of messages with headers.
    pub(crate) fn is_harmony(&self) -> bool {
        self.dialect.tools == Some(ToolFormat::Harmony)
            || self.dialect.reasoning == Some(ReasoningFormat::Harmony)
    }

    /// True if reasoning is told apart.
    pub(crate) fn knows_reasoning(&self) -> bool {
        self.dialect.reasoning.is_some()
    }
}

/// Whether the name of a tool gets into the prompt.
fn shows_tools(template: &ChatTemplate) -> bool {
    let mut history = History::default();
    let fine = history.push("", Turn::User("Hello.".into()), None).is_ok();
    let messages = history.for_template(CallStyle::default());
    fine && render(template, &messages).is_some_and(|prompt| prompt.contains(PROBE))
}

/// The first style in which the template takes a call and its answer, and where it looks for thoughts.
fn call_style(template: &ChatTemplate) -> CallStyle {
    let styles = [(false, false), (true, false), (false, true), (true, true)];
    let styles = styles.map(|(arguments_are_text, has_short_ids)| CallStyle {
        arguments_are_text,
        has_short_ids,
        thoughts_are_thinking: false,
    });
    let prompt = |style: CallStyle| render(template, &one_call()?.for_template(style));
    let found = styles.into_iter().find_map(|style| Some((style, prompt(style)?)));
    let (style, shown) = found.unwrap_or_default();
    let odd = CallStyle { thoughts_are_thinking: true, ..style };
    let is_odd = !shown.contains(THOUGHT) && prompt(odd).is_some_and(|prompt| prompt.contains(THOUGHT));
    if is_odd { odd } else { style }
}

/// A call with its answer.
fn one_call() -> Option<History> {
    let arguments = PastArguments::Object(Map::from_iter([("at".to_owned(), json!("noon"))]));
    let id = "call_0123456789abcdef".to_owned();
    let call = PastCall { id: id.clone(), name: PROBE.into(), arguments };
    let turns = [
        Turn::User("Hello.".into()),
        Turn::Assistant { content: String::new(), reasoning: Some(THOUGHT.into()), calls: vec![call] },
        Turn::Answer { place: String::new(), call_id: id, content: "42".into() },
    ];
    let mut history = History::default();
    turns.into_iter().all(|turn| history.push("", turn, None).is_ok()).then_some(history)
}

/// The prompt for these messages and a tool, if the template makes one.
fn render(template: &ChatTemplate, messages: &Value) -> Option<String> {
    let parameters = json!({"type": "object", "properties": {"at": {"type": "string"}}});
    let function = json!({"name": PROBE, "description": "Looks.", "parameters": parameters});
    let tools = json!([{"type": "function", "function": function}]);
    let input = TemplateInput {
        messages,
        tools: Some(&tools),
        add_generation_prompt: true,
        kwargs: None,
        // A day that every template can print.
        now_unix_s: 1_709_208_000,
    };
    template.render(&input).ok()
}

/// Words that no template writes by itself.
const PROBE: &str = "probe_of_tools";
const THOUGHT: &str = "probe of thoughts";
