//! The last steps of every lane, for whoever looks: a ring of fixed size that the lane overwrites. A step
//! allocates nothing for it, takes no lock and never waits, whether nobody looks or many do.

use atom_base::{LaneId, StepNo};
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// One step of one lane, as it was taken in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepRecord {
    /// Counts the lane's steps from 1, over all epochs: what [`Host::steps_after`](crate::Host::steps_after)
    /// goes on from.
    pub number: u64,
    /// Whose step it was.
    pub lane: LaneId,
    /// The group's count, equal on all of its lanes.
    pub step: StepNo,
    /// Of the group, whose steps are counted anew in each.
    pub epoch: u32,
    /// When its results were taken in, in microseconds since the host's start.
    pub at_us: u64,
    /// Rows of the recording that the whole group replayed.
    pub bucket_rows: u32,
    /// Rows of this lane's requests that decode.
    pub decode_rows: u32,
    /// Rows of this lane's prompts.
    pub prefill_rows: u32,
    /// In the exchange before it, for the other lanes.
    pub wait_us: u32,
    /// From its launch, or the end of the step before it, to its results.
    pub replay_us: u32,
    /// Requests that ran after it.
    pub running: u32,
    /// Requests that waited after it.
    pub waiting: u32,
    /// Age of the oldest waiting request when the step was planned.
    pub oldest_wait_ms: u32,
    /// Share of the KV cache that requests held when the step was planned, in thousandths.
    pub kv_per_mille: u16,
    /// Prompts of the group waited for other lanes' prompts.
    pub is_held: bool,
    /// Different experts of a layer that this lane's rows chose, summed over layers; 0 unless they are
    /// [counted](crate::Host::count_experts).
    pub distinct_experts: u32,
}

/// One lane's ring. The lane's first rank writes, anyone reads.
///
/// Each place is a sequence lock: its number is taken away before the words change and put back after, so
/// a reader that saw the same number twice saw one record. A thread that lost its seat in the middle of a
/// record could spoil a later one only by sleeping for a whole round of the ring; then a viewer sees one
/// wrong step, and nothing else depends on it.
pub(crate) struct StepRing {
    /// Records begun since start.
    begun: AtomicU64,
    places: Box<[Place; STEPS_KEPT]>,
}

#[derive(Default)]
struct Place {
    number: AtomicU64,
    words: [AtomicU64; StepRecord::WORDS],
}

impl StepRing {
    pub(crate) fn new() -> Self {
        Self { begun: AtomicU64::new(0), places: Box::new(std::array::from_fn(|_| Place::default())) }
    }

    /// Adds a record in place of the oldest one; its number and lane are not the writer's to say.
    pub(crate) fn push(&self, record: &StepRecord) {
        let number = self.begun.fetch_add(1, Ordering::Release) + 1;
        let place = self.place(number);
        place.number.store(0, Ordering::Relaxed);
        // No word is seen changed by who still sees the old number after it.
        fence(Ordering::Release);
        for (cell, word) in place.words.iter().zip(record.to_words()) {
            cell.store(word, Ordering::Relaxed);
        }
        place.number.store(number, Ordering::Release);
    }

    /// Appends the records after number `seen` that are still here, in order. One that is being written
    /// has no later one behind it, so whoever goes on from the last number gets it the next time.
    pub(crate) fn after(&self, seen: u64, lane: LaneId, out: &mut Vec<StepRecord>) {
        let last = self.begun.load(Ordering::Acquire);
        let kept = last.saturating_sub(STEPS_KEPT as u64);
        out.extend((seen.max(kept) + 1..=last).filter_map(|number| self.read(number, lane)));
    }

    fn read(&self, number: u64, lane: LaneId) -> Option<StepRecord> {
        let place = self.place(number);
        let is_here = place.number.load(Ordering::Acquire) == number;
        let words = std::array::from_fn(|at| place.words[at].load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        let is_whole = is_here && place.number.load(Ordering::Relaxed) == number;
        is_whole.then(|| StepRecord { number, lane, ..StepRecord::from_words(words) })
    }

    fn place(&self, number: u64) -> &Place {
        &self.places[(number % STEPS_KEPT as u64) as usize]
    }
}

impl StepRecord {
    const WORDS: usize = 8;

    fn to_words(self) -> [u64; Self::WORDS] {
        let pair = |high: u32, low: u32| u64::from(high) << 32 | u64::from(low);
        [
            self.step.0,
            self.at_us,
            pair(self.epoch, self.bucket_rows),
            pair(self.decode_rows, self.prefill_rows),
            pair(self.wait_us, self.replay_us),
            pair(self.running, self.waiting),
            pair(self.oldest_wait_ms, u32::from(self.kv_per_mille) << 1 | u32::from(self.is_held)),
            u64::from(self.distinct_experts),
        ]
    }

    /// The reverse, but for number and lane.
    fn from_words(words: [u64; Self::WORDS]) -> Self {
        let [step, at_us, sizes, rows, times, requests, rest, experts] = words;
        let (high, low) = (|word: u64| (word >> 32) as u32, |word: u64| word as u32);
        Self {
            number: 0,
            lane: LaneId(0),
            step: StepNo(step),
            at_us,
            epoch: high(sizes),
            bucket_rows: low(sizes),
            decode_rows: high(rows),
            prefill_rows: low(rows),
            wait_us: high(times),
            replay_us: low(times),
            running: high(requests),
            waiting: low(requests),
            oldest_wait_ms: high(rest),
            kv_per_mille: (low(rest) >> 1) as u16,
            is_held: low(rest) & 1 == 1,
            distinct_experts: low(experts),
        }
    }
}

/// Steps kept of each lane, 72 bytes each: a viewer who looks ten times a second misses none up to 2,560
/// steps a second, and one who has just come sees a picture's width of the past.
pub(crate) const STEPS_KEPT: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    /// A record in which every field follows from one number.
    fn record(n: u64) -> StepRecord {
        let low = n as u32;
        StepRecord {
            number: n,
            lane: LaneId(7),
            step: StepNo(n),
            at_us: n * 3,
            epoch: low + 1,
            bucket_rows: low + 2,
            decode_rows: low + 3,
            prefill_rows: low + 4,
            wait_us: low + 5,
            replay_us: low + 6,
            running: low + 7,
            waiting: low + 8,
            oldest_wait_ms: low + 9,
            kv_per_mille: (n % 1001) as u16,
            is_held: n % 2 == 1,
            distinct_experts: low + 10,
        }
    }

    fn after(ring: &StepRing, seen: u64) -> Vec<StepRecord> {
        let mut out = Vec::new();
        ring.after(seen, LaneId(7), &mut out);
        out
    }

    #[test]
    fn a_reader_goes_on_from_what_it_has_seen_and_misses_what_was_overwritten() {
        let ring = StepRing::new();
        assert_eq!(after(&ring, 0), []);
        let kept = STEPS_KEPT as u64;
        for n in 1..=3 * kept + 5 {
            ring.push(&record(n));
            assert_eq!(after(&ring, n - 1), [record(n)]);
            assert_eq!(after(&ring, n), []);
            let first = n.saturating_sub(kept) + 1;
            assert_eq!(after(&ring, 0), (first..=n).map(record).collect::<Vec<_>>());
            assert_eq!(after(&ring, n + 9), [], "a viewer of another ring asks for what is to come");
        }
    }

    /// The writer goes round the ring as fast as it can; whatever a reader gets was written as it is.
    #[test]
    fn no_record_is_a_mixture_of_two() {
        let (ring, done) = (StepRing::new(), AtomicBool::new(false));
        let last = 40 * STEPS_KEPT as u64;
        std::thread::scope(|scope| {
            let readers: Vec<_> = (0..2)
                .map(|_| {
                    scope.spawn(|| {
                        let mut seen = 0;
                        while !done.load(Ordering::Acquire) || seen < last {
                            for found in after(&ring, seen) {
                                assert!(found.number > seen, "{} after {seen}", found.number);
                                assert_eq!(found, record(found.number));
                                seen = found.number;
                            }
                        }
                    })
                })
                .collect();
            for n in 1..=last {
                ring.push(&record(n));
            }
            done.store(true, Ordering::Release);
            readers.into_iter().for_each(|reader| reader.join().unwrap());
        });
    }
}
