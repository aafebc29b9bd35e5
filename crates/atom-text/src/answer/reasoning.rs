//! How checkpoints mark reasoning.
//!
//! Sources, in the order of [`ReasoningFormat::ALL`]: the chat templates of deepseek-ai/DeepSeek-V3.1,
//! zai-org/GLM-4.6 and MiniMaxAI/MiniMax-M2 (in llama.cpp's `models/templates`); that of
//! mistralai/Ministral-3-14B-Reasoning-2512; the chat template of moonshotai/Kimi-K2-Thinking,
//! and vLLM's reasoning parser of that name for calls in open reasoning; the fixtures of vLLM's
//! `tests/reasoning/test_minimax_m3_reasoning_parser.py`; `docs/format.md` of openai/harmony.

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

    /// True where the parser follows a published template or fixture, as all of them do so far.
    pub fn is_verified(self) -> bool {
        match self {
            Self::Think | Self::Mistral | Self::KimiK2 | Self::MinimaxM3 | Self::Harmony => true,
        }
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
