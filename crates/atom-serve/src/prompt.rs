//! Text to tokens, with a bound.

use crate::error::ApiError;
use crate::server::Server;
use atom_base::TokenId;
use std::sync::Arc;

/// The tokens of a text, or an error before any work if they can't be few enough.
pub(crate) fn encode(server: &Server, text: &str, add_special: bool) -> Result<Arc<[TokenId]>, ApiError> {
    let tokenizer = &server.text.tokenizer;
    // Tens of megabytes take the tokenizer many seconds; this takes none. What doesn't fit by its
    // tokens is refused later, with their exact number.
    let tokens_min = text.len() / (tokenizer.token_bytes_max().max(1) * NORMALIZER_SHRINKS_MAX);
    let context = server.context();
    if tokens_min > context {
        return Err(ApiError::PromptTooLong { bytes: text.len(), tokens_min, context });
    }
    Ok(server.tokens.encode(text, add_special)?.into())
}

/// Unicode's composition (NFC) makes three bytes out of nine at the most; with some room.
const NORMALIZER_SHRINKS_MAX: usize = 4;
