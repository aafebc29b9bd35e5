//! Calls whose parameters are tags.

use super::references::{self, with_definitions};
use super::{Lark, strings};
use crate::answer::parameters::Kind;
use crate::answer::{Tool, ToolFormat};
use serde_json::{Value, json};

/// How a format writes a call and its parameters. `NAME`, `KEY` and `STRING` stand for what they say.
struct Shape {
    call: &'static [&'static str],
    parameter: &'static [&'static str],
    parameter_close: &'static [&'static str],
    /// As patterns: what a value may not hold beside that, since the parser takes it for the end too.
    not_within: &'static [&'static str],
    call_close: &'static [&'static str],
}

fn shape_of(format: ToolFormat) -> Shape {
    match format {
        ToolFormat::Glm45 => Shape {
            call: &["NAME", "\n"],
            parameter: &["<arg_key>", "KEY", "</arg_key>", "\n", "<arg_value>"],
            parameter_close: &["</arg_value>"],
            not_within: &[],
            call_close: &["</tool_call>"],
        },
        ToolFormat::MinimaxM2 => Shape {
            call: &["<invoke name=\"NAME\">\n"],
            parameter: &["<parameter name=\"KEY\">"],
            parameter_close: &["</parameter>"],
            not_within: &[],
            call_close: &["</invoke>"],
        },
        ToolFormat::DeepseekV4 => Shape {
            call: &["<", "｜DSML｜", "invoke name=\"NAME\">\n"],
            parameter: &["<", "｜DSML｜", "parameter name=\"KEY\" string=\"STRING\">"],
            parameter_close: &["</", "｜DSML｜", "parameter>"],
            not_within: &[],
            call_close: &["</", "｜DSML｜", "invoke>\n"],
        },
        // The format that is left.
        _ => Shape {
            call: &["\n<function=NAME>\n"],
            parameter: &["<parameter=KEY>\n"],
            parameter_close: &["\n</parameter>"],
            not_within: &[
                "((?s:.*)[^\\n])?<\\/parameter>(?s:.*)",
                "(?s:.*)\\n(<parameter=|<\\/function>)(?s:.*)",
            ],
            call_close: &["</function>\n", "</tool_call>"],
        },
    }
}

impl Lark<'_> {
    /// Parameters come in the order of their declaration; those that aren't required may be left out.
    pub(super) fn tagged_call(&mut self, format: ToolFormat, at: usize, tool: &Tool) -> String {
        let shape = shape_of(format);
        let mut call = self.filled(shape.call, &[("NAME", tool.name.as_str())]);
        let required: Vec<&str> =
            tool.parameters["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        let (parameters, definitions) = references::moved(tool.parameters.clone());
        match parameters["properties"].as_object() {
            Some(properties) => {
                for (number, (key, schema)) in properties.iter().enumerate() {
                    let name = format!("{at}_{number}");
                    let schema = if schema.is_object() { schema.clone() } else { json!({}) };
                    let schema = with_definitions(schema, definitions.clone());
                    let rule = self.parameter(&shape, &name, key, &schema);
                    let optional = if required.contains(&key.as_str()) { "" } else { "?" };
                    call.push_str(&format!(" {rule}{optional}"));
                }
            }
            // Nothing is declared, so everything is allowed.
            None => {
                let rule = self.any_parameter(&shape, at);
                call.push_str(&format!(" {rule}*"));
            }
        }
        format!("{call} {}", self.markers(shape.call_close))
    }

    fn parameter(&mut self, shape: &Shape, name: &str, key: &str, schema: &Value) -> String {
        let is_text = is_text(schema);
        let says = if is_text { "true" } else { "false" };
        let head = self.filled(shape.parameter, &[("STRING", says), ("KEY", key)]);
        let one = schema.get("const").map(std::slice::from_ref);
        let choices = schema["enum"].as_array().map(Vec::as_slice).or(one);
        let choices: Option<Vec<&str>> =
            choices.and_then(|values| values.iter().map(Value::as_str).collect());
        let value = match choices {
            Some(choices) if is_text && !choices.is_empty() => {
                let choices: Vec<String> = choices.iter().map(|choice| self.text(choice)).collect();
                format!("({}) {}", choices.join(" | "), self.close(shape))
            }
            _ if is_text => self.until_close(shape, &format!("value_{name}"), &strings::patterns(schema)),
            _ => {
                let value = self.rule(&format!("value_{name}"), &self.json(schema));
                format!("{value} {}", self.close(shape))
            }
        };
        self.rule(&format!("parameter_{name}"), &format!("{head} {value} \"\\n\""))
    }

    fn any_parameter(&mut self, shape: &Shape, at: usize) -> String {
        let (before, after) = shape
            .parameter
            .iter()
            .position(|text| text.contains("KEY"))
            .map_or((shape.parameter, &[][..]), |at| shape.parameter.split_at(at));
        let (first, last) = after.first().and_then(|text| text.split_once("KEY")).unwrap_or_default();
        let last = last.replace("STRING", "true");
        let mut texts = before.to_vec();
        texts.push(first);
        let head = self.markers(&texts);
        let mut texts = vec![last.as_str()];
        texts.extend(after.iter().skip(1));
        let tail = self.markers(&texts);
        let value = self.until_close(shape, &format!("value_{at}"), &[]);
        self.rule(&format!("parameter_{at}"), &format!("{head} /[A-Za-z0-9_.-]+/ {tail} {value} \"\\n\""))
    }

    fn close(&self, shape: &Shape) -> String {
        self.markers(shape.parameter_close)
    }

    /// A text that matches all patterns up to the closing tag, and the tag.
    fn until_close(&mut self, shape: &Shape, name: &str, patterns: &[String]) -> String {
        let not_within: Vec<String> = shape.not_within.iter().map(|pattern| (*pattern).to_owned()).collect();
        self.until(name, shape.parameter_close, patterns, &not_within)
    }

    fn filled(&self, texts: &[&str], values: &[(&str, &str)]) -> String {
        let fill = |text: &&str| {
            let mut text = (*text).to_owned();
            for (word, value) in values {
                text = text.replace(word, value);
            }
            text
        };
        let texts: Vec<String> = texts.iter().map(fill).collect();
        self.markers(&texts.iter().map(String::as_str).collect::<Vec<_>>())
    }
}

/// True for a parameter that the parser reads as a string, whatever it looks like.
fn is_text(schema: &Value) -> bool {
    Kind::of(schema) == Kind::Text
}
