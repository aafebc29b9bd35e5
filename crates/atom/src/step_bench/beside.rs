//! Streams that decode in one lane while another one computes prompts: how long they wait for their tokens, and what it
//! costs the prompts.

use super::Bench;
use super::meter::{Track, Wave};
use super::report::{Figure, Unit};
use super::scenarios::Load;
use anyhow::{Result, ensure};
use atom_base::LaneId;
use atom_engine::EngineLimits;
use std::str::FromStr;
use std::time::Instant;

/// So many streams in lane 1, and prompts for lane 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Beside {
    streams: usize,
    prompts: Load,
}

impl FromStr for Beside {
    type Err = String;

    /// `32+20x8192`
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("'{text}' is no load; write STREAMS+REQUESTSxTOKENS, such as 32+20x8192");
        let (streams, prompts) = text.split_once('+').ok_or_else(wrong)?;
        let streams = streams.parse().ok().filter(|&n: &usize| n > 0).ok_or_else(wrong)?;
        let prompts: Load = prompts.parse().map_err(|_| wrong())?;
        if prompts.answer == 1 { Ok(Self { streams, prompts }) } else { Err(wrong()) }
    }
}

impl Beside {
    pub(super) fn name(&self) -> String {
        let Load { requests, prompt, .. } = self.prompts;
        format!("{} streams beside {requests} x {prompt}", self.streams)
    }

    /// What is warmed up.
    pub(super) fn prompts(&self) -> Load {
        self.prompts
    }

    /// Most requests of a lane.
    pub(super) fn requests_of_a_lane(&self) -> usize {
        self.streams.max(self.prompts.requests)
    }

    /// The streams with contexts of so many tokens, as long as a lane can hold them; refused with the numbers if that is less
    /// than some tokens.
    fn streams(&self, context: usize, limits: &EngineLimits, page_size: usize) -> Result<Load> {
        ensure!(
            limits.lanes > 1,
            "--beside has streams in one lane and prompts in another, and there is one; use -tp 2 --enable-dp-attention"
        );
        let room = (limits.cache_tokens / self.streams / page_size * page_size).min(limits.max_model_len);
        ensure!(
            room >= context + STREAMED_MIN,
            "--beside: each of {} streams has room for {room} tokens in its lane, and --context {context} and {STREAMED_MIN} \
             more are needed; raise --max-model-len or --kv-cache-memory, or have fewer streams",
            self.streams
        );
        Ok(Load { requests: self.streams, prompt: context, answer: room - context })
    }
}

impl Bench<'_> {
    /// Times from token to token of all streams while the prompts are computed, the 99th percentile of them, and tokens of
    /// prompts each second, beside streams and alone.
    pub(super) fn beside(
        &mut self,
        beside: &Beside,
        context: usize,
        page_size: usize,
    ) -> Result<Vec<Figure>> {
        let streams = beside.streams(context, self.meter.host().limits(), page_size)?;
        let prompts = beside.prompts;
        let tokens = (prompts.requests * prompts.prompt) as f64;
        let mut alone = self.meter.together(prompts, Some(LaneId(0)))?;
        alone.hear_all()?;
        self.meter.settle()?;

        let mut streaming = self.meter.together(streams, Some(LaneId(1)))?;
        streaming.hear(|tracks| tracks.iter().all(|track| !track.times.is_empty()))?;
        let mut wave = self.meter.beside(prompts, LaneId(0))?;
        wave.hear_all()?;
        let (start, end) = (wave.start, wave.start + wave.whole());
        // Tokens come from another thread than ours: those up to the end are here when a later one is.
        streaming
            .hear(|tracks| tracks.iter().all(|track| track.has_ended || track.times.last() > Some(&end)))?;
        ensure!(
            streaming.tracks.iter().all(|track| track.times.last() > Some(&end)),
            "streams of {} tokens had ended before the prompts were computed; raise --max-model-len",
            streams.answer
        );
        let waits = waits_within(&streaming.tracks, start, end);
        self.meter.end(streaming)?;
        ensure!(
            !waits.is_empty(),
            "the prompts were computed between two tokens of the streams: use more of them"
        );
        let rate = |wave: &Wave| tokens / wave.whole().as_secs_f64();
        let name = beside.name();
        let figure = |what: &str, unit, seen| Figure::new(format!("{name}: {what}"), unit, seen);
        Ok(vec![
            figure("p99", Unit::Milliseconds, vec![percentile(&waits, 99)]),
            figure("next token", Unit::Milliseconds, waits),
            figure("prefill", Unit::TokensEachSecond, vec![rate(&wave)]),
            figure("alone", Unit::TokensEachSecond, vec![rate(&alone)]),
        ])
    }
}

/// Milliseconds from token to token, of those that came within.
fn waits_within(tracks: &[Track], start: Instant, end: Instant) -> Vec<f64> {
    let waits = tracks.iter().flat_map(|track| track.times.windows(2));
    let within = waits.filter(|pair| pair[1] >= start && pair[1] <= end);
    within.map(|pair| (pair[1] - pair[0]).as_secs_f64() * 1e3).collect()
}

/// The least of `seen` that so many of a hundred don't exceed.
fn percentile(seen: &[f64], of_hundred: usize) -> f64 {
    let mut sorted = seen.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[(sorted.len() * of_hundred).div_ceil(100).max(1) - 1]
}

/// Tokens of each stream at the least: a few would be over before a prompt is.
const STREAMED_MIN: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn loads_are_read_and_what_is_none_is_refused() {
        let prompts = Load { requests: 20, prompt: 8192, answer: 1 };
        assert_eq!("32+20x8192".parse(), Ok(Beside { streams: 32, prompts }));
        for wrong in ["", "32", "0+20x8192", "32+20", "32+20x8192+4", "x+1x1", "32+0x1"] {
            let refusal = wrong.parse::<Beside>().unwrap_err();
            assert!(refusal.contains(&format!("'{wrong}'")) && refusal.contains("32+20x8192"), "{refusal}");
        }
    }

    #[test]
    fn streams_take_what_room_a_lane_has() {
        let limits = EngineLimits {
            max_model_len: 2048,
            cache_tokens: 40_000,
            queue_max: 100,
            max_num_seqs: 32,
            vocab_size: 1000,
            lanes: 2,
            grammars: false,
        };
        let beside: Beside = "32+4x100".parse().unwrap();
        let streams =
            |context, limits: &EngineLimits| beside.streams(context, limits, 64).map_err(|e| e.to_string());
        // 40,000 / 32 = 1,250, in pages of 64.
        assert_eq!(streams(1000, &limits), Ok(Load { requests: 32, prompt: 1000, answer: 216 }));
        assert!(streams(1200, &limits).unwrap_err().contains("1216 tokens"));
        let one_lane = EngineLimits { lanes: 1, ..limits };
        assert!(streams(1000, &one_lane).unwrap_err().contains("--enable-dp-attention"));
    }

    #[test]
    fn waits_are_those_that_end_while_prompts_are_computed() {
        let zero = Instant::now();
        let at = |ms: u64| zero + Duration::from_millis(ms);
        let track =
            |times: &[u64]| Track { times: times.iter().map(|&ms| at(ms)).collect(), has_ended: false };
        let tracks = [track(&[0, 10, 30, 31, 90]), track(&[5, 95])];
        assert_eq!(waits_within(&tracks, at(10), at(31)), [10.0, 20.0, 1.0]);
        assert_eq!(percentile(&[3.0, 1.0, 2.0], 99), 3.0);
        assert_eq!(percentile(&(1..=200).map(f64::from).collect::<Vec<_>>(), 99), 198.0);
        assert_eq!(percentile(&[7.0], 99), 7.0);
    }
}
