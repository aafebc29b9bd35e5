//! Whether and how much the model thinks before it answers: what a request says of it becomes variables of
//! the chat template, where the template knows one, and is refused where it doesn't.

use crate::declare::Takes::{Never, Word};
use crate::declare::{Field, Object, field, idle, needed};
use crate::error::ApiError;
use crate::fields::{Fields, wrong};
use atom_text::ChatTemplate;
use serde_json::{Map, Value, json};

/// Variables of a chat template (`chat_template_kwargs`), each checked to be one that the template reads.
#[derive(Clone, Debug, Default)]
pub(crate) struct Variables(Map<String, Value>);

impl Variables {
    /// Takes `chat_template_kwargs`, `reasoning_effort` and `thinking`.
    pub(crate) fn read(fields: &mut Fields, template: &ChatTemplate) -> Result<Self, ApiError> {
        let mut variables = Self::default();
        for (name, value) in fields.object("chat_template_kwargs")?.into_iter().flatten() {
            variables.set(template, &name, value, &format!("chat_template_kwargs.{name}"))?;
        }
        if let Some(thinks) = read_thinking(fields)? {
            variables.think(template, thinks, "thinking")?;
        }
        if let Some(effort) = fields.string("reasoning_effort")? {
            variables.effort(template, &effort, "reasoning_effort")?;
        }
        Ok(variables)
    }

    /// Switches thinking on or off. `field` is where the client asked for it.
    pub(crate) fn think(
        &mut self,
        template: &ChatTemplate,
        thinks: bool,
        field: &str,
    ) -> Result<(), ApiError> {
        match switch(template) {
            Some(name) => self.set(template, name, json!(thinks), field),
            None => Err(refuse(field, "this model's chat template has no switch for thinking")),
        }
    }

    /// Whether the template has a switch for thinking at all.
    pub(crate) fn has_switch(template: &ChatTemplate) -> bool {
        switch(template).is_some()
    }

    /// How much to think. The word goes to templates that read one, as it is, and switches thinking on where these
    /// have a switch too. Where there is only a switch, `none` and `minimal` are off, and more is on.
    pub(crate) fn effort(
        &mut self,
        template: &ChatTemplate,
        effort: &str,
        field: &str,
    ) -> Result<(), ApiError> {
        if !EFFORTS.contains(&effort) {
            return Err(wrong(field, &effort.into(), format!("one of {}", EFFORTS.join(", "))));
        }
        match switch(template) {
            Some(name) if effort == "none" => self.set(template, name, json!(false), field),
            Some(name) if !template.reads(EFFORT) => {
                self.set(template, name, json!(effort != "minimal"), field)
            }
            None if !template.reads(EFFORT) => {
                Err(refuse(field, "this model's chat template has no variable for it"))
            }
            switch => {
                // Some don't think unless they are told to. Who told them something else meant it.
                if let Some(name) = switch
                    && effort != "minimal"
                {
                    self.0.entry(name).or_insert(json!(true));
                }
                self.set(template, EFFORT, json!(effort), field)
            }
        }
    }

    /// The same where another field has the word on whether to think at all: the effort only says how much.
    pub(crate) fn effort_beside_switch(
        &mut self,
        template: &ChatTemplate,
        effort: &str,
        field: &str,
    ) -> Result<(), ApiError> {
        let decides = switch(template).is_some_and(|name| self.0.contains_key(name));
        if decides && EFFORTS.contains(&effort) && !template.reads(EFFORT) {
            return Ok(());
        }
        self.effort(template, effort, field)
    }

    pub(crate) fn as_map(&self) -> Option<&Map<String, Value>> {
        (!self.0.is_empty()).then_some(&self.0)
    }

    fn set(
        &mut self,
        template: &ChatTemplate,
        name: &str,
        value: Value,
        field: &str,
    ) -> Result<(), ApiError> {
        if !template.reads(name) {
            return Err(refuse(field, "this model's chat template has no such variable"));
        }
        match self.0.get(name) {
            Some(before) if *before != value => Err(ApiError::BadField {
                name: field.to_owned(),
                found: format!("{value} for the chat template's '{name}'"),
                expected: format!("{before}, which another field of the request asks for"),
            }),
            _ => {
                self.0.insert(name.to_owned(), value);
                Ok(())
            }
        }
    }
}

/// `{"type": "enabled"}` or `{"type": "disabled"}`.
fn read_thinking(fields: &mut Fields) -> Result<Option<bool>, ApiError> {
    let Some(mut inner) = fields.inner("thinking")? else { return Ok(None) };
    let kind = inner.string("type")?;
    inner.finish()?;
    match kind.as_deref() {
        Some("enabled") => Ok(Some(true)),
        Some("disabled") => Ok(Some(false)),
        Some(other) => Err(wrong("thinking.type", &other.into(), "\"enabled\" or \"disabled\"")),
        None => {
            let name = "thinking.type".into();
            Err(ApiError::Missing { name, expected: "it is \"enabled\" or \"disabled\"" })
        }
    }
}

/// The variable that switches thinking on and off.
fn switch(template: &ChatTemplate) -> Option<&'static str> {
    SWITCHES.into_iter().find(|name| template.reads(name))
}

fn refuse(field: &str, reason: &'static str) -> ApiError {
    ApiError::Unsupported { name: field.to_owned(), reason }
}

/// Qwen, GLM, SmolLM and many more; DeepSeek, Kimi and Granite.
const SWITCHES: [&str; 2] = ["enable_thinking", "thinking"];
const EFFORT: &str = "reasoning_effort";
/// OpenAI's words, and the one that DeepSeek has on top.
pub(crate) const EFFORTS: [&str; 7] = ["none", "minimal", "low", "medium", "high", "xhigh", "max"];

pub(crate) const EFFORT_FIELD: Field =
    field("reasoning_effort", Word(&EFFORTS), "How much the model thinks, where its template knows it.");
pub(crate) const SWITCH: Object = Object {
    name: "ChatThinking",
    groups: &[&[
        needed("type", Word(&["enabled", "disabled"]), ""),
        idle("budget_tokens", Never("thoughts can't be cut to a number of tokens")),
    ]],
};
