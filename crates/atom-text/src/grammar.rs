//! Constraints on a continuation: which tokens may come next, by a JSON schema, a regular expression, a
//! list of choices, a grammar or structural tags.
//!
//! [`GrammarVocabulary`] is made once of a tokenizer. It compiles a [`GrammarSource`] to a [`Grammar`],
//! within bounds on bytes, on what the parser builds and on time; a grammar makes a [`Constraint`] for
//! each continuation. The work is done by llguidance, which walks a trie of all tokens with an Earley
//! parser over bytes: so tokens that cut characters or span several symbols are judged by their bytes.
//!
//! Errors are texts for the client. A panic inside of llguidance is an error too.

mod ebnf;
mod format;
mod schema;
mod source;
mod vocabulary;

pub use format::{Format, FormatKind, Tag, TagCount};
pub(crate) use schema::check as check_schema;
pub use source::{GrammarSource, StructuralTag, StructuralTags};
pub(crate) use source::{between_slashes, regex_literal, with_options};
pub use vocabulary::GrammarVocabulary;

use atom_base::TokenId;
use llguidance::Matcher;
use llguidance::api::StopReason;
use std::fmt;
use std::sync::{Mutex, PoisonError};

/// A compiled constraint of a request, shared by its choices.
pub struct Grammar {
    /// In the first state; behind a lock since a matcher is not for two threads at a time.
    first: Mutex<Matcher>,
}

/// Where one continuation is in its grammar.
pub struct Constraint {
    matcher: Matcher,
}

impl Grammar {
    /// A constraint before the first token, which shares nothing with any other.
    pub fn start(&self) -> Constraint {
        Constraint { matcher: self.first.lock().unwrap_or_else(PoisonError::into_inner).deep_clone() }
    }
}

impl Constraint {
    /// Sets bit `t % 32` of word `t / 32` for every token `t` that may come next, and clears all others.
    /// Behind a complete text that nothing can continue, these are the model's end tokens.
    ///
    /// An error says why there is no such token; the continuation can't go on then.
    pub fn mask(&mut self, allowed: &mut [u32]) -> Result<(), String> {
        allowed.fill(0);
        let mask = self.matcher.compute_mask_or_eos().map_err(|error| {
            let reason = first_line(&error);
            if reason == StopReason::NoExtensionBias.to_string() { NOTHING.to_owned() } else { reason }
        })?;
        for (word, &bits) in allowed.iter_mut().zip(mask.as_slice()) {
            *word = bits;
        }
        if allowed.iter().all(|&word| word == 0) { Err(NOTHING.to_owned()) } else { Ok(()) }
    }

    /// Takes in the token that was chosen.
    pub fn advance(&mut self, token: TokenId) -> Result<(), String> {
        if self.matcher.is_stopped() && !self.matcher.is_error() {
            // The end of a text may be said again; nothing else can come.
            let env = self.matcher.tok_env().map_err(|error| first_line(&error))?;
            let is_end = env.tok_trie().eos_tokens().contains(&token);
            return if is_end { Ok(()) } else { Err(format!("token {token} comes behind the end")) };
        }
        self.matcher.consume_token(token).map_err(|error| first_line(&error))
    }

    /// True if the text so far is complete: the model may end it.
    pub fn is_complete(&mut self) -> Result<bool, String> {
        if self.matcher.is_stopped() {
            return match self.matcher.get_error() {
                Some(error) => Err(first_line(&error)),
                None => Ok(true),
            };
        }
        self.matcher.is_accepting().map_err(|error| first_line(&error))
    }
}

impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammar").finish_non_exhaustive()
    }
}

impl fmt::Debug for Constraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Constraint").finish_non_exhaustive()
    }
}

/// What llguidance says, without the dump of its state and the trace of a panic behind it.
fn first_line(error: &impl fmt::Display) -> String {
    let text = error.to_string();
    let end = text.find("\n<").unwrap_or(text.len());
    let text = text[..end].trim_end();
    match text.char_indices().nth(REASON_CHARS_MAX) {
        Some((cut, _)) => format!("{}..", &text[..cut]),
        None => text.to_owned(),
    }
}

const NOTHING: &str = "no token of the model's vocabulary can continue this text, and it is not complete";

/// An error message is no place for a client's whole grammar.
const REASON_CHARS_MAX: usize = 500;

#[cfg(test)]
mod tests;
