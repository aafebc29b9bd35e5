//! A device that computes nothing and checks everything: page tables and a KV cache exactly as a rank
//! keeps them, with what each cache row was written for.

use crate::broken::Broken;
use crate::model::{Context, FakeModel, History, mix};
use atom_base::{OutRow, PageId, RequestId, ScoredToken, Span, TableEntry, TokenId, slot_of_last};
use atom_engine::{Plan, SchedulerConfig};
use atom_group::Bucket;
use std::collections::BTreeMap;

/// One lane's device. Every token that it returns is a hash of the context read back through the page
/// table, so a wrong page, table, chunk or prefix gives [`Broken`] or a wrong token.
pub struct FakeDevice {
    model: FakeModel,
    page_size: usize,
    cells: Box<[Option<Cell>]>, // [pages * page_size]
    slots: Box<[Slot]>,         // [max_num_seqs + 1]
    users: Box<[u32]>,          // [pages], page tables of this step that name the page
    recordings: BTreeMap<usize, Recording>,
    executed: Vec<Operation>,
}

/// A recorded step: a function of the bucket and of nothing else.
struct Recording {
    operations: Vec<Operation>,
    signature: u64,
}

/// What a lane does in a step, as its peers can see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Computation over this many rows.
    Compute(usize),
    /// All lanes bring this many rows.
    AllGather(usize),
    /// All lanes get this many rows back.
    ReduceScatter(usize),
}

/// Keys and values of one position.
#[derive(Clone, Copy, Debug)]
struct Cell {
    position: u32,
    token: TokenId,
    context: Context,
}

#[derive(Clone, Default)]
struct Slot {
    table: Vec<PageId>,
    history: Option<History>,
    /// The last token that was sampled for the occupant.
    last: Option<TokenId>,
}

impl FakeDevice {
    /// A device with the cache and slots that `config` speaks of.
    pub fn new(config: &SchedulerConfig, model: FakeModel) -> Self {
        Self {
            model,
            page_size: config.page_size,
            cells: vec![None; config.pages * config.page_size].into(),
            slots: vec![Slot::default(); config.max_num_seqs + 1].into(),
            users: vec![0; config.pages].into(),
            recordings: BTreeMap::new(),
            executed: Vec::new(),
        }
    }

    /// Records a bucket; returns the recording's signature. `skewed` makes it one that fits no peer's.
    pub fn record(&mut self, bucket: Bucket, skewed: bool) -> u64 {
        let recording = Recording::of(bucket, LAYERS + usize::from(skewed));
        let signature = recording.signature;
        self.recordings.insert(bucket.index(), recording);
        signature
    }

    /// True if the bucket has a recording.
    pub fn has_recording(&self, bucket: Bucket) -> bool {
        self.recordings.contains_key(&bucket.index())
    }

    /// Runs a step: `results[i]` is for `plan.out[i]`. Returns the recording's signature.
    pub fn replay(
        &mut self,
        bucket: Bucket,
        plan: &Plan,
        results: &mut Vec<ScoredToken>,
    ) -> Result<u64, Broken> {
        results.clear();
        let signature = self.execute(bucket)?;
        check_shape(bucket, plan)?;
        self.load(plan)?;
        self.check_writers(plan)?;
        for (span, owner) in spans(plan) {
            self.write(span, owner, plan, span.rows)?;
        }
        self.write_padding(bucket.rows() - plan.rows());
        let mut out = plan.out.iter().peekable();
        for (span, owner) in spans(plan) {
            self.read(span, owner, &mut out, results)?;
        }
        match out.next() {
            Some(row) => Err(malformed(format!("row {} has logits and is in no span", row.row))),
            None => Ok(signature),
        }
    }

    /// Runs a step that fails in the middle: some rows are written, no result comes out. The peers
    /// see all operations.
    pub fn replay_torn(&mut self, bucket: Bucket, plan: &Plan) -> Result<u64, Broken> {
        let signature = self.execute(bucket)?;
        self.load(plan)?;
        for (span, owner) in spans(plan) {
            self.write(span, owner, plan, span.rows / 2)?;
        }
        Ok(signature)
    }

    /// The operations of the last replay.
    pub fn executed(&self) -> &[Operation] {
        &self.executed
    }

    fn execute(&mut self, bucket: Bucket) -> Result<u64, Broken> {
        let recording = self.recordings.get(&bucket.index());
        let recording = recording.ok_or(Broken::NoRecording { rows: bucket.rows() })?;
        self.executed.clear();
        self.executed.extend_from_slice(&recording.operations);
        Ok(recording.signature)
    }

    /// Takes in new table entries and slot states. Entry 0 means a new occupant of the slot.
    fn load(&mut self, plan: &Plan) -> Result<(), Broken> {
        for &TableEntry { slot, index, page } in &plan.table_entries {
            let state = &mut self.slots[slot.0 as usize];
            if index == 0 {
                state.table.clear();
                (state.history, state.last) = (None, None);
            }
            if index as usize != state.table.len() {
                return Err(Broken::TableGap { slot, index, known: state.table.len() });
            }
            if page == PageId::SINK {
                return Err(Broken::SinkTabled { slot, index });
            }
            state.table.push(page);
        }
        for load in &plan.slot_loads {
            let history = History::of(&load.prompt, &load.generated);
            self.slots[load.slot.0 as usize].history = Some(history);
        }
        Ok(())
    }

    /// Every page that is written in this step must be in one page table only.
    fn check_writers(&mut self, plan: &Plan) -> Result<(), Broken> {
        self.users.fill(0);
        for span in &plan.spans {
            for page in &self.slots[span.slot.0 as usize].table {
                self.users[page.0 as usize] += 1;
            }
        }
        for (span, owner) in spans(plan) {
            for position in span.start..span.start + span.rows {
                let page = self.page(span, owner, position)?;
                let users = self.users[page.0 as usize];
                if users > 1 {
                    return Err(Broken::SharedPageWritten { owner, page, users });
                }
            }
        }
        Ok(())
    }

    fn page(&self, span: &Span, owner: RequestId, position: u32) -> Result<PageId, Broken> {
        let table = &self.slots[span.slot.0 as usize].table;
        let page = table.get(position as usize / self.page_size).copied();
        page.ok_or(Broken::NoPage { owner, slot: span.slot, position })
    }

    fn cell_index(&self, page: PageId, position: u32) -> usize {
        page.0 as usize * self.page_size + position as usize % self.page_size
    }

    /// Writes the first `rows` rows of a span.
    fn write(&mut self, span: &Span, owner: RequestId, plan: &Plan, rows: u32) -> Result<(), Broken> {
        let mut context = self.walk(span, owner, 0..span.start, Context::default())?;
        for i in 0..rows {
            let (row, position) = ((span.first_row + i) as usize, span.start + i);
            let at = self.cell_index(self.page(span, owner, position)?, position);
            if plan.cache_rows[row] as usize != at {
                let (row, tabled) = (plan.cache_rows[row], at as u32);
                return Err(Broken::WrongCacheRow { owner, position, row, tabled });
            }
            let token = self.token(span, plan.tokens[row])?;
            context = context.then(token);
            self.cells[at] = Some(Cell { position, token, context });
        }
        Ok(())
    }

    /// A row's token, also where the plan only says that this device sampled it last.
    fn token(&self, span: &Span, token: TokenId) -> Result<TokenId, Broken> {
        match slot_of_last(token) {
            None => Ok(token),
            Some(slot) if slot == span.slot => {
                let last = self.slots[slot.0 as usize].last;
                last.ok_or_else(|| malformed(format!("nothing was sampled in slot {slot} yet")))
            }
            Some(slot) => Err(malformed(format!("the last token of slot {slot} in {span:?}"))),
        }
    }

    /// Padding rows write to the Sink, and what they write is nothing that anybody may read.
    fn write_padding(&mut self, rows: usize) {
        let context = Context::of(&[TokenId::MAX]);
        let poison = Cell { position: u32::MAX, token: TokenId::MAX, context };
        for cell in self.cells.iter_mut().take(self.page_size.min(rows)) {
            *cell = Some(poison);
        }
    }

    /// Reads positions back through the page table; each must have been written for this very prefix.
    fn walk(
        &self,
        span: &Span,
        owner: RequestId,
        positions: std::ops::Range<u32>,
        from: Context,
    ) -> Result<Context, Broken> {
        let mut context = from;
        for position in positions {
            let page = self.page(span, owner, position)?;
            let cell = self.cells[self.cell_index(page, position)];
            let cell = cell.ok_or(Broken::Unwritten { owner, position, page })?;
            context = context.then(cell.token);
            if cell.position != position || cell.context != context {
                let (token, found_position) = (cell.token, cell.position);
                return Err(Broken::ForeignRow { owner, position, page, token, found_position });
            }
        }
        Ok(context)
    }

    /// Computes the logits of a span, after all spans were written.
    fn read<'a>(
        &mut self,
        span: &Span,
        owner: RequestId,
        out: &mut std::iter::Peekable<impl Iterator<Item = &'a OutRow>>,
        results: &mut Vec<ScoredToken>,
    ) -> Result<(), Broken> {
        let end = span.first_row + span.rows;
        let (mut context, mut at) = (Context::default(), 0);
        while let Some(row) = out.next_if(|row| row.row < end) {
            let position = span.start + row.row.wrapping_sub(span.first_row);
            if row.row < span.first_row || row.slot != span.slot || row.position != position + 1 {
                let what = format!("{row:?} is not of {span:?}");
                return Err(malformed(what));
            }
            context = self.walk(span, owner, at..position + 1, context)?;
            at = position + 1;
            results.push(self.logits(row, owner, context)?);
        }
        self.walk(span, owner, at..span.start + span.rows, context)?;
        Ok(())
    }

    fn logits(&mut self, row: &OutRow, owner: RequestId, context: Context) -> Result<ScoredToken, Broken> {
        if let Some(target) = row.target {
            return Ok(self.model.score(context, target, &row.params));
        }
        let state = &mut self.slots[row.slot.0 as usize];
        let history = state.history.filter(|_| row.params.has_penalties());
        if row.params.has_penalties() && history.is_none() {
            return Err(Broken::NoHistory { owner, slot: row.slot });
        }
        let chosen = self.model.choose(context, history, &row.params);
        state.last = Some(chosen.token);
        if let Some(history) = &mut state.history {
            history.push(chosen.token);
        }
        Ok(chosen)
    }
}

impl Recording {
    fn of(bucket: Bucket, layers: usize) -> Self {
        let rows = bucket.rows();
        let layer = [
            Operation::Compute(rows),
            Operation::AllGather(rows),
            Operation::Compute(rows),
            Operation::ReduceScatter(rows),
        ];
        let mut operations = layer.repeat(layers);
        operations.push(Operation::Compute(bucket.out_rows()));
        let signature = operations.iter().fold(0, |hash, operation| {
            let (kind, rows) = match operation {
                Operation::Compute(rows) => (1, rows),
                Operation::AllGather(rows) => (2, rows),
                Operation::ReduceScatter(rows) => (3, rows),
            };
            mix(hash ^ (*rows as u64) << 2 ^ kind)
        });
        Self { operations, signature }
    }
}

fn spans(plan: &Plan) -> impl Iterator<Item = (&Span, RequestId)> {
    plan.spans.iter().zip(plan.owners.iter().copied())
}

fn malformed(what: String) -> Broken {
    Broken::Malformed { what }
}

/// Sizes, and that spans cover all rows in order, each slot once, with rising positions.
fn check_shape(bucket: Bucket, plan: &Plan) -> Result<(), Broken> {
    let rows = plan.rows();
    if rows > bucket.rows() || plan.out.len() > bucket.out_rows() {
        return Err(Broken::TooLarge {
            rows,
            out_rows: plan.out.len(),
            bucket_rows: bucket.rows(),
            bucket_out_rows: bucket.out_rows(),
        });
    }
    if plan.positions.len() != rows || plan.cache_rows.len() != rows {
        let (positions, cached) = (plan.positions.len(), plan.cache_rows.len());
        return Err(malformed(format!("{rows} tokens, {positions} positions, {cached} cache rows")));
    }
    if plan.owners.len() != plan.spans.len() {
        return Err(malformed(format!("{} owners of {} spans", plan.owners.len(), plan.spans.len())));
    }
    let mut next = 0;
    for (i, span) in plan.spans.iter().enumerate() {
        if span.first_row != next || span.rows == 0 {
            return Err(malformed(format!("{span:?} should start at row {next} and have rows")));
        }
        if plan.spans[..i].iter().any(|other| other.slot == span.slot) {
            return Err(malformed(format!("slot {} has two spans", span.slot)));
        }
        next += span.rows;
        let positions = plan.positions.get(span.first_row as usize..next as usize).unwrap_or_default();
        if !positions.iter().copied().eq(span.start..span.start + span.rows) {
            return Err(malformed(format!("positions {positions:?} of {span:?}")));
        }
    }
    if next as usize != rows {
        return Err(malformed(format!("spans cover {next} of {rows} rows")));
    }
    Ok(())
}

/// Layers of the recorded step: more than one, so that their order can be wrong.
const LAYERS: usize = 2;

#[cfg(test)]
#[path = "device_tests.rs"]
mod tests;
