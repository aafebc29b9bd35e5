//! Tools as this API spells them.

use super::content::{CACHE_CONTROL, take_cache_control};
use crate::chat::tools::{
    DESCRIPTION, PARAMETERS, STRICT, TOOL_NAME, ToolChoice, ToolList, Tools, read_schema,
};
use crate::declare::Takes::{Flag, Only, Pattern, Schema, Text, Unread, Word};
use crate::declare::{Field, Object, field, idle, needed};
use crate::error::ApiError;
use crate::fields::{Fields, wrong};
use atom_text::Tool;
use serde_json::Value;

/// Takes `tools` and `tool_choice`.
pub(super) fn read(fields: &mut Fields) -> Result<Tools, ApiError> {
    let mut list = ToolList::default();
    for (at, item) in fields.list("tools")?.unwrap_or_default().into_iter().enumerate() {
        let place = format!("tools[{at}]");
        list.push(&place, read_tool(&place, item)?)?;
    }
    let (choice, parallel) = read_choice(fields)?;
    let field = if matches!(choice, ToolChoice::Named(_)) { "tool_choice.name" } else { "tool_choice" };
    Tools::new(list, choice, parallel, field)
}

fn read_tool(place: &str, item: Value) -> Result<Tool, ApiError> {
    let mut fields = Fields::nested(place, item, &TOOL)?;
    match fields.string("type")?.as_deref() {
        None | Some("custom") => {}
        Some(kind) => {
            let reason = "no tools run on this server, and the model knows no tool by its type: describe it as a \
                          custom tool";
            return Err(ApiError::unsupported_kind(fields.name("type"), kind, reason));
        }
    }
    take_cache_control(&mut fields)?;
    let tool = Tool {
        name: fields.required_string("name", "it is how the model calls the tool")?,
        description: fields.string("description")?,
        parameters: read_schema(&mut fields, "input_schema")?,
        strict: fields.boolean("strict")?.unwrap_or(false),
    };
    fields.finish()?;
    Ok(tool)
}

/// The choice, and whether there may be several calls.
fn read_choice(fields: &mut Fields) -> Result<(ToolChoice, bool), ApiError> {
    let Some(choice) = fields.take("tool_choice") else { return Ok((ToolChoice::Auto, true)) };
    let mut inner = Fields::nested("tool_choice", choice, &NAMED)?;
    let kind = inner.required_string("type", "it is \"auto\", \"any\", \"tool\" or \"none\"")?;
    let choice = match kind.as_str() {
        "auto" => ToolChoice::Auto,
        "any" => ToolChoice::Required,
        "tool" => ToolChoice::Named(inner.required_string("name", "name one of the tools")?),
        "none" => ToolChoice::None,
        _ => return Err(wrong("tool_choice.type", &kind.into(), "\"auto\", \"any\", \"tool\" or \"none\"")),
    };
    if kind != "tool" {
        inner.is_declared_as(&OTHER);
    }
    let single = inner.boolean("disable_parallel_tool_use")?.unwrap_or(false);
    inner.finish()?;
    Ok((choice, !single))
}

pub(super) const TOOL: Object = Object {
    name: "MessagesTool",
    groups: &[&[
        field("type", Word(&["custom"]), ""),
        needed("name", Pattern(TOOL_NAME), "No other tool has it."),
        DESCRIPTION,
        field("input_schema", Schema(PARAMETERS), "The JSON schema of the input; absent: there is none."),
        STRICT,
        CACHE_CONTROL,
        field("eager_input_streaming", Unread(&Flag), "Of no consequence: arguments stream always."),
        idle("defer_loading", Only(&["false"], "the model sees all tools")),
        idle("allowed_callers", Only(&["[\"direct\"]"], "no code runs on this server")),
        idle("input_examples", Only(&["[]"], "put them into the description")),
    ]],
};

pub(super) const CHOICES: &[&Object] = &[&OTHER, &NAMED];
const OTHER: Object = Object {
    name: "MessagesToolChoice",
    groups: &[&[needed("type", Word(&["auto", "any", "none"]), ""), SINGLE]],
};
const NAMED: Object = Object {
    name: "MessagesNamedTool",
    groups: &[&[needed("type", Word(&["tool"]), ""), needed("name", Text, "One of the tools."), SINGLE]],
};
const SINGLE: Field = field("disable_parallel_tool_use", Flag, "The answer ends before a second call.");
