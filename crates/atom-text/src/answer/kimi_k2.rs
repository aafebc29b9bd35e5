//! Kimi K2: a section of calls with ids.
//!
//! ```text
//! <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>
//! {"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>
//! ```
//!
//! (In one line.) Source: the chat template of moonshotai/Kimi-K2-Thinking, as in llama.cpp's
//! `models/templates/moonshotai-Kimi-K2-Thinking.jinja`, which writes the id alone: so it has the name. The
//! fixtures of vLLM's `tests/tool_parsers/test_kimi_k2_tool_parser.py` have what models do beside it.

use super::section::{Head, Markers};

pub(super) const MARKERS: &[&str] = &[
    OPENINGS[0],
    OPENINGS[1],
    SECTION.call,
    SECTION.separator,
    SECTION.ends[0],
    SECTION.ends[1],
    SECTION.ends[2],
];
pub(super) const OPENINGS: &[&str] = &["<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"];

pub(super) const SECTION: Markers = Markers {
    call: "<|tool_call_begin|>",
    separator: "<|tool_call_argument_begin|>",
    ends: &["<|tool_call_end|>", "<|tool_calls_section_end|>", "<|tool_call_section_end|>"],
    head: Head::NumberedName,
};
