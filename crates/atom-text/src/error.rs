//! Everything that can go wrong with text.

use std::path::PathBuf;
use thiserror::Error;

/// Why text could not be read, encoded, rendered or matched.
#[derive(Debug, Error)]
pub enum TextError {
    /// Loading; the checkpoint's fault: the folder has no tokenizer.
    #[error("{} has no tokenizer.json; a byte-level BPE tokenizer in that form is needed", folder.display())]
    NoTokenizer {
        /// The checkpoint's folder.
        folder: PathBuf,
    },
    /// Loading; the file system's fault, or a file that can't be what its name says.
    #[error("can't read {path}: {reason}", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system or the parser said.
        reason: String,
    },
    /// Loading; a kind of tokenizer that this build doesn't have.
    #[error("tokenizer {what} {found:?} is not supported; supported: {supported}")]
    Unsupported {
        /// Which part of the tokenizer: `model`, `pre`, `decoder`.
        what: &'static str,
        /// What the checkpoint has.
        found: String,
        /// What would work.
        supported: String,
    },
    /// Loading; the checkpoint's fault: a vocabulary that contradicts itself.
    #[error("the tokenizer's vocabulary is damaged: {reason}")]
    Vocabulary {
        /// What is wrong, with the numbers.
        reason: String,
    },
    /// Encoding; the tokenizer's own rules failed on this text.
    #[error("the tokenizer can't encode this text ({bytes} bytes): {reason}")]
    Encode {
        /// Length of the text.
        bytes: usize,
        /// What the encoder said.
        reason: String,
    },
    /// Loading; the checkpoint's or the user's fault: the chat template isn't valid Jinja.
    #[error("the chat template can't be used: {reason}; pass another with --chat-template FILE")]
    TemplateSyntax {
        /// Where and what.
        reason: String,
    },
    /// A chat request to a model without a template; the client's fault.
    #[error(
        "this model has no chat template: use /v1/completions, or start the server with --chat-template FILE"
    )]
    NoChatTemplate,
    /// Rendering; the template refused the messages with `raise_exception`. The client's fault.
    #[error("the chat template refuses these messages: {message}")]
    TemplateRefused {
        /// The template's own words.
        message: String,
    },
    /// Rendering; the template failed on these messages.
    #[error("the chat template failed: {reason}")]
    TemplateFailed {
        /// Where and what.
        reason: String,
    },
    /// Rendering; the template did more work than any honest one does.
    #[error(
        "the chat template was stopped after {fuel} units of work; send fewer messages, or use another template"
    )]
    TemplateFuel {
        /// The budget.
        fuel: u64,
    },
    /// Rendering; the prompt grew beyond any context.
    #[error("the chat template wrote more than {max} bytes; send shorter messages, or use another template")]
    TemplateOutput {
        /// The bound in bytes.
        max: usize,
    },
    /// Rendering; the request's messages, tools or template arguments have the wrong shape. The client's fault.
    #[error("{field}: {reason}")]
    Request {
        /// The field, with its index where there is one.
        field: String,
        /// What is wrong and what would be right.
        reason: String,
    },
    /// Compiling a constraint: it is malformed, allows nothing, or would take too much work. The client's fault.
    #[error("the {kind} can't be used to constrain the output: {reason}")]
    Grammar {
        /// What it is.
        kind: &'static str,
        /// What is wrong, with the numbers.
        reason: String,
    },
    /// Compiling a constraint; too many clients with hard ones.
    #[error("{running} constraints are being compiled, at most {max} are at once; try again later")]
    GrammarBusy {
        /// Compilations that go on.
        running: usize,
        /// The bound.
        max: usize,
    },
    /// Compiling a constraint; the system's fault.
    #[error("no thread to compile a constraint: {reason}")]
    GrammarThread {
        /// What the system said.
        reason: String,
    },
}

impl TextError {
    /// True when another request could succeed on the same server: HTTP 400 rather than 500.
    pub fn is_clients_fault(&self) -> bool {
        match self {
            Self::NoChatTemplate
            | Self::TemplateRefused { .. }
            | Self::TemplateFailed { .. }
            | Self::TemplateFuel { .. }
            | Self::TemplateOutput { .. }
            | Self::Request { .. }
            | Self::Grammar { .. }
            | Self::Encode { .. } => true,
            Self::NoTokenizer { .. }
            | Self::Read { .. }
            | Self::Unsupported { .. }
            | Self::Vocabulary { .. }
            | Self::TemplateSyntax { .. }
            | Self::GrammarBusy { .. }
            | Self::GrammarThread { .. } => false,
        }
    }
}
