//! The step trace of a world: what a server's `--step-trace` writes, without a server.

use atom_group::{Facts, GroupState, Outcome, TraceEncoder, TraceHeader};

/// A trace of one group, in memory.
pub(crate) struct Tape {
    encoder: TraceEncoder,
    bytes: Vec<u8>,
}

impl Tape {
    pub(crate) fn new(state: &GroupState) -> Self {
        let mut bytes = Vec::new();
        let encoder = TraceEncoder::new(&TraceHeader::of(state, 1), &mut bytes);
        Self { encoder, bytes }
    }

    pub(crate) fn step(&mut self, now_us: u64, facts: &[Facts], outcome: &Outcome) {
        self.encoder.step(0, now_us, facts, outcome, &mut self.bytes);
    }

    pub(crate) fn finish(self) -> Vec<u8> {
        let Self { encoder, mut bytes } = self;
        encoder.end(&mut bytes);
        bytes
    }
}
