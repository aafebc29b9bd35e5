//! What happens in a world, drawn from its seed before it starts: sizes, arrivals, disturbances.

use crate::dice::Dice;
use crate::model::FakeModel;
use crate::options::WorldArgs;
use atom_base::{LaneId, RequestId, SamplingParams, StopParams, TokenId};
use atom_engine::{EngineLimits, Request, SchedulerConfig};
use atom_group::{Alignment, Lattice, LatticeArgs, Policy};
use std::ops::Range;
use std::sync::Arc;

/// Everything that is not decided by the code under simulation.
pub(crate) struct Script {
    pub(crate) scheduler: SchedulerConfig,
    pub(crate) model: FakeModel,
    pub(crate) limits: EngineLimits,
    pub(crate) lattice: Lattice,
    pub(crate) record_all: bool,
    pub(crate) policy: Policy,
    /// In order of time.
    pub(crate) arrivals: Vec<Arrival>,
    /// When each lane asks to leave.
    pub(crate) exits_us: Vec<u64>,
    /// When each lane is asked to rest, and for how long: about the same time for all of them.
    pub(crate) pauses_us: Vec<Vec<Range<u64>>>, // [lanes][pauses]
    /// Of 1000 ticks of a lane, in how many its youngest is made to give way.
    pub(crate) preempt_per_mille: u32,
    /// Of 1000 ticks of a lane, in how many it comes late.
    pub(crate) late_per_mille: u32,
    /// Of 1000 steps of a lane, in how many its part fails and it goes on.
    pub(crate) torn_per_mille: u32,
    pub(crate) calamity: Calamity,
}

/// A request on its way.
pub(crate) struct Arrival {
    pub(crate) at_us: u64,
    pub(crate) request: Request,
    pub(crate) abort_at_us: Option<u64>,
    /// The [`atom_engine::Refusal`] that it must meet at the door, by name.
    pub(crate) refusal: Option<&'static str>,
}

/// What ends the group before its time, at the first opportunity from `step` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Calamity {
    None,
    /// The lane can't go on, and says so.
    Fatal {
        lane: usize,
        step: u64,
    },
    /// The lane does not come in time.
    Late {
        lane: usize,
        step: u64,
    },
    /// The lane makes a recording that fits no other's.
    WrongRecording {
        lane: usize,
        step: u64,
    },
    /// The lane reads other facts than its peers.
    TornFacts {
        lane: usize,
        step: u64,
    },
}

impl Script {
    pub(crate) fn draw(seed: u64, args: &WorldArgs) -> Self {
        let mut dice = Dice::new(seed, STREAM);
        let model = draw_model(&mut dice);
        let scheduler = draw_sizes(&mut dice, &model);
        let sizes = dice
            .chance(300)
            .then(|| (0..dice.within(1..=3)).map(|_| dice.within(1..=scheduler.rows_max) as u32).collect());
        let (rows_max, max_num_seqs) = (scheduler.rows_max as u32, scheduler.max_num_seqs as u32);
        let limits = EngineLimits {
            max_model_len: scheduler.max_model_len,
            cache_tokens: (scheduler.pages - 1) * scheduler.page_size,
            queue_max: dice.within(2..=40),
            max_num_seqs: scheduler.max_num_seqs,
            vocab_size: model.vocab as usize,
            lanes: args.lanes,
            grammars: false,
        };
        let arrivals = draw_arrivals(&mut dice, args, &limits);
        let last_us = arrivals.last().map_or(0, |a| a.at_us);
        let exits_us = (0..args.lanes).map(|_| last_us + dice.within(0..=50_000) as u64).collect();
        let pauses_us = draw_pauses(&mut dice, args.lanes, last_us);
        let calamity = if args.faults { draw_calamity(&mut dice, args.lanes) } else { Calamity::None };
        let mut policy = draw_policy(&mut dice);
        if matches!(calamity, Calamity::TornFacts { .. }) {
            // A wrong time must not be acted upon before it is found: only the bucket would differ then,
            // and no exchange would come.
            policy.step_ms_max = None;
        }
        let multiple_of = dice.pick(&[1, 1, 1, 2, 3, 4]);
        let mut rate = |rates: &[u32]| if args.faults { dice.pick(rates) } else { 0 };
        Self {
            preempt_per_mille: rate(&[0, 0, 20, 200]),
            late_per_mille: rate(&[0, 0, 10, 300]),
            torn_per_mille: rate(&[0, 0, 0, 5, 50]),
            record_all: dice.chance(300),
            lattice: Lattice::new(&LatticeArgs {
                rows_max,
                max_num_seqs,
                sizes,
                multiple_of,
                rows_workspace_max: None,
            })
            .expect("sizes are drawn within their bounds"),
            policy,
            pauses_us,
            calamity,
            scheduler,
            model,
            limits,
            arrivals,
            exits_us,
        }
    }
}

fn draw_model(dice: &mut Dice) -> FakeModel {
    // Small vocabularies make prompts and continuations meet in the prefix cache.
    let vocab = dice.pick(&[2, 3, 10, 60]);
    FakeModel {
        vocab,
        eos: dice.below(vocab as usize) as TokenId,
        eos_per_mille: dice.pick(&[0, 0, 30, 100]),
        nan_per_mille: dice.pick(&[0, 0, 0, 5]),
    }
}

/// Caches hold from half of the longest request to a few of them: oversubscribed most of the time.
fn draw_sizes(dice: &mut Dice, model: &FakeModel) -> SchedulerConfig {
    let page_size = dice.pick(&[1, 2, 3, 4, 8, 16]);
    let max_num_seqs = dice.within(1..=8);
    // Few have prompts that are worth cutting to an edge; they take longer to run.
    let is_wide = dice.chance(80);
    let max_model_len = if is_wide { dice.within(150..=400) } else { dice.within(4..=72) };
    let longest = max_model_len.div_ceil(page_size);
    let pages = dice.within(longest.div_ceil(2).max(2)..=longest * 2 + 6) + 1;
    let spread = if is_wide { 400 } else { dice.pick(&[1, 8, 64]) };
    SchedulerConfig {
        pages,
        page_size,
        max_num_seqs,
        rows_max: max_num_seqs + dice.below(spread),
        max_model_len,
        prefix_cache: dice.chance(850),
        eos: Box::new([model.eos]),
    }
}

fn draw_arrivals(dice: &mut Dice, args: &WorldArgs, limits: &EngineLimits) -> Vec<Arrival> {
    let tokens = |dice: &mut Dice, count: usize| -> Vec<TokenId> {
        (0..count).map(|_| dice.below(limits.vocab_size) as TokenId).collect()
    };
    let stems: Vec<_> = (0..3).map(|_| tokens(dice, limits.max_model_len)).collect();
    let gap_us_max = dice.pick(&[0, 1000, 8000, 60_000]);
    let abort_per_mille = if args.faults { dice.pick(&[0, 100, 500]) } else { 0 };
    let pinned_per_mille = dice.pick(&[0, 300, 900]);
    let mut at_us = 0;
    let arrival = |id: usize| {
        at_us += dice.within(0..=gap_us_max) as u64;
        // A pause now and then, so that the group parks.
        at_us += if dice.chance(30) { 300_000 } else { 0 };
        let length = dice.within(1..=limits.max_model_len.min(limits.cache_tokens));
        // Some are a stem and nothing else, so that one meets another that is still being computed.
        let shared = if dice.chance(300) { length } else { dice.within(0..=length) };
        let mut prompt = stems[dice.below(3)][..shared].to_vec();
        prompt.extend(tokens(dice, length - prompt.len()));
        let mut request = draw_request(dice, id as u64 + 1, prompt, limits);
        // Uneven load: most of the pinned ones go to the first lane.
        request.lane = dice.chance(pinned_per_mille).then(|| {
            let lane = if dice.chance(700) { 0 } else { dice.below(args.lanes) };
            LaneId(lane as u16)
        });
        let refusal = dice.chance(40).then(|| spoil(dice, &mut request, limits));
        let abort_at_us = dice.chance(abort_per_mille).then(|| at_us + dice.within(0..=40_000) as u64);
        Arrival { at_us, request, abort_at_us, refusal }
    };
    (0..args.requests).map(arrival).collect()
}

fn draw_request(dice: &mut Dice, id: u64, prompt: Vec<TokenId>, limits: &EngineLimits) -> Request {
    let room = limits.max_model_len.min(limits.cache_tokens) - prompt.len();
    let max_tokens = if dice.chance(60) { 0 } else { dice.within(1..=24).min(room) };
    let stop_tokens = if dice.chance(200) { dice.within(1..=2) } else { 0 };
    let sampling = SamplingParams {
        seed: dice.below(4) as u64,
        choice: dice.below(2) as u32,
        presence_penalty: if dice.chance(200) { 0.5 } else { 0.0 },
        logprobs: dice.chance(300).then(|| dice.below(3) as u8),
        prompt_logprobs: dice.chance(150).then(|| dice.below(3) as u8),
        ..SamplingParams::default()
    };
    Request {
        id: RequestId(id),
        prompt: prompt.into(),
        sampling: Arc::new(sampling),
        stop: StopParams {
            max_tokens: max_tokens as u32,
            stop_token_ids: (0..stop_tokens).map(|_| dice.below(limits.vocab_size) as TokenId).collect(),
            ignore_eos: dice.chance(200),
        },
        lane: None,
        session: None,
        grammar: None,
    }
}

/// Makes a request one that the door must keep out; says how.
fn spoil(dice: &mut Dice, request: &mut Request, limits: &EngineLimits) -> &'static str {
    match dice.below(4) {
        0 => {
            request.prompt = Arc::default();
            "EmptyPrompt"
        }
        1 => {
            let most = limits.max_model_len.min(limits.cache_tokens);
            request.stop.max_tokens = most as u32;
            let too_long = request.prompt.len() + most > limits.max_model_len;
            if too_long { "TooLong" } else { "NeverFits" }
        }
        2 => {
            let known = request.prompt.len() - 1;
            request.prompt =
                request.prompt[..known].iter().copied().chain([limits.vocab_size as TokenId]).collect();
            "UnknownToken"
        }
        _ => {
            request.lane = Some(LaneId(limits.lanes as u16));
            "NoSuchLane"
        }
    }
}

/// Anything that a user may set, and now and then nothing.
fn draw_policy(dice: &mut Dice) -> Policy {
    let alignment = dice.chance(600).then(|| Alignment {
        target_fill_per_mille: dice.within(50..=1000) as u32,
        hold_steps_max: dice.within(1..=30) as u32,
        partial_hold_steps_max: dice.pick(&[0, 2, 2, 8, 30]),
        stall_steps: dice.within(1..=10) as u32,
        kv_high_per_mille: dice.chance(500).then(|| dice.within(500..=1000) as u32),
        kv_low_per_mille: dice.chance(100).then(|| dice.below(200) as u32),
        queue_ms_max: dice.chance(300).then(|| dice.within(1..=100) as u32),
    });
    Policy {
        alignment,
        // A row takes 2.1 ms, most of the largest of these steps 9 ms and what they attend to.
        step_ms_max: dice.chance(300).then(|| dice.within(2..=10) as u32),
        padding_per_mille_max: dice.chance(700).then(|| dice.within(0..=600) as u32),
    }
}

fn draw_pauses(dice: &mut Dice, lanes: usize, last_us: u64) -> Vec<Vec<Range<u64>>> {
    let count = if dice.chance(400) { dice.within(1..=3) } else { 0 };
    let starts: Vec<_> = (0..count).map(|_| dice.below(last_us as usize + 50_000) as u64).collect();
    let mut pause = |start: u64| {
        // Some lanes hear of it late, and one may not hear of it at all before it is over.
        let from = start + dice.below(20_000) as u64;
        from..from + dice.within(1000..=60_000) as u64
    };
    (0..lanes).map(|_| starts.iter().map(|&start| pause(start)).collect()).collect()
}

fn draw_calamity(dice: &mut Dice, lanes: usize) -> Calamity {
    let (lane, step) = (dice.below(lanes), dice.within(1..=120) as u64);
    match dice.below(16) {
        0 => Calamity::Fatal { lane, step },
        // A lane alone has nobody to be late for, or to differ from.
        1 if lanes > 1 => Calamity::Late { lane, step },
        2 if lanes > 1 => Calamity::WrongRecording { lane, step: step % 6 },
        3 if lanes > 1 => Calamity::TornFacts { lane, step },
        _ => Calamity::None,
    }
}

/// Keeps the script's numbers apart from those that are drawn while the world runs.
const STREAM: u32 = 1;
