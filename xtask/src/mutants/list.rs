//! The faults: each a replacement of one text that stands exactly once in its file.

/// A fault that somebody might make, and the test that must notice.
pub(crate) struct Mutant {
    pub(crate) name: &'static str,
    pub(crate) file: &'static str,
    pub(crate) find: &'static str,
    pub(crate) replace: &'static str,
    pub(crate) test: Test,
}

/// A test by its place.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Test {
    pub(crate) package: &'static str,
    /// A file of `tests`, or `lib` for the unit tests.
    pub(crate) target: &'static str,
    pub(crate) name: &'static str,
}

const fn unit(package: &'static str, name: &'static str) -> Test {
    Test { package, target: "lib", name }
}

const fn group(name: &'static str) -> Test {
    unit("atom-group", name)
}

const fn explored(name: &'static str) -> Test {
    Test { package: "atom-sim", target: "explore", name }
}

const TWO_LANES: Test = explored("no_order_of_events_breaks_a_group_of_two_lanes");
const LOSSES_OF_ONE: Test = explored("no_order_of_losses_breaks_a_group_of_one_lane");
const LOSSES_OF_TWO: Test = explored("no_order_of_losses_breaks_a_group_of_two_lanes");
const FINE: Test = explored("b_16_no_order_of_operations_of_one_or_two_lanes_loses_a_wake_up");

/// In an order in which little is built again: by the packages of their tests, from the bottom.
pub(crate) const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "bucket-edge-off-by-one",
        file: "crates/atom-group/src/lattice.rs",
        find: "partition_point(|b| b.rows < rows.0)",
        replace: "partition_point(|b| b.rows <= rows.0).min(self.buckets.len() - 1)",
        test: group("settle::tests::every_bucket_holds_exactly_up_to_its_edge"),
    },
    Mutant {
        name: "hold-without-bound",
        file: "crates/atom-group/src/hold.rs",
        find: "        if self.steps >= self.limit(knobs) {\n            return Some(Release::Limit);\n        }\n",
        replace: "",
        test: group("hold::tests::each_reason_ends_a_hold_when_its_time_has_come"),
    },
    Mutant {
        name: "pause-decided-by-one-lane",
        file: "crates/atom-group/src/settle.rs",
        find: "if all(FactsFlags::PAUSE) && ",
        replace: "if facts.iter().any(|f| f.flags.has(FactsFlags::PAUSE)) && ",
        test: group("shape::tests::b_19_a_pause_is_everybodys_or_nobodys"),
    },
    Mutant {
        name: "one-idle-lane-parks-all",
        file: "crates/atom-group/src/settle.rs",
        find: "let idle = facts.iter().all(",
        replace: "let idle = facts.iter().any(",
        test: group("settle::tests::b_07_idle_lanes_beside_a_busy_one_are_granted_nothing"),
    },
    Mutant {
        name: "signatures-not-compared",
        file: "crates/atom-group/src/state.rs",
        find: "if let Some(lane) = facts.iter().position(|f| f.last_signature != expected) {",
        replace: "if let Some(lane) = facts.iter().position(|f| f.last_signature != expected).filter(|_| false) {",
        test: group("settle::tests::a_wrong_signature_is_refused_before_the_first_replay"),
    },
    Mutant {
        name: "state-hashes-not-compared",
        file: "crates/atom-group/src/state.rs",
        find: "if f.state_hash != hash {",
        replace: "if false {",
        test: group("settle::tests::lanes_that_diverged_are_named_with_both_values"),
    },
    Mutant {
        name: "grants-not-capped-by-the-bucket",
        file: "crates/atom-group/src/settle.rs",
        find: "facts.prefill_rows.min(self.cap_rows - decode_rows).min(room);",
        replace: "facts.prefill_rows + 0 * room;",
        test: group("settle::tests::prefill_is_cut_to_what_decode_leaves_of_the_top_bucket"),
    },
    Mutant {
        name: "decode-rows-cut-by-step-ms-max",
        file: "crates/atom-group/src/shape.rs",
        find: "let floor = state.recorded_holding(GroupRows::settled(decode));",
        replace: "let floor = state.recorded_holding(GroupRows::settled(decode.min(1)));",
        test: group("shape::tests::b_34_whatever_lanes_say_they_do_the_same_and_decode_rides"),
    },
    Mutant {
        name: "exchange-skipped-at-zero-rows",
        file: "crates/atom-group/src/exchange.rs",
        find: "        let board = &self.facts[machine::board(step.0)];\n",
        replace: concat!(
            "        if mine.decode_rows + mine.prefill_rows == 0 {\n",
            "            all.fill(*mine);\n",
            "            return Ok(());\n",
            "        }\n",
            "        let board = &self.facts[machine::board(step.0)];\n",
        ),
        test: group("exchange::tests::work_for_one_parked_lane_wakes_all"),
    },
    Mutant {
        name: "parked-lane-deaf-to-peers",
        file: "crates/atom-group/src/exchange.rs",
        find: "|| wake() || peer_came()",
        replace: "|| wake() || peer_came() && false",
        test: group("exchange::tests::work_for_one_parked_lane_wakes_all"),
    },
    Mutant {
        name: "boards-do-not-alternate",
        file: "crates/atom-group/src/machine.rs",
        find: "(step % BOARDS as u64) as usize",
        replace: "(step % BOARDS as u64) as usize * 0",
        test: group("exchange::tests::every_lane_leaves_every_exchange_with_the_same_facts"),
    },
    Mutant {
        name: "no-ring-after-arrival",
        file: "crates/atom-group/src/machine.rs",
        find: "Self::Arrive => Self::Ring,",
        replace: "Self::Arrive => Self::Wait,",
        test: group("exchange::tests::every_lane_leaves_every_exchange_with_the_same_facts"),
    },
    Mutant {
        name: "looks-before-counting-as-sleeper",
        file: "crates/atom-group/src/machine.rs",
        find: concat!(
            "            Self::GlanceClosed { left: 0 } => Self::Enlist,\n",
            "            Self::GlanceClosed { left } => Self::Glance { left: left - 1 },\n",
            "            Self::Enlist => Self::Lock,",
        ),
        replace: concat!(
            "            Self::GlanceClosed { left: 0 } => Self::Lock,\n",
            "            Self::GlanceClosed { left } => Self::Glance { left: left - 1 },\n",
            "            Self::Enlist => Self::Sleep,",
        ),
        test: FINE,
    },
    Mutant {
        name: "notified-without-the-lock",
        file: "crates/atom-group/src/machine.rs",
        find: "Self::AnySleepers if outcome => Self::PassLock,",
        replace: "Self::AnySleepers if outcome => Self::Notify,",
        test: FINE,
    },
    Mutant {
        name: "resume-wakes-nobody",
        file: "crates/atom-group/src/machine.rs",
        find: "resumed || self.mail || self.exit",
        replace: "resumed && false || self.mail || self.exit",
        test: TWO_LANES,
    },
    Mutant {
        name: "exit-wakes-nobody",
        file: "crates/atom-group/src/machine.rs",
        find: "resumed || self.mail || self.exit",
        replace: "resumed || self.mail",
        test: TWO_LANES,
    },
    Mutant {
        name: "end-decided-by-one-lane",
        file: "crates/atom-group/src/settle.rs",
        find: "if idle && all(FactsFlags::EXIT) {",
        replace: "if idle && facts.iter().any(|f| f.flags.has(FactsFlags::EXIT)) {",
        test: TWO_LANES,
    },
    Mutant {
        name: "decode-cut-under-all-events",
        file: "crates/atom-group/src/settle.rs",
        find: "let decode_rows = facts.decode_rows.min(self.cap_rows);",
        replace: "let decode_rows = facts.decode_rows.min(1);",
        test: TWO_LANES,
    },
    Mutant {
        name: "mail-of-an-ended-epoch-is-taken",
        file: "crates/atom-group/src/life.rs",
        find: "self.0 == Some(epoch)",
        replace: "self.0 >= Some(epoch)",
        test: LOSSES_OF_ONE,
    },
    Mutant {
        name: "a-group-forms-again-once-too-often",
        file: "crates/atom-group/src/epoch.rs",
        find: "self.current > u64::from(self.reforms_max)",
        replace: "self.current > u64::from(self.reforms_max) + 1",
        test: LOSSES_OF_ONE,
    },
    Mutant {
        name: "a-group-ends-and-turns-red-last",
        file: "crates/atom-group/src/watch.rs",
        find: concat!(
            "            Self::TakeSeats { end: Some(_) } => Self::TurnRed,\n",
            "            // Red before any answer: who gets one finds that nothing more is taken.\n",
            "            Self::TurnRed => Self::CloseForGood,\n",
            "            Self::CloseForGood => Self::FailAll,\n",
            "            Self::Replace | Self::Publish { .. } | Self::FailAll | Self::Rest => Self::Rest,",
        ),
        replace: concat!(
            "            Self::TakeSeats { end: Some(_) } => Self::CloseForGood,\n",
            "            Self::CloseForGood => Self::FailAll,\n",
            "            Self::FailAll => Self::TurnRed,\n",
            "            Self::Replace | Self::Publish { .. } | Self::TurnRed | Self::Rest => Self::Rest,",
        ),
        test: LOSSES_OF_ONE,
    },
    Mutant {
        name: "a-lost-seat-is-not-taken",
        file: "crates/atom-group/src/watch.rs",
        find: "Self::ShutMail => Self::TakeSeats { end: None },",
        replace: "Self::ShutMail => Self::FailLost,",
        test: LOSSES_OF_ONE,
    },
    Mutant {
        name: "waits-of-an-old-epoch-are-not-closed",
        file: "crates/atom-group/src/watch.rs",
        find: "Act::Close { epoch }\n",
        replace: "Act::Close { epoch }.after()\n",
        test: LOSSES_OF_TWO,
    },
    Mutant {
        name: "one-loss-counts-twice",
        file: "crates/atom-group/src/watch.rs",
        find: "self.phase == Phase::Running && seen == self.epoch()",
        replace: "self.phase == Phase::Running && seen <= self.epoch()",
        test: LOSSES_OF_TWO,
    },
    Mutant {
        name: "late-result-after-preemption",
        file: "crates/atom-engine/src/sequence.rs",
        find: "        if planned > computed {\n",
        replace: "        if planned > computed.max(usize::MAX) {\n",
        test: Test {
            package: "atom-engine",
            target: "late_results",
            name: "b_76_a_late_result_of_a_preempted_request_reaches_nobody",
        },
    },
    Mutant {
        name: "slot-released-twice",
        file: "crates/atom-engine/src/sequence.rs",
        find: "            free_slots.push(slot);\n",
        replace: "            free_slots.push(slot);\n            free_slots.push(slot);\n",
        test: Test {
            package: "atom-sim",
            target: "scheduler",
            name: "an_oversubscribed_cache_preempts_and_everybody_finishes",
        },
    },
    Mutant {
        name: "shared-page-written",
        file: "crates/atom-engine/src/scheduler.rs",
        find: "let computed = shared * self.config.page_size;",
        replace: "let computed = (shared * self.config.page_size).saturating_sub(1);",
        test: Test {
            package: "atom-sim",
            target: "scheduler",
            name: "a_repeated_prompt_reports_exactly_what_it_does_not_compute",
        },
    },
    Mutant {
        name: "padding-routed-to-experts",
        file: "crates/atom-cpu/src/replay/heads.rs",
        find: "numbers.fill(NO_EXPERT);",
        replace: "numbers.fill(NO_EXPERT.abs());",
        test: unit("atom-cpu", "replay::tests::heads::rows_that_were_granted_but_do_not_run_choose_nobody"),
    },
    Mutant {
        name: "mail-taken-in-an-epoch-that-is-over",
        file: "crates/atom-rank/src/mail.rs",
        find: "if queue.to.is(epoch) {",
        replace: "if queue.to.is(epoch) || epoch > 0 {",
        test: unit("atom-rank", "mail::tests::a_lane_of_an_epoch_that_is_over_takes_no_mail"),
    },
    Mutant {
        name: "own-bucket-from-own-rows",
        file: "crates/atom-rank/src/lane.rs",
        find: "        let outcome = settle(&self.state, &self.facts).map(|(state, step)| {\n",
        replace: concat!(
            "        let me = self.lane_in_group;\n",
            "        for (_, facts) in self.facts.iter_mut().enumerate().filter(|(lane, _)| *lane != me) {\n",
            "            (facts.decode_rows, facts.prefill_rows) = (0, 0);\n",
            "        }\n",
            "        let outcome = settle(&self.state, &self.facts).map(|(state, step)| {\n",
        ),
        test: Test { package: "atom-rank", target: "faults", name: "an_idle_group_parks_and_wakes_together" },
    },
    Mutant {
        name: "early-return-around-a-collective",
        file: "crates/atom-rank/src/lane.rs",
        find: "                    self.replay(bucket, grants)?;\n",
        replace: concat!(
            "                    if self.replay(bucket, grants).is_err() {\n",
            "                        return Ok(());\n",
            "                    }\n",
        ),
        test: Test {
            package: "atom-rank",
            target: "faults",
            name: "a_rank_that_fails_answers_everybody_and_turns_health_red",
        },
    },
    Mutant {
        name: "woken-lane-without-deadline",
        file: "crates/atom-rank/src/lane.rs",
        find: "            self.note(Activity::Wanting, self.state.patience());\n",
        replace: "",
        test: Test {
            package: "atom-rank",
            target: "stages",
            name: "a_lane_that_is_stuck_when_it_wakes_is_given_up",
        },
    },
    Mutant {
        name: "last-order-without-deadline",
        file: "crates/atom-rank/src/lane.rs",
        find: "        board.wait_done(self.order, patience)?;\n",
        replace: "",
        test: Test {
            package: "atom-rank",
            target: "stages",
            name: "a_follower_that_is_stuck_in_the_last_order_is_given_up",
        },
    },
];
