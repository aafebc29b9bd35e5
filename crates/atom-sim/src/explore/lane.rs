//! One lane: a scheduler small enough to try everything with, and where it is in its loop.

use super::group::ROWS_MAX;
use atom_group::Grant;
use atom_group::machine::{BOARDS, Bell, Calls, Visit, Wait};

/// A lane's scheduler and all words that it shares.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Lane {
    pub(super) at: At,
    pub(super) requests: [Request; SLOTS],
    pub(super) mail: [Mail; MAIL_MAX],
    /// What it read of the calls from outside in its last round; its mail is not in it.
    pub(super) told: Calls,
    /// It can't go on, and says so in its next facts.
    pub(super) broken: bool,
    /// The group's state as it knows it.
    pub(super) state: u16,
    /// Of its last recording or replay: the bucket's place + 1.
    pub(super) signature: u8,
    pub(super) seat: u8,
    pub(super) mine: Brought,
    pub(super) boards: [Brought; BOARDS],
    /// Counted as a sleeper.
    pub(super) enlisted: bool,
    pub(super) holds_lock: bool,
    pub(super) nap: Nap,
    /// What the first lane to conclude found for this one.
    pub(super) granted: (u8, u8),
    pub(super) blamed: bool,
    /// Steps in succession in which it had prompts and no row for them.
    pub(super) unserved: u8,
}

/// Where a lane is in its loop: the operation that comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum At {
    /// Read whether it shall leave or rest.
    Ask,
    /// Take in mail and say what it wants.
    Take,
    Visit(Visit),
    /// Within [`Visit::Ring`].
    Ring(Bell),
    /// Within [`Visit::Wait`].
    Wait(Wait),
    /// Parked.
    Rest(Wait),
    Gone(Why),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Why {
    /// Told to leave, without work.
    Asked,
    /// A lane said that it can't go on.
    Fatal,
    Closed,
    /// It gave up on somebody.
    Late,
    /// It stopped without a word, parked or not.
    Died {
        parked: bool,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Nap {
    Awake,
    Asleep,
    /// The bell rang; the lock must be had before it can look.
    Rung,
    /// The same because of its deadline: it will not sleep again.
    Late,
}

/// A request: prompt positions not yet computed, and tokens not yet generated. None without tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Request {
    pub(super) prompt: u8,
    pub(super) tokens: u8,
    /// Some of its prompt was computed.
    pub(super) begun: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) enum Mail {
    #[default]
    None,
    Submit {
        prompt: u8,
        tokens: u8,
    },
    /// Of the oldest request.
    Abort,
}

/// Facts, small.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Brought {
    pub(super) step: u8,
    pub(super) decode: u8,
    pub(super) prefill: u8,
    pub(super) partial: bool,
    pub(super) fatal: bool,
    pub(super) exit: bool,
    pub(super) pause: bool,
    pub(super) state: u16,
    pub(super) signature: u8,
}

impl Lane {
    pub(super) fn new(state: u16, seat: u8, signature: u8) -> Self {
        let boards = [Brought { step: seat, ..Brought::default() }; BOARDS];
        Self {
            at: At::Ask,
            requests: Default::default(),
            mail: Default::default(),
            told: Calls::default(),
            broken: false,
            state,
            signature,
            seat,
            mine: Brought::default(),
            boards,
            enlisted: false,
            holds_lock: false,
            nap: Nap::Awake,
            granted: (0, 0),
            blamed: false,
            unserved: 0,
        }
    }

    pub(super) fn has_mail(&self) -> bool {
        self.mail[0] != Mail::None
    }

    pub(super) fn has_work(&self) -> bool {
        self.requests[0] != Request::default()
    }

    /// Requests here or on their way.
    pub(super) fn load(&self) -> usize {
        let mailed = self.mail.iter().filter(|mail| matches!(mail, Mail::Submit { .. })).count();
        self.requests.iter().filter(|r| r.tokens > 0).count() + mailed
    }

    /// False if the box is full.
    pub(super) fn put(&mut self, mail: Mail) -> bool {
        let free = self.mail.iter_mut().find(|slot| **slot == Mail::None);
        free.map(|slot| *slot = mail).is_some()
    }

    pub(super) fn take_mail(&mut self) {
        for mail in std::mem::take(&mut self.mail) {
            match mail {
                Mail::None => {}
                Mail::Submit { prompt, tokens } => {
                    let slot = self.requests.iter_mut().find(|r| r.tokens == 0);
                    *slot.expect("nobody submits more than fits") = Request { prompt, tokens, begun: false };
                }
                Mail::Abort => self.requests[0] = Request::default(),
            }
        }
        self.sweep();
    }

    /// What it tells the others for `step`.
    pub(super) fn facts(&self, step: u8) -> Brought {
        Brought {
            step,
            fatal: self.broken,
            exit: self.told.exit,
            pause: self.told.pause,
            state: self.state,
            signature: self.signature,
            ..want(&self.requests)
        }
    }

    /// Computes what was granted. A request may have given way since it was wanted; then less is used.
    pub(super) fn run(&mut self, grant: Grant) {
        compute(&mut self.requests, (grant.decode_rows as u8, grant.prefill_rows as u8));
        let starved = self.mine.prefill > 0 && grant.prefill_rows == 0;
        self.unserved = if starved { self.unserved + 1 } else { 0 };
        self.sweep();
    }

    /// A request that decodes gives way: all of it is computed again.
    pub(super) fn preempt(&mut self) -> bool {
        let decoding = self.requests.iter_mut().rev().find(|r| r.tokens > 0 && r.prompt == 0);
        decoding.map(|request| (request.prompt, request.begun) = (2, false)).is_some()
    }

    fn sweep(&mut self) {
        if self.requests[0].tokens == 0 {
            self.requests = [self.requests[1], Request::default()];
        }
        for request in self.requests.iter_mut().filter(|r| r.tokens == 0) {
            *request = Request::default();
        }
        if self.requests[0].tokens == 0 {
            self.requests.swap(0, 1);
        }
    }
}

/// The rows that requests need, as facts.
pub(super) fn want(requests: &[Request]) -> Brought {
    let decode = requests.iter().filter(|r| r.tokens > 0 && r.prompt == 0).count() as u8;
    let prompts: u8 = requests.iter().map(|r| r.prompt).sum();
    Brought {
        decode,
        prefill: prompts.min(ROWS_MAX as u8 - decode),
        partial: requests.iter().any(|r| r.begun && r.prompt > 0),
        ..Brought::default()
    }
}

/// Gives requests the decode rows and prompt rows that were granted.
pub(super) fn compute(requests: &mut [Request], (mut decode, mut prefill): (u8, u8)) {
    for request in requests.iter_mut().filter(|r| r.tokens > 0) {
        if request.prompt == 0 {
            request.tokens -= decode.min(1);
            decode -= decode.min(1);
        } else {
            let rows = prefill.min(request.prompt);
            prefill -= rows;
            request.prompt -= rows;
            request.begun |= rows > 0;
            // The last prompt row chooses the first token.
            request.tokens -= u8::from(rows > 0 && request.prompt == 0);
        }
    }
}

/// Lanes of the largest setup.
pub(super) const LANES_MAX: usize = 4;
/// Requests that a lane has at once.
const SLOTS: usize = 2;
/// Two requests and an abort.
const MAIL_MAX: usize = 3;
