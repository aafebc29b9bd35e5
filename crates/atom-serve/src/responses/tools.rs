//! Tools as this API spells them, and the calls of them.
//!
//! A model knows functions with JSON arguments. What this API has beside those becomes one where the client runs
//! it: a `custom` tool is a function of one string, a `namespace` is functions whose names begin with its own.

use super::custom::INPUT;
use crate::chat::tools::{
    ALLOWED_TOOLS, AllowedTool, DESCRIPTION, MODE, PARALLEL, PARAMETERS, STRICT, TOOL_NAME, ToolChoice,
    ToolList, Tools, check_name, read_mode_and_tools, read_schema,
};
use crate::declare::Takes::{
    Either, Flag, List, Map as Mapping, Object as Inner, OneOf, Only, Pattern, Schema, Text, Unread, Word,
};
use crate::declare::{Field, Object, field, idle, needed};
use crate::error::ApiError;
use crate::fields::{Fields, wrong};
use atom_text::Tool;
use serde_json::{Map, Value, json};
use std::collections::HashMap;

/// How calls of the offered tools are spelled in an answer, by the name that the model uses.
#[derive(Clone, Debug, Default)]
pub(super) struct Spellings(HashMap<String, Spelling>);

/// A tool whose name in this API isn't all there is to say of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Spelling {
    pub(super) namespace: Option<String>,
    pub(super) name: String,
    /// It takes a text, and no arguments.
    pub(super) is_custom: bool,
}

impl Spellings {
    /// That of the tool that the model calls so, offered or not.
    pub(super) fn of(&self, name: &str) -> Spelling {
        let plain = || Spelling { namespace: None, name: name.to_owned(), is_custom: false };
        self.0.get(name).cloned().unwrap_or_else(plain)
    }
}

impl FromIterator<(String, Spelling)> for Spellings {
    fn from_iter<T: IntoIterator<Item = (String, Spelling)>>(spellings: T) -> Self {
        Self(spellings.into_iter().collect())
    }
}

/// Takes `tools`, `tool_choice` and `parallel_tool_calls`, which every response repeats: of the tools those that are
/// in force, as they are.
pub(super) fn read(
    fields: &mut Fields,
    echo: &mut Map<String, Value>,
) -> Result<(Tools, Spellings), ApiError> {
    let mut reader = Reader::default();
    for (at, item) in fields.list("tools")?.unwrap_or_default().into_iter().enumerate() {
        reader.tool(&format!("tools[{at}]"), item)?;
    }
    echo.insert("tools".into(), reader.in_force.into());
    let choice = fields.take("tool_choice").unwrap_or_else(|| "auto".into());
    echo.insert("tool_choice".into(), choice.clone());
    let choice = read_choice(choice)?;
    let parallel = fields.boolean("parallel_tool_calls")?.unwrap_or(true);
    echo.insert("parallel_tool_calls".into(), parallel.into());
    let field = if matches!(choice, ToolChoice::Named(_)) { "tool_choice.name" } else { "tool_choice" };
    Ok((Tools::new(reader.list, choice, parallel, field)?, Spellings(reader.spellings)))
}

/// The name by which the model calls a tool of a namespace.
pub(super) fn joined_name(namespace: Option<&str>, name: &str) -> String {
    match namespace {
        None | Some("") => name.to_owned(),
        // Names of MCP servers end so.
        Some(namespace) if namespace.ends_with(SEPARATOR) => format!("{namespace}{name}"),
        Some(namespace) => format!("{namespace}{SEPARATOR}{name}"),
    }
}

#[derive(Default)]
struct Reader {
    list: ToolList,
    spellings: HashMap<String, Spelling>,
    in_force: Vec<Value>,
}

impl Reader {
    fn tool(&mut self, place: &str, item: Value) -> Result<(), ApiError> {
        let echo = item.clone();
        let mut fields = Fields::nested(place, item, &FUNCTION)?;
        let kind = fields.required_string("type", "it is \"function\"")?;
        match kind.as_str() {
            "function" | "custom" => {
                let echo = self.one(place, fields, echo, &kind, None)?;
                self.in_force.push(echo);
                Ok(())
            }
            "namespace" => self.namespace(place, fields, echo),
            _ if is_left_out(&kind) => Ok(()),
            _ => Err(refused_kind(&fields, &kind)),
        }
    }

    /// A tool that the client runs. Gives back what of it is in force.
    fn one(
        &mut self,
        place: &str,
        mut fields: Fields,
        mut echo: Value,
        kind: &str,
        namespace: Option<&Namespace>,
    ) -> Result<Value, ApiError> {
        let is_custom = kind == "custom";
        if is_custom {
            fields.is_declared_as(&CUSTOM);
        }
        let name = fields.required_string("name", "it is how the model calls the tool")?;
        check_name(&fields.name("name"), &name)?;
        let description = fields.string("description")?;
        let mut tool = if is_custom {
            let format = read_custom_format(&mut fields)?;
            echo["format"] = json!({"type": "text"});
            custom_tool(name, description, format)
        } else {
            let parameters = read_schema(&mut fields, "parameters")?;
            Tool { name, description, parameters, strict: fields.boolean("strict")?.unwrap_or(false) }
        };
        fields.finish()?;
        let spelling = Spelling {
            namespace: namespace.map(|namespace| namespace.name.clone()),
            name: tool.name.clone(),
            is_custom,
        };
        if let Some(namespace) = namespace {
            namespace.include(&mut tool);
        }
        let joined = tool.name.clone();
        self.list.push_named(place, tool)?;
        if is_custom || namespace.is_some() {
            self.spellings.insert(joined, spelling);
        }
        Ok(echo)
    }

    fn namespace(&mut self, place: &str, mut fields: Fields, mut echo: Value) -> Result<(), ApiError> {
        fields.is_declared_as(&NAMESPACE);
        let name = fields.required_string("name", "calls of its tools have it")?;
        check_name(&fields.name("name"), &name)?;
        let mut namespace = Namespace { name, introduction: fields.string("description")? };
        let tools = fields.list("tools")?.unwrap_or_default();
        fields.finish()?;
        let mut in_force = Vec::with_capacity(tools.len());
        for (at, item) in tools.into_iter().enumerate() {
            let place = format!("{place}.tools[{at}]");
            let echo = item.clone();
            let mut fields = Fields::nested(&place, item, &FUNCTION)?;
            let kind = fields.required_string("type", "it is \"function\" or \"custom\"")?;
            if !matches!(kind.as_str(), "function" | "custom") {
                let name = fields.name("type");
                return Err(wrong(&name, &kind.into(), "\"function\" or \"custom\" within a namespace"));
            }
            in_force.push(self.one(&place, fields, echo, &kind, Some(&namespace))?);
            namespace.introduction = None;
        }
        if !in_force.is_empty() {
            echo["tools"] = in_force.into();
            self.in_force.push(echo);
        }
        Ok(())
    }
}

/// Whose tool it is.
struct Namespace {
    name: String,
    /// What the namespace says of itself, which the model reads with its first tool.
    introduction: Option<String>,
}

impl Namespace {
    fn include(&self, tool: &mut Tool) {
        tool.name = joined_name(Some(&self.name), &tool.name);
        if let Some(introduction) = &self.introduction {
            let own = tool.description.take().unwrap_or_default();
            tool.description = Some(format!("{}: {introduction}\n\n{own}", self.name).trim_end().to_owned());
        }
    }
}

/// The function that stands for a tool that takes a text.
fn custom_tool(name: String, description: Option<String>, format: Option<String>) -> Tool {
    let description = match (description, format) {
        (description, None) => description,
        (None, Some(format)) => Some(format),
        (Some(description), Some(format)) => Some(format!("{description}\n\n{format}")),
    };
    let text = json!({"type": "string", "description": "The whole input of the tool, as it is."});
    let parameters = json!({
        "type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": false,
    });
    Tool { name, description, parameters, strict: false }
}

/// A grammar of the tool's text as words for the model: within JSON, no grammar can hold it.
fn read_custom_format(fields: &mut Fields) -> Result<Option<String>, ApiError> {
    let place = fields.name("format");
    let Some(format) = fields.take("format") else { return Ok(None) };
    let mut inner = Fields::nested(&place, format, &FREE)?;
    let kind = inner.required_string("type", "it is \"text\" or \"grammar\"")?;
    let words = match kind.as_str() {
        "text" => None,
        "grammar" => {
            inner.is_declared_as(&GRAMMAR);
            let syntax = inner.required_string("syntax", "it is \"lark\" or \"regex\"")?;
            if !matches!(syntax.as_str(), "lark" | "regex") {
                return Err(wrong(&inner.name("syntax"), &syntax.into(), "\"lark\" or \"regex\""));
            }
            let definition = inner.required_string("definition", "send the grammar itself")?;
            Some(format!("The input follows this grammar ({syntax}):\n{definition}"))
        }
        _ => return Err(wrong(&inner.name("type"), &kind.into(), "\"text\" or \"grammar\"")),
    };
    inner.finish()?;
    Ok(words)
}

/// Tools of other servers that agents declare with every request, whether the model wants them or not. Without them
/// an answer is what it would be from a model that doesn't use them.
fn is_left_out(kind: &str) -> bool {
    kind.starts_with("web_search") || matches!(kind, "image_generation" | "tool_search")
}

/// Tools that say what the answer is to be made from, or that aren't this server's to run.
fn refused_kind(fields: &Fields, kind: &str) -> ApiError {
    let reason = "no tools run on this server: describe it as a function and run it yourself";
    ApiError::unsupported_kind(fields.name("type"), kind, reason)
}

fn read_choice(choice: Value) -> Result<ToolChoice, ApiError> {
    let word = match choice {
        Value::String(word) => word,
        Value::Object(_) if choice["type"] == ALLOWED_TOOLS => return read_allowed(choice),
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
    let mut fields = Fields::nested("tool_choice", choice, &NAMED)?;
    let kind = fields.required_string("type", "it is \"function\", \"custom\" or \"allowed_tools\"")?;
    if !matches!(kind.as_str(), "function" | "custom") {
        let expected = "\"function\", \"custom\" or \"allowed_tools\"";
        return Err(wrong("tool_choice.type", &kind.into(), expected));
    }
    Ok(ToolChoice::Named(read_name(fields)?.name))
}

/// The rest of an object that names a tool.
fn read_name(mut fields: Fields) -> Result<AllowedTool, ApiError> {
    let place = fields.name("name");
    let name = fields.required_string("name", "name one of the tools")?;
    let namespace = fields.string("namespace")?;
    fields.finish()?;
    Ok(AllowedTool { name: joined_name(namespace.as_deref(), &name), place })
}

fn read_allowed(choice: Value) -> Result<ToolChoice, ApiError> {
    let mut fields = Fields::nested("tool_choice", choice, &ALLOWED)?;
    fields.string("type")?;
    read_mode_and_tools(fields, |place, item| {
        if item["type"].as_str().is_some_and(is_left_out) {
            return Ok(None);
        }
        let mut fields = Fields::nested(place, item, &NAMED)?;
        let kind = fields.required_string("type", "it is \"function\" or \"custom\"")?;
        match kind.as_str() {
            "function" | "custom" => read_name(fields).map(Some),
            _ => Err(refused_kind(&fields, &kind)),
        }
    })
}

const CHOICES: &str =
    "\"none\", \"auto\", \"required\", {\"type\": \"function\", \"name\": ..} or allowed_tools";
/// Between the name of a namespace and that of its tool.
const SEPARATOR: &str = "__";

/// What [`read`] takes. Tools that are left out don't count, so that the list may be longer than there may be tools.
pub(super) const FIELDS: &[Field] = &[
    field(
        "tools",
        List(
            &Either(&[Inner(&FUNCTION), Inner(&CUSTOM), Inner(&NAMESPACE), Schema(LEFT_OUT)]),
            0,
            usize::MAX,
        ),
        "Tools that the model may call. Those that a server would run are left out or refused.",
    ),
    field(
        "tool_choice",
        Either(&[Word(&["none", "auto", "required"]), Inner(&NAMED), Inner(&ALLOWED)]),
        "`required` and a named tool hold the answer to a call, `allowed_tools` to calls of these.",
    ),
    PARALLEL,
];

const FUNCTION: Object = Object {
    name: "ResponsesTool",
    groups: &[
        &[
            needed("type", Word(&["function"]), ""),
            field(
                "parameters",
                Schema(PARAMETERS),
                "The JSON schema of the arguments; absent: there are none.",
            ),
            STRICT,
            // What comes back is no business of the model's until it comes.
            field("output_schema", Unread(&Mapping), "Of no consequence."),
        ],
        OF_CLIENT,
    ],
};
const CUSTOM: Object = Object {
    name: "ResponsesCustomTool",
    groups: &[
        &[
            needed("type", Word(&["custom"]), "It takes a text, and no arguments."),
            field("format", OneOf(&[&FREE, &GRAMMAR]), "A grammar is shown to the model, and holds nothing."),
        ],
        OF_CLIENT,
    ],
};
/// What tools have that the client runs.
const OF_CLIENT: &[Field] = &[
    needed("name", Pattern(TOOL_NAME), "No other tool has it."),
    DESCRIPTION,
    field("defer_loading", Unread(&Flag), "Of no consequence: the model sees all tools."),
    idle("allowed_callers", Only(&[r#"["direct"]"#], "no code runs on this server")),
];
const FREE: Object =
    Object { name: "ResponsesCustomText", groups: &[&[needed("type", Word(&["text"]), "")]] };
const GRAMMAR: Object = Object {
    name: "ResponsesCustomGrammar",
    groups: &[&[
        needed("type", Word(&["grammar"]), ""),
        needed("syntax", Word(&["lark", "regex"]), ""),
        needed("definition", Text, "The grammar itself."),
    ]],
};
const NAMESPACE: Object = Object {
    name: "ResponsesNamespace",
    groups: &[&[
        needed("type", Word(&["namespace"]), ""),
        needed("name", Pattern(TOOL_NAME), "Calls of its tools have it."),
        DESCRIPTION,
        field("tools", List(&OneOf(&[&FUNCTION, &CUSTOM]), 0, usize::MAX), ""),
    ]],
};
/// See [`is_left_out`].
const LEFT_OUT: &str = r#"{"type": "object", "required": ["type"], "description": "Left out.",
    "properties": {"type": {"type": "string", "pattern": "^web_search|^(image_generation|tool_search)$"}}}"#;
/// Tools that are left out may be named, and don't count.
const ALLOWED: Object = Object {
    name: "ResponsesAllowedTools",
    groups: &[&[
        needed("type", Word(&[ALLOWED_TOOLS]), ""),
        MODE,
        needed(
            "tools",
            List(&Either(&[Inner(&NAMED), Schema(LEFT_OUT)]), 1, usize::MAX),
            "Some of the tools that are in force.",
        ),
    ]],
};
const NAMED: Object = Object {
    name: "ResponsesNamedTool",
    groups: &[&[
        needed("type", Word(&["function", "custom"]), ""),
        needed("name", Text, "One of the tools."),
        field("namespace", Text, "That of the tool, if it has one."),
    ]],
};
