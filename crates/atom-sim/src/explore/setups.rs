//! The setups that are explored: small ones with every change, larger ones by hand.

use super::{Budget, Plant, Setup};
use atom_group::{Alignment, Policy};

const NONE: Budget = Budget {
    requests: 0,
    aborts: 0,
    preemptions: 0,
    pauses: 0,
    exits: 0,
    faults: 0,
    deaths: 0,
    closes: 0,
    errors: 0,
    divergences: 0,
    silences: 0,
};

/// Prompts are held for two steps at the most.
fn aligned() -> Policy {
    let alignment = Alignment {
        target_fill_per_mille: 1000,
        hold_steps_max: 2,
        partial_hold_steps_max: 1,
        stall_steps: 1,
        kv_high_per_mille: None,
        kv_low_per_mille: None,
        queue_ms_max: None,
    };
    Policy { alignment: Some(alignment), ..Policy::default() }
}

/// A step of four rows is over the bound while somebody decodes, one of two is not.
fn capped() -> Policy {
    Policy { step_ms_max: Some(1), ..Policy::default() }
}

fn setup(name: &str, lanes: usize, requests: u8) -> Setup {
    Setup {
        name: format!("{lanes} lanes, {name}"),
        lanes,
        fine: false,
        from_start: false,
        policy: aligned(),
        replay_us: |rows| 400 * rows,
        kinds: vec![(1, 2), (5, 1)],
        budget: Budget { requests, ..NONE },
        restarts_max: None,
        plant: None,
    }
}

/// With every atomic operation a move of its own.
fn fine(name: &str, lanes: usize, budget: Budget) -> Setup {
    let base = setup(&format!("fine, {name}"), lanes, 0);
    Setup { fine: true, kinds: vec![(1, 1)], budget, ..base }
}

/// What continuous integration explores.
pub fn small() -> Vec<Setup> {
    (1..=4)
        .flat_map(|lanes| {
            let fine = all_fine(lanes, FINE_SMALL[lanes - 1]);
            coarse(lanes).into_iter().chain(fine).chain(all_supervised(lanes, SUPERVISED_SMALL[lanes - 1]))
        })
        .collect()
}

/// For patient machines.
pub fn deep(lanes: usize) -> Vec<Setup> {
    let base = setup("deep", lanes, 0);
    let requests = [4, 4, 3, 3][lanes - 1];
    let everything =
        Budget { requests: requests - 1, aborts: 1, preemptions: 1, pauses: 1, exits: 1, ..NONE };
    let mut all = vec![
        Setup {
            kinds: vec![(1, 1), (3, 2), (5, 1)],
            budget: Budget { requests: requests + 1, ..NONE },
            ..base.clone()
        },
        Setup { budget: everything, name: format!("{lanes} lanes, deep, everything"), ..base },
    ];
    all.extend(all_fine(lanes, usize::MAX).into_iter().skip(FINE_SMALL[lanes - 1]));
    all.extend(all_supervised(lanes, usize::MAX).into_iter().skip(SUPERVISED_SMALL[lanes - 1]));
    all.push(fine("two requests and a wish to leave", lanes, Budget { requests: 2, exits: 1, ..NONE }));
    all
}

fn coarse(lanes: usize) -> Vec<Setup> {
    let requests = [4, 3, 2, 2][lanes - 1];
    let few = Budget { requests: requests - 1, ..NONE };
    let base = setup("work", lanes, requests);
    vec![
        Setup { budget: Budget { exits: 1, ..base.budget }, ..base.clone() },
        Setup { policy: capped(), ..setup("work under a bound of time", lanes, requests) },
        Setup {
            policy: Policy::NONE,
            from_start: true,
            ..setup("work from before the start", lanes, few.requests)
        },
        Setup { budget: Budget { pauses: 1, exits: 1, ..few }, ..setup("pause, leave", lanes, 0) },
        Setup { budget: Budget { aborts: 1, exits: 1, ..few }, ..setup("abort, leave", lanes, 0) },
        Setup { budget: Budget { pauses: 2, aborts: 1, ..few }, ..setup("pauses, abort", lanes, 0) },
        Setup {
            budget: Budget { faults: 1, closes: 1, deaths: 1, preemptions: 1, ..few },
            ..setup("calamities", lanes, 0)
        },
    ]
}

/// The first `many` of the fine setups: the later ones have more orders.
fn all_fine(lanes: usize, many: usize) -> Vec<Setup> {
    let budgets = [
        ("nothing comes", NONE),
        ("a close", Budget { closes: 1, ..NONE }),
        ("a death", Budget { deaths: 1, ..NONE }),
        ("a request", Budget { requests: 1, ..NONE }),
        ("a pause", Budget { pauses: 1, ..NONE }),
        ("a request and a close", Budget { requests: 1, closes: 1, ..NONE }),
        ("a request and a death", Budget { requests: 1, deaths: 1, ..NONE }),
        ("a request and a wish to leave", Budget { requests: 1, exits: 1, ..NONE }),
        ("a request in a pause", Budget { requests: 1, pauses: 1, ..NONE }),
        ("a request in a pause, and a wish to leave", Budget { requests: 1, pauses: 1, exits: 1, ..NONE }),
    ];
    budgets.into_iter().take(many).map(|(name, budget)| fine(name, lanes, budget)).collect()
}

/// With a supervisor, and a group that may form again so often.
fn supervised(name: &str, lanes: usize, restarts_max: u32, budget: Budget) -> Setup {
    let base = setup(&format!("supervised, {name}"), lanes, 0);
    Setup { policy: Policy::NONE, kinds: vec![(1, 1)], budget, restarts_max: Some(restarts_max), ..base }
}

/// Groups that lose ranks: the first `many`, the later ones have more orders.
fn all_supervised(lanes: usize, many: usize) -> Vec<Setup> {
    let one = Budget { requests: 1, ..NONE };
    let budgets = [
        ("an error", 1, Budget { errors: 1, ..one }),
        ("two errors, no restart", 0, Budget { errors: 2, ..one }),
        ("an error and a wish to leave", 1, Budget { errors: 1, exits: 1, ..one }),
        ("a silence, no request", 1, Budget { silences: 1, ..NONE }),
        ("two errors", 1, Budget { errors: 2, ..one }),
        ("an error and a divergence", 1, Budget { errors: 1, divergences: 1, ..one }),
        ("an error and an end", 1, Budget { errors: 1, closes: 1, ..one }),
        ("a silence", 1, Budget { silences: 1, ..one }),
        ("an error and a silence", 1, Budget { errors: 1, silences: 1, ..one }),
        ("three errors", 2, Budget { errors: 3, ..one }),
        ("two silences", 2, Budget { silences: 2, ..one }),
    ];
    let of = |(name, restarts, budget)| supervised(name, lanes, restarts, budget);
    budgets.into_iter().take(many).map(of).collect()
}

/// A setup that comes to the fault.
pub fn planted(plant: Plant) -> Setup {
    let name = format!("{plant:?}");
    let base = match plant {
        Plant::NeverRings | Plant::LooksBeforeCounting => fine(&name, 2, Budget { requests: 1, ..NONE }),
        Plant::OneBoard => fine(&name, 2, Budget { requests: 1, ..NONE }),
        Plant::SkipsWithoutRows | Plant::OwnBucket => setup(&name, 2, 1),
        Plant::PausesAlone => {
            Setup { budget: Budget { requests: 1, pauses: 1, ..NONE }, ..setup(&name, 2, 0) }
        }
        Plant::MailBeforeCalls => {
            Setup { budget: Budget { requests: 1, exits: 1, ..NONE }, ..setup(&name, 2, 0) }
        }
        Plant::WaitsStayOpen | Plant::EveryComplaintCounts | Plant::StateKept => {
            supervised(&name, 2, 1, Budget { requests: 1, errors: 1, ..NONE })
        }
        Plant::MailForAnybody | Plant::SeatsKept => {
            supervised(&name, 1, 1, Budget { requests: 1, silences: 1, ..NONE })
        }
        Plant::AnswersBeforeRed | Plant::LooksOnce => {
            supervised(&name, 1, 0, Budget { requests: 1, errors: 1, ..NONE })
        }
    };
    Setup { plant: Some(plant), ..base }
}

/// Fine setups that continuous integration has time for, by lanes.
const FINE_SMALL: [usize; 4] = [10, 10, 7, 4];
/// Supervised ones.
const SUPERVISED_SMALL: [usize; 4] = [11, 8, 5, 2];
