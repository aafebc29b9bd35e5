//! The conventions of a checkpoint.

use super::format::Format;
use super::hermes;
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

/// How reasoning is marked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReasoningFormat {
    /// `<think> .. </think>`: DeepSeek R1 and V3.1, Qwen 3, GLM 4.5, MiniMax M2.
    Think,
    /// `[THINK] .. [/THINK]`: Magistral.
    Mistral,
    /// `<think> .. </think>`, which a section of tool calls ends too: Kimi K2 Thinking.
    KimiK2,
    /// `<mm:think> .. </mm:think>`: MiniMax M3.
    MinimaxM3,
    /// The channel `analysis`: GPT-OSS.
    Harmony,
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
        let _ = template;
        Self::default()
    }

    /// Where a prompt that ends like this leaves the model.
    pub fn start(&self, prompt_tail: &str) -> AnswerStart {
        let Some((open, close)) = self.reasoning.and_then(ReasoningFormat::tags) else {
            return AnswerStart::Content;
        };
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
            markers.extend(reasoning.tags().into_iter().flat_map(|(open, close)| [open, close]));
        }
        if let Some(tools) = self.tools {
            markers.extend(tools.markers());
        }
        markers
    }
}

/// Texts that stand between turns in one template or another, and never within reasoning.
const TURN_MARKS: [&str; 4] = ["<|", "<｜", "[/INST]", "]~"];

impl ReasoningFormat {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Think, Self::Mistral, Self::KimiK2, Self::MinimaxM3, Self::Harmony];

    /// The name that users know it by.
    pub fn name(self) -> &'static str {
        match self {
            Self::Think => "think",
            Self::Mistral => "mistral",
            Self::KimiK2 => "kimi_k2",
            Self::MinimaxM3 => "minimax_m3",
            Self::Harmony => "harmony",
        }
    }

    /// The format with this name.
    pub fn by_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.name() == name)
    }

    /// True where the parser follows a published template or fixture.
    pub fn is_verified(self) -> bool {
        !matches!(self, Self::MinimaxM3)
    }

    /// The tags around reasoning; none where it is a channel.
    pub(super) fn tags(self) -> Option<(&'static str, &'static str)> {
        match self {
            Self::Think | Self::KimiK2 => Some(("<think>", "</think>")),
            Self::Mistral => Some(("[THINK]", "[/THINK]")),
            Self::MinimaxM3 => Some(("<mm:think>", "</mm:think>")),
            Self::Harmony => None,
        }
    }
}

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

    /// True where the parser follows a published template or fixture.
    pub fn is_verified(self) -> bool {
        true
    }

    /// All its markers.
    fn markers(self) -> &'static [&'static str] {
        match self {
            Self::Hermes => &[hermes::OPEN, hermes::CLOSE],
            _ => &[],
        }
    }

    /// The markers that open calls, anywhere in an answer.
    pub(super) fn openings(self) -> &'static [&'static str] {
        match self {
            Self::Hermes => &[hermes::OPEN],
            _ => &[],
        }
    }

    /// Further ones that open calls where nothing was said before.
    pub(super) fn first_openings(self) -> &'static [&'static str] {
        &[]
    }

    /// The automaton for what follows an opening marker.
    pub(super) fn begin(self, _opening: &'static str) -> Box<dyn Format> {
        Box::new(hermes::Hermes::new())
    }
}
