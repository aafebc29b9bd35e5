//! The tools that a request offers, and which of them the model may or must call.
//!
//! [`Tools::read`] reads them as chat completions spell them. Other APIs build a [`ToolList`] and a
//! [`ToolChoice`] from their own spelling and get the same checks.

use crate::declare::Takes::{Either, Flag, List, Object as Inner, Pattern, Schema, Text, Word};
use crate::declare::{Field, Object, Takes, field, needed};
use crate::error::ApiError;
use crate::fields::{Fields, wrong};
use atom_base::limits::{TOOL_NAME_BYTES_MAX, TOOLS_BYTES_MAX, TOOLS_MAX};
use atom_text::Tool;
use serde_json::{Value, json};
use std::collections::HashSet;
use std::sync::Arc;

/// What a request says of tools, checked: names are unique and well formed, a named choice exists.
#[derive(Clone, Debug)]
pub(crate) struct Tools {
    list: Arc<[Tool]>,
    choice: ToolChoice,
    parallel: bool,
}

/// Which of the offered tools the answer calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ToolChoice {
    /// None: the model doesn't learn of them.
    None,
    /// The model decides.
    Auto,
    /// At least one.
    Required,
    /// This one.
    Named(String),
    /// Some of these or, where they aren't `required`, none. The model sees the others too, so that the prompt's
    /// beginning stays the same.
    Allowed { tools: Vec<AllowedTool>, required: bool },
}

/// A tool that a request names among those that may be called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AllowedTool {
    pub(crate) name: String,
    /// Where the client put it, for the error.
    pub(crate) place: String,
}

/// Tools as they are read, one after the other.
#[derive(Debug, Default)]
pub(crate) struct ToolList {
    tools: Vec<Tool>,
    names: HashSet<String>,
    bytes: usize,
}

impl Tools {
    /// `choice_field` is how the client spells the place of a named tool, for the error.
    pub(crate) fn new(
        list: ToolList,
        choice: ToolChoice,
        parallel: bool,
        choice_field: &str,
    ) -> Result<Self, ApiError> {
        match &choice {
            ToolChoice::Named(name) if !list.names.contains(name) => {
                return Err(wrong(choice_field, &json!(name), list.one_of()));
            }
            ToolChoice::Allowed { tools, .. } => {
                if let Some(other) = tools.iter().find(|tool| !list.names.contains(&tool.name)) {
                    return Err(wrong(&other.place, &json!(other.name), list.one_of()));
                }
            }
            ToolChoice::Required if list.tools.is_empty() => {
                return Err(wrong(choice_field, &json!("required"), "\"none\" or \"auto\" without 'tools'"));
            }
            _ => {}
        }
        Ok(Self { list: list.tools.into(), choice, parallel })
    }

    /// Takes `tools`, `tool_choice` and `parallel_tool_calls`.
    pub(crate) fn read(fields: &mut Fields) -> Result<Self, ApiError> {
        let items = fields.list("tools")?.unwrap_or_default();
        let mut list = ToolList::default();
        for (at, item) in items.into_iter().enumerate() {
            let tool = read_tool(&format!("tools[{at}]"), item)?;
            list.push(&format!("tools[{at}].function"), tool)?;
        }
        let parallel = fields.boolean("parallel_tool_calls")?.unwrap_or(true);
        let (choice, choice_field) = read_choice(fields)?;
        Self::new(list, choice, parallel, choice_field)
    }

    /// The tools that an answer may call.
    pub(crate) fn callable(&self) -> Arc<[Tool]> {
        match &self.choice {
            ToolChoice::Allowed { tools, .. } => {
                let names: HashSet<&str> = tools.iter().map(|tool| tool.name.as_str()).collect();
                self.list.iter().filter(|tool| names.contains(tool.name.as_str())).cloned().collect()
            }
            _ => self.offered(),
        }
    }

    /// The tools that the model sees; none with [`ToolChoice::None`].
    pub(crate) fn offered(&self) -> Arc<[Tool]> {
        if self.choice == ToolChoice::None { Arc::default() } else { self.list.clone() }
    }

    pub(crate) fn choice(&self) -> &ToolChoice {
        &self.choice
    }

    /// False: the answer has one call at the most.
    pub(crate) fn is_parallel(&self) -> bool {
        self.parallel
    }

    /// The offered tools as templates know them: OpenAI's shape, always in the same order of keys, so that
    /// requests that differ only there share their cached prompt. `strict` is no word for the model.
    pub(crate) fn for_template(&self) -> Option<Value> {
        let offered = self.offered();
        let tools = offered.iter().map(|tool| {
            let mut function = json!({"name": tool.name});
            if let Some(description) = &tool.description {
                function["description"] = description.as_str().into();
            }
            function["parameters"] = tool.parameters.clone();
            json!({"type": "function", "function": function})
        });
        (!offered.is_empty()).then(|| tools.collect())
    }

    /// True if the arguments of a tool must follow its schema to the letter.
    pub(crate) fn are_strict(&self) -> bool {
        self.offered().iter().any(|tool| tool.strict)
    }
}

impl ToolList {
    /// Adds the tool whose name the client put at `place` (like `tools[2].function`).
    pub(crate) fn push(&mut self, place: &str, tool: Tool) -> Result<(), ApiError> {
        check_name(&format!("{place}.name"), &tool.name)?;
        self.push_named(place, tool)
    }

    /// The same for a name that was made of names which have been checked.
    pub(crate) fn push_named(&mut self, place: &str, tool: Tool) -> Result<(), ApiError> {
        let name = format!("{place}.name");
        if self.tools.len() == TOOLS_MAX {
            return Err(wrong("tools", &json!(vec![0; TOOLS_MAX + 1]), format!("at most {TOOLS_MAX} tools")));
        }
        self.bytes += tool.name.len()
            + tool.description.as_ref().map_or(0, String::len)
            + tool.parameters.to_string().len();
        if self.bytes > TOOLS_BYTES_MAX {
            return Err(ApiError::BadField {
                name: "tools".into(),
                found: format!("{} bytes of names, descriptions and schemas up to '{place}'", self.bytes),
                expected: format!("at most {TOOLS_BYTES_MAX} bytes"),
            });
        }
        if !self.names.insert(tool.name.clone()) {
            return Err(wrong(&name, &tool.name.into(), "a name that no tool before it has"));
        }
        self.tools.push(tool);
        Ok(())
    }

    fn one_of(&self) -> String {
        let names: Vec<_> = self.tools.iter().map(|tool| format!("\"{}\"", tool.name)).collect();
        match names.len() {
            0 => "absent: the request has no 'tools'".into(),
            1..=NAMES_SHOWN_MAX => format!("one of the tools: {}", names.join(", ")),
            count => format!("the name of one of the {count} tools"),
        }
    }
}

/// Checks a tool's name, which the client put at `place`.
pub(crate) fn check_name(place: &str, name: &str) -> Result<(), ApiError> {
    if is_tool_name(name) { Ok(()) } else { Err(wrong(place, &name.into(), tool_name_rule())) }
}

/// The rule of the OpenAI API; formats rely on it where a name stands between markers.
fn is_tool_name(name: &str) -> bool {
    (1..=TOOL_NAME_BYTES_MAX).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-')
}

/// The name in a call of an earlier answer: as the model wrote it, who may have made one up.
pub(crate) fn past_tool_name(name: String, place: &str) -> Result<String, ApiError> {
    if (1..=PAST_NAME_BYTES_MAX).contains(&name.len()) && !name.contains(char::is_control) {
        return Ok(name);
    }
    let expected = format!("1 to {PAST_NAME_BYTES_MAX} bytes without control characters");
    Err(wrong(place, &name.into(), expected))
}

fn tool_name_rule() -> String {
    format!("1 to {TOOL_NAME_BYTES_MAX} of the letters a-z and A-Z, digits, '_' and '-'")
}

/// A schema that a client left out: in the OpenAI API that is a function without arguments.
pub(crate) fn no_parameters() -> Value {
    json!({"type": "object", "properties": {}})
}

/// Reads the schema of a tool's arguments from the field that the API has for it.
pub(crate) fn read_schema(fields: &mut Fields, name: &str) -> Result<Value, ApiError> {
    let Some(schema) = fields.object(name)? else { return Ok(no_parameters()) };
    match schema.get("type") {
        None => {}
        Some(kind) if kind == "object" => {}
        Some(other) => {
            let place = format!("{}.type", fields.name(name));
            return Err(wrong(&place, other, "\"object\": arguments are given by name"));
        }
    }
    Ok(Value::Object(schema))
}

fn read_tool(place: &str, item: Value) -> Result<Tool, ApiError> {
    let mut fields = Fields::nested(place, item, &TOOL)?;
    let kind = fields
        .string("type")?
        .ok_or_else(|| ApiError::Missing { name: fields.name("type"), expected: "it is \"function\"" })?;
    if kind != "function" {
        return Err(wrong(&fields.name("type"), &kind.into(), "\"function\", the only type built here"));
    }
    let function = fields.inner("function")?.ok_or_else(|| ApiError::Missing {
        name: fields.name("function"),
        expected: "send an object with a name, a description and parameters",
    })?;
    fields.finish()?;
    let mut fields = function;
    let name = fields.string("name")?.ok_or_else(|| ApiError::Missing {
        name: fields.name("name"),
        expected: "it is how the model calls the function",
    })?;
    let tool = Tool {
        name,
        description: fields.string("description")?,
        parameters: read_schema(&mut fields, "parameters")?,
        strict: fields.boolean("strict")?.unwrap_or(false),
    };
    fields.finish()?;
    Ok(tool)
}

/// The choice and how the client spelled its place.
fn read_choice(fields: &mut Fields) -> Result<(ToolChoice, &'static str), ApiError> {
    let place = "tool_choice";
    match fields.take(place) {
        None => Ok((ToolChoice::Auto, place)),
        Some(Value::String(word)) => match word.as_str() {
            "none" => Ok((ToolChoice::None, place)),
            "auto" => Ok((ToolChoice::Auto, place)),
            // Mistral's word for the same.
            "required" | "any" => Ok((ToolChoice::Required, place)),
            _ => Err(wrong(place, &word.into(), CHOICES)),
        },
        Some(object @ Value::Object(_)) if object["type"] == ALLOWED_TOOLS => {
            Ok((read_allowed(object)?, place))
        }
        Some(object @ Value::Object(_)) => Ok((read_named(object)?, "tool_choice.function.name")),
        Some(other) => Err(wrong(place, &other, CHOICES)),
    }
}

fn read_named(object: Value) -> Result<ToolChoice, ApiError> {
    let mut fields = Fields::nested("tool_choice", object, &NAMED_CHOICE)?;
    match fields.string("type")?.as_deref() {
        Some("function") => {}
        Some(other) => return Err(wrong("tool_choice.type", &other.into(), CHOICE_TYPES)),
        None => {
            let name = "tool_choice.type".into();
            return Err(ApiError::Missing { name, expected: "it is \"function\" or \"allowed_tools\"" });
        }
    }
    Ok(ToolChoice::Named(read_function_name(fields)?.name))
}

/// The rest of an object that names a function.
fn read_function_name(mut fields: Fields) -> Result<AllowedTool, ApiError> {
    let place = fields.name("function.name");
    let missing = || ApiError::Missing { name: place.clone(), expected: "name one of the tools" };
    let function = fields.inner("function")?;
    fields.finish()?;
    let mut fields = function.ok_or_else(missing)?;
    let name = fields.string("name")?.ok_or_else(missing)?;
    fields.finish()?;
    Ok(AllowedTool { name, place })
}

fn read_allowed(object: Value) -> Result<ToolChoice, ApiError> {
    let mut fields = Fields::nested("tool_choice", object, &ALLOWED_CHOICE)?;
    fields.string("type")?;
    let inner = fields.inner(ALLOWED_TOOLS)?.ok_or_else(|| ApiError::Missing {
        name: fields.name(ALLOWED_TOOLS),
        expected: "send an object with a mode and tools",
    })?;
    fields.finish()?;
    read_mode_and_tools(inner, |place, item| {
        let mut fields = Fields::nested(place, item, &NAMED_CHOICE)?;
        let kind = fields.required_string("type", "it is \"function\"")?;
        if kind != "function" {
            return Err(wrong(&fields.name("type"), &kind.into(), "\"function\""));
        }
        read_function_name(fields).map(Some)
    })
}

/// Reads what [`ALLOWED`] declares; `read` takes the place of a tool and the tool, and may leave it out.
pub(crate) fn read_mode_and_tools(
    mut fields: Fields,
    read: impl Fn(&str, Value) -> Result<Option<AllowedTool>, ApiError>,
) -> Result<ToolChoice, ApiError> {
    let mode = fields.required_string("mode", "it is \"auto\" or \"required\"")?;
    let required = match mode.as_str() {
        "auto" => false,
        "required" => true,
        _ => return Err(wrong(&fields.name("mode"), &mode.into(), "\"auto\" or \"required\"")),
    };
    let place = fields.name("tools");
    let items = fields
        .list("tools")?
        .ok_or_else(|| ApiError::Missing { name: place.clone(), expected: "name some of the tools" })?;
    fields.finish()?;
    let mut tools = Vec::with_capacity(items.len());
    for (at, item) in items.into_iter().enumerate() {
        tools.extend(read(&format!("{place}[{at}]"), item)?);
    }
    if tools.is_empty() {
        let expected = "a list of at least one tool that can be called; or send \"none\"";
        return Err(wrong(&place, &json!([]), expected));
    }
    Ok(ToolChoice::Allowed { tools, required })
}

const CHOICES: &str = "\"none\", \"auto\", \"required\", {\"type\": \"function\", \"function\": {\"name\": ..}} or allowed_tools";
const CHOICE_TYPES: &str = "\"function\" or \"allowed_tools\"";
/// The type of a choice among some of the tools.
pub(crate) const ALLOWED_TOOLS: &str = "allowed_tools";

/// What the parsers of answers take for a name at the most.
const PAST_NAME_BYTES_MAX: usize = 512;
pub(crate) const PAST_TOOL_NAME: Takes =
    Schema(r#"{"type": "string", "pattern": "^[^\\u0000-\\u001f\\u007f-\\u009f]{1,512}$"}"#);

/// Names that an error lists; with more it would be a page.
const NAMES_SHOWN_MAX: usize = 16;

pub(crate) const TOOLS: Field =
    field("tools", List(&Inner(&TOOL), 0, TOOLS_MAX), "Functions that the model may call.");
pub(crate) const TOOL_CHOICE: Field = field(
    "tool_choice",
    Either(&[Word(&["none", "auto", "required", "any"]), Inner(&NAMED_CHOICE), Inner(&ALLOWED_CHOICE)]),
    "`required` (or `any`) and a named function hold the answer to a call, `allowed_tools` to calls of these.",
);
pub(crate) const PARALLEL: Field =
    field("parallel_tool_calls", Flag, "False: the answer ends before a second call.");

const TOOL: Object = Object {
    name: "ChatTool",
    groups: &[&[needed("type", Word(&["function"]), ""), needed("function", Inner(&FUNCTION), "")]],
};
const FUNCTION: Object = Object {
    name: "Function",
    groups: &[&[
        needed("name", Pattern(TOOL_NAME), "No other tool has it."),
        DESCRIPTION,
        field("parameters", Schema(PARAMETERS), "The JSON schema of the arguments; absent: there are none."),
        STRICT,
    ]],
};
const NAMED_CHOICE: Object = Object {
    name: "ChatNamedTool",
    groups: &[&[needed("type", Word(&["function"]), ""), needed("function", Inner(&CHOSEN), "")]],
};
const ALLOWED_CHOICE: Object = Object {
    name: "ChatAllowedTools",
    groups: &[&[needed("type", Word(&[ALLOWED_TOOLS]), ""), needed(ALLOWED_TOOLS, Inner(&ALLOWED), "")]],
};
const ALLOWED: Object = Object {
    name: "ChatAllowed",
    groups: &[&[MODE, needed("tools", List(&Inner(&NAMED_CHOICE), 1, TOOLS_MAX), "Some of the tools.")]],
};
/// How calls of allowed tools are wanted.
pub(crate) const MODE: Field =
    needed("mode", Word(&["auto", "required"]), "`required` holds the answer to a call of one of these.");
const CHOSEN: Object =
    Object { name: "FunctionName", groups: &[&[needed("name", Text, "One of the tools.")]] };

/// See [`is_tool_name`].
pub(crate) const TOOL_NAME: &str = "^[A-Za-z0-9_-]{1,64}$";
const _: () = assert!(TOOL_NAME_BYTES_MAX == 64, "as it is declared");
/// See [`read_schema`].
pub(crate) const PARAMETERS: &str = r#"{"type": "object", "properties": {"type": {"const": "object"}}}"#;
pub(crate) const DESCRIPTION: Field = field("description", Text, "For the model.");
pub(crate) const STRICT: Field = field("strict", Flag, "Arguments follow the schema to the letter.");
