//! Every request of a load: what it asked for, what it was told, and when.

use super::report::{LoadCounts, LoadReport};
use super::token;
use atom_base::{FinishReason, RequestId, ScoredToken};
use atom_engine::{Event, Events, LaneLoad, Placement};

/// One request.
struct Track {
    arrived_us: f64,
    last_us: f64,
    prompt: usize,
    output: usize,
    generated: usize,
    placement: Placement,
    started: bool,
    ended: bool,
}

/// All of them, with what every lane has open: as a host's outbox keeps it.
pub(super) struct Requests {
    tracks: Vec<Track>,
    loads: Vec<LaneLoad>, // [lanes]
    refused: u64,
    now_us: f64,
    tokens: u64,
    ended_in_step: usize,
    /// (arrival, first token) and (token, next token) of this step, µs.
    firsts: Vec<(f64, f64)>,
    nexts: Vec<(f64, f64)>,
    ends: Vec<(f64, f64)>,
    spare: Vec<ScoredToken>,
}

impl Requests {
    pub(super) fn new(lanes: usize) -> Self {
        Self {
            tracks: Vec::new(),
            loads: vec![LaneLoad::default(); lanes],
            refused: 0,
            now_us: 0.0,
            tokens: 0,
            ended_in_step: 0,
            firsts: Vec::new(),
            nexts: Vec::new(),
            ends: Vec::new(),
            spare: Vec::new(),
        }
    }

    /// What every lane has open.
    pub(super) fn loads(&self) -> &[LaneLoad] {
        &self.loads
    }

    /// Takes a request; returns its number.
    pub(super) fn open(&mut self, at_us: f64, prompt: usize, output: usize, placement: Placement) -> u64 {
        let load = &mut self.loads[usize::from(placement.lane.0)];
        load.requests += 1;
        load.tokens += prompt;
        load.backlog += placement.prefill_rows;
        let (arrived_us, last_us) = (at_us, at_us);
        let (generated, started, ended) = (0, false, false);
        self.tracks.push(Track { arrived_us, last_us, prompt, output, generated, placement, started, ended });
        self.tracks.len() as u64 - 1
    }

    pub(super) fn refuse(&mut self) {
        self.refused += 1;
    }

    /// What is told from now on is told at `now_us`.
    pub(super) fn begin_step(&mut self, now_us: f64) {
        (self.now_us, self.ended_in_step) = (now_us, 0);
    }

    /// Requests that ended since the step began.
    pub(super) fn ended_in_step(&self) -> usize {
        self.ended_in_step
    }

    /// New tokens for so many rows.
    pub(super) fn results(&mut self, count: usize) -> Vec<ScoredToken> {
        let mut results = std::mem::take(&mut self.spare);
        results.extend((0..count as u64).map(|at| token(self.tokens + at)));
        self.tokens += count as u64;
        results
    }

    /// Keeps the room of what [`results`](Self::results) gave.
    pub(super) fn take_back(&mut self, mut results: Vec<ScoredToken>) {
        results.clear();
        self.spare = results;
    }

    /// Tells what happened in the step.
    pub(super) fn tell(&mut self, report: &mut LoadReport) {
        self.firsts.drain(..).for_each(|(arrived, now)| report.first_token(arrived, now));
        self.nexts.drain(..).for_each(|(last, now)| report.next_token(last, now));
        self.ends.drain(..).for_each(|(arrived, now)| report.end(arrived, now));
    }

    /// Counts everything; asserts that everybody ended with all that was asked for.
    pub(super) fn conclude(&self, counts: &mut LoadCounts) {
        for (id, track) in self.tracks.iter().enumerate() {
            assert!(track.ended, "request {id} has not ended in a group that is idle");
            assert_eq!(track.generated, track.output, "request {id} ended early");
        }
        counts.requests = self.tracks.len() as u64 + self.refused;
        counts.refused = self.refused;
        counts.finished = self.tracks.iter().filter(|t| t.ended).count() as u64;
        counts.prompt_tokens = self.tracks.iter().map(|t| t.prompt as u64).sum();
        counts.generated_tokens = self.tracks.iter().map(|t| t.generated as u64).sum();
        assert!(
            self.loads.iter().all(|load| *load == LaneLoad::default()),
            "lanes without requests have load"
        );
    }
}

impl Events for Requests {
    fn emit(&mut self, request: RequestId, event: Event) {
        let track = &mut self.tracks[request.0 as usize];
        assert!(!track.ended, "request {request} goes on after its end");
        let load = &mut self.loads[usize::from(track.placement.lane.0)];
        if !std::mem::replace(&mut track.started, true) {
            load.backlog -= track.placement.prefill_rows;
        }
        match event {
            Event::Started { .. } => {}
            Event::Token(_) => {
                track.generated += 1;
                let gaps = if track.generated == 1 { &mut self.firsts } else { &mut self.nexts };
                gaps.push((track.last_us, self.now_us));
                track.last_us = self.now_us;
            }
            Event::Finished(FinishReason::Length) => {
                track.ended = true;
                load.requests -= 1;
                load.tokens -= track.prompt;
                self.ended_in_step += 1;
                self.ends.push((track.arrived_us, self.now_us));
            }
            Event::Finished(_) | Event::Failed(_) | Event::PromptScored { .. } => {
                unreachable!("nothing of a load asks for it: {event:?}")
            }
        }
    }
}
