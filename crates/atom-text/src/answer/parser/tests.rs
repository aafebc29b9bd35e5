use super::*;
use serde_json::{Value, json};
use std::sync::LazyLock;

mod cases;
mod cuts;
mod formats;
mod splits;

/// A tool with parameters of every type.
fn tool(name: &str) -> Tool {
    let properties = json!({
        "s": {"type": "string"},
        "n": {"type": "integer"},
        "x": {"type": "number"},
        "b": {"type": "boolean"},
        "o": {"type": "object"},
        "a": {"type": "array"},
        "u": {"type": ["string", "null"]},
    });
    let parameters = json!({"type": "object", "properties": properties});
    Tool { name: name.into(), description: None, parameters, strict: false }
}

fn tools() -> Arc<[Tool]> {
    static TOOLS: LazyLock<Arc<[Tool]>> = LazyLock::new(|| Arc::new([tool("f"), tool("get_weather")]));
    TOOLS.clone()
}

fn dialect(reasoning: Option<ReasoningFormat>, tools: Option<ToolFormat>) -> Dialect {
    Dialect { reasoning, tools }
}

/// What an answer says, whatever its pieces: neighbours of one kind are one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Answer {
    content: String,
    reasoning: String,
    /// Id, name and arguments.
    calls: Vec<(Option<String>, String, String)>,
    /// The kinds of parts in order, each once in a row.
    order: String,
}

impl Answer {
    fn of(parts: &[AnswerPart]) -> Self {
        let mut answer = Self::default();
        for part in parts {
            let kind = match part {
                AnswerPart::Content(text) => {
                    answer.content += text;
                    'c'
                }
                AnswerPart::Reasoning(text) => {
                    answer.reasoning += text;
                    'r'
                }
                AnswerPart::Call { index, id, name } => {
                    assert_eq!(*index as usize, answer.calls.len(), "calls are numbered in order");
                    answer.calls.push((id.clone(), name.clone(), String::new()));
                    '@'
                }
                AnswerPart::Arguments { index, json } => {
                    assert_eq!(*index as usize + 1, answer.calls.len(), "arguments belong to the last call");
                    answer.calls.last_mut().unwrap().2 += json;
                    '{'
                }
            };
            if kind == '@' || !answer.order.ends_with(kind) {
                answer.order.push(kind);
            }
        }
        answer
    }

    /// Names and arguments, which must be JSON.
    fn values(&self) -> Vec<(&str, Value)> {
        let value = |json: &str| serde_json::from_str(json).unwrap_or_else(|error| panic!("{json}: {error}"));
        self.calls.iter().map(|(_, name, json)| (name.as_str(), value(json))).collect()
    }
}

fn read(dialect: Dialect, start: AnswerStart, deltas: &[&str]) -> Answer {
    read_to(AnswerEnd::Whole, dialect, start, deltas)
}

fn read_to(end: AnswerEnd, dialect: Dialect, start: AnswerStart, deltas: &[&str]) -> Answer {
    let mut parser = AnswerParser::new(dialect, start, tools());
    let mut parts = Vec::new();
    for delta in deltas {
        parser.push(delta, &mut parts);
    }
    parser.finish(end, &mut parts);
    let answer = Answer::of(&parts);
    assert_eq!(parser.calls() as usize, answer.calls.len());
    answer
}

/// An answer in one line: content as it is, reasoning in `[]`, calls as `@name{..}` or `@id=name{..}`.
fn line(dialect: Dialect, start: AnswerStart, text: &str) -> String {
    line_to(AnswerEnd::Whole, dialect, start, text)
}

fn line_to(end: AnswerEnd, dialect: Dialect, start: AnswerStart, text: &str) -> String {
    let mut parser = AnswerParser::new(dialect, start, tools());
    let mut parts = Vec::new();
    parser.push(text, &mut parts);
    parser.finish(end, &mut parts);
    let show = |part: &AnswerPart| match part {
        AnswerPart::Content(text) => text.clone(),
        AnswerPart::Reasoning(text) => format!("[{text}]"),
        AnswerPart::Call { id: Some(id), name, .. } => format!("@{id}={name}"),
        AnswerPart::Call { id: None, name, .. } => format!("@{name}"),
        AnswerPart::Arguments { json, .. } => json.clone(),
    };
    parts.iter().map(show).collect()
}

/// Calls as a model of this format writes them.
fn written(format: ToolFormat, calls: &[(&str, Value)]) -> String {
    let one = |(index, (name, arguments)): (usize, &(&str, Value))| {
        let tags = |open: fn(&str, &Value) -> String| -> String {
            arguments.as_object().unwrap().iter().map(|(key, value)| open(key, value)).collect()
        };
        match format {
            ToolFormat::Hermes => {
                format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {arguments}}}\n</tool_call>\n")
            }
            ToolFormat::Llama3Json => {
                let separator = if index == 0 { "" } else { "; " };
                format!("{separator}{{\"name\": \"{name}\", \"parameters\": {arguments}}}")
            }
            ToolFormat::Mistral => format!("[TOOL_CALLS]{name}[ARGS]{arguments}"),
            ToolFormat::DeepseekV3 => format!(
                "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>\n"
            ),
            ToolFormat::DeepseekV31 => {
                format!("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>")
            }
            ToolFormat::KimiK2 => format!(
                "<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
            ),
            ToolFormat::Qwen3Coder => {
                let inner = tags(|key, value| format!("<parameter={key}>\n{}\n</parameter>\n", plain(value)));
                format!("<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>\n")
            }
            ToolFormat::Glm45 => {
                let inner = tags(|key, value| {
                    format!("<arg_key>{key}</arg_key>\n<arg_value>{}</arg_value>\n", plain(value))
                });
                format!("<tool_call>{name}\n{inner}</tool_call>\n")
            }
            ToolFormat::MinimaxM2 => {
                let inner =
                    tags(|key, value| format!("<parameter name=\"{key}\">{}</parameter>\n", plain(value)));
                format!("<invoke name=\"{name}\">\n{inner}</invoke>\n")
            }
            ToolFormat::DeepseekV4 => {
                let inner = tags(|key, value| {
                    let (is_string, text) = (value.is_string(), plain(value));
                    format!(
                        "<｜DSML｜parameter name=\"{key}\" string=\"{is_string}\">{text}</｜DSML｜parameter>\n"
                    )
                });
                format!("<｜DSML｜invoke name=\"{name}\">\n{inner}</｜DSML｜invoke>\n")
            }
            ToolFormat::Harmony => format!(
                "<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"
            ),
        }
    };
    let all: String = calls.iter().enumerate().map(one).collect();
    match format {
        _ if calls.is_empty() => all,
        ToolFormat::DeepseekV3 | ToolFormat::DeepseekV31 => {
            format!("<｜tool▁calls▁begin｜>{all}<｜tool▁calls▁end｜>")
        }
        ToolFormat::KimiK2 => format!("<|tool_calls_section_begin|>{all}<|tool_calls_section_end|>"),
        ToolFormat::MinimaxM2 => format!("<minimax:tool_call>\n{all}</minimax:tool_call>"),
        ToolFormat::DeepseekV4 => format!("<｜DSML｜tool_calls>\n{all}</｜DSML｜tool_calls>"),
        _ => all,
    }
}

/// A value as it stands in a tag.
fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// An answer as a model of this dialect writes it.
fn answer_text(dialect: Dialect, thought: &str, content: &str, calls: &[(&str, Value)]) -> String {
    if is_harmony(dialect) {
        let analysis = format!("<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant");
        let analysis = if thought.is_empty() { "" } else { &analysis };
        let last = format!("<|channel|>final<|message|>{content}<|end|>");
        let last = if content.is_empty() { "" } else { &last };
        return format!("{analysis}{last}{}", written(ToolFormat::Harmony, calls));
    }
    let thought = match dialect.reasoning.and_then(ReasoningFormat::tags) {
        Some((open, close)) if !thought.is_empty() => format!("{open}\n{thought}{close}\n\n"),
        _ => String::new(),
    };
    let calls = dialect.tools.map_or(String::new(), |format| written(format, calls));
    format!("{thought}{content}{calls}")
}

fn is_harmony(dialect: Dialect) -> bool {
    dialect.reasoning == Some(ReasoningFormat::Harmony) || dialect.tools == Some(ToolFormat::Harmony)
}

/// Every format of calls with every format of reasoning, and each alone.
fn dialects() -> impl Iterator<Item = Dialect> {
    let reasoning = || ReasoningFormat::ALL.into_iter().map(Some).chain([None]);
    let tools = ToolFormat::ALL.into_iter().map(Some).chain([None]);
    tools.flat_map(move |tools| reasoning().map(move |reasoning| Dialect { reasoning, tools }))
}

/// Arguments that break parsers which count braces, complete JSON or cut within characters.
fn hard_arguments() -> Vec<Value> {
    vec![
        json!({}),
        json!({"s": ""}),
        json!({"s": "{a,b} }{ ]["}),
        json!({"s": "\"quoted\" \\ back\\\\slash \n new\tline"}),
        json!({"s": "東京 🦀 é", "n": -7, "x": 1.5, "b": true, "u": null}),
        json!({"o": {"a": {"b": [{}, [], {"c": "}"}]}}, "a": [1, [2, {"d": "]"}]]}),
        json!({"s": "<a> < </ <|x|> [y] <｜z｜>"}),
        json!({"o": {"</parameter>": "\n</arg_value>\"</｜DSML｜parameter>"}, "a": ["</function>", "\\"]}),
        json!({"undeclared": "5"}),
    ]
}

#[test]
fn content_that_is_whole_may_quote_markers() {
    let dialect = dialect(Some(ReasoningFormat::Think), Some(ToolFormat::Hermes));
    let text = "<think>a</think>\n\n{\"x\": \"<tool_call>\\n<think>b</think>\"}";
    let call = "<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>";
    for (text, expected) in [(text.to_owned(), &text[18..]), (format!("<think>a</think>{call}"), "")] {
        for cut in 0..text.len() {
            let mut parser = AnswerParser::new(dialect, AnswerStart::Content, tools()).with_whole_content();
            let mut parts = Vec::new();
            parser.push(&text[..cut], &mut parts);
            parser.push(&text[cut..], &mut parts);
            parser.finish(AnswerEnd::Whole, &mut parts);
            let answer = Answer::of(&parts);
            assert_eq!(
                (answer.content.as_str(), answer.reasoning.as_str()),
                (expected, "a"),
                "{cut}: {text}"
            );
            assert_eq!(answer.calls.len(), usize::from(expected.is_empty()), "{cut}: {text}");
        }
    }
}

/// A choice may be " yes"; what separates it from thoughts is a line break or two.
#[test]
fn blanks_at_the_start_of_a_format_behind_thoughts_are_its_own() {
    let dialect = dialect(Some(ReasoningFormat::Think), Some(ToolFormat::Hermes));
    for (behind, expected) in [
        (" yes", " yes"),
        ("\n\n yes ", " yes "),
        ("\n\t\nx", "\t\nx"),
        ("\n\n\nx", "\nx"),
        ("\n\n{}", "{}"),
        ("\n\n ", " "),
    ] {
        let text = format!("<think>a</think>{behind}");
        for cut in 0..text.len() {
            let mut parser = AnswerParser::new(dialect, AnswerStart::Content, tools()).with_whole_content();
            let mut parts = Vec::new();
            parser.push(&text[..cut], &mut parts);
            parser.push(&text[cut..], &mut parts);
            parser.finish(AnswerEnd::Whole, &mut parts);
            let answer = Answer::of(&parts);
            assert_eq!(
                (answer.content.as_str(), answer.reasoning.as_str()),
                (expected, "a"),
                "{cut}: {text:?}"
            );
        }
    }
}

#[test]
fn an_id_that_a_call_before_had_is_none() {
    let dialect = dialect(None, Some(ToolFormat::KimiK2));
    let call = "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>";
    let text = format!("<|tool_calls_section_begin|>{call}{call}<|tool_calls_section_end|>");
    assert_eq!(line(dialect, AnswerStart::Content, &text), "@functions.f:0=f{}@f{}");
}

#[test]
fn a_tag_that_is_quoted_in_a_text_opens_no_reasoning() {
    let dialect = dialect(Some(ReasoningFormat::Think), None);
    let text = "<think>a</think>Write <think> first. </think> ends it.";
    assert_eq!(line(dialect, AnswerStart::Content, text), "[a]Write <think> first. </think> ends it.");
}
