//! DeepSeek V3.2 and V4, DSML: a section of calls; each parameter says whether it is a string.
//!
//! ```text
//! <｜DSML｜tool_calls>
//! <｜DSML｜invoke name="get_weather">
//! <｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>
//! <｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
//! </｜DSML｜invoke>
//! </｜DSML｜tool_calls>
//! ```
//!
//! Source: `models/templates/deepseek-ai-DeepSeek-V4.jinja` of ikawrakow/ik_llama.cpp, and the fixtures of
//! vLLM's `tests/tool_parsers/test_deepseekv4_tool_parser.py`. V3.2 has `function_calls` around the calls
//! (llama.cpp's `models/templates/DeepSeek-V3.2.jinja`).

use super::tagged::{Closes, Tags};

pub(super) const MARKERS: &[&str] = &["｜DSML｜"];
pub(super) const OPENINGS: &[&str] = &["<｜DSML｜tool_calls>", "<｜DSML｜function_calls>"];

pub(super) const TAGS: Tags = Tags {
    section_closes: &["</｜DSML｜tool_calls>", "</｜DSML｜function_calls>"],
    call: "<｜DSML｜invoke name=\"",
    call_close: "</｜DSML｜invoke>",
    parameter: "<｜DSML｜parameter name=\"",
    value_ends: &["</｜DSML｜parameter>"],
    closes: &[Closes::Value],
    is_on_lines: false,
};
