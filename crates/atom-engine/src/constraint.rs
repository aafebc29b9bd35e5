//! Constraints at the engine's seam: what a continuation may look like, as masks over tokens. Who
//! computes them, and on which thread, is not known here: the scheduler hands out [`MaskWork`] whenever
//! the next mask of a request can be computed, and plans name the cell that it will be in.

use atom_base::{MaskCell, MaskFault, TokenId};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};

/// What the continuations of a request may look like. Shared by its choices.
pub trait Grammar: Send + Sync {
    /// A constraint before the first token, for one continuation.
    fn start(&self) -> Result<Box<dyn TokenConstraint>, String>;
}

/// Where one continuation is in its grammar.
pub trait TokenConstraint: Send {
    /// Sets bit `t % 32` of word `t / 32` for every token that may come next; all are clear before.
    /// An error, also if there is none, ends the request with these words.
    fn mask(&mut self, allowed: &mut [u32]) -> Result<(), String>;

    /// Takes in the token that was chosen.
    fn advance(&mut self, token: TokenId) -> Result<(), String>;
}

/// A request's grammar.
#[derive(Clone)]
pub struct GrammarRef(pub Arc<dyn Grammar>);

/// One mask to be computed. Those of one request are handed out one after the other: the next one only when
/// a token was chosen by the last.
#[derive(Debug)]
pub struct MaskWork {
    client: usize,
    constraint: Arc<Mutex<Progress>>,
    /// To take in before; none for the first mask.
    token: Option<TokenId>,
    cell: Arc<MaskCell>,
}

/// Of one sequence: where its constraint is, and the mask of its next token.
#[derive(Debug)]
pub(crate) struct Constrained {
    /// See [`MaskWork::client`].
    client: usize,
    constraint: Arc<Mutex<Progress>>,
    /// None before the first admission.
    pub(crate) cell: Option<Arc<MaskCell>>,
}

enum Progress {
    NotStarted(GrammarRef),
    Started(Box<dyn TokenConstraint>),
}

impl Constrained {
    pub(crate) fn new(grammar: &GrammarRef) -> Self {
        // Choices of one request share it.
        let client = Arc::as_ptr(&grammar.0).cast::<()>() as usize;
        Self { client, constraint: Arc::new(Mutex::new(Progress::NotStarted(grammar.clone()))), cell: None }
    }

    /// The work for the mask behind `token`, or for the first one.
    pub(crate) fn next(&mut self, token: Option<TokenId>) -> MaskWork {
        let cell = Arc::new(MaskCell::new());
        self.cell = Some(Arc::clone(&cell));
        MaskWork { client: self.client, constraint: Arc::clone(&self.constraint), token, cell }
    }
}

impl MaskWork {
    /// The work for the first mask of a continuation, and its cell.
    pub fn first(grammar: &GrammarRef) -> (Self, Arc<MaskCell>) {
        let mut constrained = Constrained::new(grammar);
        let work = constrained.next(None);
        let cell = Arc::clone(&work.cell);
        (work, cell)
    }

    /// The same number for all choices of a request, and for no other request while it runs.
    pub fn client(&self) -> usize {
        self.client
    }

    /// True when the request is gone: nobody reads the cell any more.
    pub fn is_abandoned(&self) -> bool {
        Arc::strong_count(&self.cell) == 1
    }

    /// Gives the work up; whoever waits for the mask is told.
    pub fn refuse(self, fault: MaskFault) {
        self.cell.refuse(fault);
    }

    /// Computes the mask over a vocabulary and fills the cell, whatever comes of it. Does not panic, whatever the
    /// grammar does: where another one's masks are computed next.
    pub fn run(self, vocab: usize) {
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            if self.is_abandoned() {
                // The constraint may end here, too.
                return drop(self);
            }
            let Self { cell, .. } = &self;
            let computed = catch_unwind(AssertUnwindSafe(|| self.mask(vocab)));
            cell.fill(computed.unwrap_or_else(|_| Err("computing the mask of its grammar panicked".into())));
            drop(self);
        }));
        // What panics when it is dropped has an answer already, or nobody who waits for one.
        drop(outcome);
    }

    fn mask(&self, vocab: usize) -> Result<Box<[u32]>, String> {
        let mut progress = self.constraint.lock().unwrap_or_else(PoisonError::into_inner);
        let mut mask = vec![0; vocab.div_ceil(32)].into_boxed_slice();
        let constraint = progress.start()?;
        if let Some(token) = self.token {
            constraint.advance(token)?;
        }
        constraint.mask(&mut mask)?;
        if mask.iter().all(|&word| word == 0) {
            return Err("its grammar allows no token here".into());
        }
        Ok(mask)
    }
}

impl Progress {
    fn start(&mut self) -> Result<&mut dyn TokenConstraint, String> {
        if let Self::NotStarted(grammar) = self {
            *self = Self::Started(grammar.0.start()?);
        }
        match self {
            Self::Started(constraint) => Ok(&mut **constraint),
            Self::NotStarted(_) => unreachable!("it was started above"),
        }
    }
}

impl fmt::Debug for GrammarRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrammarRef").finish_non_exhaustive()
    }
}

impl fmt::Debug for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotStarted(_) => "NotStarted",
            Self::Started(_) => "Started",
        })
    }
}
