//! MiniMax M2: a section of calls, each a tag with a name.
//!
//! ```text
//! <minimax:tool_call>
//! <invoke name="get_weather">
//! <parameter name="city">Paris</parameter>
//! </invoke>
//! </minimax:tool_call>
//! ```
//!
//! Source: the chat template of MiniMaxAI/MiniMax-M2, as in llama.cpp's
//! `models/templates/unsloth-MiniMax-M2.jinja`.

use super::tagged::{Closes, Tags};

pub(super) const MARKERS: &[&str] = &["<minimax:tool_call>", "</minimax:tool_call>"];
pub(super) const OPENINGS: &[&str] = &["<minimax:tool_call>"];

pub(super) const TAGS: Tags = Tags {
    section_closes: &["</minimax:tool_call>"],
    call: "<invoke name=\"",
    call_close: "</invoke>",
    parameter: "<parameter name=\"",
    value_ends: &["</parameter>"],
    closes: &[Closes::Value],
    is_on_lines: false,
};
