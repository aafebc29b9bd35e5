//! One rank's device as the loops see it: model, recordings by bucket, page tables.

use crate::collectives::SharedCollectives;
use atom_base::ScoredToken;
use atom_engine::Plan;
use atom_group::{BUCKETS_MAX, Bucket};
use atom_model::Model;
use atom_ops::{Backend, ExpertRows, OpsError, PageTables, Recording, Reserve, StepInputs, StepShape};
use std::time::Duration;

/// A loaded rank.
pub(crate) struct Device {
    backend: Box<dyn Backend>,
    model: Model,
    /// Of the epoch that runs.
    collectives: Option<SharedCollectives>,
    recordings: [Option<Recorded>; BUCKETS_MAX],
    tables: Vec<u32>, // [slots, stride]
    stride: usize,
    top: StepShape,
    lane_in_group: usize,
    results: Vec<ScoredToken>, // [out rows]
    /// Recordings can count experts.
    counts_experts: bool,
}

#[derive(Clone, Copy)]
struct Recorded {
    number: usize,
    signature: u64,
}

impl Device {
    /// Reserves everything that steps touch.
    pub(crate) fn new(
        mut backend: Box<dyn Backend>,
        model: Model,
        reserve: &Reserve,
        lane_in_group: usize,
        counts_experts: bool,
    ) -> Result<Self, OpsError> {
        backend.reserve(reserve)?;
        Ok(Self {
            backend,
            model,
            top: reserve.top,
            collectives: None,
            recordings: [None; BUCKETS_MAX],
            tables: vec![0; reserve.slots * reserve.pages_per_sequence],
            stride: reserve.pages_per_sequence,
            lane_in_group,
            results: vec![ScoredToken::NOT_A_NUMBER; reserve.top.out_rows],
            counts_experts,
        })
    }

    /// Meets others through `collectives` from now on, with room for the largest step. What was in flight
    /// is dropped.
    pub(crate) fn join(&mut self, collectives: SharedCollectives) {
        self.backend.abandon();
        for collective in self.model.record(self.top).collectives() {
            collectives.reserve(collective.comm, collective.elements);
        }
        self.collectives = Some(collectives);
    }

    /// Records a bucket and returns the signature of its collectives. What an earlier epoch recorded is
    /// still right: a recording depends on the layout only.
    pub(crate) fn record(&mut self, bucket: Bucket) -> Result<u64, OpsError> {
        if let Some(recorded) = &self.recordings[bucket.index()] {
            return Ok(recorded.signature);
        }
        let lanes = self.top.lanes;
        let shape = StepShape { rows: bucket.rows(), out_rows: bucket.out_rows(), lanes };
        let mut recording: Recording = self.model.record(shape);
        if self.counts_experts {
            recording = recording.counting_experts();
        }
        let signature = recording.signature();
        let number = self.backend.record(recording)?;
        self.recordings[bucket.index()] = Some(Recorded { number, signature });
        Ok(signature)
    }

    /// Records a bucket anew for one step and gives up what was recorded of it: how every step begins
    /// under `--enforce-eager`.
    pub(crate) fn record_anew(&mut self, bucket: Bucket) -> Result<u64, OpsError> {
        if let Some(recorded) = self.recordings[bucket.index()].take() {
            self.backend.forget(recorded.number);
        }
        self.record(bucket)
    }

    /// Begins a replay of a bucket for `plan`. `group_rows[l]` is what lane `l` was granted. Returns the
    /// recording's signature; [`finish`](Self::finish) waits for the end.
    pub(crate) fn launch(
        &mut self,
        bucket: Bucket,
        plan: &Plan,
        group_rows: &[u32],
        patience: Duration,
    ) -> Result<u64, OpsError> {
        assert!(plan.rows() <= bucket.rows(), "{} rows in a bucket of {}", plan.rows(), bucket.rows());
        assert!(self.heeds_masks() || !plan.has_masks(), "masks on a device that heeds none");
        let recorded = self.recordings[bucket.index()].expect("settle replays only what was recorded");
        for entry in &plan.table_entries {
            self.tables[entry.slot.0 as usize * self.stride + entry.index as usize] = entry.page.0;
        }
        let inputs = StepInputs {
            tokens: &plan.tokens,
            positions: &plan.positions,
            cache_rows: &plan.cache_rows,
            spans: &plan.spans,
            out: &plan.out,
            slot_loads: &plan.slot_loads,
            tables: PageTables { entries: &self.tables, stride: self.stride },
            group_rows,
            lane: self.lane_in_group,
        };
        let collectives = self.collectives.as_ref().expect("a rank joins before it runs");
        collectives.set_patience(patience);
        self.backend.launch(recorded.number, &inputs, collectives)?;
        Ok(recorded.signature)
    }

    /// Waits for the oldest step that was launched, of so many rows with logits: one result for each, on a
    /// rank that samples.
    pub(crate) fn finish(&mut self, out_rows: usize) -> Result<&[ScoredToken], OpsError> {
        let results = &mut self.results[..out_rows];
        self.backend.finish(results)?;
        Ok(results)
    }

    /// See [`Backend::heeds_masks`].
    pub(crate) fn heeds_masks(&self) -> bool {
        self.backend.heeds_masks()
    }

    /// See [`Backend::count_experts`].
    pub(crate) fn count_experts(&mut self, counts: bool) {
        self.backend.count_experts(counts);
    }

    /// See [`Backend::expert_rows`].
    pub(crate) fn expert_rows(&self) -> ExpertRows {
        self.backend.expert_rows()
    }
}
