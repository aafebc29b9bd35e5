//! The model's tokens as the constraints see them, and the bounded work of compiling.

use super::{Constraint, Grammar, GrammarSource, first_line};
use crate::pieces::PieceKind;
use crate::{TextError, Tokenizer};
use atom_base::TokenId;
use llguidance::api::ParserLimits;
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use std::collections::BTreeSet;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

/// The vocabulary of a model, made once: constraints are compiled against it.
pub struct GrammarVocabulary {
    factory: Arc<ParserFactory>,
    /// Compilations that go on, those that nobody waits for any more included.
    compiling: Arc<AtomicUsize>,
    limits: CompileLimits,
}

/// Bounds of a compilation.
#[derive(Clone, Copy, Debug)]
pub(super) struct CompileLimits {
    pub(super) time: Duration,
    pub(super) at_once: usize,
}

/// A place among those that compile.
struct Place(Arc<AtomicUsize>);

impl GrammarVocabulary {
    /// The tokens of a tokenizer. A text that is complete may be ended by any of its
    /// [`end_tokens`](Tokenizer::end_tokens), or by one of `further_ends`, which other files of the checkpoint name.
    pub fn new(tokenizer: &Tokenizer, further_ends: &[TokenId]) -> Result<Self, TextError> {
        let made = catch_unwind(AssertUnwindSafe(|| factory(tokenizer, further_ends)));
        let factory = made.unwrap_or_else(|_| Err("it panicked".to_owned()));
        let factory = factory.map_err(|reason| TextError::Vocabulary {
            reason: format!("constraints can't be computed over it: {reason}"),
        })?;
        let limits = CompileLimits { time: COMPILE_TIME_MAX, at_once: COMPILATIONS_MAX };
        Ok(Self { factory: Arc::new(factory), compiling: Arc::default(), limits })
    }

    /// Compiles a constraint, at most for [`COMPILE_TIME_MAX`]. Blocks: call it where text is worked on.
    pub fn compile(&self, source: &GrammarSource) -> Result<Grammar, TextError> {
        source.check_bytes()?;
        let place = Place::take(&self.compiling, self.limits.at_once)?;
        let (sender, compiled) = mpsc::sync_channel(1);
        let (factory, own) = (Arc::clone(&self.factory), source.clone());
        let body = move || {
            let outcome = compile(&factory, &own);
            drop(place);
            // Nobody listens after the deadline.
            let _ = sender.send(outcome);
        };
        let thread = std::thread::Builder::new().name("grammar".into()).stack_size(COMPILE_STACK_BYTES);
        thread.spawn(body).map_err(|error| TextError::GrammarThread { reason: error.to_string() })?;
        let outcome = compiled.recv_timeout(self.limits.time).unwrap_or_else(|error| {
            Err(match error {
                mpsc::RecvTimeoutError::Timeout => {
                    format!("compiling it took more than {:?}; make it simpler", self.limits.time)
                }
                mpsc::RecvTimeoutError::Disconnected => "compiling it failed".to_owned(),
            })
        });
        outcome.map_err(|reason| source.refuse(source.with_hint(reason)))
    }

    #[cfg(test)]
    pub(super) fn limit(&mut self, limits: CompileLimits) {
        self.limits = limits;
    }
}

impl fmt::Debug for GrammarVocabulary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrammarVocabulary").finish_non_exhaustive()
    }
}

impl Place {
    fn take(compiling: &Arc<AtomicUsize>, max: usize) -> Result<Self, TextError> {
        let running = compiling.fetch_add(1, Ordering::SeqCst);
        let place = Self(Arc::clone(compiling));
        if running < max { Ok(place) } else { Err(TextError::GrammarBusy { running, max }) }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Errors of llguidance and of its panics, which it catches itself, are texts.
fn compile(factory: &ParserFactory, source: &GrammarSource) -> Result<Grammar, String> {
    let made = catch_unwind(AssertUnwindSafe(|| {
        let grammar = source.grammar()?;
        let mut first = Matcher::new(factory.create_parser(grammar));
        // What explodes, or allows nothing, mostly does so at once.
        let mut words = vec![0; factory.tok_env().tok_trie().vocab_size().div_ceil(32)];
        match first.get_error() {
            Some(error) => Err(first_line(&error)),
            None => {
                let mut constraint = Constraint { matcher: first };
                constraint.mask(&mut words)?;
                first = constraint.matcher;
                Ok(Grammar { first: Mutex::new(first) })
            }
        }
    }));
    made.unwrap_or_else(|_| Err("compiling it failed".to_owned()))
}

fn factory(tokenizer: &Tokenizer, further_ends: &[TokenId]) -> Result<ParserFactory, String> {
    let vocab = tokenizer.vocab_size();
    let words: Vec<Vec<u8>> = (0..vocab as TokenId).map(|token| word(tokenizer, token)).collect();
    let known = further_ends.iter().filter(|&&token| (token as usize) < vocab);
    let ends: BTreeSet<TokenId> = tokenizer.end_tokens().iter().chain(known).copied().collect();
    let ends: Vec<TokenId> = ends.into_iter().collect();
    let info = TokRxInfo::new(vocab as u32, ends.first().copied().unwrap_or(NO_TOKEN));
    let mut trie = TokTrie::from(&info, &words);
    if !ends.is_empty() {
        trie = trie.with_eos_tokens(&ends);
    }
    // Not canonical: tokens are never forced, the model chooses how it cuts what the grammar leaves it.
    let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
    let slices = llguidance::earley::SlicedBiasComputer::general_slices();
    let mut factory = ParserFactory::new(&env, InferenceCapabilities::default(), &slices)
        .map_err(|error| first_line(&error))?;
    factory.quiet();
    *factory.limits_mut() = parser_limits();
    Ok(factory)
}

/// The bytes of a token as the trie has them. No text leads to a special token: a marker that is never in
/// UTF-8 stands in front. Ids without a token, and tokens that the trie has no room for, are left out.
fn word(tokenizer: &Tokenizer, token: TokenId) -> Vec<u8> {
    let bytes = tokenizer.token_bytes(token).unwrap_or_default();
    if bytes.len() > TOKEN_BYTES_MAX {
        return Vec::new();
    }
    match tokenizer.pieces.kind(token) {
        PieceKind::Special => [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes].concat(),
        PieceKind::Normal | PieceKind::Added | PieceKind::Absent => bytes.to_vec(),
    }
}

pub(super) fn parser_limits() -> ParserLimits {
    ParserLimits {
        // A state takes 1 to 2 kB: 20 MB of one continuation at the most, a few GB if all of a large batch are
        // made to explode. Honest schemas have some hundred.
        max_lexer_states: 10_000,
        // 200,000 is what the schemas of FHIR take, the largest that are published.
        max_grammar_size: 250_000,
        // The server's own words go to the client, not a dump.
        verbose_errors: false,
        // The rest as llguidance has it: 20 ms of work on the first lexer, 15 ms on a mask. A grammar that is ambiguous
        // without end takes more, since an item costs what its row is long: at 5,000 items a mask in place of 50,000 one
        // was cut where its masks took 180 ms already, and at 1,000 a row schemas of 300 optional properties are. So
        // requests have an allowance beside (`atom_engine::Allowance`).
        ..ParserLimits::default()
    }
}

/// How long a client is kept waiting for a grammar. What llguidance counts by itself ends most within tens
/// of milliseconds; this is for what it doesn't count, on a machine that is busy.
pub(super) const COMPILE_TIME_MAX: Duration = Duration::from_secs(10);

/// Compilations at once. Those that nobody waits for go on until they end by themselves.
const COMPILATIONS_MAX: usize = 16;

/// Rules that name each other are followed by recursion: some ten thousand of them fit into a source.
const COMPILE_STACK_BYTES: usize = 256 << 20;

/// Depth of the trie: 1,024, with the marker of a special token.
const TOKEN_BYTES_MAX: usize = 1000;

/// How llguidance writes that there is no end token.
const NO_TOKEN: TokenId = TokenId::MAX;
