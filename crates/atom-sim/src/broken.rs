//! What can be found broken. Every variant is a fault of the code under simulation, or of a test that
//! breaks a rule on purpose; none is the world's.

use crate::model::Ending;
use atom_base::{PageId, RequestId, SlotId, TokenId};
use atom_engine::{Counters, Refusal};
use thiserror::Error;

/// A rule that did not hold.
#[derive(Clone, Debug, Error, PartialEq)]
#[expect(missing_docs, reason = "each message names its fields")]
pub enum Broken {
    /// A plan larger than the bucket that everybody replays.
    #[error("{rows} rows, {out_rows} with logits, in a bucket of {bucket_rows} and {bucket_out_rows}")]
    TooLarge { rows: usize, out_rows: usize, bucket_rows: usize, bucket_out_rows: usize },
    /// Arrays of a plan that contradict each other.
    #[error("the plan contradicts itself: {what}")]
    Malformed { what: String },
    /// A replay of a bucket that was never recorded.
    #[error("a replay of {rows} rows, which were never recorded")]
    NoRecording { rows: usize },
    /// A page table with a hole: an entry does not follow the one before.
    #[error("slot {slot}: table entry {index} after {known} entries")]
    TableGap { slot: SlotId, index: u32, known: usize },
    /// The Sink in a page table.
    #[error("slot {slot}: table entry {index} is the Sink")]
    SinkTabled { slot: SlotId, index: u32 },
    /// A position whose page is not in the table.
    #[error("request {owner}, slot {slot}: no page for position {position}")]
    NoPage { owner: RequestId, slot: SlotId, position: u32 },
    /// A row written elsewhere than where its page table says that it is read.
    #[error("request {owner}, position {position}: written to cache row {row}, its table says {tabled}")]
    WrongCacheRow { owner: RequestId, position: u32, row: u32, tabled: u32 },
    /// Invariant 11: a page written by one and named by the tables of others.
    #[error("request {owner} writes page {page}, which is in {users} page tables of this step")]
    SharedPageWritten { owner: RequestId, page: PageId, users: u32 },
    /// A read of a cache row that nobody wrote.
    #[error("request {owner} reads position {position} from page {page}, where nothing was written")]
    Unwritten { owner: RequestId, position: u32, page: PageId },
    /// A read of a cache row that was written for another prefix.
    #[error(
        "request {owner} reads position {position} from page {page} and finds token {token} of position \
         {found_position}, of another prefix"
    )]
    ForeignRow { owner: RequestId, position: u32, page: PageId, token: TokenId, found_position: u32 },
    /// Penalties without a history to count.
    #[error("request {owner} has penalties, but the history of slot {slot} was not loaded")]
    NoHistory { owner: RequestId, slot: SlotId },
    /// More rows than the group granted.
    #[error("{rows} rows planned, {granted} granted")]
    AboveGrant { rows: usize, granted: usize },
    /// A want that was granted whole, met with no lack of pages, and not used: padding for nothing.
    #[error("{wanted} rows wanted and granted, {rows} planned, and nobody had to give way")]
    WantNotMeant { wanted: usize, rows: usize },
    /// Invariant 4: a lane without requests that computes or holds pages.
    #[error("an idle lane has {rows} rows and holds {pages} pages")]
    IdleLaneWorks { rows: usize, pages: usize },
    /// Somebody runs who is not among the oldest.
    #[error("request {owner} runs, though {running} older requests should")]
    Overtaken { owner: RequestId, running: usize },
    /// The oldest gave way.
    #[error("request {owner} was the oldest that ran, and gave way")]
    OldestGaveWay { owner: RequestId },
    /// A span that does not continue the one before.
    #[error("request {owner} continues at position {start}, expected {expected}")]
    WrongStart { owner: RequestId, start: u32, expected: u32 },
    /// An event for nobody.
    #[error("an event for request {request}, which was never submitted")]
    Unknown { request: RequestId },
    /// An event after the terminal one.
    #[error("request {request} ended and then got {event}")]
    AfterEnd { request: RequestId, event: String },
    /// An event that may not come now.
    #[error("request {request} got {event} {when}")]
    OutOfOrder { request: RequestId, event: String, when: &'static str },
    /// An event with other content than the request has when it runs alone.
    #[error("request {request} got {got}; alone it gets {expected}")]
    WrongContent { request: RequestId, got: String, expected: String },
    /// Ended otherwise than expected.
    #[error(
        "request {request} ended with {got:?} after {scored} scores and {tokens} tokens, expected {expected}"
    )]
    WrongEnding { request: RequestId, got: Ending, scored: usize, tokens: usize, expected: String },
    /// An impossible number of cached tokens.
    #[error("request {request} reports {cached} cached tokens of {prompt}; {why}")]
    CachedTokens { request: RequestId, cached: u32, prompt: usize, why: String },
    /// No terminal event.
    #[error("request {request} never ended")]
    NeverEnded { request: RequestId },
    /// `Scheduler::abort` does not know what is there, or knows what is not.
    #[error("abort of request {request} said {said}, but {truth}")]
    Abort { request: RequestId, said: bool, truth: &'static str },
    /// Something is held though nobody runs.
    #[error("not back to baseline: {what}; {counters:?}")]
    NotAtBaseline { what: &'static str, counters: Counters },
    /// A free slot or a kept page that can't be had.
    #[error("{what}: {got}, expected {expected}")]
    Probe { what: &'static str, got: usize, expected: usize },
    /// The door let somebody in who can't be served, or kept out who can.
    #[error("the door said {got:?}, expected {expected}")]
    Door { got: Option<Refusal>, expected: &'static str },
    /// Lanes of a group that concluded differently from equal facts.
    #[error("lane {lane} and lane 0 differ in {what}: {theirs}, {ours}")]
    LanesDiffer { lane: usize, what: &'static str, theirs: String, ours: String },
    /// A step whose bucket or grants don't follow from what was wanted.
    #[error("lane {lane}: wanted {wanted}, granted {granted}, in a bucket of {bucket} rows")]
    WrongGrant { lane: usize, wanted: String, granted: String, bucket: usize },
    /// Prompts held for longer than any hold may last, or while nobody decodes.
    #[error("prompts held for {steps} steps in succession, with {decode_rows} rows that decode")]
    Held { steps: u32, decode_rows: u32 },
    /// Somebody waits for longer than the world exists.
    #[error("lane {lane}: somebody waits for {age_ms} ms in a world of {now_ms} ms")]
    WrongAge { lane: usize, age_ms: u32, now_ms: u64 },
    /// The group goes on for ever.
    #[error("{ticks} ticks, and requests are left")]
    NoEnd { ticks: usize },
    /// The group ended otherwise than the world made it.
    #[error("the group ended with {got}, expected {expected}")]
    WrongEnd { got: String, expected: String },
    /// An assertion of the code under simulation.
    #[error("a panic: {0}")]
    Panic(String),
}
