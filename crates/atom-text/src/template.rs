//! Chat templates: messages to the text that a model was trained on.

mod budget;
mod clock;
mod json;
mod library;

use crate::content::kind;
use crate::{TextError, Tokenizer, TokenizerSource};
use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Error, ErrorKind, Value};
use serde_json::{Map, Value as Json};
use std::collections::HashSet;
use std::fmt;
use std::io;

/// Bytes of one rendered prompt: a request's whole body and as much again for the template's own text.
const OUTPUT_BYTES_MAX: usize = 2 * atom_base::limits::BODY_BYTES_MAX;

/// A checkpoint's chat template, compiled, or the knowledge that it has none.
///
/// The environment is that of Python's transformers: blocks take their line break and indentation with
/// them, methods of Python's strings and dicts work, `raise_exception`, `strftime_now` and a `tojson` that
/// doesn't escape for HTML are there, `break` and `continue` too, and `{% generation %}` marks nothing.
///
/// Loops, recursion, strings and output are bounded by the size of the request, so that neither a template
/// nor a message can keep a server busy. What the engine's accounting doesn't see are lists that a template
/// nests in or adds to themselves over and over: a template is trusted that far, as part of its checkpoint.
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// `bos_token` and the like, for templates that print them.
    special_texts: Vec<(&'static str, String)>,
    /// Variables that it reads and doesn't set itself, those of the environment included.
    reads: HashSet<String>,
}

/// What a rendering is made from.
#[derive(Clone, Copy, Debug)]
pub struct TemplateInput<'a> {
    /// A list of objects with `role` and `content` (see [`flatten_messages`](crate::flatten_messages)).
    pub messages: &'a Json,
    /// A list of tool definitions.
    pub tools: Option<&'a Json>,
    /// Ends with the beginning of the assistant's answer.
    pub add_generation_prompt: bool,
    /// Further variables (`chat_template_kwargs`), such as `enable_thinking`.
    pub kwargs: Option<&'a Map<String, Json>>,
    /// Now, in seconds since 1970, for templates that print a date. They get it in UTC.
    pub now_unix_s: i64,
}

impl ChatTemplate {
    /// Compiles the template of a checkpoint, or `instead` of it (`--chat-template`).
    ///
    /// A folder's `chat_template.jinja` wins over `chat_template` in its `tokenizer_config.json`, which is
    /// a string or a list of named templates; of those, `default` is used, and `tool_use` when a request
    /// has tools. A checkpoint without any is no error here: [`render`](Self::render) says so.
    pub fn load(
        source: &TokenizerSource,
        tokenizer: &Tokenizer,
        instead: Option<&str>,
    ) -> Result<Self, TextError> {
        let texts = match instead {
            Some(text) => vec![(library::DEFAULT, text.to_owned())],
            None => library::find(source)?,
        };
        let mut environment = environment()?;
        for (name, text) in texts {
            library::check_size(&text)?;
            environment
                .add_template_owned(name, library::without_generation_marks(&text))
                .map_err(|error| TextError::TemplateSyntax { reason: describe(&error) })?;
        }
        let special_texts = tokenizer.special_texts().map(|(name, text)| (name, text.to_owned())).collect();
        let reads = environment.templates().flat_map(|(_, template)| template.undeclared_variables(false));
        let reads = reads.collect();
        Ok(Self { environment, special_texts, reads })
    }

    /// False for a checkpoint that has no template.
    pub fn is_present(&self) -> bool {
        self.environment.get_template(library::DEFAULT).is_ok()
    }

    /// The template of requests without tools, as text: without `{% generation %}`, which renders nothing.
    pub fn text(&self) -> Option<String> {
        Some(self.environment.get_template(library::DEFAULT).ok()?.source().to_owned())
    }

    /// True if the template looks at a variable of this name, so that a request can set it.
    pub fn reads(&self, variable: &str) -> bool {
        self.reads.contains(variable)
    }

    /// The prompt for a chat.
    pub fn render(&self, input: &TemplateInput) -> Result<String, TextError> {
        check_shape(input)?;
        let fuel = budget::fuel(input);
        let mut environment = self.environment.clone();
        environment.set_fuel(Some(fuel));
        let named = |name| environment.get_template(name).ok();
        let template = input
            .tools
            .and_then(|_| named(library::TOOL_USE))
            .or_else(|| named(library::DEFAULT))
            .ok_or(TextError::NoChatTemplate)?;
        let mut out = BoundedOutput::default();
        let result = template.render_captured_to(self.context(input), &mut out).map(drop);
        match result {
            Ok(()) => String::from_utf8(out.bytes)
                .map_err(|error| TextError::TemplateFailed { reason: error.to_string() }),
            Err(_) if out.is_over => Err(TextError::TemplateOutput { max: OUTPUT_BYTES_MAX }),
            Err(error) => Err(classify(&error, fuel)),
        }
    }

    /// The text of the templates, for those who look for what a checkpoint can write.
    pub(crate) fn source(&self) -> String {
        let named = |name| Some(self.environment.get_template(name).ok()?.source().to_owned());
        [library::DEFAULT, library::TOOL_USE].into_iter().filter_map(named).collect()
    }

    fn context(&self, input: &TemplateInput) -> Value {
        let now_unix_s = input.now_unix_s;
        let strftime_now = move |format: &str| {
            clock::strftime(now_unix_s, format)
                .map_err(|reason| Error::new(ErrorKind::InvalidOperation, reason))
        };
        // transformers passes `none` for tools and documents that aren't there, and templates count on it.
        let mut variables = vec![
            ("messages", json::to_value(input.messages)),
            ("tools", input.tools.map_or(Value::from(()), json::to_value)),
            ("documents", Value::from(())),
            ("add_generation_prompt", Value::from(input.add_generation_prompt)),
            ("strftime_now", Value::from_function(strftime_now)),
        ];
        variables.extend(self.special_texts.iter().map(|(name, text)| (*name, Value::from(text.as_str()))));
        let kwargs =
            input.kwargs.into_iter().flatten().map(|(name, value)| (name.as_str(), json::to_value(value)));
        Value::from_pairs(variables.into_iter().chain(kwargs))
    }
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate").field("is_present", &self.is_present()).finish_non_exhaustive()
    }
}

/// Variables that a request gives in fields of their own.
const RESERVED: [&str; 5] = ["messages", "tools", "add_generation_prompt", "strftime_now", "raise_exception"];

fn check_shape(input: &TemplateInput) -> Result<(), TextError> {
    let refuse = |field: String, reason: String| Err(TextError::Request { field, reason });
    for (field, list) in [("messages", Some(input.messages)), ("tools", input.tools)] {
        let items = match list {
            None => continue,
            Some(Json::Array(items)) => items,
            Some(other) => return refuse(field.into(), format!("is {}; it must be a list", kind(other))),
        };
        if items.is_empty() && field == "messages" {
            return refuse(field.into(), "is empty; at least one message is needed".into());
        }
        if let Some(at) = items.iter().position(|item| !item.is_object()) {
            return refuse(
                format!("{field}[{at}]"),
                format!("is {}; it must be an object", kind(&items[at])),
            );
        }
    }
    match input.kwargs.into_iter().flatten().find(|(name, _)| RESERVED.contains(&name.as_str())) {
        Some((name, _)) => {
            refuse(format!("chat_template_kwargs.{name}"), "is set by the request's own fields".into())
        }
        None => Ok(()),
    }
}

fn environment() -> Result<Environment<'static>, TextError> {
    let syntax = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build()
        .map_err(|error| TextError::TemplateSyntax { reason: error.to_string() })?;
    let mut environment = Environment::new();
    environment.set_syntax(syntax);
    environment.set_unknown_method_callback(budget::method);
    // Here `none` could be iterated over like an empty list. In Python it can't, and templates ask.
    environment.add_test("iterable", |value: Value| !value.is_none() && value.try_iter().is_ok());
    environment.add_filter("tojson", json::tojson);
    environment.add_filter("join", budget::join);
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        let error = Error::new(ErrorKind::InvalidOperation, "raise_exception");
        Err(error.with_source(Refusal(message)))
    });
    Ok(environment)
}

/// The argument of `raise_exception`, on its way out.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Refusal(String);

/// Output that stops at a bound instead of taking all memory.
#[derive(Default)]
struct BoundedOutput {
    bytes: Vec<u8>,
    is_over: bool,
}

impl io::Write for BoundedOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() > OUTPUT_BYTES_MAX - self.bytes.len() {
            self.is_over = true;
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What a failed rendering means. The engine wraps errors of macros and calls, so the whole chain counts.
fn classify(error: &Error, fuel: u64) -> TextError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(current) = cause {
        if let Some(Refusal(message)) = current.downcast_ref() {
            return TextError::TemplateRefused { message: message.clone() };
        }
        if current.downcast_ref::<Error>().is_some_and(|error| error.kind() == ErrorKind::OutOfFuel) {
            return TextError::TemplateFuel { fuel };
        }
        cause = current.source();
    }
    TextError::TemplateFailed { reason: describe(error) }
}

/// An error of the engine in one line.
fn describe(error: &Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(current) = cause {
        text.push_str(": ");
        text.push_str(&current.to_string());
        cause = current.source();
    }
    text
}

#[cfg(test)]
mod tests;
