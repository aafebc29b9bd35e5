//! DeepSeek V3.1: as V3, with the name before the separator and bare arguments behind it.
//!
//! ```text
//! <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
//! ```
//!
//! Source: the chat template of deepseek-ai/DeepSeek-V3.1, as in llama.cpp's
//! `models/templates/deepseek-ai-DeepSeek-V3.1.jinja`.

use super::deepseek_v3;
use super::section::{Head, Markers};

pub(super) const SECTION: Markers = Markers { head: Head::Name, ..deepseek_v3::SECTION };
