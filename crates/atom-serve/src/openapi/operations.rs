//! Every path, in the words of the document.

use super::{Gives, Operation, Takes};
use crate::{chat, completions, messages, responses, tokens};

/// Groups of operations.
pub(crate) const TAGS: [(&str, &str); 5] = [
    ("generation", "Answers of the model."),
    ("tokens", "Text to tokens and back, without the model."),
    ("server", "What the server says of itself."),
    ("operation", "Orders to the server."),
    ("page", "The page at / and what it draws."),
];

pub(crate) const CHAT: Operation = Operation {
    id: "createChatCompletion",
    tag: "generation",
    summary: "The next message of a conversation.",
    takes: Takes::Generation(&chat::BODY),
    gives: Gives::JsonOrStream("ChatCompletion", "ChatCompletionChunk"),
    fails: &[],
    is_open: false,
};
pub(crate) const COMPLETIONS: Operation = Operation {
    id: "createCompletion",
    tag: "generation",
    summary: "Continues texts or tokens.",
    takes: Takes::Generation(&completions::BODY),
    gives: Gives::JsonOrStream("Completion", "CompletionChunk"),
    fails: &[],
    is_open: false,
};
pub(crate) const RESPONSES: Operation = Operation {
    id: "createResponse",
    tag: "generation",
    summary: "The next items of a conversation. Nothing is stored.",
    takes: Takes::Generation(&responses::BODY),
    gives: Gives::JsonOrStream("Response", "ResponseEvent"),
    fails: &[],
    is_open: false,
};
pub(crate) const MESSAGES: Operation = Operation {
    id: "createMessage",
    tag: "generation",
    summary: "The next message of a conversation, in the words of the Anthropic API.",
    takes: Takes::Generation(&messages::BODY),
    gives: Gives::JsonOrStream("Message", "MessageEvent"),
    fails: &[],
    is_open: false,
};
pub(crate) const COUNT_TOKENS: Operation = tokens(
    "countTokens",
    "Tokens of the prompt that these messages make.",
    &[&messages::COUNT],
    "CountedTokens",
);
pub(crate) const RENDER_CHAT: Operation =
    tokens("renderChatCompletion", "Tokens that this chat is computed from.", &[&chat::BODY], "Rendered");
pub(crate) const RENDER_COMPLETIONS: Operation = tokens(
    "renderCompletion",
    "Tokens that these prompts are computed from.",
    &[&completions::BODY],
    "RenderedPrompts",
);
pub(crate) const TOKENIZE: Operation =
    tokens("tokenize", "Tokens of a text or of a conversation.", tokens::TOKENIZE, "Tokens");
pub(crate) const DETOKENIZE: Operation =
    tokens("detokenize", "The text of tokens.", &[&tokens::DETOKENIZE], "Detokenized");
pub(crate) const TOKENIZER_INFO: Operation = Operation {
    tag: "tokens",
    ..asked("tokenizerInfo", "Special tokens and the chat template.", "TokenizerInfo")
};

pub(crate) const MODELS: Operation = asked("listModels", "The model, by each of its names.", "ModelList");
pub(crate) const MODEL: Operation = Operation {
    takes: Takes::Name,
    fails: &[404],
    ..asked("retrieveModel", "The model, if it has this name.", "Model")
};
pub(crate) const SERVER_INFO: Operation =
    asked("serverInfo", "What is served, and how it is laid out.", "ServerInfo");
pub(crate) const VERSION: Operation = asked("version", "The version of the server.", "Version");
pub(crate) const DOCUMENT: Operation = asked("openapi", "This document.", "Document");
pub(crate) const CACHE_STATS: Operation =
    asked("cacheStats", "What the caches of tokens and of keys and values hold.", "CacheStats");
pub(crate) const METRICS: Operation = Operation {
    gives: Gives::Text { kind: atom_telemetry::CONTENT_TYPE, changes: false },
    ..asked("metrics", "Metrics in Prometheus' text format.", "")
};
pub(crate) const HEALTH: Operation = health("health", "Whether a request would be taken.");
pub(crate) const LIVE: Operation = health("healthLive", "Whether waiting may help.");
pub(crate) const READY: Operation = health("healthReady", "Whether requests should come here.");
pub(crate) const PING: Operation = health("ping", "The same as /health.");

pub(crate) const START_PROFILE: Operation =
    order("startProfile", "Begins to record steps.", "ProfileBegun", &[403, 409]);
pub(crate) const STOP_PROFILE: Operation =
    order("stopProfile", "Writes what was recorded to a file.", "ProfileWritten", &[403, 409]);
pub(crate) const PAUSE: Operation =
    order("pause", "Lets no lane compute until a resume.", "EngineState", &[409, 504]);
pub(crate) const RESUME: Operation = order("resume", "Ends a pause.", "EngineState", &[]);
pub(crate) const DRAIN: Operation = order("drain", "Refuses new requests from now on.", "EngineState", &[]);
pub(crate) const EXIT: Operation = order("exit", "Drains, and ends the process.", "EngineState", &[]);

pub(crate) const STEPS: Operation = Operation {
    tag: "page",
    gives: Gives::Stream("StepsEvent"),
    fails: &[429],
    ..asked("steps", "The last steps of every lane, and new ones as they come.", "")
};

/// A file of the page.
pub(crate) const fn asset(id: &'static str, kind: &'static str) -> Operation {
    Operation {
        id,
        tag: "page",
        summary: "A part of the page.",
        takes: Takes::Nothing,
        gives: Gives::Text { kind, changes: true },
        fails: &[],
        is_open: true,
    }
}

const fn tokens(
    id: &'static str,
    summary: &'static str,
    takes: &'static [&'static crate::declare::Object],
    gives: &'static str,
) -> Operation {
    let (takes, gives) = (Takes::Body(takes), Gives::Json(gives));
    Operation { id, tag: "tokens", summary, takes, gives, fails: &[], is_open: false }
}

const fn asked(id: &'static str, summary: &'static str, gives: &'static str) -> Operation {
    let (takes, gives) = (Takes::Nothing, Gives::Json(gives));
    Operation { id, tag: "server", summary, takes, gives, fails: &[], is_open: false }
}

const fn health(id: &'static str, summary: &'static str) -> Operation {
    let (takes, gives) = (Takes::Nothing, Gives::Health);
    Operation { id, tag: "server", summary, takes, gives, fails: &[503], is_open: true }
}

const fn order(
    id: &'static str,
    summary: &'static str,
    gives: &'static str,
    fails: &'static [u16],
) -> Operation {
    let (takes, gives) = (Takes::Order, Gives::Json(gives));
    Operation { id, tag: "operation", summary, takes, gives, fails, is_open: false }
}
