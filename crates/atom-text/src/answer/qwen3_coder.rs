//! Qwen3-Coder and Qwen 3.5: tags with a name behind `=`, values on lines of their own.
//!
//! ```text
//! <tool_call>
//! <function=get_weather>
//! <parameter=city>
//! Paris
//! </parameter>
//! </function>
//! </tool_call>
//! ```
//!
//! Source: the chat template of Qwen/Qwen3-Coder-30B-A3B-Instruct, as in vLLM's
//! `examples/tool_chat_template_qwen3coder.jinja`. The model leaves out the outer tag or the end of a
//! parameter now and then (vLLM's parser of this name reads on there, and so does this one).

use super::tagged::{Closes, Tags};

pub(super) const MARKERS: &[&str] = &["<tool_call>", "</tool_call>"];
pub(super) const OPENINGS: &[&str] = &["<tool_call>", "<function="];

pub(super) const TAGS: Tags = Tags {
    section_closes: &["</tool_call>"],
    call: "<function=",
    call_close: "</function>",
    parameter: "<parameter=",
    value_ends: &["\n</parameter>", "</parameter>", "\n<parameter=", "\n</function>"],
    closes: &[Closes::Value, Closes::Value, Closes::ValueForNext, Closes::Call],
    is_on_lines: true,
};
