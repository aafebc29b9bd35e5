//! Load in virtual time: conservation, repeatability, and loads whose outcome is arithmetic.

#![allow(clippy::unwrap_used, reason = "the exemption for tests stops at their helper functions")]

use atom_engine::{LoadBalance, SchedulerConfig};
use atom_group::{Alignment, LatticeArgs, Policy};
use atom_sim::{Length, LoadArgs, LoadError, LoadReport, Machine, Shape, Source, StepCost, TERMS, run_load};
use std::ops::RangeInclusive;

/// A step of 2 ms and 0.1 ms for each row of the bucket.
fn cost() -> StepCost {
    let zero = StepCost { machine: Machine::default(), parameters: [0.0; TERMS.len()] };
    ["step_us = 2000", "bucket_row_us = 100"].into_iter().try_fold(zero, StepCost::with).unwrap()
}

fn shape(prompt: RangeInclusive<usize>, output: RangeInclusive<usize>) -> Shape {
    Shape { prompt: Length(prompt), output: Length(output), prefixes: 0, prefix_tokens: 0 }
}

fn args(lanes: usize, source: Source) -> LoadArgs {
    LoadArgs {
        lanes,
        cost: cost(),
        record_us: 30_000,
        record_all: true,
        lattice: LatticeArgs { rows_max: 256, max_num_seqs: 16, ..LatticeArgs::default() },
        scheduler: SchedulerConfig {
            pages: 257,
            page_size: 16,
            max_num_seqs: 16,
            rows_max: 256,
            max_model_len: 2048,
            prefix_cache: true,
            eos: Box::default(),
        },
        queue_max: 1024,
        policy: Policy { alignment: Some(Alignment::default()), ..Policy::default() },
        balance: LoadBalance::Work,
        source,
        seconds: 10.0,
        warm_up_seconds: 1.0,
        seed: 7,
    }
}

fn mixed(lanes: usize, rate: f64) -> LoadArgs {
    args(lanes, Source::Open { rate, shape: shape(20..=600, 1..=80) })
}

fn run(args: &LoadArgs) -> LoadReport {
    run_load(args).unwrap()
}

#[test]
fn equal_seeds_give_equal_reports_and_others_others() {
    for policy in [Policy::NONE, Policy { step_ms_max: Some(8), ..mixed(1, 1.0).policy }] {
        let args = LoadArgs { policy, ..mixed(3, 20.0) };
        let report = run(&args);
        assert_eq!(run(&args), report);
        assert_eq!(run(&args).to_string(), report.to_string());
        assert_ne!(run(&LoadArgs { seed: 8, ..args }), report);
    }
}

/// The run itself asserts that every request got as many tokens as it asked for, that what was told
/// is what schedulers counted, and that no lane's load is left.
#[test]
fn every_request_ends_and_tokens_are_counted_once() {
    let closed = Source::Closed { concurrency: 9, shape: shape(1..=300, 1..=40) };
    let recorded = Source::parse_recorded("0 5 3\n0.5, 600, 1 # late\n\n# nothing\n0.5 1 200\n").unwrap();
    let tight = |mut args: LoadArgs| {
        args.scheduler.pages = 60;
        args
    };
    for (args, preempts) in [
        (mixed(1, 8.0), false),
        (mixed(4, 30.0), false),
        (tight(mixed(2, 12.0)), true),
        (args(3, closed), false),
        (LoadArgs { record_all: false, ..mixed(2, 5.0) }, false),
    ] {
        let report = run(&args);
        let c = &report.counts;
        assert!(c.requests > 20, "{report}");
        assert_eq!(c.finished + c.refused, c.requests, "{report}");
        assert!(c.rows > 0 && c.steps > 0 && c.generated_tokens >= c.finished);
        assert_eq!(c.preemptions > 0, preempts, "{report}");
        assert_eq!(c.records > 0, !args.record_all, "{report}");
    }
    let counts = run(&args(2, recorded)).counts;
    assert_eq!((counts.finished, counts.prompt_tokens, counts.generated_tokens), (3, 606, 204));
}

/// 16 users a lane, prompts of one token: every step has 16 rows in every lane and gives 16 tokens.
#[test]
fn a_saturated_group_decodes_at_the_rate_of_its_steps() {
    for lanes in [1, 4] {
        let source = Source::Closed { concurrency: 16 * lanes, shape: shape(1..=1, 50..=50) };
        let report = run(&LoadArgs { policy: Policy::NONE, ..args(lanes, source) });
        let expected = (16 * lanes) as f64 / (2e-3 + 16.0 * 100e-6);
        let got = report.tokens_per_second();
        assert!((got / expected - 1.0).abs() < 0.01, "{lanes} lanes: {got} for {expected}");
        assert_eq!(report.padding_share(), 0.0, "{report}");
        assert_eq!(report.next_token_us.max() / 10, 360, "{report}");
    }
}

/// One user, prompts of 200 tokens in steps of 200 rows, 49 steps of one row each after that.
#[test]
fn a_request_alone_takes_its_steps() {
    let source = Source::Closed { concurrency: 1, shape: shape(200..=200, 50..=50) };
    let mut args = args(1, source);
    args.scheduler.prefix_cache = false;
    let report = run(&args);
    let (first_ms, next_ms) = (2.0 + 0.1 * 200.0, 2.0 + 0.1);
    let expected = 50.0 / (first_ms + 49.0 * next_ms) * 1000.0;
    let got = report.tokens_per_second();
    assert!((got / expected - 1.0).abs() < 0.01, "{got} for {expected}");
    for (histogram, ms) in [(&report.first_token_us, first_ms), (&report.next_token_us, next_ms)] {
        for quantile in [0.0, 0.5, 1.0] {
            let got = histogram.value_at_quantile(quantile) as f64 / 1000.0;
            assert!((got / ms - 1.0).abs() < 0.002, "{got} for {ms} ms");
        }
    }
}

/// Below saturation as many tokens leave as are asked for; above it, no more than steps give.
#[test]
fn an_open_load_is_served_up_to_saturation_and_refused_beyond() {
    let output = 50;
    let at = |rate| {
        let source = Source::Open { rate, shape: shape(1..=1, output..=output) };
        let args = args(2, source);
        run(&LoadArgs { seconds: 60.0, queue_max: 4, policy: Policy::NONE, ..args })
    };
    let saturated = 32.0 / (2e-3 + 16.0 * 100e-6);
    let half = saturated / 2.0 / output as f64;
    let (below, above) = (at(half), at(4.0 * half));
    assert_eq!(below.counts.refused, 0, "{below}");
    assert!((below.tokens_per_second() / (saturated / 2.0) - 1.0).abs() < 0.05, "{below}");
    assert!((above.tokens_per_second() / saturated - 1.0).abs() < 0.01, "{above}");
    assert!(above.counts.refused > above.counts.requests / 4, "{above}");
    assert!(above.busy_share() > 0.99 && below.busy_share() <= 1.0, "{above}");
}

#[test]
fn shared_beginnings_are_computed_once_where_they_are_kept() {
    let shape = Shape { prefixes: 3, prefix_tokens: 400, ..shape(450..=500, 5..=5) };
    let args = args(2, Source::Open { rate: 10.0, shape });
    let report = run(&args);
    let share = report.counts.cached_tokens as f64 / report.counts.prompt_tokens as f64;
    assert!(share > 0.7, "{report}");
    let mut without = args;
    without.scheduler.prefix_cache = false;
    let without = run(&without);
    assert_eq!(without.counts.cached_tokens, 0);
    assert!(without.counts.rows > 2 * report.counts.rows, "{without}");
}

/// Everything at its largest: a group as large as facts are exchanged for.
#[test]
fn a_group_of_1024_lanes_serves_a_mixed_load() {
    let shape = Shape { prefixes: 4, prefix_tokens: 64, ..shape(32..=300, 4..=24) };
    let mut args = args(1024, Source::Open { rate: 4000.0, shape });
    args.scheduler.page_size = 64;
    args.scheduler.pages = 65;
    let args = LoadArgs { seconds: 0.5, warm_up_seconds: 0.1, ..args };
    let report = run(&args);
    let c = &report.counts;
    assert_eq!((c.finished, c.refused), (c.requests, 0), "{report}");
    assert!((1800..2200).contains(&c.requests), "{report}");
    assert!(report.alignment_share() > 0.0 && report.padding_share() > 0.0, "{report}");
}

#[test]
fn impossible_loads_are_refused_with_the_numbers() {
    let refused = |args: &LoadArgs| run_load(args).unwrap_err().to_string();
    assert!(refused(&mixed(1025, 1.0)).contains("--lanes 1025"));
    assert!(refused(&mixed(1, 0.0)).contains("--rate 0"));
    assert!(refused(&LoadArgs { warm_up_seconds: 10.0, ..mixed(1, 1.0) }).contains("--warm-up 10"));
    assert!(refused(&LoadArgs { seconds: f64::NAN, ..mixed(1, 1.0) }).contains("--seconds NaN"));
    let long = args(1, Source::Open { rate: 1.0, shape: shape(2000..=2000, 49..=49) });
    assert!(refused(&long).contains("2049"));
    for (text, line) in [("1 2", 1), ("0 1 1\n5 1 1\n4 1 1", 3), ("0 0 1", 1), ("0 1 1 1", 1), ("x 1 1", 1)] {
        let error = Source::parse_recorded(text).unwrap_err();
        assert!(matches!(error, LoadError::Recorded { line: found, .. } if found == line), "{text}: {error}");
    }
    for text in ["", "0", "5..3", "..", "1..x"] {
        assert_eq!(text.parse::<Length>(), Err(LoadError::Length(text.to_owned())));
    }
    assert_eq!("512..2048".parse(), Ok(Length(512..=2048)));
}
