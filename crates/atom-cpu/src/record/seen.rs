//! Which experts the rows of a step chose.

use atom_ops::{Op, Recording};
use std::sync::atomic::{AtomicU64, Ordering};

/// A bit for every expert behind every router of a recording. Workers set bits while a step runs; the meetings of the
/// step order what the last look sees.
pub(crate) struct ExpertsSeen {
    words: Box<[AtomicU64]>, // [routers, stride]
    stride: usize,
}

impl ExpertsSeen {
    /// With no room if the recording was not made to count.
    pub(crate) fn new(recording: &Recording) -> Self {
        let experts = |op: &Op| match op {
            Op::Route { spec, .. } => Some(spec.experts),
            _ => None,
        };
        let routers: Vec<usize> = recording.ops().iter().filter_map(experts).collect();
        let stride = routers.iter().copied().max().unwrap_or(0).div_ceil(64);
        let count = if recording.counts_experts() { routers.len() * stride } else { 0 };
        Self { words: (0..count).map(|_| AtomicU64::new(0)).collect(), stride }
    }

    /// Before a step.
    pub(crate) fn clear(&self) {
        self.words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
    }

    /// Rows chose these behind router `number`, as numbers of routes.
    pub(crate) fn add(&self, number: usize, chosen: &[f32]) {
        for expert in chosen.iter().map(|&expert| expert as usize) {
            self.words[number * self.stride + expert / 64].fetch_or(1 << (expert % 64), Ordering::Relaxed);
        }
    }

    /// Different ones, summed over routers.
    pub(crate) fn count(&self) -> u64 {
        self.words.iter().map(|word| u64::from(word.load(Ordering::Relaxed).count_ones())).sum()
    }

    /// Whether there is room to count in.
    pub(crate) fn can_count(&self) -> bool {
        !self.words.is_empty()
    }
}
