//! Calls whose parameters are tags.

use super::references::{self, with_definitions};
use super::{Lark, strings};
use crate::answer::parameters::Kind;
use crate::answer::{Tool, ToolFormat, deepseek_v4, minimax_m2, qwen3_coder};
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
            None if parameters["additionalProperties"] == false => {}
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
                let choices: Vec<String> =
                    choices.iter().map(|choice| Value::from(*choice).to_string()).collect();
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

/// Refuses what can't be held where parameters are tags. Of a tool that isn't strict only what would be read as
/// something else: its other words are left out.
pub(super) fn check(format: ToolFormat, tool: &Tool) -> Result<(), String> {
    let is_tagged = matches!(
        format,
        ToolFormat::Qwen3Coder | ToolFormat::Glm45 | ToolFormat::MinimaxM2 | ToolFormat::DeepseekV4
    );
    if !is_tagged {
        return Ok(());
    }
    let parameters = &tool.parameters;
    let properties = parameters["properties"].as_object();
    for (key, schema) in properties.into_iter().flatten() {
        check_key(key)?;
        if !is_text(schema) {
            continue;
        }
        let choices = schema["enum"].as_array().into_iter().flatten().chain(schema.get("const"));
        for choice in choices.filter_map(Value::as_str) {
            if let Some(end) = value_ends(format).iter().find(|end| format!("\n{choice}").contains(**end)) {
                return Err(format!("the value {choice:?} of {key:?} holds {end:?}, which ends a parameter"));
            }
        }
        if tool.strict {
            strings::check(schema).map_err(|reason| format!("of {key:?} {reason}"))?;
        }
    }
    if !tool.strict {
        return Ok(());
    }
    if let Some(word) = NOT_OF_TAGS.iter().find(|word| parameters.get(**word).is_some()) {
        return Err(format!("'{word}' beside its properties can't be held where parameters are tags"));
    }
    let mut required = parameters["required"].as_array().into_iter().flatten().filter_map(Value::as_str);
    match required.find(|key| !properties.is_some_and(|properties| properties.contains_key(*key))) {
        Some(key) => {
            Err(format!("{key:?} is required and no property: where parameters are tags it needs one"))
        }
        None => Ok(()),
    }
}

/// A key stands in a tag as it is.
fn check_key(key: &str) -> Result<(), String> {
    let is_odd = |c: char| c.is_control() || matches!(c, '<' | '>' | '"');
    if key.is_empty() || key.trim() != key || key.contains(is_odd) || key.len() > KEY_BYTES_MAX {
        return Err(format!(
            "the property {key:?} can't be the name in a tag: 1 to {KEY_BYTES_MAX} bytes without '<', '>', '\"', \
             control characters and blanks at its ends"
        ));
    }
    Ok(())
}

/// What the parser takes for the end of a value.
fn value_ends(format: ToolFormat) -> &'static [&'static str] {
    match format {
        ToolFormat::Glm45 => &["</arg_value>"],
        ToolFormat::MinimaxM2 => minimax_m2::TAGS.value_ends,
        ToolFormat::DeepseekV4 => deepseek_v4::TAGS.value_ends,
        _ => qwen3_coder::TAGS.value_ends,
    }
}

/// Words of an object that say more than which parameters there are. Each of them would let pass what it forbids.
const NOT_OF_TAGS: [&str; 12] = [
    "allOf",
    "anyOf",
    "oneOf",
    "not",
    "if",
    "$ref",
    "patternProperties",
    "propertyNames",
    "minProperties",
    "maxProperties",
    "dependentRequired",
    "dependentSchemas",
];

/// Half of what the parser takes for an opening tag.
const KEY_BYTES_MAX: usize = 256;

/// True for a parameter that the parser reads as a string, whatever it looks like.
fn is_text(schema: &Value) -> bool {
    Kind::of(schema) == Kind::Text
}
