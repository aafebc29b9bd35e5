//! What a request says of thinking.

use super::blocks::Thinking;
use crate::chat::thinking::{EFFORTS, Variables};
use crate::constraint::{self, Wanted};
use crate::declare::Takes::{Whole, Word};
use crate::declare::{Field, Object, field, needed};
use crate::error::ApiError;
use crate::fields::{Fields, wrong};
use crate::params::U32;
use crate::server::Server;
use serde_json::json;

/// Takes `thinking`, `output_config` and `output_format`. Says whether the client sees the thoughts: it does if it
/// asked for thinking, as in the API, though a template may begin an answer with thoughts all the same. The
/// format that the answer must have comes along.
pub(super) fn read(
    fields: &mut Fields,
    server: &Server,
    variables: &mut Variables,
    max_tokens: Option<u32>,
) -> Result<(Thinking, Option<Wanted>), ApiError> {
    let template = &server.text.template;
    let thinking = match fields.take("thinking") {
        // As in the API. An answer that has nothing else is shown all the same.
        None => Thinking::Hidden(String::new()),
        Some(value) => {
            let mut inner = Fields::nested("thinking", value, &ENABLED)?;
            let kind = inner.required_string("type", WORDS)?;
            if kind != "enabled" {
                inner.is_declared_as(&OTHER);
            }
            let thinking = match kind.as_str() {
                "enabled" => {
                    read_budget(&mut inner, max_tokens)?;
                    // A model that has no switch and thinks, thinks always.
                    if Variables::has_switch(template) || server.text.dialect.reasoning.is_none() {
                        variables.think(template, true, "thinking")?;
                    }
                    Thinking::Shown
                }
                "adaptive" => {
                    // The model decides; a switch that it has must not be off.
                    if Variables::has_switch(template) {
                        variables.think(template, true, "thinking")?;
                    }
                    Thinking::Shown
                }
                "disabled" => {
                    if Variables::has_switch(template) {
                        variables.think(template, false, "thinking")?;
                    }
                    Thinking::Hidden(String::new())
                }
                _ => return Err(wrong("thinking.type", &kind.into(), WORDS)),
            };
            // Thoughts come as they are, which is more than a summary.
            let display = inner.string("display")?;
            inner.finish()?;
            match (thinking, display.as_deref()) {
                (thinking, None | Some("summarized")) => thinking,
                (Thinking::Shown, Some("omitted")) => Thinking::Omitted,
                (hidden, Some("omitted")) => hidden,
                (_, Some(other)) => {
                    let expected = "\"summarized\" or \"omitted\"";
                    return Err(wrong("thinking.display", &other.into(), expected));
                }
            }
        }
    };
    let mut format = None;
    if let Some(mut inner) = fields.inner("output_config")? {
        if let Some(effort) = inner.string("effort")? {
            // Whether to think is what 'thinking' says, in this API.
            variables.effort_beside_switch(template, &effort, "output_config.effort")?;
        }
        format = constraint::read_format(&mut inner, "format")?;
        inner.finish()?;
    }
    // Where the format stood before `output_config`; clients of that time still send it.
    if let Some(older) = constraint::read_format(fields, "output_format")? {
        if format.is_some() {
            return Err(ApiError::BadField {
                name: "output_format".into(),
                found: "given beside 'output_config.format'".into(),
                expected: "absent: the younger field says it".into(),
            });
        }
        format = Some(older);
    }
    Ok((thinking, format))
}

/// To the API a budget is a target that may be missed. This server never aims at it: the bound that holds
/// is `max_tokens`, and `usage` says how many tokens were thoughts.
fn read_budget(thinking: &mut Fields, max_tokens: Option<u32>) -> Result<(), ApiError> {
    let Some(budget) = thinking.integer("budget_tokens")? else {
        return Err(ApiError::Missing {
            name: thinking.name("budget_tokens"),
            expected: "send a number of tokens",
        });
    };
    match max_tokens {
        Some(max) if budget >= i64::from(max) => Err(wrong(
            "thinking.budget_tokens",
            &json!(budget),
            format!("less than max_tokens, which is {max}"),
        )),
        _ => Ok(()),
    }
}

const WORDS: &str = "\"enabled\", \"disabled\" or \"adaptive\"";
/// As in the API.
const BUDGET_MIN: i64 = 1024;

pub(super) const KINDS: &[&Object] = &[&ENABLED, &OTHER];
const ENABLED: Object = Object {
    name: "MessagesThinkingEnabled",
    groups: &[&[
        needed("type", Word(&["enabled"]), ""),
        needed("budget_tokens", Whole(BUDGET_MIN, U32), "Less than `max_tokens`; nothing aims at it."),
        DISPLAY,
    ]],
};
const OTHER: Object = Object {
    name: "MessagesThinking",
    groups: &[&[needed("type", Word(&["adaptive", "disabled"]), ""), DISPLAY]],
};
const DISPLAY: Field =
    field("display", Word(&["summarized", "omitted"]), "`omitted`: blocks of thoughts are there and empty.");
pub(super) const OUTPUT: Object = Object {
    name: "MessagesOutputConfig",
    groups: &[&[
        field("effort", Word(&EFFORTS), "How much the model thinks, where its template knows it."),
        constraint::FORMAT,
    ]],
};
