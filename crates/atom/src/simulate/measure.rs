//! Times of chosen steps on running ranks.
//!
//! In every lane one request decodes all the time: the *metronome*. Its tokens number the steps, and the
//! time from one to the next is what a step takes, all of it: exchange, settling, planning, replay. Other
//! requests come and go beside it. What a step had in it follows from when their tokens came.

use crate::launch::Running;
use anyhow::{Context, Result, ensure};
use atom_base::{LaneId, RequestId, SamplingParams, StopParams, TokenId};
use atom_engine::{Event, Request};
use atom_group::Activity;
use atom_sim::StepWork;
use std::collections::HashMap;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// Steps to measure: beside the metronome, in the first `busy` lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Point {
    pub(super) busy: usize,
    pub(super) kind: Kind,
    /// Positions that rows read beside their own.
    pub(super) context: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    /// So many more requests of a lane decode.
    Decode(usize),
    /// A prompt has so many new tokens.
    Prefill(usize),
}

/// A measured step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen {
    pub(super) work: StepWork,
    pub(super) us: f64,
}

/// Running ranks and what they said.
pub(super) struct Meter<'a> {
    running: &'a Running,
    lanes: usize,
    /// Rows of the lattice's buckets.
    edges: Vec<usize>,
    vocabulary: u32,
    page_size: usize,
    next_id: u64,
    words: u64,
    said: mpsc::Receiver<Said>,
    say: mpsc::Sender<Said>,
    log: Log,
}

/// What a lane had in a step.
#[derive(Clone, Copy)]
struct LaneWork {
    rows: u64,
    out_rows: u64,
    pairs: u64,
    reads: u64,
}

struct Said {
    at: Instant,
    id: RequestId,
    what: What,
}

enum What {
    Started(usize),
    Token,
    Ended,
    Failed(String),
}

/// What is known of the requests of a round.
#[derive(Default)]
struct Log {
    tracks: HashMap<RequestId, Track>,
    metronomes: Vec<RequestId>, // [lanes]
    /// `[lanes]`: tokens of each metronome so far.
    beats: Vec<usize>,
    /// When the first lane's metronome spoke.
    times: Vec<Instant>,
}

struct Track {
    lane: usize,
    prompt: usize,
    cached: usize,
    /// Step of the first token, and tokens so far.
    first: Option<usize>,
    tokens: usize,
    ended: bool,
}

impl<'a> Meter<'a> {
    pub(super) fn new(running: &'a Running, edges: Vec<usize>, page_size: usize) -> Self {
        let (say, said) = mpsc::channel();
        let limits = running.host.limits();
        let (lanes, vocabulary) = (limits.lanes, limits.vocab_size as u32);
        Self {
            running,
            lanes,
            edges,
            vocabulary,
            page_size,
            next_id: 0,
            words: 1,
            said,
            say,
            log: Log::default(),
        }
    }

    /// Measures every point once, in order.
    pub(super) fn round(&mut self, points: &[Point]) -> Result<Vec<Vec<Seen>>> {
        self.start_metronomes()?;
        self.wait_beats(WARM_BEATS)?;
        let seen = points.iter().map(|point| self.measure(*point)).collect::<Result<Vec<_>>>()?;
        for id in std::mem::take(&mut self.log.metronomes) {
            self.running.host.abort(id);
        }
        // What is aborted says nothing more; whoever was aborted in a step is gone after it.
        while self.running.host.stats().iter().any(|lane| lane.counters.running > 0) {
            std::thread::sleep(LOOK_EVERY);
        }
        while self.said.try_recv().is_ok() {}
        Ok(seen)
    }

    /// All in one step, so that their counts agree: submitted while everybody rests.
    fn start_metronomes(&mut self) -> Result<()> {
        let host = &self.running.host;
        host.pause();
        let resting = || host.health().lanes.iter().all(|lane| lane.activity == Activity::Parked);
        while !resting() {
            std::thread::sleep(LOOK_EVERY);
        }
        self.log = Log { beats: vec![0; self.lanes], ..Log::default() };
        let tokens = host.limits().max_model_len - 2;
        for lane in 0..self.lanes {
            let prompt = self.fresh(1);
            let id = self.submit(lane, prompt, tokens)?;
            self.log.metronomes.push(id);
        }
        self.running.host.resume();
        Ok(())
    }

    fn measure(&mut self, point: Point) -> Result<Vec<Seen>> {
        self.wait_beats(1)?;
        let from = self.log.times.len();
        let mut ids = Vec::new();
        for lane in 0..point.busy {
            match point.kind {
                Kind::Decode(requests) => {
                    for index in 0..requests {
                        let prompt = self.fixed(lane * 1000 + index + 1, point.context.max(1));
                        ids.push(self.submit(lane, prompt, DECODED_TOKENS)?);
                    }
                }
                Kind::Prefill(rows) => {
                    // What is cached ends with a page.
                    let context = point.context / self.page_size * self.page_size;
                    let mut prompt = self.fixed(lane * 1000, context);
                    prompt.extend(self.fresh(rows));
                    ids.push(self.submit(lane, prompt, 1)?);
                }
            }
        }
        while !ids.iter().all(|id| self.log.tracks[id].ended) {
            self.take_one()?;
        }
        // The step after the last one ends its time.
        self.wait_beats(1)?;
        let until = self.log.times.len().min(self.log.beats.iter().copied().min().unwrap_or(0));
        let seen = (from.max(1)..until).filter_map(|step| self.seen(point, step, &ids)).collect();
        self.log.tracks.retain(|id, _| !ids.contains(id));
        Ok(seen)
    }

    /// A step, if it is one that the point is about.
    fn seen(&self, point: Point, step: usize, ids: &[RequestId]) -> Option<Seen> {
        // The metronome's one prompt token gave its first.
        let beat = step as u64 + 1;
        let mut lanes = vec![LaneWork { rows: 1, out_rows: 1, pairs: beat, reads: beat }; self.lanes];
        for track in ids.iter().map(|id| &self.log.tracks[id]) {
            let Some(first) = track.first.filter(|&first| (first..first + track.tokens).contains(&step))
            else {
                continue;
            };
            let lane = &mut lanes[track.lane];
            lane.out_rows += 1;
            let (new, start) = if step > first {
                (1, (track.prompt + step - first - 1) as u64)
            } else {
                ((track.prompt - track.cached) as u64, track.cached as u64)
            };
            lane.rows += new;
            lane.pairs += new * (2 * start + new + 1) / 2;
            lane.reads += start + new;
        }
        let expected = match point.kind {
            Kind::Decode(requests) => 1 + requests as u64,
            Kind::Prefill(rows) => 1 + rows as u64,
        };
        let is_meant = |(lane, l): (usize, &LaneWork)| {
            let is_busy = lane < point.busy;
            let is_decode = matches!(point.kind, Kind::Decode(_));
            l.rows == if is_busy { expected } else { 1 } && (l.out_rows == l.rows || !is_decode)
        };
        if !lanes.iter().enumerate().all(is_meant) || self.mixes(point, step, ids) {
            return None;
        }
        let largest = lanes.iter().map(|l| l.rows).max()? as usize;
        let bucket = *self.edges.iter().find(|&&edge| edge >= largest)?;
        let mut work = StepWork::new(self.lanes, bucket);
        for lane in lanes {
            work.rows.add(lane.rows);
            work.out_rows.add(lane.out_rows);
            work.pairs.add(lane.pairs);
            work.reads.add(lane.reads);
        }
        let us = (self.log.times[step] - self.log.times[step - 1]).as_secs_f64() * 1e6;
        Some(Seen { work, us })
    }

    /// True if some request of a decode point still prefills in that step.
    fn mixes(&self, point: Point, step: usize, ids: &[RequestId]) -> bool {
        matches!(point.kind, Kind::Decode(_))
            && ids.iter().any(|id| self.log.tracks[id].first.is_some_and(|first| first >= step))
    }

    fn submit(&mut self, lane: usize, prompt: Vec<TokenId>, tokens: usize) -> Result<RequestId> {
        self.next_id += 1;
        let (id, say) = (RequestId(self.next_id), self.say.clone());
        let tokens = tokens.min(self.running.host.limits().max_model_len - prompt.len());
        let (cached, first, ended) = (0, None, false);
        let track = Track { lane, prompt: prompt.len(), cached, first, tokens: 0, ended };
        self.log.tracks.insert(id, track);
        let request = Request {
            id,
            prompt: prompt.into(),
            sampling: Arc::new(SamplingParams::default()),
            stop: StopParams { max_tokens: tokens as u32, stop_token_ids: Box::default(), ignore_eos: true },
            lane: Some(LaneId(lane as u16)),
            session: None,
            grammar: None,
        };
        let sink = move |event| {
            let at = Instant::now();
            let what = match event {
                Event::Started { cached_tokens } => What::Started(cached_tokens as usize),
                Event::Token(_) => What::Token,
                Event::Finished(_) => What::Ended,
                Event::PromptScored { .. } => return,
                Event::Failed(error) => What::Failed(error.to_string()),
            };
            // Whoever measured may be gone.
            let _ = say.send(Said { at, id, what });
        };
        self.running.host.submit(request, Box::new(sink))?;
        Ok(id)
    }

    fn wait_beats(&mut self, beats: usize) -> Result<()> {
        let until: Vec<_> = self.log.beats.iter().map(|b| b + beats).collect();
        while self.log.beats.iter().zip(&until).any(|(beats, until)| beats < until) {
            self.take_one()?;
        }
        Ok(())
    }

    /// Takes in what is said next. A lane tells its oldest request's token first: the metronome's.
    fn take_one(&mut self) -> Result<()> {
        let Said { at, id, what } = self.said.recv_timeout(SILENCE_MAX).context("the ranks fell silent")?;
        let Log { tracks, metronomes, beats, times } = &mut self.log;
        if let Some(lane) = metronomes.iter().position(|metronome| *metronome == id) {
            ensure!(
                !matches!(what, What::Ended),
                "the context is too short to measure in: raise --max-model-len"
            );
            if matches!(what, What::Token) {
                beats[lane] += 1;
                if lane == 0 {
                    times.push(at);
                }
            }
            return Ok(());
        }
        let Some(track) = tracks.get_mut(&id) else { return Ok(()) };
        match what {
            What::Started(cached) => track.cached = cached,
            What::Token => {
                track.first.get_or_insert(beats[track.lane] - 1);
                track.tokens += 1;
            }
            What::Ended => track.ended = true,
            What::Failed(error) => anyhow::bail!("a rank failed: {error}"),
        }
        Ok(())
    }

    /// Tokens that nobody asked for before.
    fn fresh(&mut self, count: usize) -> Vec<TokenId> {
        self.words += 1;
        self.tokens(self.words, count)
    }

    /// The same tokens for the same key.
    fn fixed(&self, key: usize, count: usize) -> Vec<TokenId> {
        self.tokens(key as u64 | 1 << 40, count)
    }

    fn tokens(&self, key: u64, count: usize) -> Vec<TokenId> {
        let mut word = key.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let next = |_| {
            word = word.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            (word >> 40) as u32 % self.vocabulary
        };
        (0..count).map(next).collect()
    }
}

/// Steps of a round before anything is measured.
const WARM_BEATS: usize = 5;
/// Tokens of each request of a decode point.
const DECODED_TOKENS: usize = 8;
/// How often to look whether ranks rest.
const LOOK_EVERY: Duration = Duration::from_millis(1);
/// Longer than any step, and no longer than anybody waits.
const SILENCE_MAX: Duration = Duration::from_secs(60);
