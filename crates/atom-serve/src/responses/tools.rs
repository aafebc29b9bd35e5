//! Tools as this API spells them.

use crate::chat::tools::{ToolChoice, ToolList, Tools, read_schema};
use crate::error::ApiError;
use crate::fields::{Fields, wrong};
use atom_text::Tool;
use serde_json::{Map, Value};

/// Takes `tools`, `tool_choice` and `parallel_tool_calls`, which every response repeats.
pub(super) fn read(fields: &mut Fields, echo: &mut Map<String, Value>) -> Result<Tools, ApiError> {
    let items = fields.list("tools")?.unwrap_or_default();
    echo.insert("tools".into(), items.clone().into());
    let mut list = ToolList::default();
    for (at, item) in items.into_iter().enumerate() {
        let place = format!("tools[{at}]");
        list.push(&place, read_tool(&place, item)?)?;
    }
    let choice = fields.take("tool_choice").unwrap_or_else(|| "auto".into());
    echo.insert("tool_choice".into(), choice.clone());
    let choice = read_choice(choice)?;
    let parallel = fields.boolean("parallel_tool_calls")?.unwrap_or(true);
    echo.insert("parallel_tool_calls".into(), parallel.into());
    let field = if matches!(choice, ToolChoice::Named(_)) { "tool_choice.name" } else { "tool_choice" };
    Tools::new(list, choice, parallel, field)
}

fn read_tool(place: &str, item: Value) -> Result<Tool, ApiError> {
    let mut fields = Fields::nested(place, item)?;
    let kind = fields.required_string("type", "it is \"function\"")?;
    if kind != "function" {
        let name = format!("{}: {kind}", fields.name("type"));
        let reason = match kind.as_str() {
            "custom" => "the model calls tools with JSON arguments: describe it as a function",
            _ => "no tools run on this server: describe it as a function and run it yourself",
        };
        return Err(ApiError::Unsupported { name, reason });
    }
    fields
        .refuse_unless("defer_loading", "the model sees all tools", |value| *value == Value::Bool(false))?;
    let tool = Tool {
        name: fields.required_string("name", "it is how the model calls the function")?,
        description: fields.string("description")?,
        parameters: read_schema(&mut fields, "parameters")?,
        strict: fields.boolean("strict")?.unwrap_or(false),
    };
    fields.finish()?;
    Ok(tool)
}

fn read_choice(choice: Value) -> Result<ToolChoice, ApiError> {
    let word = match choice {
        Value::String(word) => word,
        Value::Object(_) => return read_named(choice),
        other => return Err(wrong("tool_choice", &other, CHOICES)),
    };
    match word.as_str() {
        "none" => Ok(ToolChoice::None),
        "auto" => Ok(ToolChoice::Auto),
        "required" => Ok(ToolChoice::Required),
        _ => Err(wrong("tool_choice", &word.into(), CHOICES)),
    }
}

fn read_named(choice: Value) -> Result<ToolChoice, ApiError> {
    let mut fields = Fields::nested("tool_choice", choice)?;
    let kind = fields.required_string("type", "it is \"function\"")?;
    if kind != "function" {
        return Err(wrong("tool_choice.type", &kind.into(), "\"function\""));
    }
    let name = fields.required_string("name", "name one of the tools")?;
    fields.finish()?;
    Ok(ToolChoice::Named(name))
}

const CHOICES: &str = "\"none\", \"auto\", \"required\" or {\"type\": \"function\", \"name\": ..}";
