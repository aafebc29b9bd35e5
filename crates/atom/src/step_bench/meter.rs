//! Requests of random token ids, given to running ranks, and when their tokens came.

use super::scenarios::Load;
use anyhow::{Context, Result, bail, ensure};
use atom_base::rng::philox;
use atom_base::{LaneId, RequestId, SamplingParams, StopParams, TokenId};
use atom_engine::{Event, Request};
use atom_rank::{Host, StepSink};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// Gives requests to a host and takes in what it says.
pub(super) struct Meter<'a> {
    host: &'a Host,
    seed: u64,
    /// Requests so far: each has its own prompt.
    requests: u64,
}

/// Requests that were submitted together.
pub(super) struct Wave {
    ids: Vec<RequestId>,
    /// When the first of them was submitted.
    pub(super) start: Instant,
    pub(super) tracks: Vec<Track>,
    said: mpsc::Receiver<Said>,
}

/// What is known of one request.
#[derive(Default)]
pub(super) struct Track {
    /// When each of its tokens came.
    pub(super) times: Vec<Instant>,
    pub(super) has_ended: bool,
}

struct Said {
    at: Instant,
    request: usize,
    what: What,
}

enum What {
    Token,
    Ended,
    Failed(String),
}

/// Sends on what a step has for a request, with the time.
struct Ear {
    request: usize,
    said: mpsc::Sender<Said>,
}

impl<'a> Meter<'a> {
    pub(super) fn new(host: &'a Host, seed: u64) -> Self {
        Self { host, seed, requests: 0 }
    }

    pub(super) fn host(&self) -> &'a Host {
        self.host
    }

    /// Submits requests while the ranks rest, so that their first step finds all of them, and wakes the ranks. To one lane, or
    /// dealt to all.
    pub(super) fn together(&mut self, load: Load, lane: Option<LaneId>) -> Result<Wave> {
        let requests = self.requests(load, lane);
        self.host.pause();
        while !self.host.is_at_rest() {
            self.look()?;
        }
        let wave = self.submit(requests);
        self.host.resume();
        wave
    }

    /// Submits a request to each of so many lanes, which sleep, as most requests of a quiet server find them.
    pub(super) fn alone(&mut self, prompt: usize, lanes: usize) -> Result<Wave> {
        let load = Load { requests: 1, prompt, answer: 1 };
        let requests = (0..lanes).map(|lane| self.request(load, Some(LaneId(lane as u16)))).collect();
        self.submit(requests)
    }

    /// Submits requests to a lane whatever the ranks do.
    pub(super) fn beside(&mut self, load: Load, lane: LaneId) -> Result<Wave> {
        let requests = self.requests(load, Some(lane));
        self.submit(requests)
    }

    /// Waits until nothing runs, so that the next wave is alone.
    pub(super) fn settle(&self) -> Result<()> {
        let is_busy = || {
            let runs = |c: atom_engine::Counters| c.running + c.waiting + c.leaving > 0;
            self.host.open_requests() > 0 || self.host.stats().iter().any(|lane| runs(lane.counters))
        };
        while is_busy() {
            self.look()?;
        }
        Ok(())
    }

    /// Ends what still runs of a wave.
    pub(super) fn end(&self, wave: Wave) -> Result<()> {
        wave.ids.iter().for_each(|&id| self.host.abort(id));
        self.settle()
    }

    /// Waits a little; an error if a rank was lost.
    pub(super) fn look(&self) -> Result<()> {
        if let Some(fault) = self.host.health().fault {
            bail!("a rank was lost: {fault}");
        }
        std::thread::sleep(LOOK_EVERY);
        Ok(())
    }

    fn submit(&self, requests: Vec<Request>) -> Result<Wave> {
        let (say, said) = mpsc::channel();
        let ids: Vec<RequestId> = requests.iter().map(|request| request.id).collect();
        let tracks = requests.iter().map(|_| Track::default()).collect();
        let start = Instant::now();
        for (number, request) in requests.into_iter().enumerate() {
            let ear = Ear { request: number, said: say.clone() };
            self.host.submit_by_step(request, Box::new(ear))?;
        }
        Ok(Wave { ids, start, tracks, said })
    }

    fn requests(&mut self, load: Load, lane: Option<LaneId>) -> Vec<Request> {
        (0..load.requests).map(|_| self.request(load, lane)).collect()
    }

    /// A request of random tokens that goes on past any end token.
    fn request(&mut self, load: Load, lane: Option<LaneId>) -> Request {
        let number = self.requests;
        self.requests += 1;
        let vocabulary = self.host.limits().vocab_size as u32;
        Request {
            id: RequestId(number),
            prompt: tokens(self.seed, number, load.prompt, vocabulary).into(),
            // The likeliest token: what the loads have that ours are compared with.
            sampling: Arc::new(SamplingParams { temperature: 0.0, ..SamplingParams::default() }),
            stop: StopParams {
                max_tokens: load.answer as u32,
                stop_token_ids: Box::default(),
                ignore_eos: true,
            },
            lane,
            session: None,
            grammar: None,
        }
    }
}

impl Wave {
    /// Takes in what is said until `enough` holds.
    pub(super) fn hear(&mut self, enough: impl Fn(&[Track]) -> bool) -> Result<()> {
        while !enough(&self.tracks) {
            let Said { at, request, what } =
                self.said.recv_timeout(SILENCE_MAX).context("the ranks fell silent")?;
            let track = &mut self.tracks[request];
            match what {
                What::Token => track.times.push(at),
                What::Ended => track.has_ended = true,
                What::Failed(error) => bail!("a request failed: {error}"),
            }
            // Whoever waits for a token of a request that has ended would wait for ever.
            let all_ended = self.tracks.iter().all(|track| track.has_ended);
            ensure!(!all_ended || enough(&self.tracks), "the requests ended before enough steps were seen");
        }
        Ok(())
    }

    /// Takes in all of it.
    pub(super) fn hear_all(&mut self) -> Result<()> {
        self.hear(|tracks| tracks.iter().all(|track| track.has_ended))
    }

    /// From the first submission to the last token so far.
    pub(super) fn whole(&self) -> Duration {
        let last = self.tracks.iter().filter_map(|track| track.times.last()).max();
        last.map_or(Duration::ZERO, |last| *last - self.start)
    }

    /// Tokens so far.
    pub(super) fn tokens(&self) -> usize {
        self.tracks.iter().map(|track| track.times.len()).sum()
    }
}

impl StepSink for Ear {
    fn take(&mut self, events: &mut dyn Iterator<Item = Event>) {
        let at = Instant::now();
        for event in events {
            let what = match event {
                Event::Token(_) => What::Token,
                Event::Finished(_) => What::Ended,
                Event::Failed(error) => What::Failed(error.to_string()),
                Event::Started { .. } | Event::PromptScored { .. } => continue,
            };
            // Whoever measured may be gone.
            let _ = self.said.send(Said { at, request: self.request, what });
        }
    }
}

/// Ids of the whole vocabulary, each as likely as any other, the same for the same seed and number.
fn tokens(seed: u64, number: u64, count: usize, vocabulary: u32) -> Vec<TokenId> {
    let block = |block: usize| {
        let counter = [block as u32, number as u32, (number >> 32) as u32, 0];
        philox(counter, [seed as u32, (seed >> 32) as u32])
    };
    // Scaling has a bias of vocabulary / 2^32, a thousandth at the most in published ones.
    let id = |word: u32| ((u64::from(word) * u64::from(vocabulary)) >> 32) as TokenId;
    (0..count.div_ceil(4)).flat_map(block).map(id).take(count).collect()
}

/// How often to look whether ranks rest.
const LOOK_EVERY: Duration = Duration::from_micros(200);
/// Longer than any step, and no longer than anybody waits.
const SILENCE_MAX: Duration = Duration::from_secs(120);

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn prompts_are_their_own_and_of_the_whole_vocabulary() {
        let of = |number| tokens(3, number, 101, 500);
        assert_eq!(of(1), of(1));
        assert_eq!(of(1).len(), 101);
        assert_ne!(of(1), of(2));
        assert_ne!(of(1), tokens(4, 1, 101, 500));
        let seen: BTreeSet<TokenId> = (0..100).flat_map(of).collect();
        assert_eq!(seen, (0..500).collect());
    }
}
