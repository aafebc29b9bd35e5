//! One request's life: waiting with its tokens, running with a slot and a lease, waiting again after
//! a preemption. Tokens are only ever appended, so nothing is lost or repeated on the way.

use crate::constraint::{Constrained, MaskWork};
use crate::pages::{Lease, Prefix};
use crate::request::Request;
use atom_base::{MaskCell, OutRow, RequestId, SlotId, TokenId, last_of};
use std::sync::Arc;

/// A request with everything it has generated so far.
pub(crate) struct Sequence {
    pub(crate) request: Request,
    /// The prompt, then the continuation. Room for all of it is taken on submission.
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) arrived_ms: u64,
    /// `Event::Started` was sent: it is sent once, also if preempted later.
    pub(crate) started: bool,
    /// Prompt tokens found in the prefix cache on the first admission.
    pub(crate) cached_tokens: Option<usize>,
    /// Prompt tokens `1 ..= scored` have their log-probability sent.
    pub(crate) scored: usize,
    /// Of a request with a grammar. Kept when it gives way: tokens are only appended.
    pub(crate) constrained: Option<Constrained>,
}

/// A sequence that holds a slot and pages.
pub(crate) struct Running {
    pub(crate) sequence: Sequence,
    pub(crate) slot: SlotId,
    pub(crate) lease: Lease,
    /// Positions `0 .. computed` are in the cache, and what was computed of them is known here.
    pub(crate) computed: usize,
    /// Positions `0 .. planned` are computed or in a step that is in flight.
    pub(crate) planned: usize,
    /// Tokens that steps in flight choose.
    pub(crate) pending: usize,
    /// Tokens, prompt included, at which the continuation is full.
    pub(crate) end: usize,
    /// Pages of the lease that the page table on the device knows.
    pub(crate) tabled: usize,
    /// Pages that are published in the prefix cache, and the prefix that they end.
    pub(crate) sealed: usize,
    pub(crate) prefix: Prefix,
    pub(crate) finished: bool,
}

/// What a request that ended or gave way still holds: a step in flight has rows of it.
pub(crate) struct Leaving {
    pub(crate) owner: RequestId,
    pub(crate) slot: SlotId,
    /// Returns its pages when dropped.
    pub(crate) _lease: Lease,
    /// Rows in steps that were not applied yet.
    pub(crate) in_flight: usize,
}

impl Sequence {
    pub(crate) fn new(request: Request, arrived_ms: u64) -> Self {
        let mut tokens = Vec::with_capacity(request.prompt.len() + request.stop.max_tokens as usize);
        tokens.extend_from_slice(&request.prompt);
        let constrained = request.grammar.as_ref().map(Constrained::new);
        Self { request, tokens, arrived_ms, started: false, cached_tokens: None, scored: 0, constrained }
    }

    pub(crate) fn prompt_len(&self) -> usize {
        self.request.prompt.len()
    }

    pub(crate) fn generated(&self) -> &[TokenId] {
        &self.tokens[self.prompt_len()..]
    }

    /// True for a request that wants its prompt scored and nothing generated.
    pub(crate) fn scores_only(&self) -> bool {
        self.request.stop.max_tokens == 0
    }

    /// Positions to compute before the next token can be chosen. The last prompt token need not be
    /// computed if nothing follows it.
    pub(crate) fn length(&self) -> usize {
        self.tokens.len() - usize::from(self.scores_only())
    }

    /// The prompt token to score at `position`, if the request asked for it and it was not sent yet.
    pub(crate) fn target(&self, position: usize) -> Option<TokenId> {
        let next = position + 1;
        let wanted = self.scored_from().is_some_and(|from| position >= from) && next < self.prompt_len();
        wanted.then(|| self.tokens[next])
    }

    /// First position whose next prompt token is still to be scored, if any is.
    pub(crate) fn scored_from(&self) -> Option<usize> {
        let unfinished =
            self.request.sampling.prompt_logprobs.is_some() && self.scored + 1 < self.prompt_len();
        unfinished.then_some(self.scored)
    }

    /// Where the mask of the next token will be, of an admitted request with a grammar.
    pub(crate) fn mask(&self) -> Option<Arc<MaskCell>> {
        self.constrained.as_ref().and_then(|constrained| constrained.cell.clone())
    }

    /// The work for the first mask. None behind a preemption: what was computed before it still holds.
    pub(crate) fn first_mask(&mut self) -> Option<MaskWork> {
        let constrained = self.constrained.as_mut().filter(|constrained| constrained.cell.is_none())?;
        Some(constrained.next(None))
    }

    /// Leading tokens that may come from the prefix cache: at least one row must be computed to have
    /// logits, and rows to be scored must be computed too.
    pub(crate) fn cacheable(&self) -> &[TokenId] {
        &self.tokens[..self.scored_from().unwrap_or(self.length() - 1)]
    }
}

impl Running {
    /// Positions to plan before the next token can be chosen. None behind a token in flight that fills
    /// the continuation, whatever it will be, or that the mask of the next one depends on.
    pub(crate) fn remaining(&self) -> usize {
        let is_full = self.pending > 0 && self.sequence.tokens.len() + self.pending >= self.end;
        let is_awaited = self.pending > 0 && self.sequence.constrained.is_some();
        if self.finished || is_full || is_awaited {
            0
        } else {
            self.sequence.length() + self.pending - self.planned
        }
    }

    /// The work for the mask behind the token that a row brought, if there is one to come.
    pub(crate) fn next_mask(&mut self, row: &OutRow) -> Option<MaskWork> {
        if self.finished || row.mask.is_none() {
            return None;
        }
        let token = self.sequence.tokens.last().copied();
        self.sequence.constrained.as_mut().map(|constrained| constrained.next(token))
    }

    /// Gives back slot and pages: at once, or when the steps in flight that it has rows in are applied.
    pub(crate) fn leave(self, leaving: &mut Vec<Leaving>, free_slots: &mut Vec<SlotId>) -> Sequence {
        let Self { sequence, slot, lease, planned, computed, .. } = self;
        if planned > computed {
            let (owner, in_flight) = (sequence.request.id, planned - computed);
            leaving.push(Leaving { owner, slot, _lease: lease, in_flight });
        } else {
            free_slots.push(slot);
        }
        sequence
    }

    /// Pages that the lease lacks for the next position.
    pub(crate) fn pages_needed(&self, page_size: usize) -> usize {
        (self.planned / page_size + 1).saturating_sub(self.lease.pages().len())
    }

    /// The token at a position, or where the device finds it.
    pub(crate) fn token(&self, position: usize) -> TokenId {
        self.sequence.tokens.get(position).copied().unwrap_or(last_of(self.slot))
    }
}
