//! The conventions of a checkpoint.

mod detect;

use super::format::Format;
use super::glm45::Glm45;
use super::hermes::Hermes;
use super::llama3_json::Llama3Json;
use super::mistral::Mistral;
use super::reasoning::ReasoningFormat;
use super::section::Section;
use super::tagged::Tagged;
use super::{
    deepseek_v3, deepseek_v4, deepseek_v31, glm45, harmony, hermes, kimi_k2, llama3_json, minimax_m2,
    mistral, qwen3_coder,
};
use crate::ChatTemplate;

/// How a checkpoint marks reasoning and tool calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Dialect {
    /// How it marks reasoning, if it reasons.
    pub reasoning: Option<ReasoningFormat>,
    /// How it writes tool calls, if it can.
    pub tools: Option<ToolFormat>,
}

/// Where the rendered prompt left the model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AnswerStart {
    /// At the beginning of its answer.
    #[default]
    Content,
    /// Within a block of reasoning that the prompt has opened.
    Reasoning,
}

/// How tool calls are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolFormat {
    /// JSON between `<tool_call>` tags: Hermes, Qwen 2.5 and 3.
    Hermes,
    /// Tags for functions and parameters: Qwen3-Coder, Qwen 3.5.
    Qwen3Coder,
    /// A bare JSON object: Llama 3.1 to 3.3.
    Llama3Json,
    /// `[TOOL_CALLS]`: Mistral.
    Mistral,
    /// Fenced JSON within a section: DeepSeek V3 and R1.
    DeepseekV3,
    /// JSON within a section: DeepSeek V3.1.
    DeepseekV31,
    /// DSML tags: DeepSeek V3.2 and V4.
    DeepseekV4,
    /// A section with ids: Kimi K2.
    KimiK2,
    /// Keys and values in tags: GLM 4.5 and later.
    Glm45,
    /// `<minimax:tool_call>`: MiniMax M2.
    MinimaxM2,
    /// The channel `commentary`: GPT-OSS.
    Harmony,
}

impl Dialect {
    /// The dialect of a template: renders it with a tool, a call and reasoning, and looks at what it writes.
    /// A template that fails on that has no dialect.
    pub fn detect(template: &ChatTemplate) -> Self {
        detect::detect(template)
    }

    /// Where a prompt that ends like this leaves the model.
    pub fn start(&self, prompt_tail: &str) -> AnswerStart {
        let Some(reasoning) = self.reasoning else { return AnswerStart::Content };
        let (open, close) = reasoning.tags().unwrap_or(harmony::ANALYSIS);
        let Some(at) = prompt_tail.rfind(open) else { return AnswerStart::Content };
        let after = &prompt_tail[at + open.len()..];
        // An opening tag before the end of a turn was somebody else's: a user may ask about tags.
        if after.contains(close) || TURN_MARKS.iter().any(|mark| after.contains(mark)) {
            return AnswerStart::Content;
        }
        AnswerStart::Reasoning
    }

    /// Texts of special tokens that an answer must show although others are skipped.
    pub fn markers(&self) -> Vec<&'static str> {
        let mut markers = Vec::new();
        if let Some(reasoning) = self.reasoning {
            match reasoning.tags() {
                Some((open, close)) => markers.extend([open, close]),
                None => markers.extend(harmony::MARKERS),
            }
        }
        if let Some(tools) = self.tools {
            markers.extend(tools.markers());
        }
        markers
    }
}

/// Texts that stand between turns in one template or another, and never within reasoning.
const TURN_MARKS: [&str; 6] = ["<|", "<｜", "[/INST]", "]~", "<sep>", "ssistant:"];

impl ToolFormat {
    /// All of them.
    pub const ALL: [Self; 11] = [
        Self::Hermes,
        Self::Qwen3Coder,
        Self::Llama3Json,
        Self::Mistral,
        Self::DeepseekV3,
        Self::DeepseekV31,
        Self::DeepseekV4,
        Self::KimiK2,
        Self::Glm45,
        Self::MinimaxM2,
        Self::Harmony,
    ];

    /// The name that users of vLLM and SGLang know it by.
    pub fn name(self) -> &'static str {
        match self {
            Self::Hermes => "hermes",
            Self::Qwen3Coder => "qwen3_coder",
            Self::Llama3Json => "llama3_json",
            Self::Mistral => "mistral",
            Self::DeepseekV3 => "deepseek_v3",
            Self::DeepseekV31 => "deepseek_v31",
            Self::DeepseekV4 => "deepseek_v4",
            Self::KimiK2 => "kimi_k2",
            Self::Glm45 => "glm45",
            Self::MinimaxM2 => "minimax_m2",
            Self::Harmony => "harmony",
        }
    }

    /// The format with this name.
    pub fn by_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.name() == name)
    }

    /// True where the parser follows a published template or fixture, as all of them do so far.
    pub fn is_verified(self) -> bool {
        true
    }

    /// Those of its markers that may be special tokens.
    fn markers(self) -> &'static [&'static str] {
        match self {
            Self::Hermes => &[hermes::OPEN, hermes::CLOSE],
            Self::Qwen3Coder => qwen3_coder::MARKERS,
            Self::Llama3Json => llama3_json::MARKERS,
            Self::Mistral => mistral::MARKERS,
            Self::DeepseekV3 | Self::DeepseekV31 => deepseek_v3::MARKERS,
            Self::DeepseekV4 => deepseek_v4::MARKERS,
            Self::KimiK2 => kimi_k2::MARKERS,
            Self::Glm45 => glm45::MARKERS,
            Self::MinimaxM2 => minimax_m2::MARKERS,
            Self::Harmony => harmony::MARKERS,
        }
    }

    /// The markers that open calls, anywhere in an answer.
    pub(super) fn openings(self) -> &'static [&'static str] {
        match self {
            Self::Hermes => &[hermes::OPEN],
            Self::Qwen3Coder => qwen3_coder::OPENINGS,
            Self::Llama3Json => llama3_json::OPENINGS,
            Self::Mistral => mistral::OPENINGS,
            Self::DeepseekV3 | Self::DeepseekV31 => deepseek_v3::OPENINGS,
            Self::DeepseekV4 => deepseek_v4::OPENINGS,
            Self::KimiK2 => kimi_k2::OPENINGS,
            Self::Glm45 => glm45::OPENINGS,
            Self::MinimaxM2 => minimax_m2::OPENINGS,
            // Messages are read as a whole.
            Self::Harmony => &[],
        }
    }

    /// Further ones that open calls where nothing was said before.
    pub(super) fn first_openings(self) -> &'static [&'static str] {
        match self {
            Self::Llama3Json => llama3_json::FIRST_OPENINGS,
            _ => &[],
        }
    }

    /// The automaton for what follows an opening marker. Harmony has none: its parser reads whole answers.
    pub(super) fn begin(self, opening: &'static str) -> Option<Box<dyn Format>> {
        Some(match self {
            Self::Hermes => Box::new(Hermes::new()),
            Self::Qwen3Coder => Box::new(Tagged::new(&qwen3_coder::TAGS, opening)),
            Self::Llama3Json => Box::new(Llama3Json::new(opening)),
            Self::Mistral => Box::new(Mistral::new()),
            Self::DeepseekV3 => Box::new(Section::new(&deepseek_v3::SECTION)),
            Self::DeepseekV31 => Box::new(Section::new(&deepseek_v31::SECTION)),
            Self::DeepseekV4 => Box::new(Tagged::new(&deepseek_v4::TAGS, opening)),
            Self::KimiK2 => Box::new(Section::new(&kimi_k2::SECTION)),
            Self::Glm45 => Box::new(Glm45::default()),
            Self::MinimaxM2 => Box::new(Tagged::new(&minimax_m2::TAGS, opening)),
            Self::Harmony => return None,
        })
    }
}
