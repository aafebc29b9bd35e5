//! DeepSeek V3 and R1: a section of calls with fenced arguments.
//!
//! ````text
//! <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
//! ```json
//! {"city": "Paris"}
//! ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
//! ````
//!
//! Source: the chat template of deepseek-ai/DeepSeek-V3-0324, as in vLLM's
//! `examples/tool_chat_template_deepseekv3.jinja`.

use super::section::{Head, Markers};

/// Those of V3.1 too.
pub(super) const MARKERS: &[&str] =
    &[OPENINGS[0], SECTION.call, SECTION.separator, SECTION.ends[0], SECTION.ends[1]];
pub(super) const OPENINGS: &[&str] = &["<｜tool▁calls▁begin｜>"];

pub(super) const SECTION: Markers = Markers {
    call: "<｜tool▁call▁begin｜>",
    separator: "<｜tool▁sep｜>",
    ends: &["<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"],
    head: Head::Line,
};
